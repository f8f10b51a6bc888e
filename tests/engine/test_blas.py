"""engine/blas.py: for which weights which backend is loaded, what is refused, and that it computes the same model."""

import ctypes
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.blas import blas_bytes, gains_by, with_blas
from hitsend.serve.engine.convert import convert
from hitsend.serve.engine.libllama import open_library
from hitsend.serve.engine.models import resolve

NATIVE = Path(__file__).resolve().parents[2] / ".native/build/bin"
WORDS, WIDTH = 49152, 576
LAYER = 3 * 1536 * WIDTH + 2 * WIDTH * WIDTH + 2 * 192 * WIDTH
ZENDNN = "/nowhere/libggml-zendnn.so"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return resolve("smollm2-135m", tmp_path_factory.mktemp("models")).path


@pytest.fixture(scope="module")
def header(bundled: str) -> GgufHeader:
    return read_header(bundled)


@pytest.fixture(scope="module")
def wide(bundled: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model in BF16."""
    converted = tmp_path_factory.mktemp("wide") / "bf16.gguf"
    convert(open_library(), bundled, converted, "bf16", "0" * 64)
    return str(converted)


def test_it_is_for_weights_of_narrow_types_as_shipped(header, wide):
    assert gains_by("lib.so", header)
    assert blas_bytes("lib.so", header, 64) == 4 * WORDS * WIDTH
    assert blas_bytes("lib.so", header, 32) == 4 * 1536 * WIDTH
    assert blas_bytes(None, header, 64) == 0
    assert not gains_by("lib.so", read_header(wide))
    assert blas_bytes("lib.so", read_header(wide), 64) == 0
    library = open_library()
    assert with_blas(library, None, read_header(wide)) is library
    with pytest.raises(ConfigError, match="engine.libllama isn't set"):  # said also where it would do nothing
        with_blas(library, "/nowhere.so", read_header(wide))


def test_zendnn_is_for_bfloat16_and_keeps_a_copy_of_it(header, wide):
    assert gains_by(ZENDNN, read_header(wide))
    assert blas_bytes(ZENDNN, read_header(wide), 1) == 2 * (WORDS * WIDTH + 30 * LAYER)
    assert not gains_by(ZENDNN, header)
    assert blas_bytes(ZENDNN, header, 64) == 0


def test_zendnn_gets_no_model_that_multiplies_what_it_computed(wide):
    header = read_header(wide)
    other = msgspec.structs.replace(header, metadata={**header.metadata, "general.architecture": "mamba2"})
    assert not gains_by(ZENDNN, other)


BACKEND = """
#include <stddef.h>
struct registry {
    int version;
    const char *(*name)(void *); size_t (*count)(void *); void *(*device)(void *, size_t);
    void *(*address)(void *, const char *);
    void *context;
};
static const char *name(void *self) { return "none"; }
static size_t count(void *self) { return 0; }
static void *device(void *self, size_t index) { return NULL; }
static void *address(void *self, const char *asked) { return NULL; }
static struct registry none = {3, name, count, device, address, NULL};
void *ggml_backend_init(void) { return &none; }
"""


@pytest.mark.parametrize(("name", "is_blas"), [("libggml-blas.so", True), ("libggml-zendnn.so", False)])
def test_only_a_blas_changes_how_steps_are_cut(header, wide, tmp_path, name, is_blas):
    library, source, backend = tmp_path / "libllama.so", tmp_path / "none.c", tmp_path / name
    library.symlink_to(open_library().path)
    source.write_text(BACKEND)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(backend), str(source)], check=True, timeout=60)
    own = open_library(str(library))
    assert not own.has_blas
    with_blas(own, str(backend), header if is_blas else read_header(wide))
    assert own.name.endswith(f" + {backend.stem.removeprefix('lib')}")
    assert own.has_blas == is_blas
    asked = ctypes.CDLL(None).getenv
    asked.restype = ctypes.c_char_p
    assert asked(b"GGML_ZENDNN_ADAPTIVE_FALLBACK") == b"0"  # else it would leave decodes to libllama


def test_what_is_no_backend_is_refused(header, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.blas: engine\.libllama isn't set"):
        with_blas(open_library(), "/nowhere.so", header)
    # the wheel's under another name: what somebody might have compiled
    library = tmp_path / "libllama.so"
    library.symlink_to(open_library().path)
    own = open_library(str(library))
    with pytest.raises(ConfigError, match=r"engine\.blas: there is no file /nowhere\.so"):
        with_blas(own, "/nowhere.so", header)
    source, other = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text("int other(void) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(other), str(source)], check=True, timeout=60)
    with pytest.raises(ConfigError, match=r"engine\.blas: .*libother\.so can't be loaded: .*ggml_backend_init"):
        with_blas(own, str(other), header)


COMPARED = """
import os, sys, numpy as np
from hitsend.core.clock import SystemClock
from hitsend.gguf import read_header
from hitsend.serve.engine.blas import with_blas
from hitsend.serve.engine.libllama import open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.shape import CellPlan
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch

path, lib, blas = sys.argv[1:]
library = open_library(lib)
def row():
    model = LoadedModel(library, path)
    plan = CellPlan(1, 256, 256)
    decoder = LlamaDecoder(model, plan, SystemClock(), step_tokens=128, num_threads=2, is_unified=False)
    ids = np.arange(100, 196, dtype=np.int32)
    found = decoder.decode(Batch(ids, np.arange(96, dtype=np.int32), np.zeros(96, np.int32), np.arange(96) == 95))
    decoder.close()
    return found[0]
first = row()
with_blas(library, blas, read_header(path))
second = row()
print(library.name, int(first.argmax() == second.argmax()), float(np.abs(first - second).max()), flush=True)
os._exit(0)
"""


@pytest.mark.model
@pytest.mark.parametrize(("name", "weights"), [("ggml-blas", "bundled"), ("ggml-zendnn", "wide")])
def test_it_computes_the_same_model(request, name, weights):
    backend = NATIVE / f"lib{name}.so"
    if not backend.exists():
        pytest.skip(f"there is no {backend.name} beside the libllama of `make native`")
    path = request.getfixturevalue(weights)
    words = [sys.executable, "-c", COMPARED, path, str(NATIVE / "libllama.so"), str(backend)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found, same, apart = ran.stdout.strip().rsplit(" ", 2)
    assert found.endswith(f" + {name}")
    assert (same, 0 < float(apart) < 2) == ("1", True)  # other roundings, so it did compute; the same weights
