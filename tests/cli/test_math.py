"""The preset `math`: its problems and their answers, and a short chain of its stages."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands import init
from rlhf_cli.demo import arithmetic
from tests.helpers.run_cli import must_succeed, rlhf

SIZES = arithmetic.Sizes(demonstrations=1200, prompts=300, evaluation=90, held_out=300, words=300)
FILES = ("sft", "prompts", "sft_eval", "heldout")


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def solve(prompt: str) -> int:
    """Return the answer of a problem, from its words."""
    value, *others = map(int, re.findall(r"\d+", prompt))
    signs = ["*"] * len(re.findall(" boxes of | bags with ", prompt))
    signs += ["+" if verb in ("brings", "buys", "finds", "adds") else "-" for verb in
              re.findall("brings|buys|finds|adds|takes|gives|loses|sells", prompt)]  # fmt: skip
    for sign, number in zip(signs, others, strict=True):
        value = value * number if sign == "*" else value + number if sign == "+" else value - number
    return value


def test_problems_are_solved_right_in_each_file_and_a_seed_gives_the_same(tmp_path: Path) -> None:
    for folder, seed in (("one", 3), ("same", 3), ("other", 4)):
        arithmetic.write(tmp_path / folder, seed, SIZES)
    for name in FILES:
        one, same, other = (rows(tmp_path / folder, name) for folder in ("one", "same", "other"))
        assert one == same != other
        for row in one:
            steps = re.findall(r"(\d+) [-+*] (\d+) = (\d+)\.", row.get("completion", ""))
            assert (
                row.get("answer", str(solve(row["prompt"]))) == str(solve(row["prompt"])) and solve(row["prompt"]) > 0
            )
            if steps:
                numbers = [steps[0][0], *(step[1] for step in steps)]
                assert numbers == re.findall(r"\d+", row["prompt"])
                assert row["completion"].endswith(f"= {solve(row['prompt'])}. The answer is {solve(row['prompt'])}.")
        if "answer" in one[0]:
            assert set(Counter(row["difficulty"] for row in one).values()) == {100}
    assert not re.search(r"\d", (tmp_path / "one/data/words.jsonl").read_text())


def test_held_out_templates_are_in_no_training_text_and_no_problem_occurs_twice(tmp_path: Path) -> None:
    arithmetic.write(tmp_path, 5, SIZES)
    words = re.compile(rf"\b({'|'.join((*arithmetic.NAMES, *arithmetic.THINGS))})\b")
    texts = {name: [words.sub("N", row["prompt"]) for row in rows(tmp_path, name)] for name in FILES}
    every = [text for name in FILES for text in texts[name]]
    assert len(every) == len(set(every))
    train, held_out = ({re.sub(r"\d+", "N", t) for n in names for t in texts[n]} for names in (FILES[:2], FILES[2:]))
    assert len(train) > 300 and len(held_out) > 80 and not train & held_out


@pytest.mark.training
def test_the_chain_runs_with_few_steps_and_scores_by_the_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(init.PRESETS, "math", replace(init.PRESETS["math"], problems=SIZES))
    run = tmp_path / "run"
    must_succeed(rlhf("init", "math", run))
    must_succeed(rlhf("check", run))
    few = ("sft.max_steps=3", "ppo.total_episodes=256", "ppo.response_length=8", "eval.n=6", "eval.best_of=[2]")
    must_succeed(rlhf("run", run, *(part for key in few for part in ("-s", key))))
    report = json.loads((run / "eval/report.json").read_text())
    assert report["models"].keys() >= {"sft", "ppo", "best_of_2"}
    samples = rows(run, "../eval/samples")
    assert {"reward"} == samples[0]["scores"].keys() and {"answer"} <= samples[0].keys()
    assert (run / "ppo/metrics.jsonl").read_text().count('"objective/score/right"') == 2
