"""Dropped rows: how many of how many, and how many are allowed (D16); plan, check and stages count the same."""

import json
from collections.abc import Callable
from dataclasses import replace as dc_replace
from pathlib import Path
from typing import Any

import pytest
import run_cli
from bad_inputs import check, foreign_scorer, replace, rlhf, warned
from run_cli import must_succeed

from rlhf_cli import data, jsonl
from rlhf_cli.commands.common.plan import data_size
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers

SHORT, LONG = "Tell me about the sun.", "Tell me about the sun and the moon. " * 40
KEYS = {
    "sft": ("rows", "data.train", {"completion": " The sun is bright."}),
    "reward": ("pairs", "data.train", {"chosen": " It is bright.", "rejected": " It is dull."}),
    "ppo": ("prompts", "data.prompts", {}),
}


def write(name: str, short: int, long: int, answers: dict[str, str]) -> None:
    """`short` rows that fit into the model's 128 positions and `long` ones that do not; no prompt twice."""
    texts = [f"{number} {SHORT}" for number in range(short)] + [f"{number} {LONG}" for number in range(long)]
    jsonl.write_jsonl(Path(f"{name}.jsonl"), [{"prompt": text, **answers} for text in texts])


def counted(command: str, *arguments: str) -> Any:
    result = must_succeed(run_cli.rlhf(command, *arguments, "--json"))
    return json.loads(result.stdout)


@pytest.fixture
def fitting(folder: Path) -> Path:
    """The folder with a reward model, and rows that are limited to the model's context."""
    foreign_scorer(folder)
    replace("sft.yaml", "max_steps: 1", "max_length: 128")
    replace("reward.yaml", "max_steps: 1", "max_length: 128")
    sizes = (
        "per_device_train_batch_size: 2\n  gradient_accumulation_steps: 2\n  num_mini_batches: 1\n  num_ppo_epochs: 1"
    )
    replace("ppo.yaml", "total_episodes: 64", f"num_train_epochs: 2\n  response_length: 8\n  {sizes}")
    return folder


# D16.


@pytest.mark.full
@pytest.mark.parametrize("stage", KEYS)
def test_d16_max_dropped_limits_the_dropped_rows(stage: str, fitting: Path) -> None:
    name, key, answers = KEYS[stage]
    place, file = f"{stage}.yaml:2: ", f"{stage}.yaml"
    write(name, 16, 84, answers)
    limit = 120 if stage == "ppo" else 128
    hint = "hint: use a model with a longer context than 128 positions, or shorten the rows"
    if stage == "ppo":
        hint = "hint: use a model with a longer context (8 tokens for a response leave 120 to a prompt), shorten the"
    text = f"84 of 100 rows are dropped: 84 by D10 (longer than {limit} tokens); data.max_dropped allows 80%"
    for result in (rlhf(stage), check(file), run_cli.rlhf("plan", file)):
        says = (f"error[D16]: {place}{text}", hint, "; the longest row has ", "; or raise data.max_dropped")
        assert result.exit_code == 2 and all(text in result.stderr for text in says), result.stderr
        assert "Traceback" not in result.stderr and "\nok" not in result.stdout
    assert not Path(stage, "manifest.json").exists()
    write(name, 20, 80, answers)  # 80 % is allowed
    result = check(file)
    assert warned(result, "D16", place, "80 of 100 rows are dropped: 80 by D10 (longer than")
    assert result.stdout.splitlines()[-1].endswith(f"{stage} {key} 80 of 100 (80.0%)")
    assert check(file, "-s", "data.max_dropped=0.79").exit_code == 2


@pytest.mark.parametrize(("long", "warns"), [(0, False), (20, False), (21, True)])
def test_above_a_fifth_it_warns(long: int, warns: bool, fitting: Path) -> None:
    write("pairs", 100 - long, long, KEYS["reward"][2])
    result = check("reward.yaml")
    assert ("warning[D16]" in result.stderr, result.exit_code) == (warns, 0)
    last = result.stdout.splitlines()[-1]
    assert last.endswith(f"reward data.train {long} of 100 ({long}.0%)") if long else last == "ok"
    assert check("reward.yaml", "-s", "data.max_dropped=0").exit_code == (2 if long else 0)


def test_d16_held_out_rows_count_separately(fitting: Path) -> None:
    """Each cause has its count; the hint is that of the largest."""
    write("pairs", 90, 0, KEYS["reward"][2])
    write("held-out", 2, 6, KEYS["reward"][2])
    same = [{"prompt": f"{number}", "chosen": " Yes.", "rejected": " Yes."} for number in range(8)]
    for row in same:
        jsonl.append_jsonl(Path("held-out.jsonl"), row)
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval: held-out.jsonl, on_identical: drop")
    result = check("reward.yaml")
    assert result.exit_code == 2 and "error[D16]: reward.yaml:2: 14 of 16 rows are dropped: 8 by D07 (" in result.stderr
    assert ", 6 by D10 (longer than 128 tokens); data.max" in result.stderr
    assert "hint: look at how the pairs" in result.stderr


@pytest.mark.parametrize("seed", range(4))
def test_a_small_evaluation_part_is_not_rejected_by_chance(fitting: Path, seed: int) -> None:
    """40 of 60 rows are bad, 67 %: no part of about six rows proves that more than 80 % are."""
    good = [{"prompt": f"{number} {SHORT}", **KEYS["reward"][2]} for number in range(20)]
    jsonl.write_jsonl(Path("pairs.jsonl"), [*good, *({**good[0], "chosen": None} for _ in range(40))])
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval_fraction: 0.1, on_bad: drop")
    result = check("reward.yaml", "-s", f"seed={seed}")
    assert "error[D16]" not in result.stderr and "warning[D16]" in result.stderr


def test_prompts_of_an_evaluation(fitting: Path) -> None:
    write("prompts", 5, 3, {})
    text = "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\n"
    Path("eval.yaml").write_text(text + "eval: {response_length: 8, temperature: 1.0}\n")
    result = check("eval.yaml")
    hint = "hint: use a model with a longer context (8 "
    assert warned(result, "D16", "eval.yaml:2: ", "3 of 8 rows are dropped", hint)
    assert result.stdout.splitlines()[-1].endswith("eval data.prompts 3 of 8 (37.5%)")
    (planned,) = counted("plan", "eval.yaml", "--flops", "1e12")["stages"].values()
    assert (planned["rows"], planned["left_out"], planned["asked"]) == (5, 3, 8)
    assert check("eval.yaml", "-s", "data.max_dropped=0.3").exit_code == 2
    says = "hint: lower eval.response_length (100 tokens for a response leave 28 to a prompt)"
    assert says in check("eval.yaml", "-s", "eval.response_length=100").stderr


# What is counted.


def test_a_conversation_counts_by_its_answers_and_a_prompt_by_its_pairs(world: Any, tmp_path: Path) -> None:
    """Nine of ten answers remain; a prompt counts for all pairs that have it."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] * 9
    last = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Well."}]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [{"messages": [*turns, *last]}])
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")
    found = data.sft_rows(tmp_path / "rows.jsonl", tokenizer, max_length=400)
    assert (len(found), found.num_dropped, found.num_expected, found.num_read) == (9, 1, 10, 1)
    answers = [{"chosen": f" Yes {number}.", "rejected": " No."} for number in range(12)]
    pairs = [{"prompt": LONG if number < 3 else SHORT, **each} for number, each in enumerate(answers)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {"prompt": "", "chosen": "a", "rejected": "b"}])
    source = DataSource(str(tmp_path / "pairs.jsonl"), on_bad="drop")
    found = data.prompt_rows(source, world.tokenizer(), max_length=120)
    assert (len(found), found.num_dropped, found.num_expected) == (1, 4, 13)
    assert {code: lost.rows for code, lost in found.dropped.items()} == {"D10": 3, "D08": 1}


def test_a_bad_row_counts_in_one_part_of_a_split(world: Any, tmp_path: Path) -> None:
    """It has no prompt to split by: counted in both parts, it would be most of the smaller one."""
    good = [{"prompt": f"{number} {SHORT}", "completion": " Yes."} for number in range(400)]
    bad = [{"prompt": "", "completion": " Yes."}] * 100
    mixed = [row for five in zip(*[iter(good)] * 4, bad, strict=True) for row in five]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", mixed)
    source = DataSource(str(tmp_path / "rows.jsonl"), on_bad="drop")
    splits = (HoldoutSplit(0.1, 0, held_out) for held_out in (True, False))
    parts = [data.sft_rows(dc_replace(source, share=split), world.tokenizer(), max_length=None) for split in splits]
    assert (sum(map(len, parts)), sum(part.num_dropped for part in parts)) == (400, 100)
    assert all(0.1 < part.dropped_share < 0.35 for part in parts)


# The same number everywhere.


@pytest.mark.full
@pytest.mark.parametrize("stage", KEYS)
def test_plan_check_and_the_stage_count_one_number(stage: str, fitting: Path) -> None:
    name, key, answers = KEYS[stage]
    write(name, 24, 76, answers)
    file = f"{stage}.yaml"
    (planned,) = counted("plan", file, "--flops", "1e12")["stages"].values()
    checked = counted("check", file)["checked"]
    (rows,) = [one for one in checked if one["what"] == key]
    assert (planned["rows"], planned["left_out"], planned["asked"], planned["rows_are"]) == (24, 76, 100, "exact")
    assert (rows["rows"], rows["left_out"], rows["asked"]) == (24, 76, 100)
    (batches,) = [one["found"] for one in checked if one["what"] == "batches"]
    done = must_succeed(rlhf(stage))
    steps = json.loads(Path(stage, "manifest.json").read_text())["step"]
    assert (planned["steps"], planned["steps_are"]) == (steps, "exact")
    assert f"; in all {steps} " in batches and "76 of 100 " in batches
    assert f"{stage:<8} {batches}" in done.stderr.splitlines()
    assert json.loads(Path(stage, "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps


def test_plan_says_about_if_it_read_a_sample(fitting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is spread over the file, in which the short rows come first."""
    write("pairs", 60, 60, KEYS["reward"][2])
    exact = counted("plan", "reward.yaml", "--flops", "1e12")["stages"]["reward"]
    assert (exact["rows"], exact["rows_are"], exact["steps_are"]) == (60, "exact", "exact")
    monkeypatch.setattr(data_size, "MAX_TOKENIZED_ROWS", 30)
    (about,) = counted("plan", "reward.yaml", "--flops", "1e12")["stages"].values()
    assert (about["rows"], about["left_out"], about["asked"]) == (60, 60, 120)
    assert (about["rows_are"], about["steps_are"], about["steps"]) == ("about", "about", exact["steps"])
    stdout = run_cli.rlhf("plan", "reward.yaml", "--flops", "1e12").stdout
    assert f"         about {exact['steps']} x " in stdout and "data     about 60 pairs; about 60 of 120 rows" in stdout
    (fixed,) = counted("plan", "reward.yaml", "--flops", "1e12", "-s", "reward.max_steps=7")["stages"].values()
    assert (fixed["steps"], fixed["steps_are"], fixed["rows_are"]) == (7, "exact", "about")
    (unread,) = counted("plan", "reward.yaml", "--flops", "1e12", "--prompt-length", "9")["stages"].values()
    assert (unread["rows"], unread["steps_are"]) == (120, "at most")


@pytest.mark.parametrize("read", [data.preference_rows, data.prompt_rows])
def test_a_sample_is_every_nth(read: Callable[..., Any], world: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n} {SHORT}", "chosen": " Yes.", "rejected": " No."} for n in range(25)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    whole, part = (read(tmp_path / "pairs.jsonl", world.tokenizer(), max_length=120, sample=n) for n in (25, 10))
    assert (whole.stride, len(whole), part.stride) == (1, 25, 3) and list(part) == list(whole)[::3]
    with pytest.raises(RLHFError, match="no usable row"):
        read(tmp_path / "pairs.jsonl", world.tokenizer(), max_length=2, sample=10)
