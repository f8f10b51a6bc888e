"""Which key a request shows.

Enters: headers. Leaves: what the authenticator is asked about. Always true: a request that shows two keys shows none;
nothing is decided here. Next: `../access/auth.py`.
"""

import base64
import binascii

from hitsend.serve.api.exchange import Exchange


def presented_key(exchange: Exchange) -> tuple[str | None, bool]:
    """The presented key as a Bearer, and whether a browser adds it on its own (Basic: the password is the key).

    Anthropic's clients send `x-api-key`. A key in both headers is no key: nobody should have to know which one counts.
    """
    values = exchange.header_values(b"authorization")
    values += [b"Bearer " + key for key in exchange.header_values(b"x-api-key")]
    if len(values) != 1:
        return None, False
    value = values[0].decode("latin-1")
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return value, False
    try:
        _, _, password = base64.b64decode(rest.strip().encode(), validate=True).decode("latin-1").partition(":")
    except binascii.Error:
        return None, True
    return f"Bearer {password}", True
