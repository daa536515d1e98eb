"""The watchdog's signals by worked numbers; its actions, its log and its memory through the real `rlhf ppo`."""

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from ppo_folder import PPO, lines, ppo, rlhf, untimed, write
from pydantic import ValidationError

from rlhf_cli.config.ppo_algorithm import SIGNAL_MESSAGES, SIGNALS, WatchdogSettings
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.monitor import EXCEEDS, Alert, Watchdog
from rlhf_cli.ppo.scores import RunningMeanStd, ScoreResult

ROWS = 64


def told(
    *,
    length: float = 10,
    kl: float = 0.0,
    ended: float = 1.0,
    repeated: float = 0.0,
    judge: float = 0.0,
    apart: float = 1.0,
    spread: float = 0.0,
    rows: int = ROWS,
) -> Experience:
    """An update of `rows` responses with these means. Half of the judge's scores lie `spread` above, half below."""
    longer = round((length % 1) * rows)
    lengths = [int(length) + (row < longer) for row in range(rows)]
    responses = [list(range(3, 3 + size)) for size in lengths]
    for row in range(round(repeated * rows)):
        responses[row] = [5] * (lengths[row] - 1) + [5]
    for row in range(rows):
        responses[row][-1] = 2 if row < round(ended * rows) else 9
    rollout = Rollout.from_lists([[7]] * rows, responses, stop_token_id=2)
    mask = rollout.response_mask
    zeros = torch.zeros(mask.shape)
    signs = torch.tensor([1.0, -1.0] * (rows // 2))
    opinions = EnsembleScores(signs * 0, {"one": torch.full((rows,), apart), "other": torch.full((rows,), -apart)})
    scores = judge + spread * signs
    scored = ScoreResult({"gold": scores, "reward": scores}, {"vote": opinions}, scores, RunningMeanStd(), scores)
    numbers = dict.fromkeys(("values", "kl", "rewards", "advantages", "returns"), zeros)
    logprobs = torch.where(mask, kl, 0.0)
    return Experience(rollout, (), False, scored, 0.05, logprobs=logprobs, ref_logprobs=zeros, **numbers)


def watchdog(judges=("gold",), *, response_length=20, stop_token="eos", **keys) -> Watchdog:
    ours = PPOSettings(
        total_episodes=64, response_length=response_length, stop_token=stop_token, watchdog={"window": 2, **keys}
    )
    return Watchdog(ours, judges)


def fired(dog: Watchdog, *updates: dict) -> list[tuple[int, str]]:
    """(step, signal) of all that fires over these updates."""
    return [
        (firing.step, firing.signal)
        for step, update in enumerate(updates, 1)
        for firing in dog.check(step, told(**update))
    ]


# Signal -> the first update, one at its limit, and one just beyond it. Windows are of two alike updates.
AT_THE_LIMIT = {
    "length": ({"length": 10}, {"length": 20}, {"length": 20.5}),
    "kl": ({"kl": 0.0}, {"kl": 0.5}, {"kl": 0.51}),
    "eos": ({"ended": 0.75}, {"ended": 0.5625}, {"ended": 0.5}),
    "repetition": ({"repeated": 0.0}, {"repeated": 0.109375}, {"repeated": 0.25}),
    "disagreement": ({"apart": 1.0}, {"apart": 2.0}, {"apart": 2.01}),
}


@pytest.mark.parametrize("signal", AT_THE_LIMIT)
def test_a_signal_fires_beyond_its_limit_and_not_at_it(signal):
    """eos: 64 rows, 0.1875 less is within 0.2, 0.25 less is not, and neither is 4 standard errors: with noise apart."""
    first, at, beyond = AT_THE_LIMIT[signal]
    rows = {"rows": 1024}
    assert fired(watchdog(), *[first | rows] * 2, *[at | rows] * 4) == []
    assert fired(watchdog(), *[first | rows] * 2, *[beyond | rows] * 2) == [(4, signal)]


def test_responses_that_become_half_as_long_fire_too():
    assert fired(watchdog(), *[{"length": 12}] * 2, *[{"length": 6}] * 4) == []
    assert fired(watchdog(), *[{"length": 12}] * 2, *[{"length": 5}] * 2) == [(4, "length")]


def test_few_responses_do_not_fire_by_noise():
    """Of 8 responses 8 end, of the next 16 twelve: 0.25 fewer, with a standard error of 0.112, which is 2.2 of it."""
    few, many = {"rows": 8}, {"rows": 128}
    assert fired(watchdog(), *[{"ended": 1.0} | few] * 2, *[{"ended": 0.75} | few] * 2) == []
    assert fired(watchdog(), *[{"ended": 1.0} | many] * 2, *[{"ended": 0.75} | many] * 2) == [(4, "eos")]


def test_a_held_out_judge_fires_by_standard_errors_below_its_best():
    """Two windows of 128 scores, each +-1 around its mean: the difference's standard error is sqrt(2 / 127)."""
    one = math.sqrt(2 / 127)
    up = [{"judge": 0.0, "spread": 1.0}, *[{"judge": 2.0, "spread": 1.0}] * 2]
    for fall, expected in ((3.99 * one, []), (4.01 * one, [(5, "judge")])):
        assert fired(watchdog(), *up, *[{"judge": 2.0 - fall, "spread": 1.0}] * 2) == expected
    assert fired(watchdog(judge=3.0), *up, *[{"judge": 2.0 - 3.5 * one, "spread": 1.0}] * 2) == [(5, "judge")]
    assert fired(watchdog(judges=()), *up, *[{"judge": -9.0, "spread": 1.0}] * 4) == []


def test_a_judge_that_falls_from_the_first_update_on_is_seen():
    steps = [{"judge": 1.0 - step / 2, "spread": 0.1} for step in range(4)]
    assert fired(watchdog(), *steps)[0] == (2, "judge")


def test_a_signal_that_lasts_fires_once_a_window():
    found = fired(watchdog(window=3), {"kl": 0.0}, *[{"kl": 2.0}] * 8)
    assert found == [(3, "kl"), (6, "kl"), (9, "kl")]


def test_a_firing_tells_its_reading_what_it_is_held_against_and_how_often():
    dog = watchdog(action="stop", actions={"length": "warn"})
    dog.check(1, told(length=10))
    (firing,) = dog.check(2, told(length=33.5))
    assert firing == Alert(2, "length", None, 21.75, 10.0, 2.0, "warn", 1)
    said = "step 2: the mean response length is 21.75 tokens, the SFT policy's 10; limit: a factor of 2"
    assert firing.text == said
    found = [firing for update in (told(length=40, kl=2.0),) * 2 for firing in dog.check(3, update)]
    assert [(one.signal, one.action, one.times) for one in found] == [("kl", "stop", 1), ("length", "warn", 2)]
    kinds = {one.signal: one.text for one in _all_at_once()}
    assert kinds["judge"] == (
        "step 3: the mean of the held-out judge `gold` is -0.5, its best was 0; limit: 4 standard errors"
    )
    assert kinds["eos"] == (
        "step 3: 50.0% of the responses have a stop token, of the SFT policy's 100.0%; limit: 20.0% less"
    )
    assert kinds.keys() == set(SIGNALS) == EXCEEDS.keys() == SIGNAL_MESSAGES.keys()


def _all_at_once() -> list[Alert]:
    dog = watchdog()
    bad = {"length": 30, "kl": 2.0, "ended": 0.0, "repeated": 1.0, "judge": -1.0, "apart": 5.0}
    return [firing for step in range(1, 5) for firing in dog.check(step, told(**({} if step < 3 else bad)))]


@pytest.mark.parametrize("signal", SIGNALS)
def test_null_is_not_watched(signal):
    dog = watchdog(**{signal: None})
    bad = {"length": 30, "kl": 2.0, "ended": 0.0, "repeated": 1.0, "judge": -1.0, "apart": 5.0}
    found = {name for _, name in fired(dog, *[{}] * 2, *[bad] * 2)}
    assert found == set(SIGNALS) - {signal}


def test_what_is_blind_by_the_settings():
    bad = {"length": 30, "ended": 0.0}
    assert fired(watchdog(stop_token="none"), *[{}] * 2, *[bad] * 2) == [(4, "length")]
    assert fired(watchdog(response_length={"min": 5, "max": 20}), *[{}] * 2, *[bad] * 2) == []
    off = Watchdog(PPOSettings(total_episodes=64, watchdog=None), ["gold"])
    assert fired(off, *[{}] * 5, *[{**bad, "kl": 2.0, "judge": -1.0}] * 5) == [] and off.state_dict() == {}


def test_its_memory_goes_through_json():
    """Looked at in one go, or with a new watchdog from the state after each update: the same firings."""
    updates = [{"judge": step / 9, "spread": 1.0, "kl": step / 5, "length": 10 + step} for step in range(9)]
    updates += [{"judge": -step / 3, "spread": 1.0, "kl": 1.0, "length": 30 - step} for step in range(9)]
    whole, found, state = fired(watchdog(), *updates), [], {}
    for step, update in enumerate(updates, 1):
        dog = watchdog()
        dog.load_state_dict(json.loads(json.dumps(state)))
        found += [(firing.step, firing.signal) for firing in dog.check(step, told(**update))]
        state = dog.state_dict()
    assert found == whole and len(whole) > 5


def test_moments_of_portions_are_those_of_the_whole():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3 + 100
    parts = RunningMeanStd.of(values[:7]) + RunningMeanStd.of(values[7:8]) + RunningMeanStd.of(values[8:])
    wide = values.double().numpy()
    assert (parts.count, parts.mean) == (50, pytest.approx(wide.mean(), rel=1e-13))
    assert parts.standard_error == pytest.approx(np.std(wide, ddof=1) / math.sqrt(50), rel=1e-12)
    assert RunningMeanStd.of(values[:1]).standard_error == math.inf


def test_repetition_is_the_share_of_runs_of_three_tokens_that_stood_before():
    """5 5 5 5 2: runs 555 555 552, one of three repeated. 3 4 5 3 4 5 2: 345 453 534 345 452, one of five."""
    rows = Rollout.from_lists([[7]] * 4, [[5, 5, 5, 5, 2], [3, 4, 5, 3, 4, 5, 2], [4, 2], [3, 4, 5, 6, 2]])
    assert torch.allclose(rows.repetition, torch.tensor([1 / 3, 1 / 5, 0.0, 0.0]))


# Settings


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"watchdog": {"actions": {"kl": "stop"}, "kl": None}}, "actions.kl has no effect: watchdog.kl is null"),
        ({"watchdog": {"kl_factor": 2.0}}, "kl_factor has no effect: no action is raise_kl_coef"),
        ({"watchdog": {"action": "raise_kl_coef"}, "kl_coef": 0.0}, "raise_kl_coef multiplies kl_coef, which is 0"),
        ({"watchdog": {"actions": {"eos": "raise_kl_coef"}}, "kl_coef": 0.0}, "which is 0"),
    ],
)
def test_settings_without_effect_are_refused(keys, said):
    with pytest.raises(ValidationError) as caught:
        PPOSettings(total_episodes=64, **keys)
    (error,) = caught.value.errors()
    assert error["type"] == "C17" and said in error["msg"]


def test_a_factor_goes_with_one_signal_that_raises():
    keys = {"actions": {"kl": "raise_kl_coef"}, "kl_factor": 2.0}
    assert PPOSettings(total_episodes=64, watchdog=keys).watchdog == WatchdogSettings(**keys)


def test_every_signal_is_a_key():
    limits = set(WatchdogSettings.model_fields) - {"action", "actions", "window", "kl_factor"}
    assert limits == set(SIGNALS) and {field.name for field in fields(Alert)} > {"signal", "reading", "limit"}


# Through `rlhf ppo`: a planted reward that pays for a keyword, and a judge that likes it three times at most.

HACK = """
def points(prompts, responses):
    return [float(response.count("e")) for response in responses]


def gold(prompts, responses):
    counts = [response.count("e") for response in responses]
    return [min(count, 3) - max(0, count - 3) / 2 for count in counts]
"""
SETTINGS = {
    "total_episodes": 32 * 30, "num_samples_per_prompt": 2, "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1, "kl_coef": 1e-9, "response_length": 12, "missing_eos_penalty": None,
    "temperature": 1.0, "learning_rate": 1.5e-3, "lr_scheduler_type": "constant", "num_sample_generations": 0,
}  # fmt: skip


def hackable(folder: Path, **watchdog: object) -> None:
    (folder / "hack.py").write_text(HACK)
    rewards = {"points": {"function": "hack:points"}, "gold": {"function": "hack:gold", "weight": 0}}
    output = {"save_steps": 5, "snapshots": 0}
    write(folder, "ppo", {**PPO, "rewards": rewards, "output": output, "ppo": SETTINGS | {"watchdog": watchdog}})


@pytest.mark.training
def test_a_planted_hack_is_stopped_before_the_judge_falls_below_sft(run_folder):
    hackable(run_folder, actions={"judge": "stop"}, kl=None, repetition=None)
    result = ppo(run_folder)
    assert result.exit_code == 1, result.output
    metrics = lines(run_folder / "ppo/metrics.jsonl")
    gold = [row["objective/score/gold"] for row in metrics]
    points = [row["objective/score/points"] for row in metrics]
    assert metrics[-1]["step"] < 30 and points[-1] > 2 * points[0]
    means = [sum(gold[step - 3 : step]) / 3 for step in range(3, len(gold) + 1)]
    assert means[-1] > gold[0], gold
    (firing,) = lines(run_folder / "ppo/watchdog.jsonl")
    assert firing["step"] == metrics[-1]["step"] and (firing["signal"], firing["source"]) == ("judge", "gold")
    assert firing["reading"] == pytest.approx(means[-1]) and firing["action"] == "stop"
    assert firing["reference"] == pytest.approx(max(means))
    assert f"error[R13]: {run_folder}/ppo.yaml:" in result.stderr and "the held-out judge `gold` is" in result.stderr
    made = json.loads((run_folder / "ppo/manifest.json").read_text())
    assert made["model_is"] == "the best step" and made["best"]["metric"] == "objective/score/gold"
    assert made["best"]["value"] > gold[0] and made["step"] == made["best"]["step"] < firing["step"]
    assert "held-out judge" in made["stopped"]
    again = ppo(run_folder)
    assert again.exit_code == 0 and "finished already" in again.stderr


@pytest.mark.training
def test_without_the_watchdog_the_same_run_ends_below_sft(run_folder):
    hackable(run_folder)
    config = run_folder / "ppo.yaml"
    config.write_text(config.read_text().replace("watchdog: {}", "watchdog: null"))
    assert ppo(run_folder).exit_code == 0
    gold = [row["objective/score/gold"] for row in lines(run_folder / "ppo/metrics.jsonl")]
    assert len(gold) == 30 and sum(gold[-5:]) / 5 < gold[0] - 1
    assert not (run_folder / "ppo/watchdog.jsonl").exists()


@pytest.mark.training
def test_a_warning_is_said_once_a_signal_and_logged_each_time(run_folder):
    hackable(run_folder, kl=0.2, judge=None)
    result = ppo(run_folder)
    assert result.exit_code == 0, result.output
    found = lines(run_folder / "ppo/watchdog.jsonl")
    by_signal = {name: [row for row in found if row["signal"] == name] for name in {row["signal"] for row in found}}
    assert {"kl", "repetition"} <= by_signal.keys() and len(by_signal["kl"]) > 2
    for name, rows in by_signal.items():
        assert [row["times"] for row in rows] == list(range(1, len(rows) + 1)), name
    assert result.stderr.count("warning[R13]") == len(by_signal)
    assert f"warning[R13]: step {by_signal['kl'][0]['step']}: KL to the SFT policy is" in result.stderr
    assert all(row["kl_coef"] == 1e-9 for row in found)


@pytest.mark.training
def test_raise_kl_coef_is_in_force_from_the_next_update_on_and_survives_a_kill(run_folder, tmp_path_factory):
    """Two updates after a state the process ends; the run that goes on is the straight one, watchdog.jsonl too."""
    import shutil

    from rlhf_cli.stages.ppo import PPORunner

    hackable(run_folder, kl=0.1, judge=None, repetition=None, actions={"kl": "raise_kl_coef"}, kl_factor=4.0)
    straight = tmp_path_factory.mktemp("straight")
    shutil.copytree(run_folder, straight, dirs_exist_ok=True)
    less = ("-s", f"ppo.total_episodes={32 * 24}", "-s", "output.save_steps=7")
    result = ppo(straight, *less)
    assert result.exit_code == 0, result.output
    metrics, found = lines(straight / "ppo/metrics.jsonl"), lines(straight / "ppo/watchdog.jsonl")
    expected = [1e-9 * 4.0 ** sum(firing["step"] < row["step"] for firing in found) for row in metrics]
    assert [row["objective/kl_coef"] for row in metrics] == pytest.approx(expected) and len(found) > 2
    assert result.stderr.count("warning[R13]") == len(found) and "; kl_coef is 4e-09 from here on" in result.stderr

    died_at = found[1]["step"] + 1
    plain = PPORunner._update

    def dies(self):
        if self.trainer.updates == died_at:
            raise SystemExit(9)
        return plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPORunner, "_update", dies)
        assert ppo(run_folder, *less).exit_code == 9
    assert ppo(run_folder, *less).exit_code == 0
    for name in ("watchdog.jsonl", "model/model.safetensors", "value/model.safetensors"):
        assert (run_folder / "ppo" / name).read_bytes() == (straight / "ppo" / name).read_bytes(), name
    assert untimed(run_folder / "ppo/metrics.jsonl") == untimed(straight / "ppo/metrics.jsonl")


@pytest.mark.parametrize(
    ("rewards", "keys", "said"),
    [
        ({"a": {"builtin": "length", "parameters": {"most": 3}, "weight": 0}}, {}, "all rewards have weight 0"),
        (None, {"actions": {"judge": "stop"}}, "ppo.watchdog.actions.judge has no effect without a source of weight 0"),
        (None, {"judge": 3.0}, "ppo.watchdog.judge has no effect without a source of weight 0"),
        (None, {"disagreement": 3.0}, "ppo.watchdog.disagreement has no effect without an ensemble"),
        (
            {"reward": {}, "a": {"builtin": "length", "parameters": {"most": 3}, "weight": 0, "clip": 1.0}},
            {},
            "clip has no effect on a source of weight 0",
        ),
    ],
)
def test_what_the_watchdog_lacks_is_said_before_the_run(run_folder, rewards, keys, said):
    sources = {"rewards": rewards} if rewards else {}
    write(run_folder, "ppo", {**PPO, **sources, "ppo": {**PPO["ppo"], "watchdog": keys}})
    result = rlhf("check", run_folder / "ppo.yaml")
    assert result.exit_code == 2 and "error[C17]" in result.output and said in result.output, result.output
