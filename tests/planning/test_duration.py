"""Time by `rlhf plan`: operations over a rate, or measured passes."""

import json
import time
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from plans import GPU, on_a_cpu, phase, plan, planned, ppo

from rlhf_cli.commands.common.plan.inputs import ModelResolver
from rlhf_cli.commands.plan.show import show
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.jsonl import append_jsonl, read_jsonl
from rlhf_cli.models import devices
from rlhf_cli.models.load import load_causal_lm, read_config
from rlhf_cli.planning import duration
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.planning.target import Target

pytestmark = pytest.mark.usefixtures("no_progress_lines")


def test_time_is_operations_over_the_rate(three: Path) -> None:
    slow, fast = (ppo("--flops", rate) for rate in ("1e9", "4e9"))
    for name, seconds in slow["step_seconds"].items():
        assert seconds == pytest.approx(phase(slow, name)["flops"] / 1e9) and seconds == 4 * fast["step_seconds"][name]
    assert slow["steps"] == 10 and slow["seconds"] == pytest.approx(10 * sum(slow["step_seconds"].values()))
    assert not slow["run"] and slow["share"] == 1


def test_operations_are_six_per_weight_and_token(three: Path) -> None:
    """2 forward, 4 backward (Kaplan et al. 2020, section 2.1), of weights in products, and those of attention."""
    stage = ppo("--prompt-length", "40", "ppo.num_ppo_epochs=3", "ppo.num_mini_batches=2")
    config = read_config("model")
    body = sum(w.numel() for w in load_causal_lm("model").model.layers.parameters() if w.ndim == 2)
    width = 40 + 24 - 1  # the last token is not read
    tokens, answers = 64 * width, 64 * 24
    attention = 14 * config.num_hidden_layers * config.hidden_size * 64 * width * width  # 4 forward, 10 backward
    head = 6 * config.vocab_size * config.hidden_size * answers
    assert phase(stage, "update")["flops"] == pytest.approx(3 * (2 * (6 * body * tokens + attention) + head), rel=0.02)
    judge = 4 * (2 * body * tokens + attention * 4 / 14) + head * 2 / 3
    assert phase(stage, "judge")["flops"] == pytest.approx(judge, rel=0.02)


@on_a_cpu
def test_passes_of_small_models_are_measured(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is no matrix product, in the threads that the stage will have. 64 episodes, 16 rows at a time."""
    threads, backbone = set(), type(load_causal_lm("model").model)
    plain = backbone.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.add(torch.get_num_threads())
        time.sleep(0.05)
        return plain(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", slow)
    monkeypatch.setattr(duration, "MAX_ROUNDS", 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "DEFAULT_THREADS", 2)
    before = torch.get_num_threads()
    stage = json.loads(plan("ppo.yaml", "ppo.num_ppo_epochs=2", "--json").stdout)["stages"]["ppo"]
    torch.set_num_threads(before)
    assert stage["run"] and set(stage["step_seconds"]) == {"rollout", "judge", "update"} and threads == {1}
    passes = 64 / 16 * 3.5  # of four models, two of which have a head
    assert passes * 0.05 < stage["step_seconds"]["judge"] < 5 * passes * 0.05
    assert 2 * stage["step_seconds"]["judge"] < stage["step_seconds"]["update"] * 3
    assert stage["share"] < 0.95  # it slept


def test_time_is_a_lower_bound_for_large_models_and_other_machines(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_measured(*more: str) -> bool:
        return bool(json.loads(plan("sft.yaml", *more, "--json").stdout)["stages"]["sft"]["run"])

    assert not is_measured(*GPU, "--flops", "4e14")
    monkeypatch.setattr(devices, "SMALL_MODEL_PARAMETERS", 100)
    assert not is_measured() and ": at least " in plan("sft.yaml").stdout


@on_a_cpu
def test_the_time_of_a_deep_model_follows_from_shallow_ones(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: Any, *_: Any, **__: Any) -> duration.PassTimes:
        layers = model.config.num_hidden_layers
        return duration.PassTimes(2 + 3 * layers, 1 + layers, layers / 2, 4 + 2 * layers, 1)

    monkeypatch.setattr(duration, "measure_passes", measure)
    monkeypatch.setattr(duration, "SHALLOW_LAYERS", (0, 1))
    monkeypatch.setattr(duration, "MAX_SHALLOW_TOKENS", 10**9)
    times = []
    for small in (10**9, 100):
        monkeypatch.setattr(devices, "SMALL_MODEL_PARAMETERS", small)
        stages = json.loads(plan(".", "--json").stdout)["stages"].values()
        times.append({stage["stage"]: stage["step_seconds"] for stage in stages})
        assert all(stage["run"] for stage in stages)
    for stage, seconds in times[0].items():
        assert times[1][stage] == pytest.approx(seconds), stage


def test_held_out_rows_are_counted_once_a_stage(three: Path) -> None:
    """SFT reads them after each epoch, the reward stage twice, with five probes of each pair at the end."""

    def evaluate(stage: str, epochs: int) -> float:
        steps = f"{stage}.max_steps=null", f"{stage}.num_train_epochs={epochs}"
        rows = "rows.jsonl" if stage == "sft" else "pairs.jsonl"
        return float(phase(planned(f"{stage}.yaml", *steps, f"data.eval={rows}")[stage], "evaluate")["flops"])

    assert evaluate("sft", 6) == pytest.approx(3 * evaluate("sft", 2))
    epochs = "sft.max_steps=null", "sft.num_train_epochs=2", "sft.per_device_train_batch_size=1"
    held, split = "data.eval=rows.jsonl", ("data.eval_fraction=0.25",)
    read = [phase(planned("sft.yaml", *epochs, *each)["sft"], "evaluate")["flops"] for each in ((held,), split)]
    assert read[1] / read[0] == pytest.approx(0.25, rel=0.1)
    assert phase(planned("sft.yaml", *epochs, held, "--nproc", "2")["sft"], "evaluate")["flops"] == read[0] / 2
    assert evaluate("reward", 2) / evaluate("reward", 1) == pytest.approx((2 * 2 + 5) / (2 + 5))
    reward = planned("reward.yaml", "reward.normalize=sft", "reward.normalize_samples=64")["reward"]
    assert phase(reward, "normalize")["flops"] > 0 and "normalize" in reward["once_seconds"]
    assert reward["seconds"] == pytest.approx(
        reward["steps"] * sum(reward["step_seconds"].values()) + sum(reward["once_seconds"].values())
    )


def test_measured_rows_have_the_average_length(three: Path) -> None:
    assert Lengths(20, 80, mean=50).average == Lengths(10, 40) and Lengths(20, 80).average == Lengths(20, 80)
    assert Lengths(20, 80, prompt_mean=5).average == Lengths(5, 80)  # a response may reach its limit
    assert Lengths(20, 80, prompt_mean=5, response_mean=31.4).average == Lengths(5, 31)
    (_, row), *_ = read_jsonl(Path("rows.jsonl"))
    append_jsonl(Path("rows.jsonl"), {**row, "completion": 3 * row["completion"]})
    chain, config = ModelResolver([], Options(), None), load("sft", Path("sft.yaml"))
    start = chain.start(config, "model.path")
    lengths = chain.data_size(config, start).lengths
    texts = [row["prompt"] + row["completion"] for _, row in read_jsonl(Path("rows.jsonl"))]
    mean = sum(len(start.tokenizer(text)["input_ids"]) for text in texts) / len(texts)
    assert lengths.mean == pytest.approx(mean, abs=1.01) and lengths.mean < lengths.row  # and the end token


@pytest.mark.parametrize(("share", "printed"), [(0.95, False), (0.25, True)])
def test_other_processes_are_reported(
    share: float, printed: bool, capsys: pytest.CaptureFixture[str], three: Path
) -> None:
    times = {"step_seconds": {"update": 10}, "seconds": 40, "share": share, "run": True, "is_bound": False}
    show(plans.parsed({**ppo(), "steps": 4, **times}), Target.of(None, 1))
    out = capsys.readouterr().out
    assert "4 x 10 s: about 40 s" in out and ("25% of the processor now; alone about 10 s" in out) == printed
