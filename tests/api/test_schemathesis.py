"""Generated requests against the served document, over a scripted pipeline: what the server does is what it says."""

import pytest
from hypothesis import HealthCheck, settings

from tests.edge import LOCAL, Edge
from tests.served import IS_DRILL

schemathesis = pytest.importorskip("schemathesis", reason="NO SCHEMATHESIS: THE DOCUMENT IS CHECKED BY OUR TESTS ONLY")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
"""Not asked: that every body which fits the schema is accepted. Rules between fields can't be said in it."""


async def app(scope, receive, send):
    """The routes with fakes behind them, for a client that doesn't know what a local server wants to see."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    headers = [LOCAL, *(header for header in scope["headers"] if header[0] not in (b"host", b"origin"))]
    await Edge().app({**scope, "headers": headers, "client": ("127.0.0.1", 5)}, receive, send)


# what lasts as long as somebody looks would be looked at for minutes; it has tests of its own
schema = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(path="/inspect/live")


@schema.parametrize()
@settings(max_examples=40 if IS_DRILL else 20, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_its_document_says(case):
    case.call_and_validate(checks=[getattr(schemathesis.checks, name) for name in CHECKS])
