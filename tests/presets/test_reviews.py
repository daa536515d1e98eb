"""The `reviews` preset: four parts that share no sentence, an independent judge, and the chain in small."""

import json
import random
from pathlib import Path

import pytest
from run_cli import ROOT, must_succeed, python, rlhf

from rlhf_cli import config, jsonl
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.pipeline.load import route_overrides

STAGES = ("sft", "reward", "ppo", "eval")
SMALL = [
    "model.new.hidden_size=32",
    "model.new.intermediate_size=64",
    "model.new.num_hidden_layers=2",
    "model.new.tokenizer.vocab_size=400",
    "sft.max_steps=20",
    "reward.max_steps=20",
    "reward.normalize_samples=16",
    "ppo.total_episodes=64",
    "ppo.num_sample_generations=0",
    "ppo.response_length=16",
    "eval.n=16",
    "eval.best_of=[2]",
    "eval.require={}",
]


def sentences(kind: str, count: int) -> list[str]:
    """Return different sentences, whose adjectives are good or bad."""
    draw = random.Random(kind)
    words = {"good": ("moving", "bright", "warm"), "bad": ("dull", "silly", "cold")}[kind]
    return [f"film number {n} is {draw.choice(words)} and {draw.choice(words)} in its story ." for n in range(count)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the preset, and its data from two files by the script that users run."""
    folder = tmp_path_factory.mktemp("reviews")
    both = ["a film like any other , as long as it lasts ."]
    for kind in ("good", "bad"):
        lines = sentences(kind, 200)
        (folder / f"{kind}.txt").write_text("\n".join([*lines, *both, lines[0], ""]), encoding="utf-8")
    assert "prepare_reviews.py pos.txt neg.txt" in must_succeed(rlhf("init", "reviews", folder / "run")).stdout
    script = ROOT / "scripts/prepare_reviews.py"
    done = must_succeed(python(script, folder / "good.txt", folder / "bad.txt", folder / "run"))
    assert done.stdout.splitlines()[0] == "train     80 sentences"
    return folder / "run"


def contents(run: Path, name: str) -> list[dict]:
    return [row for _, row in jsonl.read_jsonl(run / f"data/{name}.jsonl")]


def test_no_sentence_is_in_two_parts_and_none_is_missing(run: Path) -> None:
    """SFT reads the sentences of training and of the pairs; its prompts start such sentences."""
    parts = {
        part: {row[side].strip() for row in contents(run, f"{part}/pairs") for side in ("chosen", "rejected")}
        for part in ("reward", "held-out")
    }
    sft = {row["completion"].strip() for row in contents(run, "train/texts")}
    parts |= {"judge": {row["text"] for row in contents(run, "judge/labelled")}, "train": sft - parts["reward"]}
    assert {part: len(texts) for part, texts in parts.items()} == {
        "reward": 180, "held-out": 40, "judge": 100, "train": 80,
    }  # fmt: skip
    assert set().union(*parts.values()) == {*sentences("good", 200), *sentences("bad", 200)}
    assert sft == parts["train"] | parts["reward"]
    prompts, held_out = (
        {row["prompt"].removeprefix("review: ") for row in contents(run, f"{part}/prompts")}
        for part in ("train", "held-out")
    )
    assert all(any(text.startswith(prompt) for text in sft) for prompt in prompts)
    assert held_out and not held_out & prompts


def test_pairs_are_a_good_sentence_against_a_bad_one(run: Path) -> None:
    good = set(sentences("good", 200))
    for part, times in (("reward", 3), ("held-out", 1)):
        pairs = contents(run, f"{part}/pairs")
        assert all(row["chosen"].strip() in good and row["rejected"].strip() not in good for row in pairs)
        for side in ("chosen", "rejected"):
            assert len(pairs) == times * len({row[side] for row in pairs})


def test_the_configs_load_and_name_this_data(run: Path) -> None:
    for stage in STAGES:
        for source in config.load(stage, run / f"{stage}.yaml").sources().values():
            assert next(raw_rows(source))
    assert config.load("eval", run / "eval.yaml").eval.require  # the gate that docs/results/reviews.md promises


@pytest.mark.full
def test_the_judge_learns_from_its_own_part(run: Path) -> None:
    done = must_succeed(python(run / "judge.py"))
    assert done.stdout.splitlines() == ["judge     accuracy 1.000", "held-out  accuracy 1.000"]


@pytest.mark.full
@pytest.mark.usefixtures("figures")
def test_the_chain_runs_in_small_and_its_frontier_is_drawn(run: Path) -> None:
    for stage, sets in route_overrides(SMALL, STAGES).items():  # here, where all is imported
        must_succeed(rlhf(stage, "--config", run / f"{stage}.yaml", *sets))
    report = json.loads((run / "eval/report.json").read_text())
    assert 0 <= report["win_rate"]["ppo_vs_sft"]["critic"]["value"] <= 1
    assert 0 <= report["models"]["ppo"]["judges"]["critic"]["mean"] <= 1
    assert report["frontier"][-1]["step"] >= 1 and report["best_of"][-1]["n"] == 2
    assert "</svg>" in (run / "eval/frontier.svg").read_text()
