"""Commands of the documents: each block runs as it stands, on tiny models, or a comment above it says why not.

The blocks of a page run in order, in one folder. Those of docs/results/ are records of long measurements.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_shell import ForkedShell
from run_cli import ROOT, must_succeed, rlhf, run_here

from rlhf_cli.commands.init import sizes
from rlhf_cli.commands.label import server
from rlhf_cli.commands.label.session import LabelSession

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
BLOCK = re.compile(r"(?ms)(?:<!-- not run: (?P<reason>[^>]*) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$")
COMMAND = re.compile(r"(?m)^(?:\$ )?(?:rlhf|make|pip|python3?|hf|vllm|torchrun|accelerate|tensorboard|\$\(rlhf) ")
REASONS = (
    "a change of your shell",
    "a GPU",
    "a network",
    "a transcript",
    "another program",
    "minutes",
    "several processes",
)

# The run of the ci preset is copied to each folder that a page takes as given. It is smaller than the preset.
RUNS = {
    "README.md": "runs/demo",
    "docs/ci.md": "smoke runs/mine",
    "docs/commands.md": "runs/demo runs/first runs/mine runs/ci",
    "docs/evaluation.md": "runs/demo runs/seed0 runs/seed1 runs/seed2",
    "docs/frontier.md": "runs/over runs/second",
    "docs/labels.md": "runs/demo",
    "docs/quick-start.md": "runs/demo",
    "docs/recommended-policy.md": "runs/demo",
    "docs/reliability.md": "runs/mine",
    "docs/rounds.md": "runs/demo",
    "docs/scaling.md": "runs/first",
    "docs/serve.md": "runs/first",
    "docs/trackers.md": "runs/first",
    "docs/tuning.md": "RUN OTHER",
}
SMALLER_RUN = {
    "sft.yaml": {"max_steps: 200": "max_steps: 40", "max_position_embeddings: 256": "max_position_embeddings: 512"},
    "reward.yaml": {"max_steps: 60": "max_steps: 10"},
    "eval.yaml": {"n: 32": "n: 12"},
}
# What a run of three updates has, and what takes seconds.
SMALLER = {
    "--step 26": "--step 3",
    "--step 31": "--step 2",
    "step_000038": "step_000003",
    "--n 500": "--n 50",
    "--n 200": "--n 40",
    "--n 100": "--n 30",
}
MODELS = ("MODEL", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-4B")  # the tiny SFT model
ANNOTATE = """
import json
tasks = json.load(open("pairs.json"))
for task in tasks:
    choice = {"from_name": "choice", "to_name": "prompt", "type": "choices", "value": {"choices": ["1"]}}
    task["annotations"] = [{"completed_by": 1, "result": [choice]}]
json.dump(tasks, open("exported.json", "w"))
"""
# What a page lets a reader do before a block, by the start of the block.
BEFORE = {
    "rlhf run runs/demo --only": "sed -i 's|^data:.*|data: {train: labels/people, eval: data/pairs_eval.jsonl}|; "
    "s/size: 16/size: 4/' runs/demo/reward.yaml",
    "rlhf label runs/demo --n 40 --import": f"python -c '{ANNOTATE}'",
    "rlhf serve runs/first": "echo 'models: {engine: {vllm: {url: http://127.0.0.1:8000}}}' >> runs/first/ppo.yaml",
    "rlhf check runs/mine": "echo 'def score(prompts, responses): return [0.0 for _ in prompts]' > my_rewards.py",
    "rlhf eval -c eval.yaml": "cp runs/over/eval.yaml . && cp runs/over/data/heldout.jsonl other.jsonl",
    "make demo\n": "mkdir -p .venv/bin && touch .venv/bin/activate",
    "rlhf ls": "mkdir -p archive/runs && cp -r runs/first archive/runs/",
}
# They would need a network or minutes. `make demo` has run: its run folder is there.
STAND_INS = {"hf": "download", "pip": "install", "make": "demo", "tensorboard": "--logdir", "vllm": "serve"}
# They train a whole run, several, or plan one several times. README.md has the run of quick-start.
SLOW = ("baselines", "ci", "commands", "one-gpu", "quick-start", "rounds", "scaling", "your-own-data")
TYPED = "What would be a nice salad with salmon for my friend?\n"


@dataclass(frozen=True)
class Block:
    """A block of commands; `reason` says why it does not run."""

    code: str
    reason: str | None
    is_shell: bool


def command_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks with commands: every `sh`, and whatever else looks like commands."""
    for match in BLOCK.finditer(text):
        is_shell = match["language"] == "sh"
        if is_shell or COMMAND.search(match["code"]):
            yield Block(match["code"], match["reason"], is_shell)


def unmarked(text: str) -> list[str]:
    """Return the blocks that neither run nor say why by one of REASONS."""
    found = []
    for block in command_blocks(text):
        is_known = block.reason is not None and block.reason.startswith(REASONS)
        if not is_known and (block.reason is not None or not block.is_shell):
            found.append(block.code)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_commands_runs_or_says_why_not(page: str) -> None:
    assert unmarked(PAGES[page]) == []


def test_a_block_that_neither_runs_nor_says_why_is_found() -> None:
    runs = "```sh\nrlhf ls\n```\n"
    marked = "<!-- not run: minutes: the demo -->\n```sh\nmake demo\n```\n"
    yaml = "```yaml\nseed: 1\n```\n"
    assert unmarked(runs + marked + yaml) == []
    assert unmarked("```\nrlhf ls\n```\n") == ["rlhf ls\n"]
    assert unmarked("```text\n$ rlhf ls\n```\n") == ["$ rlhf ls\n"]
    assert unmarked(marked.replace("minutes", "tedious")) == ["make demo\n"]


def test_a_script_ends_at_its_first_command_that_fails(shell: ForkedShell, tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    typed.write_text("")
    ended = shell.run("rlhf explain kl_coef > kl\nrlhf explain no_such_key\necho after", tmp_path, typed)
    assert ended.returncode == 2 and "error[C01]" in ended.stdout and "after" not in ended.stdout
    assert "KL penalty" in (tmp_path / "kl").read_text()
    assert shell.run("make reviews", tmp_path, typed).returncode == 1, "only `make demo` has a stand-in"


def label_all(session: LabelSession, port: int) -> None:
    """A person in front of the page, in place of its server."""
    for annotator in session.annotators:
        for number, shown in enumerate(list(session.pending(annotator))):
            session.choose(annotator, shown.pair.name, "12"[number % 2], seconds=1.0)


@pytest.fixture(scope="module")
def ci_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks") / "ci"
    must_succeed(rlhf("init", "ci", folder))
    for name, changes in SMALLER_RUN.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    must_succeed(run_here(folder))
    return folder


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedShell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "serve", label_all)
        patch.setattr(sizes, "CPU_MINUTES", 0.05)
        patch.setattr(sizes, "measure_speed", lambda folder: sizes.Speed(training=4_000.0, generation=1_000.0))
        patch.setattr(sizes, "MIN_STEPS", 2)
        with closing(ForkedShell(tmp_path_factory.mktemp("shell"), STAND_INS)) as shell:
            yield shell


def prepare(page: str, ci_run: Path, folder: Path) -> None:
    """Write the files that a page takes as given."""
    for name in RUNS.get(page, "").split():
        shutil.copytree(ci_run, folder / name)
    for name in MODELS:
        shutil.copytree(ci_run / "sft/model", folder / name)
    pairs = (ci_run / "data/pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(pairs[:100]), encoding="utf-8")
    (folder / "prompts.txt").write_text(TYPED)


def page_cases() -> Iterator[Any]:
    """Yield the pages with blocks to run, marked by how long these take."""
    for page, text in PAGES.items():
        if any(not block.reason for block in command_blocks(text)):
            yield pytest.param(page, marks=pytest.mark.slow if Path(page).stem in SLOW else pytest.mark.full)


@pytest.mark.parametrize("page", [*page_cases()])
def test_the_blocks_of_a_page_run(page: str, ci_run: Path, shell: ForkedShell, tmp_path: Path) -> None:
    prepare(page, ci_run, tmp_path)
    for block in command_blocks(PAGES[page]):
        if not block.reason:
            code = re.sub("|".join(SMALLER), lambda found: SMALLER[found[0]], block.code)
            before = [script for start, script in BEFORE.items() if code.startswith(start)]
            ended = shell.run("\n".join([*before, code]), tmp_path, tmp_path / "prompts.txt")
            assert ended.returncode == 0, ended.stdout
