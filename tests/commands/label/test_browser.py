"""The page of `rlhf label` in a real browser: looks, keys, and labels on disk. `make browser`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import LOOKS, faults, opened, picture, wait_for_title
from ppo_folder import lines
from run_cli import ROOT, fails, must_succeed, rlhf

from rlhf_cli.commands.label.server import NOT_ALLOWED
from rlhf_cli.commands.label.session import Pair
from rlhf_cli.commands.label.store import LabelStore
from rlhf_cli.data.labels import MAX_SECONDS
from tests.commands.label.test_server import served

pytestmark = pytest.mark.browser

UNREAD = 400  # ms; sooner a key would be the second press of the pair before
MARKDOWN = """## Boiling an egg

Put the egg into **boiling** water, with *a spoon*, and set `timer = 8`:

1. Soft: 5 minutes
2. Medium: 7 minutes
   - smaller eggs take less
   - from the fridge one more
3. Hard: 10 minutes

| egg | minutes | yolk |
|-----|--------:|------|
| soft | 5 | runny |
| hard | 10 | firm, and pale at its edge |

```python
def boil(minutes: int) -> str:
    return f"an egg of {minutes} minutes, and a line that is far too long for a column of a page on a small phone"
```

> Salt in the water does not make the shell easier to peel.
"""
ELEMENTS = """# Title

A **bold** `code` <b>
line
- one
- *two*
  1. x

3. y
|a|b|
|-|-|
|1|2|
```py
a = 1
```
---
> said"""
HTML = (
    "<h3>Title</h3><p>A <strong>bold</strong> <code>code</code> &lt;b&gt;<br>line</p>"
    "<ul><li>one</li><li><em>two</em><ol><li>x</li></ol></li></ul>"
    '<ol start="3"><li>y</li></ol>'
    '<div class="table" tabindex="0"><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table></div>'
    '<pre tabindex="0"><code>a = 1</code></pre><hr><blockquote>said</blockquote>'
)
UNUSUAL = "- one\r\n- two\r\n\r\n```three```\n```\nfour\n``` five\n```\n# six\u2028seven"
UNUSUAL_HTML = (
    "<ul><li>one</li><li>two</li></ul><p>``<code>three</code>``</p>"
    '<pre tabindex="0"><code>four\n``` five</code></pre><h3>six</h3><p>seven</p>'
)
LONG = "\n\n".join(f"Paragraph {number}. " + "The egg goes into the water when it boils. " * 6 for number in range(12))
TURNS = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "How do I boil an egg?"},
    {"role": "assistant", "content": "How do you like it?"},
    {
        "role": "user",
        "content": "Hard, please. And write the times as a table, so that I can hang it up in a kitchen.",
    },
]
SHOWN = [
    Pair("0:0-1", TURNS, (MARKDOWN, "Ten minutes, from when the water boils."), ("sft", "ppo"), (True, False)),
    Pair("1:0-1", "Write an essay about eggs.", (LONG, LONG[:1800]), ("sft", "ppo")),
    Pair("2:0-1", "Say nothing.", ("\u200b\u200b", "```\n```"), ("sft", "ppo")),
]


@contextmanager
def labelling(chromium: Any, folder: Path, look: str = "light") -> Iterator[tuple[Any, int]]:
    """The page on SHOWN; yields it with the server's process."""
    with served(folder, SHOWN) as (address, process), opened(chromium, address, look) as page:
        wait_for_title(page, "Pair 1 of 3")
        yield page, process


def press(page: Any, key: str, title: str) -> None:
    """Press a key that shows another pair, and wait for it."""
    page.wait_for_timeout(UNREAD)
    page.keyboard.press(key)
    wait_for_title(page, title)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_readable(chromium: Any, tmp_path: Path, look: str) -> None:
    found = {}
    with labelling(chromium, tmp_path, look) as (page, process):

        def seen(state: str) -> None:
            picture(page, f"label-{state}-{look}")
            found[state] = faults(page)

        seen("turns")
        page.keyboard.press("?")
        seen("help")
        page.keyboard.press("Escape")
        press(page, "1", "Pair 2 of 3")
        seen("long")
        press(page, "0", "Pair 3 of 3")
        seen("empty")
        press(page, "s", "All pairs are labelled")
        seen("end")
        press(page, "u", "Pair 3 of 3")
        os.kill(process, signal.SIGKILL)
        page.wait_for_timeout(UNREAD)
        page.keyboard.press("1")
        page.get_by_role("alert").filter(has_text="not saved").wait_for()
        seen("gone")
    assert {state: wrong for state, wrong in found.items() if wrong} == {}


def test_the_keyboard_alone_labels(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        page.get_by_role("button", name="complete").press("Space")
        for key, title in (
            ("1", "Pair 2 of 3"),
            ("0", "Pair 3 of 3"),
            ("b", "All pairs are labelled"),
            ("u", "Pair 3 of 3"),
        ):
            press(page, key, title)
            assert page.evaluate("document.activeElement.id") == "title"  # where a screen reader goes on
        assert page.get_by_role("status").inner_text() == "Undone. Pair 3 of 3"
        assert page.get_by_role("button", name="complete").get_attribute("aria-pressed") == "false"
    first, second = LabelStore(tmp_path).labels
    assert (first.tags, first.choice, second.choice) == (["complete"], ("first", "second")[first.order[0]], "tie")


def test_keys_that_are_no_choice_label_nothing(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        press(page, "0", "Pair 2 of 3")
        page.keyboard.press("0")  # the second of a double press
        page.wait_for_timeout(UNREAD)
        for key in ("x", "Control+1", "?", "1", "Escape"):  # with the help open, 1 is no choice
            page.keyboard.press(key)
        page.get_by_role("button", name="Help").click()
        page.get_by_role("checkbox", name="Choose by single keys").uncheck()
        page.keyboard.press("Escape")
        page.keyboard.press("1")
        page.get_by_role("button", name="Skip").click()
        wait_for_title(page, "Pair 3 of 3")
    assert [label.choice for label in LabelStore(tmp_path).labels] == ["tie", "skip"]


def test_a_pair_that_another_tab_labelled_is_not_labelled_again(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        page.request.post(f"{page.url}label", data={"pair": "0:0-1", "choice": "skip", "seconds": 1})
        press(page, "1", "Pair 2 of 3")
        assert "has a label: skip" in page.get_by_role("alert").inner_text()
    assert [label.choice for label in LabelStore(tmp_path).labels] == ["skip"]


def test_a_page_of_an_earlier_command_says_so(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        page.route("**/label*", lambda route: route.fulfill(status=403, body=NOT_ALLOWED))
        page.wait_for_timeout(UNREAD)
        page.keyboard.press("1")
        said = page.get_by_role("alert").filter(has_text="of an earlier rlhf label")
        said.wait_for()
        assert "Not saved" in said.inner_text()
        assert page.title() == "Pair 1 of 3"


def test_markdown_becomes_elements_and_html_stays_text(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        box = page.evaluate_handle("document.createElement('div')")
        page.evaluate("([box, text]) => blocks(box, text)", [box, ELEMENTS])
        assert box.evaluate("box => box.innerHTML") == HTML
        page.keyboard.press("m")
        assert (
            "**boiling**" in page.locator(".answer .plain").all_inner_texts()[0] + page.locator("#second").inner_text()
        )


def test_markdown_hides_no_word_of_an_answer(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        box = page.evaluate_handle("document.createElement('div')")
        page.evaluate("([box, text]) => blocks(box, text)", [box, UNUSUAL])
        assert box.evaluate("box => box.innerHTML") == UNUSUAL_HTML


def test_a_pair_that_was_open_for_days_is_saved(chromium: Any, tmp_path: Path) -> None:
    with labelling(chromium, tmp_path) as (page, _):
        page.evaluate("began -= 1e9")
        press(page, "1", "Pair 2 of 3")
    assert [label.seconds for label in LabelStore(tmp_path).labels] == [MAX_SECONDS]


@contextmanager
def command(*arguments: object) -> Iterator[str]:
    """Run `rlhf label` as a user does; yield the address that it prints, and end it with Ctrl-C."""
    words = [sys.executable, "-m", "rlhf_cli", "label", *map(str, arguments)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stderr is not None
    try:
        yield next(line.split()[-1] for line in process.stderr if "http://" in line)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(60) == 0 and "data: {train: labels/people}" in said, said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_new_user_labels_pairs_by_keys_and_trains_on_them(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    must_succeed(rlhf("init", "ci", run))
    must_succeed(rlhf("run", run, "--only", "sft"))
    with command(run, "--n", 12) as address, opened(chromium, address) as page:
        wait_for_title(page, "Pair 1 of 12")
        for number, key in enumerate("12" * 5 + "0b", start=1):
            press(page, key, f"Pair {number + 1} of 12" if number < 12 else "All pairs are labelled")

    labels = run / "labels/people/labels.jsonl"
    assert len(lines(labels)) == 12
    config = run / "reward.yaml"
    text = config.read_text().replace("data/pairs.jsonl", "labels/people")
    config.write_text(text.replace("per_device_train_batch_size: 16", "per_device_train_batch_size: 4"))
    result = must_succeed(rlhf("reward", "-c", config))
    assert "2 pairs omitted: 1 bad, 1 tie" in result.stderr and "reward   10 pairs" in result.stderr
    assert json.loads((run / "reward/manifest.json").read_text())["step"] == 60
    assert "finished already" in rlhf("reward", "-c", config).stderr
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[:-1]))
    fails(rlhf("reward", "-c", config), "C15", "data.train")  # the labels' hash is an input
