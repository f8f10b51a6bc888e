"""A checkpoint's vocabulary as a table: what every token id says, and which ids are more than text.

Enters: nothing. Leaves: one frozen struct, made once per model by the text child and read by `chat` and `output`.
Always true: `token_bytes[id]` is exactly what the token adds to a text (a control token's entry is its own spelling),
so every stage that turns ids into bytes is pure Python and agrees with every other. Next: `request.py`.
"""

import msgspec

OTHER_FILE = (
    "{} is another file than when hitsend started (its tokens or its template differ), so prompts and answers would be "
    "read by the wrong one: restart hitsend, or put the file back"
)
"""What is said of a model's file where one of the processes that read it finds another one."""


class Vocabulary(msgspec.Struct, frozen=True):
    """All tokens of one model.

    `control_ids`: tokens that are never text (turn markers, bos, unknown). `user_defined_ids`: tokens added to the
    vocabulary by their spelling (`<think>`, `<tool_call>`, runs of blanks). `end_ids`: tokens by which the model says
    that it has finished. `adds_bos`: the checkpoint wants `bos_id` in front of every prompt. `adds_space_prefix`: a
    prompt that begins with plain text gets one blank in front (SentencePiece). `strips_left_ids` and
    `strips_right_ids` swallow the blanks beside them.
    """

    token_bytes: tuple[bytes, ...]
    control_ids: frozenset[int] = frozenset()
    user_defined_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    adds_bos: bool = False
    adds_space_prefix: bool = False
    strips_left_ids: frozenset[int] = frozenset()
    strips_right_ids: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        """Number of ids: 0 .. size - 1."""
        return len(self.token_bytes)

    def spelling(self, token_id: int) -> str:
        """The token as text (U+FFFD where its bytes are no text). Raises IndexError for an id outside the table."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    def detokenize(self, token_ids: tuple[int, ...]) -> bytes:
        """The bytes of all tokens in a row, control tokens spelled out. Raises IndexError."""
        return b"".join(map(self.token_bytes.__getitem__, token_ids))
