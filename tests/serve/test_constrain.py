"""What an answer is held to, by where its prompt comes from."""

from types import SimpleNamespace
from typing import Any

import pytest

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.request import Message, OutputFormat, Request
from hitsend.core.tool_format import REASONING_FORMATS
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.formats import Formats
from hitsend.serve.pipeline import constrain

THINKING = REASONING_FORMATS["think"]
WORDS = Vocabulary((b"a", THINKING.begin.encode(), THINKING.end.encode()), user_defined_ids=frozenset({1, 2}))
WANTED = OutputFormat("choice", ("a", "b"))


class Text:
    vocabulary = WORDS

    async def compile(self, source: Any) -> str:
        return "compiled"


STAGES: Any = SimpleNamespace(text=Text(), formats=Formats(reasoning=THINKING))


async def test_a_chat_answer_is_held_to_it_once_its_thoughts_are_over():
    request = Request("r", "m", (Message("user", "x"),), output_format=WANTED)
    assert await constrain(request, (0,), STAGES) == ConstraintSpec("compiled", (2,), (1,))


@pytest.mark.parametrize("ids", [(0,), (0, 1)])
async def test_what_goes_on_from_a_prompt_is_held_to_it_from_its_first_token(ids: tuple[int, ...]):
    request = Request("r", "m", (), prompts=(ids,), output_format=WANTED)
    assert await constrain(request, ids, STAGES) == ConstraintSpec("compiled")
    assert await constrain(Request("r", "m", (), prompts=(ids,)), ids, STAGES) is None
