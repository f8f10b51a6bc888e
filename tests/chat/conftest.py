import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.request import Message
from hitsend.serve.chat.prompt import Composer, Open, Prepare, Prompt, Refused
from hitsend.serve.chat.template import ChatTemplate
from hitsend.serve.text_worker import TextWorker, special_variables
from tests.vocabularies import ALTERNATING, CHATML, HEADERS, THINKING, THINKING_TOKENS, write_bpe, write_spm

# Spellings that real vocabularies hold, of every awkward kind: overlapping, nested, beginning or ending like others.
CONTROL = (
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_sep|>", "[INST]", "[/INST]", "<start_of_turn>",
    "<end_of_turn>", "<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_prefix|>", "<<SYS>>",
    "<|im_", "|><|",
)  # fmt: skip
ADDED = (*THINKING_TOKENS, "\n\n", "  ", "<table>", "@@:@@", "[multimodal]")


class Desk:
    """One opened vocabulary and template in this very process, asked as the text child is asked."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        self.worker = TextWorker(open_order(path, template))
        self.vocabulary = self.worker.vocabulary
        self.ids = {self.vocabulary.spelling(i): i for i in range(self.vocabulary.size)}

    def with_template(self, source: str) -> "Desk":
        """The same vocabulary, already loaded, under another template."""
        desk, worker = copy.copy(self), copy.copy(self.worker)
        worker.template = ChatTemplate(
            source, special_tokens=special_variables(worker.metadata, worker.vocabulary), max_chars=8_000_000
        )
        worker._composer = Composer(worker.template, worker._tokenizer, SystemClock(), 4_000_000)
        desk.worker = worker
        return desk

    def ask(self, *messages: Message, **fields: object) -> Prompt | Refused:
        answer = self.worker.answer(Prepare(messages=messages, wants_text=True, **fields))
        assert isinstance(answer, Prompt | Refused)
        return answer

    def prompt(self, *messages: Message, **fields: object) -> Prompt:
        answer = self.ask(*messages, **fields)
        assert isinstance(answer, Prompt), answer
        return answer

    def text(self, *messages: Message, **fields: object) -> str:
        return str(self.prompt(*messages, **fields).text)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return self.vocabulary.detokenize(token_ids).decode("utf-8", "replace")

    def control(self, token_ids: tuple[int, ...]) -> list[str]:
        return [self.vocabulary.spelling(i) for i in token_ids if i in self.vocabulary.control_ids]


def open_order(path: Path, template: str | None = None, **fields: object) -> Open:
    values = {"render_timeout_s": 60.0, "tokenize_timeout_s": 60.0, "max_prompt_bytes": 4_000_000, "wants_table": True}
    return Open(model_path=str(path), libllama=None, template=template, **(values | fields))


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "bpe.gguf"
    return write_bpe(path, template=CHATML, control=CONTROL, added=ADDED)


@pytest.fixture(scope="session")
def desk_for(bpe_file: Path) -> Callable[[str], Desk]:
    return Desk(bpe_file).with_template


@pytest.fixture(scope="session")
def chatml(desk_for: Callable[[str], Desk]) -> Desk:
    return desk_for(CHATML)


@pytest.fixture(scope="session")
def thinking(desk_for: Callable[[str], Desk]) -> Desk:
    return desk_for(THINKING)


@pytest.fixture(scope="session")
def headers(desk_for: Callable[[str], Desk]) -> Desk:
    return desk_for(HEADERS)


@pytest.fixture(scope="session")
def alternating(desk_for: Callable[[str], Desk]) -> Desk:
    return desk_for(ALTERNATING)


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    path = tmp_path_factory.mktemp("vocabulary") / "spm.gguf"
    return Desk(write_spm(path, template=ALTERNATING, added=("<tool>", "\n\n")))


def system(text: str | None) -> Message:
    return Message("system", text)


def user(text: str | None, **fields: object) -> Message:
    return Message("user", text, fields)


def assistant(text: str | None, **fields: object) -> Message:
    return Message("assistant", text, fields)


def tool(text: str | None, **fields: object) -> Message:
    return Message("tool", text, fields)
