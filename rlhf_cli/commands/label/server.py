"""The page on 127.0.0.1: what it is sent, and what it sends back. All state is on disk, in the LabelStore."""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from rlhf_cli import terminal
from rlhf_cli.commands.label.agreement import agreement_text, habits_text
from rlhf_cli.commands.label.session import LabelSession, Refused, Shown
from rlhf_cli.data.labels import MAX_SECONDS
from rlhf_cli.errors import RLHFError
from rlhf_cli.progress import Progress

HOST = "127.0.0.1"
TAGS = ("correct", "complete", "clear", "concise", "harmless")
MAX_BODY_BYTES = 2**16
NOT_ALLOWED = "open the address that `rlhf label` printed: it contains a token"
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class LabelServer:
    """Serves the pairs of a session. `changed` is called with the number of labels added by each request."""

    session: LabelSession
    changed: Callable[[int], None] = lambda count: None
    tags: Sequence[str] = TAGS
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def app(self) -> Starlette:
        """Return the application; every address begins with the token."""
        routes = [
            Route("/{token}/", self._page),
            Route("/{token}/state", self._state),
            Route("/{token}/label", self._label, methods=["POST"]),
            Route("/{token}/undo", self._undo, methods=["POST"]),
            Route("/{rest:path}", _refuse, methods=["GET", "POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        return Starlette(routes=routes, middleware=[hosts])

    def addresses(self, port: int) -> dict[str, str]:
        """Return the address of each annotator's page."""
        page = f"http://{HOST}:{port}/{self.token}/"
        if len(self.session.annotators) == 1:
            return {self.session.annotators[0]: page}
        return {name: f"{page}?annotator={name}" for name in self.session.annotators}

    async def _page(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refuse(request)
        nonce = secrets.token_urlsafe(16)
        page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        headers = {**HEADERS, "Content-Security-Policy": POLICY.format(nonce)}
        return HTMLResponse(page.replace("NONCE", nonce), headers=headers)

    async def _state(self, request: Request) -> Response:
        return await self._answer(request, lambda annotator, body: self.session.next(annotator))

    async def _label(self, request: Request) -> Response:
        return await self._answer(request, self._choose)

    async def _undo(self, request: Request) -> Response:
        return await self._answer(request, self._take_back)

    def _choose(self, annotator: str, body: dict[str, Any]) -> Shown | None:
        """Store the choice of a request, and return the next pair."""
        self.session.choose(
            annotator,
            str(body.get("pair")),
            str(body.get("choice")),
            seconds=_seconds(body.get("seconds")),
            tags=body.get("tags", []),
        )
        return self.session.next(annotator)

    def _take_back(self, annotator: str, body: dict[str, Any]) -> Shown | None:
        """Take back the label of a request's pair, and return the pair, or the next one if there was none."""
        return self.session.undo(annotator, str(body.get("pair"))) or self.session.next(annotator)

    async def _answer(self, request: Request, act: Callable[[str, dict[str, Any]], Shown | None]) -> Response:
        """Do what a request asks for, and return what the page shows then, or the error as one line.

        The file is written in the event loop, so that two requests never write at once.
        """
        if not self._is_allowed(request):
            return _refuse(request)
        before = self.session.done
        try:
            annotator = self._annotator(request)
            body = await _body(request) if request.method == "POST" else {}
            shown = act(annotator, body)
        except Refused as error:
            return _json({"error": str(error)}, 409)
        except RLHFError as error:
            terminal.error(str(error))
            problem = error.problems[0]
            return _json({"error": f"{problem.text}; {problem.hint}"}, 507)
        self.changed(self.session.done - before)
        return _json(self._view(annotator, shown), 200)

    def _is_allowed(self, request: Request) -> bool:
        given = request.path_params["token"].encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, self.token.encode())

    def _annotator(self, request: Request) -> str:
        """Return who asks. Raises Refused for an unknown name."""
        names = self.session.annotators
        name = request.query_params.get("annotator", names[0] if len(names) == 1 else "")
        if name not in names:
            raise Refused(f"add ?annotator=NAME to the address; the names are {', '.join(names)}")
        return name

    def _view(self, annotator: str, shown: Shown | None) -> dict[str, Any]:
        """Return what the page shows: nothing tells who wrote an answer."""
        progress = self.session.progress(annotator)
        last = self.session.store.last(annotator)
        view: dict[str, Any] = {
            "annotator": annotator if len(self.session.annotators) > 1 else "",
            "done": progress.done,
            "total": progress.total,
            "pace": f"{progress.an_hour:.0f} an hour" if progress.an_hour else "",
            "agreement": agreement_text(self.session.store.labels),
            "last": last.pair if last and last.pair in self.session.pairs else None,
            "tags": list(self.tags),
            "summary": habits_text(self.session.store.labels, annotator) if shown is None else [],
            "shown": None,
        }
        if shown is not None:
            prompt = shown.pair.prompt
            turns = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
            view["shown"] = {
                "pair": shown.pair.name,
                "prompt": [{"role": turn["role"], "content": turn["content"]} for turn in turns],
                "answers": [answer.strip() for answer in shown.answers],
                "ended": list(shown.ended),
            }
        return view


def _refuse(request: Request) -> Response:
    return PlainTextResponse(NOT_ALLOWED, 403, headers=HEADERS)


def _json(value: dict[str, Any], status: int) -> Response:
    return Response(orjson.dumps(value), status, headers=HEADERS, media_type="application/json")


def _seconds(value: Any) -> float:
    """Return the seconds that a label took. Raises Refused for anything but a number of a day at most."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_SECONDS:
        raise Refused(f"seconds: {value!r:.40} is not a number from 0 to {MAX_SECONDS:g}")
    return float(value)


async def _body(request: Request) -> dict[str, Any]:
    """Return the object that a request sends. Raises Refused for anything else."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise Refused(f"a request has at most {MAX_BODY_BYTES} bytes")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise Refused("a request is a JSON object")
    return value


def serve(session: LabelSession, port: int) -> None:
    """Serve the page until Ctrl-C. Raises RLHFError C11 if the port is in use."""
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        text = f"--port {port} cannot be used: {error.strerror}"
        raise RLHFError("C11", text, hint="omit --port: a free one is taken") from error

    with listening, Progress("label", session.total, "label", done=session.done) as bar:
        server = LabelServer(session, bar.advance)
        for name, address in server.addresses(listening.getsockname()[1]).items():
            terminal.error(f"label    open {address}" + (f"  ({name})" if len(session.annotators) > 1 else ""))
        terminal.say("label    Ctrl-C ends it; the same command continues")
        config = uvicorn.Config(
            server.app(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        with suppress(KeyboardInterrupt):
            asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
