"""engine/blas.py: for which weights the backend is loaded, what is refused, and that it computes the same model."""

import subprocess
import sys
from pathlib import Path

import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.blas import blas_bytes, gains_by_blas, with_blas
from hitsend.serve.engine.convert import convert
from hitsend.serve.engine.libllama import open_library
from hitsend.serve.engine.models import resolve

NATIVE = Path(__file__).resolve().parents[2] / ".native/build/bin"
WORDS, WIDTH = 49152, 576


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return resolve("smollm2-135m", tmp_path_factory.mktemp("models")).path


@pytest.fixture(scope="module")
def header(bundled: str) -> GgufHeader:
    return read_header(bundled)


def test_it_is_for_weights_of_narrow_types_as_shipped(bundled, header, tmp_path):
    assert gains_by_blas(header)
    assert blas_bytes("lib.so", header, 64) == 4 * WORDS * WIDTH
    assert blas_bytes("lib.so", header, 32) == 4 * 1536 * WIDTH
    assert blas_bytes(None, header, 64) == 0
    converted = tmp_path / "bf16.gguf"
    convert(open_library(), bundled, converted, "bf16", "0" * 64)
    assert not gains_by_blas(read_header(str(converted)))
    assert blas_bytes("lib.so", read_header(str(converted)), 64) == 0
    library = open_library()
    assert with_blas(library, None, read_header(str(converted))) is library
    with pytest.raises(ConfigError, match="engine.libllama isn't set"):  # said also where it would do nothing
        with_blas(library, "/nowhere.so", read_header(str(converted)))


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
@pytest.mark.skipif(not (NATIVE / "libggml-blas.so").exists(), reason="`make native` made no libggml-blas.so here")
def test_it_computes_the_same_model(bundled):
    words = [sys.executable, "-c", COMPARED, bundled, str(NATIVE / "libllama.so"), str(NATIVE / "libggml-blas.so")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    name, same, apart = ran.stdout.strip().rsplit(" ", 2)
    assert name.endswith(" + ggml-blas")
    assert (same, 0 < float(apart) < 2) == ("1", True)  # other roundings, so it did compute; the same weights
