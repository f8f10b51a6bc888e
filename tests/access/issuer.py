"""An issuer of tokens on this machine: real keys, a real HTTP server that counts who asks for them."""

import base64
import contextlib
import json
import time

import jwt
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

ISSUER = "https://issuer.example"
AUDIENCE = "hitsend"


class SigningKey:
    """A key pair and its public JWK."""

    def __init__(self, key_id, kind="RS256", **jwk):
        self.key_id = key_id
        self.kind = kind
        self.private = (
            ec.generate_private_key(ec.SECP256R1()) if kind == "ES256" else rsa.generate_private_key(65537, 2048)
        )
        algorithm = jwt.get_algorithm_by_name(kind)
        self.jwk = algorithm.to_jwk(self.private.public_key(), as_dict=True) | {"kid": key_id, "use": "sig"} | jwk

    @property
    def pem(self):
        return self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def token(self, header=None, **claims):
        """A signed token; a claim that is None is left out."""
        values = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600} | claims
        values = {name: value for name, value in values.items() if value is not None}
        return jwt.encode(values, self.private, algorithm=self.kind, headers={"kid": self.key_id} | (header or {}))


def unsigned(header, claims):
    """A token of these parts with nothing for a signature."""
    return (
        ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, claims))
        + "."
    )


class Issuer:
    """What it publishes at `url`, and how often that was read; `other_hits` counts every other path."""

    def __init__(self, keys):
        self.keys = keys
        self.url = ""
        self.base = ""
        self.hits = 0
        self.other_hits = []
        self.answer = None

    async def publish(self, request):
        if request.path != "/jwks.json":
            self.other_hits.append(request.path)
            return web.json_response({"keys": []})
        self.hits += 1
        return self.answer() if self.answer else web.json_response({"keys": [key.jwk for key in self.keys]})


@contextlib.asynccontextmanager
async def issuing(*keys):
    issuer = Issuer(list(keys))
    app = web.Application()
    app.router.add_get("/{path:.*}", issuer.publish)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    issuer.base = f"http://127.0.0.1:{port}"
    issuer.url = f"{issuer.base}/jwks.json"
    try:
        yield issuer
    finally:
        await runner.cleanup()
