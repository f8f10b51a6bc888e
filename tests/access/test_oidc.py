"""Tokens of an issuer: a real key server on this machine, and the attacks that such tokens have seen."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import time

import jwt
import pytest
from aiohttp import web

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError, InvalidApiKey
from hitsend.core.limits import Level, Limits
from hitsend.serve.access import jwks
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.issuers import tokens_of
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyOwner, KeyStore
from hitsend.serve.access.terms import LimitsChange, TermsChange
from hitsend.serve.database.connection import Database, database_url
from hitsend.settings import OidcSettings
from tests.access.issuer import AUDIENCE, ISSUER, SigningKey, issuing, unsigned

ONE, TWO, CURVE = SigningKey("one"), SigningKey("two"), SigningKey("curve", "ES256")
FOREIGN = SigningKey("one")
"""Somebody else's key under the same id."""


class Access:
    def __init__(self, issuer, database, auth, tokens):
        self.issuer = issuer
        self.keys = KeyStore(database, SystemClock())
        self.principals = PrincipalStore(database, SystemClock())
        self.auth = auth
        self.tokens = tokens

    def ask(self, token):
        """The principal, or None where it is refused."""
        try:
            return self.auth.authenticate(f"Bearer {token}", "127.0.0.1")
        except InvalidApiKey as error:
            assert error.message == "missing or wrong API key: send `Authorization: Bearer hs_…`"
            return None


@contextlib.asynccontextmanager
async def access(folder, *keys, **settings):
    async with issuing(*keys) as issuer:
        wanted = OidcSettings(**({"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": issuer.url} | settings))
        database = await Database.open(database_url(None, folder))
        tokens = tokens_of(wanted)
        auth = Authenticator(KeyStore(database, SystemClock()), tokens)
        await auth.start()
        try:
            yield Access(issuer, database, auth, tokens)
        finally:
            await auth.stop()
            await database.close()


async def test_a_good_token_is_a_principal_with_its_levels(tmp_path):
    claims = {"org_claim": "org", "app_claim": "azp", "role_claim": "realm.roles"}
    async with access(tmp_path, ONE, CURVE, **claims) as at:
        await at.principals.create("org", ("o",), TermsChange(limits=LimitsChange(requests_per_minute=5)))
        await at.auth.refresh()
        for key in (ONE, CURVE):
            found = at.ask(key.token(org="o", azp="bot", realm={"roles": ["x", "reader", "admin"]}))
            assert (found.user, found.app, found.org, found.name, found.role) == ("alice", "bot", "o", "alice", "admin")
            assert found.levels == (Level("org", ("o",), Limits(requests_per_minute=5)),)
            assert not found.is_anonymous
        assert at.ask(ONE.token(org="o", azp="bot", realm={"roles": "root"})).role == "caller"
        assert at.ask(ONE.token(org="o", azp="bot", realm=["admin"])).role == "caller"
        await at.principals.change("org", ("o",), TermsChange(), is_disabled=True)
        await at.auth.refresh()
        assert at.ask(ONE.token(org="o", azp="bot")) is None
        assert at.ask(ONE.token(org="p", azp="bot"))


async def test_nobody_is_admin_by_a_claim_that_was_not_configured(tmp_path):
    async with access(tmp_path, ONE) as at:
        assert at.ask(ONE.token(role="admin", roles=["admin"])).role == "caller"


async def test_subjects_are_apart_and_keys_go_on_working(tmp_path):
    async with access(tmp_path, ONE) as at:
        alice, again, bob = (at.ask(ONE.token(sub=sub)) for sub in ("alice", "alice", "bob"))
        assert alice.key_id == again.key_id != bob.key_id
        assert len(alice.key_id) <= 32, "as its column"
        assert at.auth.are_keys_required, "an issuer is set, so nobody is anonymous"
        with pytest.raises(InvalidApiKey):
            at.auth.authenticate(None, "127.0.0.1")
        made = await at.keys.create(KeyOwner("k"))
        await at.auth.refresh()
        assert at.ask(made.key).key_id == made.id


def confused(key):
    """Signed with HS256, the secret being the public key as everybody can read it."""
    head, body = ({"alg": "HS256", "kid": key.key_id, "typ": "JWT"}, claims())
    signed = unsigned(head, body)[:-1]
    for secret in (key.pem, key.pem.strip(), json.dumps(key.jwk).encode()):
        mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        yield f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def claims(**others):
    return {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600} | others


def attacks(issuer):
    """(name, token): none of them is good."""
    good = ONE.token()
    head, body, signature = good.split(".")
    now = int(time.time())
    for spelling in ("none", "None", "NONE", "nOnE", ""):
        yield f"alg {spelling}", unsigned({"alg": spelling, "kid": "one"}, claims())
        yield f"alg {spelling}, signed", unsigned({"alg": spelling, "kid": "one"}, claims()) + signature
    yield from ((f"HS256 with the public key, {n}", token) for n, token in enumerate(confused(ONE)))
    yield "signature of another token", f"{head}.{ONE.token(sub='admin').split('.')[1]}.{signature}"
    yield "no signature", f"{head}.{body}."
    yield "somebody else's key under a known id", FOREIGN.token()
    yield "a known key under another's id", ONE.token({"kid": "curve"})
    yield "expired", ONE.token(exp=now - 31)
    yield "not yet", ONE.token(nbf=now + 60)
    for missing in ("exp", "iss", "aud", "sub"):
        yield f"no {missing}", ONE.token(**{missing: None})
    yield "exp as text", ONE.token(exp="never")
    yield "another audience", ONE.token(aud="other")
    yield "audience inside a longer one", ONE.token(aud=f"{AUDIENCE}-other")
    yield "no audience in the list", ONE.token(aud=["other"])
    yield "another issuer", ONE.token(iss=f"{ISSUER}.evil")
    yield "issuer with a slash", ONE.token(iss=f"{ISSUER}/")
    yield "empty subject", ONE.token(sub="")
    yield "subject that breaks a terminal", ONE.token(sub="\x1b[31m")
    yield "long subject", ONE.token(sub="x" * 200)
    for key_id in (
        "",
        "../../dev/null",
        "/dev/null",
        "one' OR '1'='1",
        "one\x00",
        "ONE",
        "x" * 2000,
        "http://127.0.0.1",
    ):
        yield f"kid {key_id[:20]!r}", FOREIGN.token({"kid": key_id})
    yield "no kid where there are many keys", jwt.encode(claims(), ONE.private, algorithm="RS256")
    evil = {"keys": [FOREIGN.jwk]}
    for name in ("jku", "x5u", "jwk_url"):
        yield name, FOREIGN.token({name: f"{issuer.base}/evil.json"})
        yield f"{name}, unknown kid", FOREIGN.token({name: f"{issuer.base}/evil.json", "kid": "evil"})
    yield "jwk in the header", FOREIGN.token({"jwk": FOREIGN.jwk})
    yield "jwks in the header", FOREIGN.token({"jwks": evil, "kid": "evil"})
    yield "x5c in the header", FOREIGN.token({"x5c": [base64.b64encode(b"certificate").decode()]})
    yield "crit", ONE.token({"crit": ["unknown"], "unknown": 1})
    yield (
        "an algorithm that isn't allowed",
        jwt.encode(claims(), ONE.private, algorithm="RS512", headers={"kid": "one"}),
    )
    yield "PSS", jwt.encode(claims(), ONE.private, algorithm="PS256", headers={"kid": "one"})
    for broken in (
        "..",
        "a.b.c",
        "....",
        f"{head}.{body}.{signature}.",
        f"{head}..{signature}",
        f"{good}{'A' * 20_000}",
    ):
        yield f"broken {broken[:12]}", broken
    yield "deep", unsigned({"alg": "RS256", "kid": "one"}, json.loads("[" * 900 + "]" * 900)) + signature
    yield "body that is no object", jwt.api_jws.encode(b"[1]", ONE.private, algorithm="RS256", headers={"kid": "one"})


async def test_no_attack_is_let_in_nothing_is_fetched_for_it_and_no_token_is_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    async with access(tmp_path, ONE, TWO, CURVE) as at:
        assert at.ask(ONE.token())
        tried = list(attacks(at.issuer))
        assert len(tried) >= 50
        assert [name for name, token in tried if at.ask(token) is not None] == []
        await asyncio.sleep(0.3)
        assert at.issuer.other_hits == []
        assert at.issuer.hits == 1, "an unknown key id within a minute asks for nothing"
        said = "\n".join(record.getMessage() for record in caplog.records)
        parts = {part for _, token in tried for part in (token, *token.split(".")) if len(part) > 30}
        assert [part for part in parts if part in said] == []


async def test_a_clock_that_is_a_little_off_is_forgiven(tmp_path):
    async with access(tmp_path, ONE, leeway_s=30) as at:
        assert at.ask(ONE.token(exp=int(time.time()) - 15))
        assert at.ask(ONE.token(nbf=int(time.time()) + 15))
        assert at.ask(ONE.token(aud=["other", AUDIENCE]))


async def test_a_token_without_a_claim_that_is_set_is_refused(tmp_path):
    async with access(tmp_path, ONE, org_claim="org") as at:
        assert at.ask(ONE.token(org="o")).org == "o"
        for org in (None, "", 5, ["o"], {"o": 1}, " o", "a\nb"):
            assert at.ask(ONE.token(org=org)) is None


async def test_a_key_that_the_issuer_adds_is_found_by_one_fetch_however_many_ask(tmp_path):
    async with access(tmp_path, ONE) as at:
        at.issuer.keys.append(TWO)
        assert at.ask(TWO.token()) is None
        at.tokens.keys._fetched_at -= jwks.MIN_PAUSE_S  # a minute later
        for number in range(200):
            at.ask(FOREIGN.token({"kid": f"random-{number}"}) if number < 3 else TWO.token())
        for _ in range(200):
            if at.ask(TWO.token()):
                break
            await asyncio.sleep(0.02)
        assert at.ask(TWO.token())
        assert at.issuer.hits == 2
        at.issuer.keys.remove(ONE)
        at.tokens.keys._fetched_at -= jwks.MIN_PAUSE_S
        at.ask(FOREIGN.token({"kid": "unknown"}))
        for _ in range(200):
            if at.ask(ONE.token()) is None:
                break
            await asyncio.sleep(0.02)
        assert at.ask(ONE.token()) is None, "a key that the issuer withdrew"
        assert at.ask(TWO.token())


def _big():
    return web.Response(body=b'{"keys": [' + b" " * jwks.MAX_BYTES + b"]}")


def _elsewhere():
    return web.HTTPFound("/evil.json")


def _many():
    return web.json_response({"keys": [{"kid": str(number)} for number in range(jwks.MAX_KEYS + 1)]})


@pytest.mark.parametrize(
    "answer",
    [
        _big,
        _elsewhere,
        _many,
        lambda: web.Response(status=500),
        lambda: web.Response(text="x"),
        lambda: web.json_response([]),
    ],
)
async def test_an_answer_that_is_no_key_set_leaves_the_known_keys(tmp_path, answer):
    async with access(tmp_path, ONE) as at:
        at.issuer.answer = answer
        assert not await at.tokens.keys._fetch()
        assert at.issuer.other_hits == []
        assert at.ask(ONE.token())


async def test_an_issuer_that_is_away_at_the_start_refuses_its_tokens_and_not_the_keys(tmp_path):
    async with access(tmp_path, ONE, jwks_url="http://127.0.0.1:9/jwks.json") as at:
        made = await at.keys.create(KeyOwner("k"))
        await at.auth.refresh()
        assert at.ask(ONE.token()) is None
        assert at.ask(made.key)


def test_keys_that_may_not_verify_are_passed_over():
    allowed = ("RS256", "ES256")
    small = jwt.get_algorithm_by_name("RS256").to_jwk(jwks_small(), as_dict=True)
    secret = {"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).decode(), "kid": "oct", "alg": "HS256"}
    private = jwt.get_algorithm_by_name("RS256").to_jwk(ONE.private, as_dict=True)
    others = [
        secret,
        private | {"kid": "private"},
        small | {"kid": "small"},
        ONE.jwk | {"kid": "enc", "use": "enc"},
        ONE.jwk | {"kid": "ops", "key_ops": ["encrypt"]},
        ONE.jwk | {"kid": "other alg", "alg": "RS512"},
        ONE.jwk | {"kid": 5},
        ONE.jwk | {"kid": "broken", "n": "!"},
        CURVE.jwk | {"kid": "curve of another kind", "crv": "P-521"},
        {},
        {"kty": ["RSA"]},
    ]
    found = jwks.usable([ONE.jwk, *others, CURVE.jwk, FOREIGN.jwk], allowed)
    assert {key_id: key.algorithms for key_id, key in found.items()} == {"one": ("RS256",), "curve": ("ES256",)}
    assert found["one"].key.public_numbers() == ONE.private.public_key().public_numbers(), "the first of an id counts"


def jwks_small():
    from cryptography.hazmat.primitives.asymmetric import rsa

    return rsa.generate_private_key(65537, 1024).public_key()


GOOD = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://issuer.example/jwks"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"audience": None}, "oidc.audience must be set"),
        ({"issuer": None}, "oidc.issuer must be set"),
        ({"jwks_url": None}, "oidc.jwks_url must be set"),
        ({"algorithms": ("RS256", "none")}, "oidc.algorithms: 'none'"),
        ({"algorithms": ("HS256",)}, "oidc.algorithms: 'HS256'"),
        ({"algorithms": ()}, "at least one"),
        ({"jwks_url": "http://issuer.example/jwks"}, "must be https"),
        ({"jwks_url": "http://127.0.0.1.evil.example/jwks"}, "must be https"),
        ({"jwks_url": "file:///etc/passwd"}, "must be https"),
        ({"jwks_url": "https://user:secret@issuer.example/jwks"}, "without a user name"),
        ({"jwks_url": "https://[::1"}, "oidc.jwks_url"),
    ],
)
def test_settings_that_can_not_be_safe_stop_the_start(change, said):
    with pytest.raises(ConfigError, match=said) as stopped:
        tokens_of(OidcSettings(**(GOOD | change)))
    assert "secret" not in str(stopped.value)


async def test_settings_that_are_safe_are_taken():
    assert tokens_of(OidcSettings()) is None
    for url in ("https://issuer.example/jwks", "http://127.0.0.1:9/x", "http://[::1]:9/x", "http://localhost/x"):
        assert tokens_of(OidcSettings(**(GOOD | {"jwks_url": url}))) is not None
