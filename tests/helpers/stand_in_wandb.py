"""The part of W&B's server that its client uses: it stores a run, and returns the last step of a resumed one."""

import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serving import serving


class StandIn(ThreadingHTTPServer):
    """Keeps the lines of the history as they came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client disconnects."""

    def answer(self, query: str, asked: dict[str, Any]) -> dict[str, Any]:
        entity = {"id": "e", "name": "me"}
        bucket = {"id": "b", "name": asked.get("name"), "displayName": "n", "config": "{}", "summaryMetrics": "{}"}
        if "RunResumeStatus" in query:
            tail = json.dumps([json.dumps(self.history[-1])] if self.history else [])
            counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
            bucket |= {**counts, "historyTail": tail, "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}'}
            return {"model": {"id": "m", "name": "p", "entity": entity, "bucket": bucket if self.history else None}}
        if "UpsertBucket" in query:
            project = {"id": "p", "name": asked["project"], "entity": entity}
            return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": not self.history}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in asked["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}, "serverInfo": {"features": []}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(content) if self.headers.get("Content-Type") == "application/json" else {}
        if self.path == "/graphql":
            self._reply({"data": self.server.answer(body["query"], body.get("variables") or {})})
            return
        lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.server.history += [json.loads(line) for line in lines]
        self._reply({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply({})

    def _reply(self, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def stand_in() -> AbstractContextManager[StandIn]:
    """Return a context in which the server runs."""
    return serving(StandIn())
