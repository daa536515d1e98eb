"""Pages in a headless Chromium, driven by playwright: in light and dark, wide and on a phone, checked by axe-core.

Without playwright, axe-core or Chromium (`make browser`, apt install chromium) the tests that need them are skipped.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (375, False), "dark-phone": (375, True)}
# The pictures of a page that people look at: three widths, in light and dark.
WIDTHS = {f"{width}-{scheme}": (width, scheme == "dark") for width in (390, 800, 1400) for scheme in ("light", "dark")}
REFUSED = "Failed to load resource"  # what the browser says of a request that a test lets fail
CHECKS = Path(__file__).with_name("page_checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def chromium() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium here: apt install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(chromium: "Browser", address: str, look: str = "light", *, scripts: bool = True) -> Iterator["Page"]:
    """A page in a look of LOOKS or WIDTHS. At its end it must have reported no error and asked no other server."""
    width, dark = (LOOKS | WIDTHS)[look]
    scheme = "dark" if dark else "light"
    phone = width < 600
    size = {"width": width, "height": 812 if phone else 900}
    context = chromium.new_context(
        viewport=size, color_scheme=scheme, has_touch=phone, is_mobile=phone, java_script_enabled=scripts
    )
    page = context.new_page()
    messages: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: REFUSED in message.text or messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    try:
        yield page
        assert not messages, messages
        origin = address.partition("?")[0]
        assert [url for url in asked if not url.startswith((origin, "data:"))] == []
    finally:
        context.close()


def wait_for_title(page: "Page", title: str) -> None:
    """Wait until the page has a title."""
    pytest.importorskip("playwright.sync_api").expect(page).to_have_title(title)


def faults(page: "Page") -> list[str]:
    """Return what axe-core and page_checks.js find wrong with a page as it is drawn."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = [
        f"{violation['id']}: {node['html']:.200} {node['failureSummary']}"
        for violation in axe.run(page).response["violations"]
        for node in violation["nodes"]
    ]
    return [*found, *page.evaluate(f"{CHECKS}; drawnWrong()")]


def picture(page: "Page", name: str, *, whole: bool = False) -> None:
    """Write what is seen of the page, or all of it, as PNG into the folder that RLHF_SCREENSHOTS names, if any."""
    folder = os.environ.get("RLHF_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=whole)
