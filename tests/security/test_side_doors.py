"""Nothing listens but what was configured, and nothing answers without a key once there is one."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hitsend.core.request import Principal
from hitsend.serve.api.routes import ROUTES
from tests.edge import Edge
from tests.served import Served, serving, until

OTHERS_PATHS = [
    *("/invocations", "/pause", "/resume", "/sleep", "/wake_up", "/is_sleeping", "/update_weights", "/load", "/ping"),
    *("/version", "/health", "/server_info", "/reset_prefix_cache", "/collective_rpc", "/init_weight_transfer_engine"),
    *("/start_profile", "/stop_profile", "/abort_requests", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/score"),
    *("/rerank", "/pooling", "/classify", "/inference/v1/generate", "/v1/load_lora_adapter", "/lora-adapters"),
    *("/config/update", "/get_config_yaml", "/spend/logs", "/key/generate", "/global/spend", "/utils/transform"),
    *("/api/tags", "/api/pull", "/api/delete", "/api/create", "/api/push", "/props", "/slots", "/debug", "/redoc"),
    *("/swagger", "/.env", "/.git/config", "/static/../hitsend.sqlite3", "/inspect/web/../../settings.py"),
    *("/admin", "/admin/", "/Admin/keys", "/admin/keys/", "/v1/../admin/keys", "/%61dmin/keys", "//admin/keys"),
]


@pytest.mark.parametrize("path", OTHERS_PATHS)
async def test_doors_that_other_servers_leave_open_are_closed(path: str):
    edge = Edge(keys={"k": Principal(key_id="k", name="n")})
    for method in ("GET", "POST", "DELETE"):
        answer = await edge.ask(path, {} if method == "POST" else None, method=method)
        assert answer.status == 401
        answer = await edge.ask(path, {} if method == "POST" else None, (b"authorization", b"Bearer k"), method=method)
        assert answer.status in (403, 404, 405)


def family(pid: int) -> set[int]:
    """A process and all that it started."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= family(int(child))
    return found


def sockets_of(pids: set[int]) -> set[str]:
    """Inodes of their sockets."""
    links = []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.append(str(link.readlink()))
            except FileNotFoundError:
                continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening(pids: set[int]) -> list[tuple[str, str]]:
    """(table, local address) of every socket of theirs that takes what others send."""
    own, found = sockets_of(pids), []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in own and (table.startswith("udp") or words[3] == "0A"):
                found.append((table, words[1]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in own and int(words[3], 16) & 0x10000:
            found.append(("unix", words[-1]))
    return found


def status(served: Served, method: str, path: str, key: str | None = None) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = b"{}" if method in ("POST", "PATCH") else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(served.url + path, body, headers, method=method), timeout=20
        ) as got:
            return int(got.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


@pytest.mark.model
@pytest.mark.slow
def test_a_started_server_listens_on_one_port_and_answers_nobody_without_a_key(tmp_path: Path):
    with serving("--set", "engine.num_slots=2", "--set", "engine.context=512", data=tmp_path) as served:
        port = int(served.url.rpartition(":")[2])
        pids = family(served.process.pid)
        assert len(pids) >= 3, "the text and the engine's process are there"
        assert listening(pids) == [("tcp", f"0100007F:{port:04X}")]
        served.chat("Hello", max_tokens=3)
        assert listening(family(served.process.pid)) == [("tcp", f"0100007F:{port:04X}")]
        command = [sys.executable, "-m", "hitsend", "keys", "create", "--name", "n", "--role", "admin", "--json"]
        made = json.loads(
            subprocess.run([*command, "--data", str(tmp_path)], check=True, capture_output=True, timeout=60).stdout
        )
        assert until(lambda: status(served, "GET", "/v1/models"), lambda code: code == 401, 5) == 401
        for route, methods in ROUTES.items():
            for method in methods:
                wanted = 200 if route == "/healthz" else 401
                assert status(served, method, route.replace("{id}", "x")) == wanted, route
        for path in ("/metrics", "/docs", "/openapi.json", "/inspect/state", "/admin/keys"):
            assert status(served, "GET", path, made["key"]) == 200
        for path in tmp_path.iterdir():
            if ".sqlite3" in path.name:
                assert path.stat().st_mode & 0o077 == 0, "keys and records are for the one who runs the server"
