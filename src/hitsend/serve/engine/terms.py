"""One upstream's terms: its kind's profile, and what the settings say otherwise.

Enters: a profile and the settings of one engine. Leaves: `Terms`: which field goes out under which name, and what is
always said besides. Always true: a field that isn't in `names` never goes out; what `check` lists as dropped is what
the body leaves out, because both read the same table. Next: `openai_body.py`.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.profiles import GROUPS, OPENAI_FIELDS, PROFILES, THOUGHTS, Profile
from hitsend.settings_upstreams import UpstreamBase, UpstreamSettings, VllmSettings, WorkersAISettings

CLOUDFLARE = "https://api.cloudflare.com/client/v4/accounts/{}/ai"
_ACCOUNT = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Terms(msgspec.Struct, frozen=True):
    """How one upstream is asked. `names`: our field → its own; `salt` is secret."""

    engine: str
    profile: Profile
    names: dict[str, str]
    max_tokens_field: str
    models: dict[str, str]
    adds: dict[str, Any] = {}
    sends_priority: bool = False
    is_thinking_off: bool = False
    salt: bytes = b""

    @property
    def takes(self) -> frozenset[str]:
        """Fields that go out."""
        return frozenset(self.names)


def kind_of(settings: UpstreamBase) -> str:
    """`openai`, `vllm` or `workers_ai`."""
    return str(settings.__struct_config__.tag)


def addresses(settings: UpstreamBase) -> tuple[str, ...]:
    """All base URLs, in order; empty where none is set. Raises ConfigError for an account that can't be in one."""
    if settings.base_urls:
        return settings.base_urls
    if settings.base_url:
        return (settings.base_url,)
    if isinstance(settings, WorkersAISettings) and settings.account_id:
        if not _ACCOUNT.fullmatch(settings.account_id):
            raise ConfigError(f"engines[{settings.name}].account_id: expected 1 to 64 letters, digits, _ and -")
        return (CLOUDFLARE.format(settings.account_id),)
    return ()


def terms_of(settings: UpstreamBase, salt: bytes = b"") -> Terms:
    """Profile and settings together. Raises ConfigError for fields that nobody could send."""
    _check_fields(settings)
    profile = _profile(settings)
    names = {name: name for name in (OPENAI_FIELDS | {THOUGHTS}) - _each(profile.lacks)} | profile.fields
    names |= {name: name for name in _each(settings.passes)} | settings.renames
    names = {name: there for name, there in names.items() if name not in _each(settings.lacks)}
    _check_renames(settings, names)
    adds = dict(profile.adds)
    if isinstance(settings, WorkersAISettings) and settings.reject_if_busy:
        adds["options"] = {"rejectIfBusy": True}
    if isinstance(settings, VllmSettings) and not settings.salts_cache:
        profile = msgspec.structs.replace(profile, salt_field=None)
    if "stream_options" in settings.lacks:
        profile = msgspec.structs.replace(profile, stream_options=None)
    return Terms(
        engine=settings.name,
        profile=profile,
        names=names,
        max_tokens_field=settings.max_tokens_field or profile.max_tokens_field,
        models=settings.models,
        adds=adds,
        sends_priority=isinstance(settings, VllmSettings) and settings.sends_priority,
        is_thinking_off=isinstance(settings, WorkersAISettings) and not settings.thinking_by_default,
        salt=salt,
    )


def changes(terms: Terms) -> list[str]:
    """What it makes of a request beyond leaving fields out, in words."""
    profile = terms.profile
    found = [f"{ours} → {theirs}" for ours, theirs in sorted(terms.names.items()) if ours != theirs]
    if terms.max_tokens_field != "max_tokens":
        found.append(f"max_tokens → {terms.max_tokens_field}")
    found += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in sorted(terms.adds.items())]
    if not profile.knows_developer:
        found.append("role developer → system")
    if profile.calls_by_schema:
        found.append("a call that has to be made: asked for as JSON in response_format, and read as a call")
    if profile.salt_field is not None:
        found.append(f"{profile.salt_field}: one per tenant")
    if profile.affinity_header is not None:
        found.append(f"{profile.affinity_header}: one per conversation")
    if terms.sends_priority:
        found.append("priority: from the request's tier")
    if terms.is_thinking_off and profile.thinking_off is not None:
        found.append(f"{profile.thinking_off} = false unless asked, for {', '.join(profile.thinking_models)}")
    return found


def drops(terms: Terms) -> list[str]:
    """Fields that hitsend knows and this upstream doesn't."""
    return sorted(_KNOWN - terms.takes)


_KNOWN = OPENAI_FIELDS.union({THOUGHTS}, *(profile.fields for profile in PROFILES.values()))
"""Fields that a request here may have."""
_ALSO_LACKED = frozenset({"stream_options"})
"""What isn't a client's to ask for, and goes out all the same."""


def _check_fields(settings: UpstreamBase) -> None:
    """A name that is written wrong would have no effect, and nobody would know."""
    for setting, also in (("passes", frozenset()), ("lacks", _ALSO_LACKED), ("renames", frozenset())):
        known = _KNOWN.union(also, () if setting == "renames" else GROUPS)
        if strays := sorted(set(getattr(settings, setting)) - known):
            where = f"engines[{settings.name}].{setting}"
            raise ConfigError(f"{where}: {strays[0]!r} is no field that is sent, only {', '.join(sorted(known))}")


def _check_renames(settings: UpstreamBase, names: dict[str, str]) -> None:
    """Of two fields under one name, one would be lost without a word."""
    for ours in sorted(settings.renames.keys() & names.keys()):
        theirs = names[ours]
        if other := next((name for name in sorted(names) if names[name] == theirs and name != ours), None):
            raise ConfigError(
                f"engines[{settings.name}].renames: {ours!r} and {other!r} would both be sent as {theirs!r}; "
                f"put {other!r} in lacks, or give one of them another name"
            )


def _profile(settings: UpstreamBase) -> Profile:
    if isinstance(settings, UpstreamSettings):
        return PROFILES[settings.server]
    if isinstance(settings, WorkersAISettings) and settings.route == "native":
        return PROFILES["workers_ai_native"]
    return PROFILES[kind_of(settings)]


def _each(names: Iterable[str]) -> set[str]:
    return {one for name in names for one in GROUPS.get(name, (name,))}
