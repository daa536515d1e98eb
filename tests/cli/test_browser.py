"""The report in a real browser: nothing complained of, nothing loaded from elsewhere, nothing cut off. `make browser`.

Screenshots go to the folder that RLHF_SCREENSHOTS names, for people to look at; RLHF_REPORT names a page of one's own.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from ppo_folder import EVAL, PPO, ppo, rlhf, write

pytestmark = pytest.mark.browser

LOOKS = {"light": (1280, False), "dark": (1280, True), "phone": (375, False), "dark-phone": (375, True)}
# The boxes that stand out of the page's width, but for those in a box that scrolls by itself.
CUT = """[...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || (box.right <= innerWidth + 1 && box.left >= -1)) return false;
  for (let up = e.parentElement; up; up = up.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(up).overflowX)) return false;
  return true;
}).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""
# Texts of figures that leave their figure.
LOST = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const all = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1;
  }).map(text => text.textContent);
})"""
# Colours of text and of what it stands on, by WCAG 2.1's contrast.
FAINT = """(() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = numbers(color).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor, parts = numbers(color);
      if (parts.length < 4 || parts[3] === 1) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('p, td, th, li, h1, h2, h3, summary, dt, dd')].filter(e => {
    if (!e.innerText || !e.getBoundingClientRect().width) return false;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map(e => e.tagName + ' ' + e.innerText.slice(0, 40));
})()"""


@pytest.fixture(scope="module")
def page(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole run; or the one that RLHF_REPORT names."""
    if given := os.environ.get("RLHF_REPORT"):
        return Path(given)
    run = Path(shutil.copytree(origin, tmp_path_factory.mktemp("seen") / "run"))
    write(run, "ppo", PPO)
    write(run, "eval", EVAL)
    assert ppo(run).exit_code == 0
    assert rlhf("eval", "-c", run / "eval.yaml").exit_code == 0
    return run / "eval/report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if not browser.program():
        pytest.skip("no Chromium here: apt install chromium")
    with browser.opened(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.parametrize("look", LOOKS)
def test_a_person_sees_all_of_it(page: Path, tab: browser.Page, tmp_path: Path, look: str) -> None:
    width, dark = LOOKS[look]
    tab.open(page, width=width, dark=dark)
    tab.screenshot(Path(os.environ.get("RLHF_SCREENSHOTS", tmp_path)) / f"report-{look}.png")
    assert tab.messages == []
    assert tab.asked == [page.resolve().as_uri()]
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(CUT) == []
    assert tab.value(LOST) == []
    assert tab.value(FAINT) == []
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
