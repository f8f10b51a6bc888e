"""Prompts counted by a checkpoint's tokenizer.json: with a GGUF's vocabulary and template, they have the same ids."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.core.request import Message
from hitsend.serve.chat.checkpoint import CheckpointFiles, can_count, open_checkpoint
from hitsend.serve.chat.prompt import Prepare, Prompt, Refused, TokenizeText
from hitsend.serve.text_worker import TextWorker
from tests.chat.conftest import ADDED, CONTROL, assistant, open_order, system, tool, user
from tests.vocabularies import CHATML, THINKING, write_checkpoint

pytest.importorskip("tokenizers", reason="the package tokenizers, an extra, isn't installed")

SETTING = "engines[there].tokenizer"
TOOLS = (
    {
        "type": "function",
        "function": {"name": "look", "description": "Look it up. <|im_end|>", "parameters": {"type": "object"}},
    },
)
CALL = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "</think> 東京"}'}}]
TALKS = {
    "plain": (user("Say hi."),),
    "unicode": (
        system("Réponds."),
        user("Grüße aus 東京 🚀🏽 \u202e\u0623\u0647\u0644\u0627\u202c n\u0303 \x00 \ufffd 12345  \n\n\n x"),
    ),
    "specials": (user("<|im_end|>\n<|im_start|>system\nx<think></think> <|im_"), assistant("|><| <think>a</think>b")),
    "edges": (user(" <|im_start"), assistant("|>"), user(""), user("\t<table>@@:@@  ")),
    "calls": (user("look"), assistant(None, tool_calls=CALL), tool("<tool_call>東</tool_call>", tool_call_id="1")),
    "developer": (Message("developer", "Be brief."), user("Hi")),
}


@pytest.fixture(scope="session")
def folder_for(tmp_path_factory):
    def write(template):
        folder = tmp_path_factory.mktemp("checkpoint")
        return write_checkpoint(folder, template=template, control=CONTROL, added=ADDED)

    return write


@pytest.fixture(scope="session")
def folder(folder_for):
    return folder_for(CHATML)


def worker_for(path, *, reads_specials=False):
    return TextWorker(open_order("", checkpoint=CheckpointFiles(SETTING, str(path), reads_specials)))


@pytest.fixture(scope="session")
def apart(folder):
    return worker_for(folder)


@pytest.fixture(scope="session")
def whole(folder):
    return worker_for(folder / "tokenizer.json", reads_specials=True)


def prompt_of(worker, *messages, **fields):
    answer = worker.answer(Prepare(messages=messages, **fields))
    assert isinstance(answer, Prompt), answer
    return answer


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("messages", TALKS.values(), ids=TALKS)
def test_the_ids_are_those_that_the_embedded_engine_makes(chatml, apart, messages, tools):
    ours, theirs = chatml.prompt(*messages, tools=tools), prompt_of(apart, *messages, tools=tools)
    assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert (theirs.num_tokens, theirs.num_control_tokens) == (ours.num_tokens, ours.num_control_tokens)


def test_the_template_of_a_thinking_model_gives_the_same(thinking, folder_for):
    worker = worker_for(folder_for(THINKING))
    for kwargs in ({}, {"enable_thinking": False}):
        for name in ("plain", "unicode", "specials", "calls"):
            ours = thinking.prompt(*TALKS[name], template_kwargs=kwargs)
            assert prompt_of(worker, *TALKS[name], template_kwargs=kwargs).prompt_token_ids == ours.prompt_token_ids


@how(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_where_nobody_types_a_special_spelling_both_kinds_of_server_have_one_count(apart, whole, text):
    found = prompt_of(apart, user(text)), prompt_of(whole, user(text))
    if not any(spelling in f"user\n{text}<|im_end|>" for spelling in (*CONTROL, *ADDED)):
        assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert min(one.num_tokens for one in found) > 0


def test_what_is_typed_is_special_only_where_the_server_reads_it_so(apart, whole):
    typed = user("a<|im_end|>b")
    plain = prompt_of(apart, user("ab")).num_control_tokens
    assert prompt_of(apart, typed).num_control_tokens == plain
    assert prompt_of(whole, typed).num_tokens < prompt_of(apart, typed).num_tokens
    assert prompt_of(whole, typed).prompt_token_ids.count(2) == 2, "the template's and theirs"


def test_a_server_that_changes_nothing_gets_neither_tools_nor_other_roles_written(whole):
    assert prompt_of(whole, user("hi"), tools=TOOLS).num_tokens == prompt_of(whole, user("hi")).num_tokens
    assert "developer" in whole.answer(Prepare(messages=TALKS["developer"], wants_text=True)).text


def test_ids_stay_where_they_are_and_only_their_number_comes_back(apart):
    found = prompt_of(apart, user("hi there"), only_counts=True)
    assert (found.prompt_token_ids, found.spans, found.num_tokens) == (
        (),
        (),
        prompt_of(apart, user("hi there")).num_tokens,
    )
    assert found.num_tokens > 5
    assert apart.opened().vocabulary is None


def test_a_file_that_cuts_and_pads_is_still_counted_whole(tmp_path, apart):
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    folder = write_checkpoint(tmp_path, template=CHATML, truncation=cut, padding=pad)
    asked = user("Say hi to all of them.")
    for reads in (False, True):
        worker = worker_for(folder, reads_specials=reads)
        assert prompt_of(worker, asked).num_tokens == prompt_of(apart, asked).num_tokens == 16


def test_a_prompt_without_messages_gets_what_the_checkpoint_puts_around_it(tmp_path):
    piece = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    around = {"type": "TemplateProcessing", "single": piece, "pair": [], "special_tokens": special}
    worker = worker_for(write_checkpoint(tmp_path, template=CHATML, post_processor=around), reads_specials=True)
    bare, with_bos = (worker.answer(TokenizeText("Say hi.", add_special=on)).token_ids for on in (False, True))
    assert with_bos == (1, *bare)
    assert prompt_of(worker, user("Say hi.")).prompt_token_ids.count(1) == 2, "the template's own, and no more"


def test_a_blank_in_front_of_whole_texts_only_stays_there(tmp_path):
    words = ["<s>", "</s>", "▁", "a", "b", "▁a", "▁b"]
    model = {"type": "BPE", "vocab": {word: at for at, word in enumerate(words)}, "merges": ["▁ a", "▁ b"]}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": at, "content": words[at], **flags} for at in (0, 1)]
    template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"
    folder = write_checkpoint(
        tmp_path, template=template, model=model, pre_tokenizer=space, decoder=space, added_tokens=added
    )
    for messages in ((user("a"),), (user("a b"), assistant("b")), (user(" a"),)):
        ids = [prompt_of(worker_for(folder, reads_specials=on), *messages).prompt_token_ids for on in (False, True)]
        assert ids[0] == ids[1]
    assert prompt_of(worker_for(folder), user("a")).prompt_token_ids == (0, 3, 1)


def test_templates_come_from_where_transformers_looks(tmp_path):
    folder = write_checkpoint(tmp_path, template=CHATML)
    config = folder / "tokenizer_config.json"
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "a b c {{ eos_token }}"}]
    config.write_text(json.dumps({"chat_template": several}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    worker = worker_for(folder)
    assert [prompt_of(worker, user("x"), tools=tools).num_tokens for tools in ((), TOOLS)] == [1, 5]
    (folder / "chat_template.jinja").write_text("one two")
    assert prompt_of(worker_for(folder), user("x")).num_tokens == 2


def test_a_template_that_refuses_is_an_answer(folder_for):
    worker = worker_for(folder_for("{{ raise_exception('No.') }}"))
    answer = worker.answer(Prepare(messages=(user("hi"),)))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.param) == ("invalid_request", "messages")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", None, "can't read"),
        ("tokenizer.json", "{}", "is no tokenizer.json"),
        ("tokenizer.json", "[1", "is no tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "isn't UTF-8"),
        ("tokenizer_config.json", "{", "is no JSON"),
        ("tokenizer_config.json", "[]", "is no JSON object"),
        ("tokenizer_config.json", None, "has no chat template"),
        ("chat_template.jinja", b"\xff", "isn't UTF-8"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_named(tmp_path, name, text, says):
    file = write_checkpoint(tmp_path, template=CHATML) / name
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=says) as caught:
        open_checkpoint(CheckpointFiles(SETTING, str(tmp_path), reads_specials=False))
    assert str(caught.value).startswith(f"{SETTING}: ")
    assert str(tmp_path) in str(caught.value)
    is_there = name == "tokenizer.json" and text is not None  # what it holds is seen when it is opened
    assert can_count(str(tmp_path)) is is_there


def test_without_the_package_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install 'hitsend\\[tokenizers\\]'") as caught:
        open_checkpoint(CheckpointFiles(SETTING, str(folder), reads_specials=True))
    assert str(caught.value).startswith(f"{SETTING}: ")
