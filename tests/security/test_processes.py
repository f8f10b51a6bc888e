"""What comes out of another process, or out of a file, is data: it is decoded or refused, and nothing else happens."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from hitsend.serve.child import Child, ChildExit
from tests.engine.test_gguf_check import written

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

FRAMES = """
import random, sys
import msgspec
from hitsend.core.frames import FrameReader, FrameTooLong, frame
from hitsend.serve.chat import prompt, text
from hitsend.serve.engine import embedding_messages, startup
from hitsend.serve.engine.startup import report_decoder, command_decoder, config_decoder
from hitsend.serve.loop import messages

touched = []
FORBIDDEN = ("open", "exec", "compile", "import", "socket.", "subprocess.", "os.", "ctypes.")
EVIL = [b"\\x91" * 2000, b"\\xff", *(bytes([kind]) + b"\\xff" * 4 for kind in (0xDF, 0xDB, 0xDD, 0xC9, 0xC6))]
decoders = [
    report_decoder, command_decoder, config_decoder,
    embedding_messages.order_decoder, embedding_messages.answer_decoder,
    msgspec.msgpack.Decoder(prompt.Order), msgspec.msgpack.Decoder(prompt.Answer),
]
good = [
    messages.Abort("r", 0), prompt.TokenizeText("abc", add_special=True), prompt.Refused("c", "m", "p"),
    prompt.TokenIds((1, 2, 3)), embedding_messages.EmbedderRefused("m"),
]
draw = random.Random(5)
bodies = [msgspec.msgpack.encode(one) for one in good]
sys.addaudithook(lambda event, _: touched.append(event) if event.startswith(FORBIDDEN) else None)
decoded = refused = 0
for number in range(10_000):
    data = bytearray(frame(draw.choice(bodies)) if number % 3 else frame(draw.randbytes(draw.randrange(200))))
    for _ in range(draw.randint(0, 4)):
        place = draw.randrange(len(data))
        action = draw.randrange(3)
        if action == 0:
            data[place] = draw.randrange(256)
        elif action == 1:
            del data[place : place + draw.randint(1, 4)]
            data = data or bytearray(b"\\0")
        else:
            data[place:place] = draw.choice(EVIL)
    try:
        found = FrameReader().feed(bytes(data))
    except FrameTooLong:
        refused += 1
        continue
    for body in found:
        for decoder in decoders:
            try:
                decoder.decode(body)
                decoded += 1
            except msgspec.DecodeError:
                refused += 1
            except RecursionError:
                refused += 1
print(decoded, refused, touched)
"""


def test_ten_thousand_mutated_frames_are_values_or_errors_and_touch_nothing():
    ran = subprocess.run([sys.executable, "-c", FRAMES], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    decoded, refused, touched = ran.stdout.split(maxsplit=2)
    assert touched.strip() == "[]"
    assert int(decoded) > 500
    assert int(refused) > 5000


SPEAKS_NONSENSE = """
import sys, time
from hitsend.serve.parent import ParentLine
line = ParentLine(int(sys.argv[sys.argv.index("--fd") + 1]))
line.send(bytes.fromhex(sys.argv[1]))
time.sleep(600)
"""


async def test_a_child_that_says_what_is_no_message_is_ended_and_reported():
    await asyncio.gather(*map(spoken, ("c1", "81", "93010203", "d9ff61", "dfffffffff", "91" * 3000, "")))


async def spoken(body: str) -> None:
    decoder = msgspec.msgpack.Decoder(dict[str, int])
    ended: asyncio.Queue[ChildExit] = asyncio.Queue()
    child = Child(["-c", SPEAKS_NONSENSE, body], on_message=decoder.decode, on_exit=ended.put_nowait)
    await child.start()
    async with asyncio.timeout(30):
        found = await ended.get()
    assert found.signal == 9
    assert not child.is_running


READER = """
import random, sys
from pathlib import Path
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.shape import memory_shape
from tests.engine.test_gguf_check import mutated
good, draw, path = Path(sys.argv[1]).read_bytes(), random.Random(13), sys.argv[1] + ".m"
refused = 0
for _ in range(10_000):
    Path(path).write_bytes(mutated(good, draw))
    try:
        memory_shape(read_header(path))
    except ConfigError:
        refused += 1
print(refused)
"""


@pytest.mark.slow
def test_ten_thousand_mutated_headers_of_models_end_no_process(tmp_path):
    written(tmp_path / "good.gguf")
    command = [sys.executable, "-c", READER, str(tmp_path / "good.gguf")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert 1000 < int(ran.stdout) < 10_000
