"""The report in a real browser: no errors, no requests, nothing cut off. `make browser`.

Screenshots go to the folder that RLHF_SCREENSHOTS names, for people to look at; RLHF_REPORT names another page.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from ppo_folder import EVAL, PPO, ppo, rlhf, write
from report_run import draws

pytestmark = pytest.mark.browser

LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (375, False), "dark-phone": (375, True)}
CHECKS = Path(browser.__file__).with_name("page_checks.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole run; or the one that RLHF_REPORT names."""
    if given := os.environ.get("RLHF_REPORT"):
        return Path(given)
    run = Path(shutil.copytree(origin, tmp_path_factory.mktemp("seen") / "run"))
    write(run, "ppo", PPO)
    write(run, "eval", EVAL)
    assert ppo(run).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        draws(patch)
        assert rlhf("eval", "-c", run / "eval.yaml").exit_code == 0
    return run / "eval/report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if not browser.program():
        pytest.skip("no Chromium here: apt install chromium")
    with browser.opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_readable(page: Path, tab: browser.Page, tmp_path: Path, look: str) -> None:
    width, dark = LOOKS[look]
    tab.open(page, width=width, dark=dark)
    tab.screenshot(Path(os.environ.get("RLHF_SCREENSHOTS", tmp_path)) / f"report-{look}.png")
    assert tab.messages == []
    assert tab.asked == [page.resolve().as_uri()]
    assert tab.value("document.documentElement.scrollWidth") <= width
    for check in ("cutOff", "outsideFigures", "lowContrast"):
        assert tab.value(f"{CHECKS}; {check}()") == [], check
    assert tab.value("matchMedia('(prefers-color-scheme: dark)').matches") is dark


def test_it_is_whole_without_scripts_and_searched_with_them(page: Path, tab: browser.Page) -> None:
    parts = "document.querySelectorAll('p:not(:has(input)), td, pre, svg')"
    shown = f"[...{parts}].filter(e => e.getBoundingClientRect().width).length"
    tab.open(page, width=1280)
    whole = tab.value(shown)
    box = "document.querySelector('input[type=search]')"
    tab.value(f"({box}.value = 'no such word anywhere', {box}.dispatchEvent(new Event('input')), 0)")
    assert tab.value(shown) < whole
    tab.value(f"({box}.value = '', {box}.dispatchEvent(new Event('input')), 0)")
    assert tab.value(shown) == whole
    tab.open(page, width=1280, scripts=False)
    tab.do("Emulation.setScriptExecutionDisabled", value=False)  # the test's own questions are scripts
    assert tab.value(shown) == whole and tab.value(f"!{box} || !{box}.getBoundingClientRect().width")
