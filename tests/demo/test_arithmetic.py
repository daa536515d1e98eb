"""The preset `math`: its problems and their answers, and a short chain of its stages."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from ppo_folder import lines
from run_cli import must_succeed, rlhf, run_here

from rlhf_cli.commands.init import presets
from rlhf_cli.demo import arithmetic
from rlhf_cli.statistics import wilson

SIZES = arithmetic.Sizes(demonstrations=1200, prompts=300, evaluation=90, held_out=300, words=300)
FILES = ("sft", "prompts", "sft_eval", "heldout")
VERBS = {"boxes|bags": "*", "brings|buys|finds|adds": "+", "takes|gives|loses|sells": "-"}


def test_answers_follow_from_the_words_and_held_out_templates_are_in_no_training_text(tmp_path: Path) -> None:
    for folder, seed in (("one", 3), ("same", 3), ("other", 4)):
        arithmetic.write(tmp_path / folder, seed, SIZES)
    names = re.compile(rf"\b({'|'.join((*arithmetic.NAMES, *arithmetic.THINGS))})\b")
    texts: dict[str, list[str]] = {}
    for file in FILES:
        one, same, other = (lines(tmp_path / folder / f"data/{file}.jsonl") for folder in ("one", "same", "other"))
        assert one == same != other
        texts[file] = [names.sub("N", row["prompt"]) for row in one]
        for row in one:
            value, *others = (int(number) for number in re.findall(r"\d+", row["prompt"]))
            signs = [VERBS[next(k for k in VERBS if verb in k)] for verb in re.findall("|".join(VERBS), row["prompt"])]
            worked = ""
            for sign, number in zip(signs, others, strict=True):
                result = {"+": value + number, "-": value - number, "*": value * number}[sign]
                worked, value = f"{worked} {value} {sign} {number} = {result}.", result
                assert value > 0
            assert row.get("answer", str(value)) == str(value)
            assert row.get("completion") in (None, f"{worked} The answer is {value}.") or "=" not in row["completion"]
        assert "answer" in one[0] or 0.15 < sum("=" not in row["completion"] for row in one) / len(one) < 0.4
        assert "answer" not in one[0] or set(Counter(row["difficulty"] for row in one).values()) == {100}
    every = [text for file in FILES for text in texts[file]]
    assert len(every) == len(set(every))  # no template occurs twice with the same numbers
    seen, held_out = ({re.sub(r"\d+", "N", t) for f in part for t in texts[f]} for part in (FILES[:2], FILES[2:]))
    assert len(seen) > 300 and len(held_out) > 80 and not seen & held_out
    assert not re.search(r"\d", (tmp_path / "one/data/words.jsonl").read_text(encoding="utf-8"))


@pytest.mark.full
def test_a_short_chain_is_scored_by_the_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "math", replace(presets.PRESETS["math"], arithmetic_sizes=SIZES))
    must_succeed(rlhf("init", "math", run := tmp_path / "run"))
    must_succeed(rlhf("check", run))
    few = ("sft.max_steps=3", "ppo.total_episodes=256", "ppo.response_length=8", "eval.n=6", "eval.best_of=[2]")
    must_succeed(run_here(run, *(part for key in few for part in ("-s", key))))
    assert all("objective/score/right" in row for row in lines(run / "ppo/metrics.jsonl"))
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    assert report["models"].keys() == {"sft", "ppo"} and [each["n"] for each in report["best_of"]] == [2]
    assert [group["value"] for group in report["by"]["groups"]] == ["easy", "medium", "hard"]
    judge = report["models"]["sft"]["judges"]["reward"]
    assert judge["ci95"] == pytest.approx(wilson(6 * judge["mean"], 6)), "a share"
    row = lines(run / "eval/samples.jsonl")[0]
    assert {"reward"} == row["scores"].keys() and {"answer", "difficulty"} == row["columns"].keys()
