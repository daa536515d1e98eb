"""A headless Chromium, controlled by its debugging pipe: pages at any width, light or dark."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    """Return the path of Chromium, if it is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One tab. `messages` are errors and console lines, `asked` the addresses that were requested."""

    def __init__(self, to: Any, answers: Any) -> None:
        self._to, self._answers, self._number, self._session = to, answers, 0, ""
        self._events: list[dict[str, Any]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its answer. Raises RuntimeError for an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]  # type: ignore[no-any-return]

    def open(
        self, path: Path | str, *, width: int, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Load a file or an address, and wait until it is drawn."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[feature])
        self.do("Emulation.setScriptExecutionDisabled", value=not scripts)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        self.do("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the entire page as PNG."""
        data = self.do("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def messages(self) -> list[str]:
        found = []
        for event in self._events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(event["params"]["args"]))
        return found

    @property
    def asked(self) -> list[str]:
        method = "Network.requestWillBeSent"
        return [event["params"]["request"]["url"] for event in self._events if event["method"] == method]

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message)  # type: ignore[no-any-return]


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A browser with one tab, its profile in `folder`."""
    name = program()
    assert name, "there is no Chromium"
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def hand_over() -> None:
        os.dup2(theirs_in, 3)
        os.dup2(theirs_out, 4)

    # Above 4, so that neither is closed by the other's dup2.
    theirs_in, theirs_out = (os.dup(os.dup(os.dup(end))) for end in (theirs_in, theirs_out))
    command = [name, *QUIET, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=hand_over, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with os.fdopen(ours_out, "wb") as to, os.fdopen(ours_in, "rb") as answers:
            yield Page(to, answers)
    finally:
        process.kill()
        process.wait()
