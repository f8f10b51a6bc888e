"""engine/libllama.py: the pinned build passes, everything else is refused in clear words before it is called."""

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.declarations import (
    CONTEXT_DEFAULTS,
    FUNCTIONS,
    LAYOUTS,
    MODEL_DEFAULTS,
    ContextParams,
    ModelParams,
)
from hitsend.serve.engine.libllama import (
    explain,
    open_library,
)

SHIM = """
#include <stdint.h>
#include <string.h>
struct model {{ char bytes[{model_size}]; }};
struct context {{ char bytes[{context_size}]; }};
struct model llama_model_default_params(void) {{ struct model p; memset(&p, 0, sizeof p); {model} return p; }}
struct context llama_context_default_params(void) {{ struct context p; memset(&p, 0, sizeof p); {context} return p; }}
int LLAMA_BUILD_NUMBER = {build};
_Bool llama_supports_rpc(void) {{ return {rpc}; }}
{others}
"""


def assignments(layout: type, values: dict[str, object], shift: int) -> str:
    kinds = {"c_int": "int32_t", "c_uint": "uint32_t", "c_float": "float", "c_bool": "_Bool", "c_ulong": "uint64_t"}
    lines = []
    for name, kind in layout._fields_:
        if name in values:
            at = getattr(layout, name).offset + (shift if getattr(layout, name).offset >= 40 else 0)
            value = int(values[name])
            lines.append(f"{{ {kinds[kind.__name__]} v = {value}; memcpy(p.bytes + {at}, &v, sizeof v); }}")
    return " ".join(lines)


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., str]:
    """A library that has every symbol and whatever layout, build number and RPC flag a test wants."""

    def build(*, shift: int = 0, number: int = 11549, rpc: int = 0, without: str = "") -> str:
        names = [n for n in FUNCTIONS if n not in {"llama_supports_rpc", without}]
        source = tmp_path / "shim.c"
        source.write_text(
            SHIM.format(
                model_size=80,
                context_size=168 + shift,
                model=assignments(ModelParams, MODEL_DEFAULTS, 0),
                context=assignments(ContextParams, CONTEXT_DEFAULTS, shift),
                build=number,
                rpc=rpc,
                others="\n".join(f"void *{name}(void) {{ return 0; }}" for name in names),
            )
        )
        path = tmp_path / "libshim.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(path), str(source)], check=True, timeout=60)
        return str(path)

    return build


def test_the_pinned_build_is_accepted() -> None:
    library = open_library()
    assert library.name == "llama.cpp b11549"
    assert library.llama_supports_rpc() is False
    assert set(LAYOUTS) == {"llama_model_default_params", "llama_context_default_params"}


def test_a_library_with_our_layout_is_accepted(built: Callable[..., str]) -> None:
    assert open_library(built()).build == 11549


def test_a_shifted_field_is_found_and_named(built: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"another struct layout .* llama_context_default_params\(\)\.\w+ is"):
        open_library(built(shift=8))


def test_missing_symbols_are_named(built: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"lacks llama_memory_seq_rm$"):
        open_library(built(without="llama_memory_seq_rm"))
    with pytest.raises(ConfigError, match=r"lacks llama_backend_init, .* and \d+ more"):
        open_library("libm.so.6")


def test_rpc_and_old_builds_are_refused(built: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="RPC"):
        open_library(built(rpc=1))


def test_an_old_build_is_refused(built: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="is llama.cpp b8145; b8146 or newer"):
        open_library(built(number=8145))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_text("not ELF")
    for wrong in (str(path), str(tmp_path / "none.so")):
        with pytest.raises(ConfigError, match=r"engine\.libllama: can't load"):
            open_library(wrong)


def test_a_missing_libgomp_names_the_debian_package() -> None:
    assert "apt install libgomp1" in explain("x.so", "libgomp.so.1: cannot open shared object file")


FREED_AND_TAKEN = """
import resource
from hitsend.serve.engine.libllama import keep_freed_memory
if {is_kept}:
    keep_freed_memory()
def take():
    held = [b"x" * 10_000_000 for _ in range(5)]
for _ in range(3):
    take()
last = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - last)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_taken_again_without_a_page_fault():
    def page_faults(*, is_kept: bool) -> int:
        words = [sys.executable, "-c", FREED_AND_TAKEN.format(is_kept=is_kept)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert page_faults(is_kept=True) < 100
    assert page_faults(is_kept=False) > 1000
