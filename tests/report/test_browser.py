"""The report in a real browser: no errors, no requests, nothing cut off, nothing that axe-core finds. `make browser`.

Screenshots go to the folder that RLHF_SCREENSHOTS names, for people to look at; RLHF_REPORT names another page.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from browser import LOOKS, faults, opened, picture
from ppo_folder import EVAL, PPO, ppo, rlhf, write
from report_run import draws

pytestmark = pytest.mark.browser

SHOWN = """
    [...document.querySelectorAll('p:not(:has(input)), td, pre, svg')]
        .filter(e => e.getBoundingClientRect().width).length
"""


@pytest.fixture(scope="module")
def address(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a whole run; or the one that RLHF_REPORT names."""
    if given := os.environ.get("RLHF_REPORT"):
        return Path(given).resolve().as_uri()
    run = Path(shutil.copytree(origin, tmp_path_factory.mktemp("seen") / "run"))
    write(run, "ppo", PPO)
    write(run, "eval", EVAL)
    assert ppo(run).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        draws(patch)
        assert rlhf("eval", "-c", run / "eval.yaml").exit_code == 0
    return (run / "eval/report.html").as_uri()


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_readable(address: str, chromium: Any, look: str) -> None:
    with opened(chromium, address, look) as page:
        picture(page, f"report-{look}", whole=True)
        assert faults(page) == []


def test_it_is_whole_without_scripts_and_searched_with_them(address: str, chromium: Any) -> None:
    with opened(chromium, address) as page:
        whole = page.evaluate(SHOWN)
        search = page.get_by_role("searchbox", name="Find in prompts")
        search.fill("no such word anywhere")
        assert page.evaluate(SHOWN) < whole
        search.fill("")
        assert page.evaluate(SHOWN) == whole
    with opened(chromium, address, scripts=False) as page:
        assert page.evaluate(SHOWN) == whole
        assert page.get_by_role("searchbox").count() == 0
