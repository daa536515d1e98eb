"""A local Hugging Face Hub: the answers that huggingface_hub, datasets and transformers ask for.

`serving` has datasets to read, `model_hub` models to push and load.
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
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "OfTheTestsOfPushes0123456789"
LARGE = (".safetensors", ".bin")  # files of the large-file store; others are part of the commits
USER = {"name": "me", "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]}
Files = dict[str, bytes]  # path -> content


@dataclass(frozen=True)
class Commit:
    title: str
    files: Files
    deleted: tuple[str, ...] = ()

    @property
    def oid(self) -> str:
        if not self.title:  # of a dataset
            return SHA
        return hashlib.sha1(repr((self.title, sorted(self.files.items()))).encode()).hexdigest()


@dataclass
class Repo:
    private: bool = True
    commits: list[Commit] = field(default_factory=lambda: [Commit("new", {".gitattributes": b"*.safetensors lfs\n"})])
    writable: bool = True  # with the token

    @property
    def head(self) -> Commit:
        return self.commits[-1]


@dataclass
class Hub:
    """`faults`: {part of "METHOD path": status, or 0 for a closed connection}."""

    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    store: Files = field(default_factory=dict)  # by sha256
    requests: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    token: str | None = TOKEN  # None: reading needs no token
    role: str = "write"

    def writes(self) -> list[str]:
        """Return the requests that changed something."""
        return [line for line in self.requests if re.match(r"PUT|POST .*(commit|create|batch)", line)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        match = re.fullmatch(r"(?:/api)?(?:/models|/datasets)?/([^/]+/[^/]+?)(?:\.git)?(/.*)?", path)
        fault = next((status for part, status in self.hub.faults.items() if part in line), None)
        if fault is not None:
            self.close_connection = not fault
            return self.send_json({"error": "out of order"}, fault) if fault else None
        if path.startswith("/store/"):
            self.hub.store[path.removeprefix("/store/")] = self.body
            self.send_json({})
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.send_json({}, 401, error_message="Invalid credentials in Authorization header")
        elif path == "/api/whoami-v2":
            self.send_json({**USER, "auth": {"accessToken": {"role": self.hub.role}}})
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif match and match[1] in self.hub.repos:
            self._repository(match[1], self.hub.repos[match[1]], (match[2] or "").strip("/"))
        else:
            self.send_json({}, 404, error_code="RepoNotFound", repo_commit=SHA)

    do_HEAD = do_POST = do_PUT = do_GET

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        exists = name in self.hub.repos
        self.hub.repos.setdefault(name, Repo(private=request.get("visibility") == "private"))
        self.send_json({"url": f"{self.hub.address}/{name}"}, 409 if exists else 200)

    def _repository(self, name: str, repo: Repo, rest: str) -> None:
        files, (action, *names) = repo.head.files, rest.split("/", 2)
        if action == "auth-check":
            self.send_json({}, 200 if repo.writable or "write" not in names else 403)
        elif action == "preupload":
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            self.send_json({"files": [_preupload(path, files) for path in paths]})
        elif rest.endswith("objects/batch"):
            objects = json.loads(self.body)["objects"]
            for each in objects:
                if each["oid"] not in self.hub.store:
                    each["actions"] = {"upload": {"href": f"{self.hub.address}/store/{each['oid']}"}}
            self.send_json({"transfer": "basic", "objects": objects})
        elif action == "commit":
            self._commit(name, repo)
        elif action == "resolve":
            self._send_file(repo, names[1])
        elif action == "paths-info":
            body = self.body.decode()
            requested = json.loads(body)["paths"] if body.startswith("{") else [unquote(p[6:]) for p in body.split("&")]
            self.send_json([entry for entry in _entries(files) if entry["path"] in requested])
        elif action == "tree":
            folder = "".join(f"{each}/" for each in names[1:])
            below = [entry for entry in _entries(files) if entry["path"].startswith(folder)]
            deep = "recursive=true" in self.path.lower()
            self.send_json([entry for entry in below if deep or "/" not in entry["path"][len(folder) :]])
        else:
            siblings = [_sibling(path, content) for path, content in files.items()]
            self.send_json({"id": name, "sha": repo.head.oid, "private": repo.private, "siblings": siblings})

    def _commit(self, name: str, repo: Repo) -> None:
        files, title, deleted = dict(repo.head.files), "", []
        for line in map(json.loads, self.body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "header":
                title = value["summary"]
            elif kind == "deletedFile":
                deleted.append(value["path"])
                del files[value["path"]]
            else:
                stored = kind == "lfsFile"
                files[value["path"]] = self.hub.store[value["oid"]] if stored else base64.b64decode(value["content"])
        repo.commits.append(Commit(title, files, tuple(deleted)))
        oid = repo.head.oid
        self.send_json({"commitUrl": f"{self.hub.address}/{name}/commit/{oid}", "commitOid": oid})

    def _send_file(self, repo: Repo, path: str) -> None:
        if path not in repo.head.files:
            return self.send_json({}, 404, error_code="EntryNotFound", repo_commit=repo.head.oid)
        content, status = repo.head.files[path], 200
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        first, _, last = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if first:
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        self.send(content, status, {"ETag": tag, "X-Repo-Commit": repo.head.oid, "Accept-Ranges": "bytes"})

    def send_json(self, value: Any, status: int = 200, **headers: str) -> None:
        """Headers: `error_code` is X-Error-Code, and so on."""
        named = {f"X-{name.replace('_', '-').title()}": value for name, value in headers.items()}
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **named})

    def send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _hash(content: bytes, path: str) -> str:
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # as git does


def _preupload(path: str, files: Files) -> dict[str, Any]:
    mode, oid = "lfs" if path.endswith(LARGE) else "regular", _hash(files[path], path) if path in files else None
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    size, is_large = len(content), path.endswith(LARGE)
    lfs = {"lfs": {"size": size, "sha256": _hash(content, path), "pointerSize": 134}} if is_large else {}
    return {"rfilename": path, "size": size, "blobId": "0" * 40 if is_large else _hash(content, path), **lfs}


def _entries(files: Files) -> list[dict[str, Any]]:
    folders = sorted({str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."})
    entries = [{"type": "file", "path": path, "size": len(content)} for path, content in files.items()]
    entries += [{"type": "directory", "path": folder, "size": 0} for folder in folders]
    return [{**entry, "oid": f"{entry['size']:040x}"} for entry in entries]


@contextmanager
def model_hub(token: str | None = TOKEN) -> Iterator[Hub]:
    """Yield an empty hub."""
    hub = Hub(token=token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serving(datasets: dict[str, Files]) -> Iterator[tuple[str, list[str]]]:
    """Yield the address and the list of requests of a hub with these datasets."""
    with model_hub(token=None) as hub:
        hub.repos = {name: Repo(private=False, commits=[Commit("", files)]) for name, files in datasets.items()}
        yield hub.address, hub.requests


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the environment for another process: the hub, its token, and a cache; no protocol with a second server."""
    names = {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {**names, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def use(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """Use the hub in this process, in which huggingface_hub has already read the environment; retries do not wait."""
    patch.setenv("HF_TOKEN", TOKEN)
    files = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": hub.address, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_DISABLE_XET": True}
    for name, value in {**constants, "HF_HUB_OFFLINE": False}.items():
        patch.setattr(huggingface_hub.constants, name, value)
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
