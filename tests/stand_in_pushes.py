"""A hub of models on this machine that can be pushed to and loaded from: what huggingface_hub and transformers ask for.

Weights go to a large-file store, as on the real one; all else is in the commits themselves.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

TOKEN = "hf_" + "OfTheTestsOfPushes0123456789"
LARGE = (".safetensors", ".bin")
Files = dict[str, bytes]


@dataclass(frozen=True)
class Commit:
    title: str
    files: Files
    deleted: tuple[str, ...] = ()

    @property
    def oid(self) -> str:
        told = repr((self.title, sorted(self.files.items())))
        return hashlib.sha1(told.encode()).hexdigest()


@dataclass
class Repo:
    private: bool = True
    commits: list[Commit] = field(default_factory=lambda: [Commit("made", {".gitattributes": b"*.safetensors lfs\n"})])
    ours: bool = True  # whether the token may write to it

    @property
    def head(self) -> Commit:
        return self.commits[-1]


@dataclass
class Hub:
    """What it holds, who asks, and what goes wrong: {part of "METHOD path": status, or 0 for an end without answer}."""

    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    store: Files = field(default_factory=dict)  # by sha256
    asked: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    token: str = TOKEN
    role: str = "write"
    me: dict[str, Any] = field(
        default_factory=lambda: {
            "name": "me",
            "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}],
        }
    )
    lose: str | None = None  # a file of which a commit keeps other bytes than were sent
    beside: str | None = None  # a file that another push puts there in the same moment

    def writes(self) -> list[str]:
        """The requests that changed something."""
        return [asked for asked in self.asked if re.match(r"PUT|POST .*(commit|create|batch)", asked)]


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.asked.append(line)
        for part, status in self.hub.faults.items():
            if part in line:
                return self._json({"error": "out of order"}, status) if status else self._hang_up()
        if path.startswith("/store/"):
            self.hub.store[path.removeprefix("/store/")] = self.body
            return self._json({})
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._json(
                {"error": "Invalid credentials"}, 401, message="Invalid credentials in Authorization header"
            )
        if path == "/api/whoami-v2":
            return self._json({**self.hub.me, "auth": {"accessToken": {"role": self.hub.role}}})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(self.body))
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(\.git)?(/.*)?", path)
        name, rest = (match[1], match[3] or "") if match else ("", "")
        if name not in self.hub.repos:
            return self._json({}, 404, code="RepoNotFound")
        self._of_repo(name, self.hub.repos[name], rest)

    do_HEAD = do_POST = do_PUT = do_GET

    def _create(self, wish: dict[str, Any]) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        status = 409 if name in self.hub.repos else 200
        if status == 200:
            self.hub.repos[name] = Repo(private=wish.get("visibility") == "private")
        self._json({"url": f"{self.hub.address}/{name}"}, status)

    def _of_repo(self, name: str, repo: Repo, rest: str) -> None:
        if rest.startswith("/auth-check"):
            self._json({}, 200 if repo.ours or not rest.endswith("/write") else 403)
        elif rest.startswith("/preupload/"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": _blob(repo.head.files.get(file["path"]), file["path"]),
                }
                for file in json.loads(self.body)["files"]
            ]
            self._json({"files": files})
        elif rest.endswith("/objects/batch"):
            wanted = json.loads(self.body)["objects"]
            upload = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/store/{each['oid']}"}}}
                if each["oid"] not in self.hub.store
                else each
                for each in wanted
            ]
            self._json({"transfer": "basic", "objects": upload})
        elif rest.startswith("/commit/"):
            self._commit(name, repo)
        elif rest.startswith("/resolve/"):
            self._send(repo, rest.split("/", 3)[3])
        elif rest.startswith("/tree/"):
            entries = [
                {"type": "file", "path": path, "size": len(file), "oid": "0"} for path, file in repo.head.files.items()
            ]
            below = rest.split("/", 3)[3:]
            self._json([each for each in entries if not below or each["path"].startswith(below[0] + "/")])
        else:
            self._json(_told(name, repo))

    def _commit(self, name: str, repo: Repo) -> None:
        files, title, deleted = dict(repo.head.files), "", []
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.store[value["oid"]]
            elif line["key"] == "deletedFile":
                deleted.append(value["path"])
                del files[value["path"]]
        if self.hub.lose in files:
            files[self.hub.lose] += b" "
        files |= {self.hub.beside: b""} if self.hub.beside else {}
        repo.commits.append(Commit(title, files, tuple(deleted)))
        self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{repo.head.oid}", "commitOid": repo.head.oid})

    def _send(self, repo: Repo, path: str) -> None:
        if path not in repo.head.files:
            return self._json({}, 404, code="EntryNotFound", commit=repo.head.oid)
        content = repo.head.files[path]
        tag = hashlib.sha256(content).hexdigest()
        self._answer(content, 200, {"ETag": f'"{tag}"', "X-Repo-Commit": repo.head.oid})

    def _json(self, value: Any, status: int = 200, *, code: str = "", message: str = "", commit: str = "") -> None:
        headers = {
            "Content-Type": "application/json",
            "X-Error-Code": code,
            "X-Error-Message": message,
            "X-Repo-Commit": commit,
        }
        self._answer(json.dumps(value).encode(), status, {name: told for name, told in headers.items() if told})

    def _answer(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def _blob(content: bytes | None, path: str) -> str | None:
    """What git, or the large-file store, calls a file's content."""
    if content is None:
        return None
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _told(name: str, repo: Repo) -> dict[str, Any]:
    siblings = []
    for path, content in repo.head.files.items():
        told: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _blob(content, path)}
        if path.endswith(LARGE):
            told |= {
                "blobId": "0" * 40,
                "lfs": {"size": len(content), "sha256": _blob(content, path), "pointerSize": 134},
            }
        siblings.append(told)
    return {"id": name, "sha": repo.head.oid, "private": repo.private, "siblings": siblings}


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub, at work."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """For another process: the hub, the token, and a cache of its own; no protocol that wants a second server."""
    told = {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {**told, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def use(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """In this process: huggingface_hub reads the environment once. Its waits between two tries take no time."""
    patch.setenv("HF_TOKEN", TOKEN)
    for name, value in {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        patch.setattr(huggingface_hub.constants, name, value)
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
