"""A hub of data sets on this machine: the few answers that huggingface_hub and datasets ask for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
Files = dict[str, bytes]  # path inside the dataset -> content


class _Hub(BaseHTTPRequestHandler):
    datasets: dict[str, Files]  # OWNER/NAME -> its files
    asked: list[str]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        name = "/".join(path.removeprefix("/api").removeprefix("/datasets/").split("/")[:2])
        files = self.datasets.get(name)
        if files is None:
            self._refuse("RepoNotFound")
        elif path.startswith("/api/"):
            self._tell(name, files, path.removeprefix(f"/api/datasets/{name}").strip("/").split("/", 2))
        else:
            self._send(files, path.removeprefix(f"/datasets/{name}/resolve/").partition("/")[2])

    do_HEAD = do_POST = do_GET

    def _tell(self, name: str, files: Files, asked: list[str]) -> None:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": f"{len(content):040x}"}
            for path, content in files.items()
        ]
        folders = sorted({parent for path in files for parent in map(str, Path(path).parents) if parent != "."})
        entries += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        if asked[0] == "paths-info":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            wanted = json.loads(body)["paths"] if body.startswith("{") else [unquote(p[6:]) for p in body.split("&")]
            return self._json([entry for entry in entries if entry["path"] in wanted])
        if asked[0] == "tree":
            below = asked[2] + "/" if len(asked) > 2 else ""
            deep = "recursive=true" in self.path.lower()
            found = [entry for entry in entries if str(entry["path"]).startswith(below)]
            return self._json([one for one in found if deep or "/" not in str(one["path"])[len(below) :]])
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        return self._json({"id": name, "sha": SHA, "private": False, "siblings": siblings})

    def _send(self, files: Files, path: str) -> None:
        if path not in files:
            return self._refuse("EntryNotFound")
        content, status = files[path], 200
        first, _, last = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if first:
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        self.send_response(status)
        self.send_header("ETag", f'"{len(files[path]):040x}{abs(hash(path))}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self._end(content)

    def _json(self, value: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._end(json.dumps(value).encode())

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", SHA)
        self._end(b"{}")

    def _end(self, content: bytes) -> None:
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(datasets: dict[str, Files]) -> Iterator[tuple[str, list[str]]]:
    """(address, list of the requests so far) of a hub with these datasets."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"datasets": datasets, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
