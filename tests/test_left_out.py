"""Rows that are left out: how many of how many, and how many may be (D16); plan, check and stages count the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check, foreign_scorer, replace, rlhf, warned
from typer.testing import CliRunner

from rlhf_cli import data, jsonl
from rlhf_cli.cli import app
from rlhf_cli.commands.plan import models
from rlhf_cli.config.loading import load
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers

SHORT, LONG = "Tell me about the sun.", "Tell me about the sun and the moon. " * 40
KEYS = {
    "sft": ("rows", "data.train", {"completion": " The sun is bright."}),
    "reward": ("pairs", "data.train", {"chosen": " It is bright.", "rejected": " It is dull."}),
    "ppo": ("prompts", "data.prompts", {}),
}


def write(name: str, short: int, long: int, answers: dict[str, str]) -> None:
    """So many rows that fit into the model's 128 positions, and so many that do not; no prompt twice."""
    texts = [f"{number} {SHORT}" for number in range(short)] + [f"{number} {LONG}" for number in range(long)]
    jsonl.write_jsonl(Path(f"{name}.jsonl"), [{"prompt": text, **answers} for text in texts])


def counted(command: str, *arguments: str) -> Any:
    result = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def fitting(folder: Path) -> Path:
    """The folder with a reward model, and rows that are cut off at the model's context."""
    foreign_scorer(folder)
    replace("sft.yaml", "max_steps: 1", "max_length: 128")
    replace("reward.yaml", "max_steps: 1", "max_length: 128")
    sizes = "per_device_train_batch_size: 2\n  gradient_accumulation_steps: 2\n  num_mini_batches: 1"
    sizes += "\n  num_ppo_epochs: 1"
    replace("ppo.yaml", "total_episodes: 64", f"num_train_epochs: 2\n  response_length: 8\n  {sizes}")
    return folder


# D16.


@pytest.mark.parametrize("stage", KEYS)
def test_max_dropped_says_where_a_stage_stops(stage: str, fitting: Path) -> None:
    name, key, answers = KEYS[stage]
    place, file = f"{stage}.yaml:2: ", f"{stage}.yaml"
    write(name, 16, 84, answers)
    limit = 120 if stage == "ppo" else 128
    says = (
        f"84 of 100 rows are left out: 84 by D10 (longer than {limit} tokens); data.max_dropped allows 80%",
        "hint: take a model with a longer context (8 tokens for a response leave 120 to a prompt), shorten the prompts"
        if stage == "ppo"
        else "hint: take a model with a longer context than 128 positions, or shorten the rows",
        "; the longest row has ",
        "; or raise data.max_dropped",
    )
    refused = rlhf(stage)
    assert refused.exit_code == 2 and f"\nerror[D16]: {place}" in refused.stderr, refused.stderr
    assert all(text in refused.stderr for text in says) and "Traceback" not in refused.stderr, refused.stderr
    assert not Path(stage, "manifest.json").exists()
    wrong = check(file)
    assert wrong.exit_code == 2 and "\nok" not in wrong.stdout and f"error[D16]: {place}" in wrong.stderr
    planned = CliRunner().invoke(app, ["plan", file])
    assert planned.exit_code == 2 and planned.stderr.startswith(f"error[D16]: {place}")
    write(name, 20, 80, answers)  # 80 % is allowed: more is not
    told = check(file)
    assert warned(told, "D16", place, "80 of 100 rows are left out: 80 by D10 (longer than")
    assert told.stdout.splitlines()[-1].endswith(f"; rows left out: {stage} {key} 80 of 100 (80.0%)")
    assert check(file, "-s", "data.max_dropped=0.79").exit_code == 2


@pytest.mark.parametrize(("long", "warns"), [(0, False), (20, False), (21, True)])
def test_above_a_fifth_it_warns(long: int, warns: bool, fitting: Path) -> None:
    write("pairs", 100 - long, long, KEYS["reward"][2])
    told = check("reward.yaml")
    assert ("warning[D16]" in told.stderr, told.exit_code) == (warns, 0)
    share = f"; rows left out: reward data.train {long} of 100 ({long}.0%)" if long else ""
    assert told.stdout.splitlines()[-1] == f"ok{share}"
    assert check("reward.yaml", "-s", "data.max_dropped=0").exit_code == (2 if long else 0)


def test_held_out_rows_count_by_themselves(fitting: Path) -> None:
    """Training and evaluation data each, and each cause with its count; the first remedy is that of the largest."""
    write("pairs", 90, 0, KEYS["reward"][2])
    write("held-out", 2, 6, KEYS["reward"][2])
    same = [{"prompt": f"{number}", "chosen": " Yes.", "rejected": " Yes."} for number in range(8)]
    for row in same:
        jsonl.append_jsonl(Path("held-out.jsonl"), row)
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval: held-out.jsonl, on_identical: drop")
    told = check("reward.yaml")
    assert told.exit_code == 2 and "error[D16]: reward.yaml:2: 14 of 16 rows are left out: 8 by D07 (" in told.stderr
    assert ", 6 by D10 (longer than 128 tokens); data.max" in told.stderr
    assert "hint: look at how the pairs" in told.stderr


@pytest.mark.parametrize("seed", range(4))
def test_a_small_part_is_not_refused_by_the_luck_of_its_draw(fitting: Path, seed: int) -> None:
    """Of 60 rows 40 are bad, 67 %: no part of some six rows proves that more than 80 % of such rows are."""
    good = [{"prompt": f"{number} {SHORT}", **KEYS["reward"][2]} for number in range(20)]
    jsonl.write_jsonl(Path("pairs.jsonl"), [*good, *({**good[0], "chosen": None} for _ in range(40))])
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval_fraction: 0.1, on_bad: drop")
    told = check("reward.yaml", "-s", f"seed={seed}")
    assert "error[D16]" not in told.stderr and "warning[D16]" in told.stderr


def test_prompts_of_an_evaluation(fitting: Path) -> None:
    write("prompts", 5, 3, {})
    text = "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\n"
    Path("eval.yaml").write_text(text + "eval: {response_length: 8, temperature: 1.0}\n")
    told = check("eval.yaml")
    assert warned(
        told, "D16", "eval.yaml:2: ", "3 of 8 rows are left out", "hint: take a model with a longer context (8 "
    )
    assert told.stdout.splitlines()[-1] == "ok; rows left out: eval data.prompts 3 of 8 (37.5%)"
    (planned,) = counted("plan", "eval.yaml", "--flops", "1e12")["stages"]
    assert (planned["rows"], planned["left_out"], planned["asked"]) == (5, 3, 8)
    assert check("eval.yaml", "-s", "data.max_dropped=0.3").exit_code == 2
    says = "hint: lower eval.response_length (100 tokens for a response leave 28 to a prompt)"
    assert says in check("eval.yaml", "-s", "eval.response_length=100").stderr


@pytest.mark.parametrize("stage", CONFIGS)
def test_the_bound_changes_no_result(stage: str, tmp_path: Path) -> None:
    """A run that was made under another one stays up to date, and its identity has no such key."""
    texts = {"sft": "model: {path: base}\ndata: {train: x.jsonl}\n", "reward": "data: {train: x.jsonl}\n"}
    path = tmp_path / f"{stage}.yaml"
    path.write_text(texts.get(stage, "data: {prompts: x.jsonl}\n" + "ppo: {total_episodes: 64}\n" * (stage == "ppo")))
    plain = load(stage, path).identity()
    assert load(stage, path, ["data.max_dropped=0.5"]).identity() == plain
    assert "max_dropped" not in plain["data"]


# What is counted.


def test_a_conversation_counts_by_its_answers(world: Any, tmp_path: Path) -> None:
    """Of ten answers nine remain: a tenth is left out, and not the whole row."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] * 9
    last = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Well."}]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [{"messages": [*turns, *last]}])
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")
    found = data.sft_rows(tmp_path / "rows.jsonl", tokenizer, max_length=400)
    assert (len(found), found.num_dropped, found.num_expected, found.num_read) == (9, 1, 10, 1)


def test_a_prompt_counts_for_all_pairs_that_have_it(world: Any, tmp_path: Path) -> None:
    answers = [{"chosen": f" Yes {number}.", "rejected": " No."} for number in range(12)]
    pairs = [{"prompt": LONG if number < 3 else SHORT, **each} for number, each in enumerate(answers)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {"prompt": "", "chosen": "a", "rejected": "b"}])
    source = DataSource(str(tmp_path / "pairs.jsonl"), on_bad="drop")
    found = data.prompt_rows(source, world.tokenizer(), max_length=120)
    assert (len(found), found.num_dropped, found.num_expected) == (1, 4, 13)
    assert {code: lost.rows for code, lost in found.dropped.items()} == {"D10": 3, "D08": 1}


def test_a_bad_row_counts_in_one_part_of_a_split(world: Any, tmp_path: Path) -> None:
    """It has no prompt that a split could go by: counted in both parts, it would be most of the smaller one."""
    good = [{"prompt": f"{number} {SHORT}", "completion": " Yes."} for number in range(400)]
    bad = [{"prompt": "", "completion": " Yes."}] * 100
    jsonl.write_jsonl(
        tmp_path / "rows.jsonl", [row for five in zip(*[iter(good)] * 4, bad, strict=True) for row in five]
    )
    parts = [
        data.sft_rows(
            DataSource(str(tmp_path / "rows.jsonl"), on_bad="drop", share=HoldoutSplit(0.1, 0, held_out)),
            world.tokenizer(),
            max_length=None,
        )
        for held_out in (True, False)
    ]
    assert [sum(numbers) for numbers in zip(*((len(part), part.num_dropped) for part in parts), strict=True)] == [
        400,
        100,
    ]
    assert all(0.1 < part.dropped_share < 0.35 for part in parts)


# One number everywhere.


@pytest.mark.training
@pytest.mark.parametrize("stage", KEYS)
def test_plan_check_and_the_stage_count_one_number(stage: str, fitting: Path) -> None:
    name, key, answers = KEYS[stage]
    write(name, 24, 76, answers)
    file = f"{stage}.yaml"
    (planned,) = counted("plan", file, "--flops", "1e12")["stages"]
    checked = counted("check", file)["checked"]
    (seen,) = [one for one in checked if one["what"] == key]
    assert (planned["rows"], planned["left_out"], planned["asked"], planned["rows_are"]) == (24, 76, 100, "exact")
    assert (seen["rows"], seen["left_out"], seen["asked"]) == (24, 76, 100)
    (batches,) = [one["found"] for one in checked if one["what"] == "batches"]
    done = rlhf(stage)
    assert done.exit_code == 0, done.stderr
    steps = json.loads(Path(stage, "manifest.json").read_text())["step"]
    assert (planned["steps"], planned["steps_are"]) == (steps, "exact")
    assert f"; in all {steps} " in batches and "76 of 100 left out (76.0%)" in batches
    assert f"{stage:<8} {batches}" in done.stderr.splitlines()
    assert json.loads(Path(stage, "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps


def test_plan_says_about_where_it_read_a_sample(fitting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is spread over the file: it is not the short rows that stand first."""
    write("pairs", 60, 60, KEYS["reward"][2])
    exact = counted("plan", "reward.yaml", "--flops", "1e12")["stages"][0]
    assert (exact["rows"], exact["rows_are"], exact["steps_are"]) == (60, "exact", "exact")
    monkeypatch.setattr(models, "MAX_TOKENIZED_ROWS", 30)
    (about,) = counted("plan", "reward.yaml", "--flops", "1e12")["stages"]
    assert (about["rows"], about["left_out"], about["asked"]) == (60, 60, 120)
    assert (about["rows_are"], about["steps_are"], about["steps"]) == ("about", "about", exact["steps"])
    told = CliRunner().invoke(app, ["plan", "reward.yaml", "--flops", "1e12"]).stdout
    assert f"         about {exact['steps']} x " in told
    assert "data     about 60 pairs; about 60 of 120 rows left out (50.0%)" in told
    (fixed,) = counted("plan", "reward.yaml", "--flops", "1e12", "-s", "reward.max_steps=7")["stages"]
    assert (fixed["steps"], fixed["steps_are"], fixed["rows_are"]) == (7, "exact", "about")
    (unread,) = counted("plan", "reward.yaml", "--flops", "1e12", "--prompt-length", "9")["stages"]
    assert (unread["rows"], unread["steps_are"]) == (120, "at most")


@pytest.mark.parametrize("read", [data.preference_rows, data.prompt_rows])
def test_a_sample_is_every_nth(read: Callable[..., Any], world: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n} {SHORT}", "chosen": " Yes.", "rejected": " No."} for n in range(25)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    whole, part = (read(tmp_path / "pairs.jsonl", world.tokenizer(), max_length=120, sample=n) for n in (25, 10))
    assert (whole.stride, len(whole), part.stride) == (1, 25, 3) and list(part) == list(whole)[::3]
    with pytest.raises(RLHFError, match="no usable row"):
        read(tmp_path / "pairs.jsonl", world.tokenizer(), max_length=2, sample=10)
