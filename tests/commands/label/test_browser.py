"""The page of `rlhf label` in a real browser: looks, keys, and labels on disk. `make browser`."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

from rlhf_cli.commands.label.store import LabelStore
from tests.commands.label.test_server import served

pytestmark = pytest.mark.browser

LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (375, False), "dark-phone": (375, True)}
CHECKS = Path(browser.__file__).with_name("page_checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if not browser.program():
        pytest.skip("no Chromium here: apt install chromium")
    with browser.opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


def until(tab: browser.Page, expression: str, value: object) -> None:
    """Wait until an expression has a value."""
    limit = time.monotonic() + 10
    while tab.value(expression) != value:
        assert time.monotonic() < limit, tab.value(expression)
        time.sleep(0.05)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_readable(tab: browser.Page, tmp_path: Path, look: str) -> None:
    width, dark = LOOKS[look]
    with served(tmp_path, 3) as (page, _):
        tab.open(page, width=width, dark=dark)
        until(tab, "document.title", "Pair 1 of 3")
        tab.screenshot(Path(os.environ.get("RLHF_SCREENSHOTS", tmp_path)) / f"label-{look}.png")
        assert tab.messages == []
        assert all(address.startswith((page, "data:")) for address in tab.asked)
        assert tab.value("document.documentElement.scrollWidth") <= width
        for check in ("cutOff", "lowContrast"):
            assert tab.value(f"{CHECKS}; {check}()") == [], check


def test_the_keyboard_alone_labels(tab: browser.Page, tmp_path: Path) -> None:
    with served(tmp_path, 2) as (page, _):
        tab.open(page, width=1280)
        until(tab, "document.title", "Pair 1 of 2")
        for key, title in (("0", "Pair 2 of 2"), ("b", "All pairs are labelled"), ("u", "Pair 2 of 2")):
            time.sleep(0.4)  # sooner it would be the second press of the pair before
            tab.do("Input.dispatchKeyEvent", type="keyDown", key=key)
            until(tab, "document.title", title)
            assert tab.value("document.activeElement.id") == "title"  # where a screen reader goes on
    assert [label.choice for label in LabelStore(tmp_path).labels] == ["tie"]
