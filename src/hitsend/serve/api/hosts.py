"""Which Host headers are served.

Enters: the Host header's values. Leaves: nothing, or an error. Always true: no decision but this one looks at Host; a
page on the web can't reach an anonymous server of this machine under a name of its own (DNS rebinding), nor send it
requests from a foreign origin, and who comes through a proxy on this machine isn't taken for its owner.
Next: `routes.py`.
"""

import re
from collections.abc import Collection

from hitsend.core.errors import InvalidRequest, PermissionDenied
from hitsend.settings import ServerSettings

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}))(?::(?P<port>[0-9]{1,5}))?")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OF_PROXIES = (
    b"forwarded",
    b"via",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-real-ip",
    b"cf-connecting-ip",
    b"true-client-ip",
)


def host_name(values: list[bytes], *, is_required: bool) -> str | None:
    """The one well-formed host name, lower case, without its port. Raises InvalidRequest."""
    if not values and not is_required:
        return None
    if len(values) != 1:
        raise InvalidRequest(f"{len(values)} Host headers, 1 expected")
    match = _HOST.fullmatch(values[0].decode("latin-1"))
    if match is None or int(match["port"] or 0) > 65535:
        raise InvalidRequest("malformed Host header")
    return match["name"].lower().rstrip(".")


def check_host(name: str | None, settings: ServerSettings, *, are_keys_required: bool) -> None:
    """Raises PermissionDenied for a name that isn't served (`server.allowed_hosts`)."""
    if name is None:
        return
    if settings.allowed_hosts:
        is_served = name in {allowed.lower() for allowed in settings.allowed_hosts}
    else:
        is_served = are_keys_required or name in _LOOPBACK or name.strip("[]") == settings.host.lower()
    if not is_served:
        raise PermissionDenied("this Host is not served here (server.allowed_hosts)")


def check_origin(origins: list[bytes], host_values: list[bytes]) -> None:
    """Refuse a browser's request from another site (where no key was put in on purpose). Raises PermissionDenied."""
    host = host_values[0].lower() if host_values else b""
    for origin in origins:
        if origin.lower() not in (b"http://" + host, b"https://" + host):
            raise PermissionDenied("requests from other sites need an API key")


def check_direct(names: Collection[bytes]) -> None:
    """Refuse a request that came by a proxy, where no key is needed: its peer is this machine, its sender perhaps not.

    `names`: of all its headers. Raises PermissionDenied. A proxy that adds no header can't be told from a neighbour.
    """
    for name in _OF_PROXIES:
        if name in names:
            header = name.decode()
            raise PermissionDenied(f"requests through a proxy ({header}) need an API key: see `hitsend keys create`")
