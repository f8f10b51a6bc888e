"""A redis-server or valkey-server for the tests of limits over several gateways; empty before each test."""

import pytest

from tests.access.valkey_server import valkey_server


@pytest.fixture(scope="session")
def one_server():
    with valkey_server() as server:
        yield server


@pytest.fixture
def server(one_server):
    one_server.client.flushall()
    return one_server


@pytest.fixture
def own_server():
    """For tests that stop, kill or empty it."""
    with valkey_server() as server:
        yield server


@pytest.fixture(params=["memory", "valkey"])
def kind(request):
    return request.param


@pytest.fixture
def server_of_kind(kind, request):
    return request.getfixturevalue("server") if kind == "valkey" else None
