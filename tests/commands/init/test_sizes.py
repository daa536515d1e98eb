"""How `rlhf init preferences` chooses sizes, and measures the speed of a model.

Modules: `commands/init/pairs.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from run_cli import is_one_error, must_succeed, rlhf

from rlhf_cli import jsonl
from rlhf_cli.commands.init import sizes
from rlhf_cli.commands.init.limits import TokenLimits
from rlhf_cli.commands.init.sizes import EPISODES_PER_UPDATE, SizingInputs, Speed, choose_sizes, learning_rate
from rlhf_cli.models import devices
from rlhf_cli.planning import duration, placement
from rlhf_cli.planning.placement import MAX_ROWS, PLACEMENTS, Placement
from rlhf_cli.planning.target import MEMORY_MARGIN, Target
from tests.conftest import World

NAMES = ("sun", "moon", "star", "cloud", "rain", "snow", "wind", "storm", "river", "lake")
PROMPTS = [f"Tell me about the {one} and the {other}." for one in NAMES for other in NAMES]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


INPUTS = SizingInputs(
    file_rows={"sft": 300, "sft_eval": 100, "pairs": 450, "pairs_eval": 100, "prompts": 150, "heldout": 100},
    limits=TokenLimits(96, 152, 0.95, prompt_mean=20.0, answer_mean=50.0, row_mean=70.0, prompt_max=56),
    parameters=600_000,
    placement=Placement(None, rows=MAX_ROWS, fullest="ppo", bytes=10**9),
    whole=None,
    target=Target(False, 16 * 10**9, "the CPU"),
    speed=Speed(training=20_000.0, generation=4_000.0),
)


def with_rows(**counts: int) -> SizingInputs:
    return replace(INPUTS, file_rows={**INPUTS.file_rows, **counts})


def test_learning_rates_meet_their_anchors() -> None:
    assert [learning_rate(stage, 10**9) for stage in ("sft", "reward", "ppo")] == ["2e-5", "1e-5", "3e-6"]
    assert [learning_rate(stage, 600_000) for stage in ("sft", "reward", "ppo")] == ["1e-3", "9e-4", "2e-4"]
    assert learning_rate("ppo", 124_000_000) == "1e-5"  # gpt2 in TRL's sentiment example: 1.41e-5


@pytest.mark.parametrize("prompts", [2, 3, 9, 31, 64, 5000])
def test_an_update_needs_no_more_prompts_than_there_are(prompts: int) -> None:
    sizes = choose_sizes(with_rows(prompts=prompts), None)
    assert sizes.total_episodes % EPISODES_PER_UPDATE == 0
    assert EPISODES_PER_UPDATE // sizes.samples <= prompts


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (6, 2), (9, 4), (299, 8), (300, 16), (5000, 32)])
def test_a_batch_is_at_most_half_the_rows(rows: int, batch: int) -> None:
    sft = choose_sizes(with_rows(sft=rows), None).sft
    assert sft.batch_rows * sft.accumulation_steps == batch


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(32, 8, 32), (96, 8, 96), (300, 6, 114), (600, 3, 114), (20_000, 1, 625)]
)
def test_few_rows_get_more_epochs_up_to_a_limit(rows: int, epochs: int, steps: int) -> None:
    sizes = choose_sizes(with_rows(sft=rows, pairs=rows), 10_000)
    assert (sizes.sft.epochs, sizes.sft.steps, sizes.sft.max_steps) == (epochs, steps, None)
    assert sizes.reward.epochs <= 2


def test_a_short_time_means_fewer_steps_and_a_note() -> None:
    long, short = choose_sizes(INPUTS, 600), choose_sizes(INPUTS, 2)
    assert long.sft.max_steps is None and long.minutes and long.minutes < 30
    assert short.minutes and short.minutes <= 3 and short.total_episodes < long.total_episodes
    slow = choose_sizes(replace(INPUTS, speed=Speed(20.0, 4.0)), 10)
    assert slow.sft.max_steps == slow.sft.steps == 10 and slow.updates == 10
    assert (long.ppo_epochs, slow.ppo_epochs) == (4, 1)
    assert slow.minutes and slow.minutes > 15 and "takes longer than 10 minutes" in slow.note
    unmeasured = replace(INPUTS, speed=None)
    unknown = choose_sizes(unmeasured, 1)  # by the data only
    assert unknown.minutes is None and unknown.sft.max_steps is None and unknown.updates == 50
    assert unknown.note.startswith("--minutes has no effect") and not choose_sizes(unmeasured, None).note


# Memory


def save_config(base: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    tiny.config("llama", vocab_size=400, max_position_embeddings=512, **sizes).save_pretrained(base)


@pytest.mark.full
@pytest.mark.parametrize(
    ("gib", "tried"), [(8.0, PLACEMENTS), (0.5, PLACEMENTS), (0.3, PLACEMENTS), (8.0, PLACEMENTS[5:6])]
)
def test_the_plan_of_the_written_folder_fits(
    gib: float, tried: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same estimator, with the lengths of the data: no stage that was written is too large."""
    base, pairs, run = tmp_path / "base", tmp_path / "pairs.jsonl", tmp_path / "run"
    monkeypatch.setattr(placement, "PLACEMENTS", tried)
    save_config(base)  # no weights
    world.tokenizer().save_pretrained(base)
    rows = [{"prompt": f"{prompt} ", "chosen": "Bright and calm.", "rejected": "Dull."} for prompt in PROMPTS]
    jsonl.write_jsonl(pairs, rows)
    result = must_succeed(rlhf("init", "preferences", run, "--data", pairs, "--base", base, "--gpu", gib))
    assert f"; a GPU of {gib:g} GiB has" in result.stdout and "memory: " in result.stdout
    ppo = (run / "ppo.yaml").read_text()
    for words, key in {"offload in PPO": "offload: true", "policy_head in PPO": "{value: policy_head}"}.items():
        assert (words in result.stdout) == (key in ppo) and (tried == PLACEMENTS or words in result.stdout)
    planned = json.loads(rlhf("plan", run, "--gpu", gib, "--flops", "1e12", "--json").stdout)
    assert len(planned["stages"]) == 4 and all(stage["fits"] for stage in planned["stages"].values())
    assert max(stage["memory_bytes"] for stage in planned["stages"].values()) <= (1 - MEMORY_MARGIN) * gib * 2**30


@pytest.mark.full
def test_a_base_without_a_chat_template_that_does_not_fit_is_an_error_with_the_reason(
    world: World, tmp_path: Path
) -> None:
    """Adapters do not train the new tokens of chatml; with --plain the conversations are texts, and adapters fit."""
    base, pairs = tmp_path / "base", tmp_path / "pairs.jsonl"
    save_config(base)
    world.tokenizer().save_pretrained(base)
    turns = [[*chat(prompt), {"role": "assistant", "content": "Bright."}] for prompt in PROMPTS]
    other = [{"role": "assistant", "content": "Dull."}]
    jsonl.write_jsonl(pairs, [{"chosen": each, "rejected": [each[0], *other]} for each in turns])
    command = ("init", "preferences", "--data", pairs, "--base", base, "--gpu", "0.09", tmp_path / "run")
    says = ("the base model has no chat template, and adapters", "with a chat template, add --plain, or take a smaller")
    assert is_one_error(rlhf(*command), "E03", *says)
    assert is_one_error(rlhf(*command, "--adapters", "lora"), "C17", "--adapters lora: the base", "add --plain")
    assert "memory: LoRA adapters on one" in must_succeed(rlhf(*command, "--plain")).stdout
    assert "chat_template" not in (tmp_path / "run/sft.yaml").read_text()


def test_evaluations_have_at_most_512_rows_or_prompts() -> None:
    many = choose_sizes(with_rows(sft_eval=4000, pairs_eval=40), None)
    assert (many.sft.eval_rows, many.reward.eval_rows) == (512, 40)
    for count, speed, prompts in ((100, 10**6, 100), (1000, 10**6, 512), (1000, 10, 64)):
        inputs = replace(with_rows(heldout=count), speed=Speed(10 * speed, speed))
        assert choose_sizes(inputs, 30).eval_n == prompts


# Speed


@pytest.mark.parametrize(("supported", "gain", "chosen"), [(True, 1.5, True), (True, 1.1, False), (False, 9.0, False)])
def test_bfloat16_on_a_cpu_is_chosen_by_its_speed(
    supported: bool, gain: float, chosen: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, bf16: bool, **__: Any) -> duration.PassTimes:
        return duration.PassTimes(*[1 / gain if bf16 else 1.0] * 4, 1)

    monkeypatch.setattr(sizes, "measure_passes", measure)
    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: supported)
    speed = sizes.measure_speed(world.base)
    assert speed.bf16_gain == (pytest.approx(gain) if chosen else None)
    assert speed.training == pytest.approx((gain if chosen else 1) * 512)


@pytest.mark.parametrize(
    ("durations", "shares", "seconds", "rounds"),
    [
        ([0.3, 2.0, 0.1], [1.0], 0.1, 1),  # a warm-up, one slow call, and quick ones
        ([30.0, 20.0, 0.1], [0.5], 20.0, 1),  # a large model is measured once
        ([0.3, 0.9, 0.9, 0.9, 0.1], [0.5, 0.95], 0.1, 2),  # other processes: measured again
        ([0.3, 0.9, 0.9, 0.9, 0.1], [0.5, 0.6, 0.4, 0.5, 0.3, 0.9], 0.1, 5),
    ],
)
def test_the_fastest_call_counts(
    durations: list[float], shares: list[float], seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left = [0.0], list(shares)

    def call() -> None:
        clock[0] += durations.pop(0) if len(durations) > 1 else durations[0]

    monkeypatch.setattr(duration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(devices, "measure_cpu_share", lambda measure: (measure(), left.pop(0)))
    assert duration.fastest(call) == (pytest.approx(seconds), max(shares[:rounds]))
    assert len(left) == len(shares) - rounds
