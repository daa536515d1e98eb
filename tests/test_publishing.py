"""ppo.push_to_hub_if_best against a hub on this machine that takes uploads."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ppo_folder import ppo
from safetensors.torch import load

TOKEN = "hf_of_a_test"


class Hub(BaseHTTPRequestHandler):
    """Takes every file inside the commit itself: no large-file store."""

    commits: list[dict]
    broken = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        address = f"http://127.0.0.1:{self.server.server_port}"
        if self.broken:
            return self._answer({"error": "the hub is down"}, 500)
        if self.path == "/api/repos/create":
            made = json.loads(body)
            self.commits.append({"made": made})
            return self._answer({"url": f"{address}/lab/policy", "name": made["name"]})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            self.commits.append({"summary": summary, "files": files})
            return self._answer({"commitUrl": f"{address}/lab/policy/commit/abc", "commitOid": "abc", "success": True})
        return self._answer({}, 200)

    def do_GET(self) -> None:
        self._answer({"id": "lab/policy", "sha": "abc", "siblings": []})

    def _answer(self, value: dict, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"commits": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def pushing(folder: Path, address: str) -> subprocess.CompletedProcess:
    """`rlhf ppo` in a process of its own: huggingface_hub reads its address once."""
    command = [
        sys.executable,
        "-m",
        "rlhf_cli",
        "ppo",
        "-c",
        str(folder / "ppo.yaml"),
        "ppo.push_to_hub_if_best=lab/policy",
    ]
    env = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.training
def test_the_best_policy_is_pushed_each_time_it_is_beaten(run_folder, hub):
    address, handler = hub
    done = pushing(run_folder, address)
    assert done.returncode == 0, done.stderr
    made = [commit["made"] for commit in handler.commits if "made" in commit]
    pushed = [commit for commit in handler.commits if "files" in commit]
    assert made[0]["name"] == "policy" and made[0]["organization"] == "lab" and made[0]["visibility"] == "private"
    assert pushed[0]["summary"].startswith("Policy after 0 PPO updates, objective/scores - objective/kl_coef")
    best = json.loads((run_folder / "ppo/manifest.json").read_text())["best"]["step"]
    assert pushed[-1]["summary"].startswith(f"Policy after {best} PPO updates")
    files = pushed[-1]["files"]
    kept = run_folder / f"ppo/snapshots/step_{best:06d}"
    assert load(files["model.safetensors"]) and files["config.json"] == (kept / "config.json").read_bytes()
    assert "state.json" not in files and TOKEN not in done.stderr + done.stdout


@pytest.mark.training
def test_r09_a_hub_that_is_down_ends_no_training(run_folder, hub):
    address, handler = hub
    handler.broken = True
    done = pushing(run_folder, address)
    assert done.returncode == 0 and "warning[R09]" in done.stderr and "was not pushed to lab/policy" in done.stderr
    assert (run_folder / "ppo/manifest.json").is_file()


def test_a_push_without_a_token_is_refused_before_anything_loads(run_folder, monkeypatch, tmp_path_factory):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("rlhf_cli.models.publishing.get_token", lambda: None)
    refused = ppo(run_folder, "-s", "ppo.push_to_hub_if_best=lab/policy")
    assert refused.exit_code == 2 and "error[C17]: --set ppo.push_to_hub_if_best: " in refused.stderr
    assert "hint: `hf auth login`" in refused.stderr
