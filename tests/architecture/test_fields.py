"""docs/fields.md has a row for every field of the wire, and none for others."""

import re

import msgspec

from hitsend.serve.api.chat_request import HABITS, UNSUPPORTED, ChatBody
from hitsend.serve.api.sampling_fields import REFUSED
from tests.architecture.tree import ROOT

ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def rows():
    return ROW.findall((ROOT / "docs/fields.md").read_text("utf-8"))


def test_each_field_has_one_row():
    named = [row[0] for row in rows()]
    assert sorted(named) == sorted(field.encode_name for field in msgspec.structs.fields(ChatBody))


def test_what_is_refused_or_has_no_effect_says_so():
    said = {name: ours for name, ours, *_ in rows()}
    assert [name for name in (*UNSUPPORTED, *REFUSED) if not said[name].startswith("refused")] == []
    assert [name for name in HABITS if "no effect" not in said[name] and "nothing" not in said[name]] == []
