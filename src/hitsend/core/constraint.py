"""What an answer is held to: a grammar, and when it begins; a budget for thoughts.

Enters: what `chat/constraints.py` made of a request. Leaves: frozen words for the text child (which compiles the
grammar first, because it may be killed) and for the loop (which holds the answer to it). Always true: a grammar is
text in llguidance's notation, so the same text gives the same masks in every process. Next: `request.py`.
"""

from typing import Any, Literal

import msgspec

WHITESPACE = r"( |\n[ \t]{0,32})"
"""Between the marks of forced JSON: one blank, or a line's end and its indentation. Small models could go on with
blanks for ever."""


class GrammarSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar as it was asked for. `param` is the request's field that a refusal names.

    `value`: a JSON schema, a regex, a list of choices, or a Lark grammar, by `kind`. `schemas` are the (param, schema)
    pairs that a Lark grammar of ours has inside: each is checked as if it stood alone.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    value: Any
    param: str = "response_format"
    schemas: tuple[tuple[str, Any], ...] = ()


class ConstraintSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the loop does. All None: nothing.

    `starts_after`: token ids that end the reasoning; the grammar begins behind them. None: there is no reasoning.
    `opens_with`: ids that begin the reasoning, where the model has to write them itself: an answer that doesn't begin
    with them has none. Empty: the prompt opened it. After `thinking_budget` tokens of reasoning the ids of
    `starts_after` are forced.
    """

    grammar: str | None = None
    starts_after: tuple[int, ...] | None = None
    opens_with: tuple[int, ...] = ()
    thinking_budget: int | None = None
