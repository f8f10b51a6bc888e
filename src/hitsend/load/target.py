"""Where requests go, and what that server understands.

Enters: flags. Leaves: a `Target`. Always true: an address with or without `/v1` means the same; a key is no part of the
address and of nothing that is printed. Next: `client.py`.
"""

import re
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.load.workload import Endpoint

_VERSIONED = re.compile(r"/v\d+$")


class Dialect(msgspec.Struct, frozen=True):
    """What the target understands beyond the least: found by `probe.py`."""

    limit: str = "max_tokens"
    ignores_end: bool = True
    gives_usage: bool = True


class Target(msgspec.Struct, frozen=True):
    """Where to send. `extra`: fields for every body, over everything else."""

    name: str
    url: str
    model: str = ""
    key: str | None = None
    endpoint: Endpoint = "chat"
    dialect: Dialect = Dialect()
    temperature: float | None = 0.0
    extra: dict[str, Any] = {}

    def root(self) -> str:
        """The server's address without `/v1`."""
        return _VERSIONED.sub("", self.url.rstrip("/"))

    def api(self, path: str) -> str:
        """An address below `/v1`, or below the version that the URL names."""
        url = self.url.rstrip("/")
        return f"{url if _VERSIONED.search(url) else f'{url}/v1'}/{path}"


def check_url(flag: str, url: str) -> str:
    """The address. Raises ConfigError where it is none."""
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ConfigError(
            f"flag {flag}={url}: it must be http://HOST:PORT or https://..., without user, query or fragment"
        )
    return url
