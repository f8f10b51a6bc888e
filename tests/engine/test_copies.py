"""engine/copies.py: which converted copies go, and which never do."""

import os
from pathlib import Path

from hitsend.serve.engine.copies import copies, discard_older, prune
from hitsend.serve.engine.layouts import converted, converted_path, hold
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.weights import laid_out
from hitsend.settings import EngineSettings
from tests.engine.test_layouts import tiny


def test_copies_that_another_file_has_or_somebody_runs_on_stay_when_a_file_changes(tmp_path):
    source, models = tiny(tmp_path / "tiny.gguf"), tmp_path / "models"
    twin = tmp_path / "twin.gguf"
    twin.write_bytes(source.read_bytes())
    said: list[str] = []

    def ask(file: Path, layout: str) -> Path:
        found = laid_out(ModelFile(str(file), "tiny", "path"), models, EngineSettings(layout=layout), said.append)
        return Path(found.weights_path)

    for layout in ("q8_0", "q4_0"):
        converted(source, models, layout, libllama=None, say=lambda _: None)
    first = [converted_path(source, models, layout) for layout in ("q8_0", "q4_0")]
    assert ask(twin, "q8_0") == first[0]  # and holds it, as a server of another process would
    os.utime(source, ns=(1, 1))  # touched, not changed
    assert ask(source, "q8_0") == first[0]
    assert [file.exists() for file in first] == [True, True]
    tiny(source, extra__key=1)
    second = ask(source, "q8_0")
    assert [file.exists() for file in (*first, second)] == [True, True, True], "the twin is as it was"
    twin.unlink()
    tiny(source, extra__key=2)
    third = ask(source, "bf16")
    assert [file.exists() for file in (*first, second, third)] == [True, True, True, True], "in use, or nobody's change"
    assert not any("deleted" in line for line in said)


def test_a_changed_files_copies_are_deleted_where_nobody_runs_on_them(tmp_path):
    source, models = tiny(tmp_path / "tiny.gguf"), tmp_path / "models"
    first = [converted(source, models, layout, libllama=None, say=lambda _: None) for layout in ("q8_0", "q4_0")]
    used = converted(source, models, "bf16", libllama=None, say=lambda _: None)
    hold(source, models, "bf16")
    tiny(source, extra__key=1)
    said: list[str] = []
    for _ in range(2):
        discard_older(source, models, said.append)
        assert [file.exists() for file in (*first, used)] == [False, False, True]
    assert said == ["layouts: tiny.gguf has changed: 2 converted copies of what it was are deleted"]


def test_prune_deletes_what_nobody_can_want_and_nothing_else(tmp_path):
    models = tmp_path / "models"
    kept, changed, gone, held = (
        tiny(tmp_path / f"{name}.gguf", extra__key=number) for number, name in enumerate("abcd")
    )
    files = {
        source.stem: converted(source, models, "q8_0", libllama=None, say=lambda _: None)
        for source in (kept, changed, gone, held)
    }
    hold(held, models, "q8_0")
    tiny(changed, extra__key=10)
    gone.unlink()
    held.unlink()
    old = files["a"].with_name("0" * 32 + ".gguf")  # as an earlier edition would have called it
    old.write_bytes(files["a"].read_bytes())
    broken = old.with_name("1" * 32 + ".gguf")
    broken.write_bytes(b"GGUF half")
    found = {Path(copy.path): (copy.source, copy.state, copy.is_used) for copy in copies(models)}
    assert found == {
        files["a"]: (str(kept), "current", False),
        files["b"]: (str(changed), "changed", False),
        files["c"]: (str(gone), "gone", False),
        files["d"]: (str(held), "gone", True),
        old: (str(kept), "outdated", False),
        broken: ("", "outdated", False),
    }
    done = {Path(copy.path): is_gone for copy, is_gone in prune(models, every=False)}
    assert done == {files["b"]: True, files["c"]: True, files["d"]: False, old: True, broken: True}
    assert {file for file in [*files.values(), old, broken] if file.exists()} == {files["a"], files["d"]}
    assert [(copy.source, is_gone) for copy, is_gone in prune(models, every=True)] == [
        (str(kept), True),
        (str(held), False),
    ]
