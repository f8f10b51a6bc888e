"""What is in a file is hostile: every line is bounded, and nothing runs before all of them were looked at."""

import io
import json

import msgspec
import pytest

from hitsend.serve.batching.ending import answer_line
from hitsend.serve.batching.input import MAX_FAULTS, Limits, check, lines, parse, wants

URL = "/v1/chat/completions"
LIMITS = Limits(max_lines=50, max_line_bytes=300)


def line(custom_id="a", **changes):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m"}} | changes).encode()


def checked(tmp_path, raw, limits=LIMITS):
    (tmp_path / "file").write_bytes(raw)
    return check(tmp_path / "file", URL, limits)


def test_good_lines_with_any_line_ends_and_blank_ones_between(tmp_path):
    found = checked(tmp_path, line("a") + b"\r\n\n   \n" + line("b") + b"\n" + line("c"))
    assert (found.num_lines, found.faults) == (3, ())


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    raw = b"\xef\xbb\xbf" + line("a") + b"\n" + line("b")
    assert checked(tmp_path, raw) == checked(tmp_path, raw[3:])
    assert list(lines(io.BytesIO(raw), 300)) == list(lines(io.BytesIO(raw[3:]), 300))
    assert checked(tmp_path, b"\xef\xbb\xbf").faults[0].code == "empty_file"


@pytest.mark.parametrize(
    ("raw", "code", "number", "param"),
    [
        (b"", "empty_file", None, "input_file_id"),
        (b"\n \n", "empty_file", None, "input_file_id"),
        (b"\n" * 10_000 + line(), "too_many_lines", 51, "input_file_id"),
        (line() + b"\n" + line("x" * 999), "line_too_long", 2, None),
        (b"{" * 100_000, "line_too_long", 1, None),
        (b"[" * 250, "invalid_line", 1, None),
        (b"\0\0\0", "invalid_line", 1, None),
        (b'{"custom_id": "\xff"}', "invalid_line", 1, None),
        (b"[1]", "invalid_line", 1, None),
        (line(custom_id=""), "invalid_line", 1, None),
        (line(custom_id=5), "invalid_line", 1, None),
        (line(extra=1), "invalid_line", 1, None),
        (line(body=[1]), "invalid_line", 1, None),
        (line(body=None), "invalid_line", 1, None),
        (line(method="GET"), "invalid_method", 1, "method"),
        (line(url="/v1/embeddings"), "invalid_url", 1, "url"),
        (line(url="/admin/keys"), "invalid_url", 1, "url"),
        (line() + b"\n" + line("b") + b"\n\n" + line(), "duplicate_custom_id", 4, "custom_id"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, raw, code, number, param):
    found = checked(tmp_path, raw)
    assert [(fault.code, fault.line, fault.param) for fault in found.faults] == [(code, number, param)]


def test_limits_are_told_with_their_values(tmp_path):
    too_many = checked(tmp_path, b"\n".join(line(str(number)) for number in range(51)))
    assert "50" in too_many.faults[0].message
    assert "batches.max_lines" in too_many.faults[0].message
    too_long = checked(tmp_path, line("x" * 400))
    assert "300" in too_long.faults[0].message
    assert len(checked(tmp_path, b"x\n" * 49).faults) == 49
    assert len(checked(tmp_path, b"x\n" * 999, Limits(1000, 300)).faults) == MAX_FAULTS


def test_a_hundred_thousand_lines(tmp_path):
    raw = b"\n".join(line(str(number)) for number in range(100_000))
    found = checked(tmp_path, raw, Limits(100_000, 300))
    assert (found.num_lines, found.faults) == (100_000, ())


def test_of_a_line_that_is_too_long_only_its_place_is_kept():
    raw = b"a\n" + b"x" * 3_000_000 + b"\nb\n" + b"y" * 11 + b"\n" + b"z" * 10
    assert list(lines(io.BytesIO(raw), 10)) == [(1, b"a\n"), (2, None), (3, b"b\n"), (4, None), (5, b"z" * 10)]


def test_what_has_to_be_known_before_it_begins():
    assert wants(parse(line(body={"model": "m", "n": 3, "stream": True}))).n == 3
    assert wants(parse(line())).stream is None


@pytest.mark.parametrize("char", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1e", "\r", "\n"])
def test_a_line_of_an_output_file_is_one_line_to_everybody(char):
    told = f"a{char}b"
    body = msgspec.Raw(msgspec.json.encode({"content": told}))
    line = answer_line("batch_1", 1, told, {"body": body}, None).decode()
    assert line.splitlines() == [line]
    found = json.loads(line)
    assert (found["custom_id"], found["response"]["body"]["content"]) == (told, told)
