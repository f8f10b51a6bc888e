"""A form with one file, however it is cut, and everything that is no such form."""

import pytest

from hitsend.core.errors import InvalidRequest, UnsupportedMediaType
from hitsend.serve.api.multipart import MAX_FIELD_BYTES, MAX_HEAD_BYTES, MAX_PARTS, Form, boundary_of

FILE = b"\r\n--not the boundary\r\n--b\r\nx\0\xff" + b"line\n" * 20
HEAD = b'Content-Disposition: form-data; name="%b"'


def part(name: bytes, content: bytes, more: bytes = b"") -> bytes:
    return b"--bound\r\n" + HEAD % name + more + b"\r\n\r\n" + content + b"\r\n"


def file_part(content: bytes, file_name: bytes = b"a.jsonl") -> bytes:
    return part(b"file", content, b'; filename="%b"\r\nContent-Type: application/octet-stream' % file_name)


GOOD = part(b"purpose", b"batch") + file_part(FILE) + b"--bound--\r\n"


def read(body: bytes, *cuts: int) -> tuple[Form, bytes]:
    taken = bytearray()
    form = Form(b"bound", taken.extend)
    last = 0
    for cut in (*cuts, len(body)):
        form.feed(body[last:cut])
        last = cut
    form.end()
    return form, bytes(taken)


def test_cut_at_every_byte_it_reads_the_same():
    for cut in range(len(GOOD) + 1):
        form, content = read(GOOD, cut)
        assert (form.fields, form.file_name, content) == ({"purpose": "batch"}, "a.jsonl", FILE), cut
    form, content = read(GOOD, *range(len(GOOD)))
    assert (form.fields, content) == ({"purpose": "batch"}, FILE)


def test_the_order_of_parts_an_empty_file_and_an_epilogue_make_no_difference():
    form, content = read(file_part(b"") + part(b"purpose", b"") + b"--bound--epilogue")
    assert (form.fields, form.file_name, content) == ({"purpose": ""}, "a.jsonl", b"")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"../../etc/passwd", "passwd"),
        (b"C:\\x\\y.jsonl", "y.jsonl"),
        (b"a\x01b", "a_b"),
        (b"", "file"),
        (b"x" * 999, "x" * 255),
    ],
)
def test_what_a_file_is_called_is_never_a_path(name, shown):
    assert read(file_part(b"x", name) + b"--bound--")[0].file_name == shown


@pytest.mark.parametrize(
    "body",
    [
        b"",
        GOOD[:-10],
        b"preamble" + GOOD,
        part(b"purpose", b"batch") + b"--bound--",
        part(b"file", b"no file name") + b"--bound--",
        file_part(b"1") + file_part(b"2") + b"--bound--",
        part(b"a", b"1") + part(b"a", b"2") + file_part(b"") + b"--bound--",
        part(b"a", b"x" * (MAX_FIELD_BYTES + 1)) + file_part(b"") + b"--bound--",
        part(b"a", b"\xff") + file_part(b"") + b"--bound--",
        b"".join(part(b"f%d" % number, b"") for number in range(MAX_PARTS)) + file_part(b"") + b"--bound--",
        b"--bound\r\n" + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\nz\r\n--bound--",
        b"--bound\r\n\r\n\r\nno head\r\n--bound--",
        b"--bound\r\n" + HEAD % b"a" + b"\r\n" + HEAD % b"b" + b"\r\n\r\nx\r\n--bound--",
        part(b"file", b"eA==", b'; filename="a"\r\nContent-Transfer-Encoding: base64') + b"--bound--",
        file_part(b"x") + b"--boundary--",
    ],
)
def test_what_is_no_such_form_is_refused(body):
    with pytest.raises(InvalidRequest):
        read(body)
    with pytest.raises(InvalidRequest):
        read(body, *range(len(body)))


def test_not_more_than_a_head_is_held():
    form = Form(b"bound", lambda _: None)
    form.feed(b"--bound\r\n" + HEAD % b"file" + b'; filename="a"\r\n\r\n')
    for _ in range(50):
        form.feed(b"x" * 65_536)
        assert len(form._held) < 64


@pytest.mark.parametrize(
    "kind", [None, b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 71]
)
def test_without_a_boundary_nothing_is_read(kind):
    with pytest.raises(UnsupportedMediaType):
        boundary_of(kind)


def test_a_boundary_may_be_quoted():
    assert boundary_of(b'multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    assert boundary_of(b"Multipart/Form-Data; boundary=a-b_c") == b"a-b_c"
