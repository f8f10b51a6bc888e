"""`hitsend models`: what is here, as JSON and for the eye; figures as a table."""

import io
import json
import subprocess
import sys

import msgspec
from rich.console import Console

from hitsend.cli.models import as_document, table_of
from hitsend.serve.engine.layouts import converted
from hitsend.serve.engine.tuned import Measured, Tuned, Way
from tests.engine.test_layouts import tiny

SHIPPED = Measured(Way(), 200.0, {1: 80.0, 8: 100.0, 32: 160.0}, 0.0, 0.0, 1, 90_000_000)
FASTER = Measured(Way("q8_0"), 400.0, {1: 90.0, 8: 200.0, 32: 300.0}, 0.002, 0.001, 1, 140_000_000, 1.7)
LOSSY = Measured(Way("q4_0"), 400.0, {1: 90.0, 8: 200.0, 32: 300.0}, 0.25, 0.02, 1, 90_000_000, 1.8)
RESULT = Tuned("m", "here", "b", 10.0, 48, (SHIPPED, FASTER, LOSSY))


def test_list_names_what_lies_in_the_models_folder(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(b"GGUF and more")
    words = ["-m", "hitsend", "models", "list", "--json", "--data", str(tmp_path)]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    mine = next(row for row in json.loads(ran.stdout)["models"] if row["name"] == "mine")
    assert (mine["num_bytes"], mine["origin"], mine["auto"]) == (13, "models folder", None)


def test_list_and_prune_show_converted_copies(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    kept, changed = (tiny(models / f"{name}.gguf") for name in ("kept", "changed"))
    tiny(changed, extra__key=1)
    for source in (kept, changed):
        converted(source, models, "q8_0", libllama=None, say=lambda _: None)
    tiny(changed, extra__key=2)

    def told(*words):
        ran = subprocess.run(
            [sys.executable, "-m", "hitsend", "models", *words, "--data", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return ran.stdout

    rows = {row["name"]: row["copies"] for row in json.loads(told("list", "--json"))["models"]}
    assert [(copy["layout"], copy["state"]) for copy in rows["kept"]] == [("q8_0", "current")]
    assert [(copy["layout"], copy["state"]) for copy in rows["changed"]] == [("q8_0", "changed")]
    assert f"deleted: q8_0 of {changed} (changed)" in told("prune")
    gone = json.loads(told("prune", "--all", "--json"))["copies"]
    assert [(copy["source"], copy["is_deleted"]) for copy in gone] == [(str(kept), True)]
    assert "0 copies deleted" in told("prune", "--all")


def test_the_document_says_what_is_within_the_bound_and_what_auto_would_be():
    document = json.loads(json.dumps(as_document(RESULT, 0.01)))
    assert document["auto"] == "q8_0"
    assert [row["is_within"] for row in document["rows"]] == [True, True, False]
    assert as_document(RESULT, 0.001)["auto"] == "as-shipped"
    assert as_document(RESULT, 0.5)["auto"] == "q4_0"


def test_the_table_has_a_line_for_each_way_and_fits_a_terminal():
    kinds = (Way("as-shipped", "q8_0"), Way(micro_batch=128), Way("q4_0+offsets"), Way(num_threads=2))
    more = [msgspec.structs.replace(LOSSY, way=way, prefill=1412.0, peak_bytes=1_234_000_000) for way in kinds]
    written = io.StringIO()
    Console(width=80, file=written).print(table_of(msgspec.structs.replace(RESULT, rows=(*RESULT.rows, *more)), 0.01))
    lines = written.getvalue().splitlines()
    assert [line[:13].strip() for line in lines[1:8]] == [
        "as-shipped",
        "q8_0",
        "q4_0",
        "KV q8_0",
        "batch 128",
        "q4_0+offsets",
        "2 threads",
    ]
    assert all(line.split()[-1] in {"yes", "no"} for line in lines[1:8])
    assert "+25.0% ±2.0" in lines[3]
