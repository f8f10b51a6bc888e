"""Whether tokens of an issuer are taken, and whether the settings for it can work.

Enters: the `[oidc]` settings. Leaves: what verifies tokens, or nothing. Always true: the library for it (the `jwt`
extra) is imported only where an issuer is set; keys come from the URL in the settings and from nowhere else, over TLS
unless it is this machine; algorithms that share a secret, and none at all, can't be allowed. Next: `oidc.py`.
"""

from urllib.parse import urlsplit

from hitsend.core.errors import ConfigError
from hitsend.serve.access.auth import Tokens, is_loopback
from hitsend.settings import OidcSettings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


def tokens_of(settings: OidcSettings) -> Tokens | None:
    """What verifies tokens by these settings, None where no issuer is set. Raises ConfigError."""
    given = {name: getattr(settings, name) for name in ("issuer", "audience", "jwks_url")}
    if not any(given.values()):
        return None
    for name, value in given.items():
        if not value:
            raise ConfigError(f"oidc.{name} must be set where one of oidc.issuer, oidc.audience, oidc.jwks_url is")
    _check_algorithms(settings.algorithms)
    _check_url(str(settings.jwks_url))
    try:
        # only those who use it pay for the import
        from hitsend.serve.access.oidc import TokenVerifier  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("oidc.issuer: tokens need PyJWT and cryptography: pip install 'hitsend[jwt]'") from error
    return TokenVerifier(settings)


def _check_algorithms(algorithms: tuple[str, ...]) -> None:
    for name in algorithms:
        if name not in ALGORITHMS:
            raise ConfigError(f"oidc.algorithms: {name[:40]!r} is not one of {', '.join(ALGORITHMS)}")
    if not algorithms:
        raise ConfigError("oidc.algorithms: at least one is needed")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise ConfigError(f"oidc.jwks_url: {error}") from error
    is_local = host == "localhost" or is_loopback(host)
    if not host or parts.username is not None or parts.scheme not in (("http", "https") if is_local else ("https",)):
        raise ConfigError("oidc.jwks_url must be https://… without a user name (http only on this machine's loopback)")
