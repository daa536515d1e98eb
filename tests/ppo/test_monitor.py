"""The watchdog's signals by worked numbers; its actions, log and state through the real `rlhf ppo`."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from ppo_folder import PPO, lines, manifest, must_succeed, ppo, untimed, write

from rlhf_cli.config.ppo import SIGNAL_MESSAGES, SIGNALS, PPOSettings
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.monitor import EXCEEDS, Alert, Watchdog
from rlhf_cli.ppo.scores import RunningMeanStd, ScoreResult
from rlhf_cli.stages.ppo.runner import PPORunner


def update(
    *,
    length: float = 10,
    kl: float = 0.0,
    ended: float = 1.0,
    repeated: float = 0.0,
    judge: float = 0.0,
    deviation: float = 1.0,
    spread: float = 0.0,
    rows: int = 64,
) -> Experience:
    """An update of `rows` responses with these means. Half of the judge's scores are `spread` above, half below."""
    longer = round((length % 1) * rows)
    responses = []
    for row in range(rows):
        size = int(length) + (row < longer)
        tokens = [5] * size if row < round(repeated * rows) else list(range(3, 3 + size))
        responses.append([*tokens[:-1], 2 if row < round(ended * rows) else 9])
    rollout = Rollout.from_lists([[7]] * rows, responses, stop_token_id=2)
    signs = torch.tensor(([1.0, -1.0] * rows)[:rows])
    members = {"one": torch.full((rows,), deviation), "other": torch.full((rows,), -deviation)}
    scores = judge + spread * signs
    ensembles = {"vote": EnsembleScores(signs * 0, members)}
    scored = ScoreResult({"gold": scores, "reward": scores}, ensembles, scores, RunningMeanStd(), scores)
    logprobs = torch.full(rollout.response_mask.shape, kl)
    return replace(tiny.experience(rollout, logprobs=logprobs), score_result=scored)


def watchdog(judges=("gold",), *, response_length=20, stop_token="eos", **keys) -> Watchdog:
    options = {"response_length": response_length, "stop_token": stop_token}
    return Watchdog(PPOSettings(total_episodes=64, watchdog={"window": 2, **keys}, **options), judges)


def alerts(dog: Watchdog, *updates: dict) -> list[Alert]:
    return [alert for step, changes in enumerate(updates, 1) for alert in dog.check(step, update(**changes))]


def fired(dog: Watchdog, *updates: dict) -> list[tuple[int, str]]:
    """(step, signal) of all alerts over these updates."""
    return [(alert.step, alert.signal) for alert in alerts(dog, *updates)]


# Signal -> the first update, one at its limit, and one just beyond it. Windows are of two equal updates.
AT_THE_LIMIT = {
    "length": ({"length": 10}, {"length": 20}, {"length": 20.5}),
    "kl": ({"kl": 0.0}, {"kl": 0.5}, {"kl": 0.51}),
    "eos": ({"ended": 0.75}, {"ended": 0.5625}, {"ended": 0.5}),
    "repetition": ({"repeated": 0.0}, {"repeated": 0.109375}, {"repeated": 0.25}),
    "disagreement": ({"deviation": 1.0}, {"deviation": 2.0}, {"deviation": 2.01}),
}


@pytest.mark.full
@pytest.mark.parametrize("signal", AT_THE_LIMIT)
def test_a_signal_fires_beyond_its_limit_and_not_at_it(signal):
    """eos: 0.1875 less is within 0.2, 0.25 less is not. With 1024 rows, noise plays no part."""
    first, at, beyond = AT_THE_LIMIT[signal]
    rows = {"rows": 1024}
    assert fired(watchdog(), *[first | rows] * 2, *[at | rows] * 4) == []
    assert fired(watchdog(), *[first | rows] * 2, *[beyond | rows] * 2) == [(4, signal)]


@pytest.mark.parametrize(
    "first,then,expected",
    [
        ({"length": 12}, {"length": 6}, []),
        ({"length": 12}, {"length": 5}, [(4, "length")]),  # half as long, too
        # 8 of 8 responses end, of the next 16 twelve: 0.25 fewer, with a standard error of 0.112, which is 2.2 of it.
        ({"ended": 1.0, "rows": 8}, {"ended": 0.75, "rows": 8}, []),
        ({"ended": 1.0, "rows": 128}, {"ended": 0.75, "rows": 128}, [(4, "eos")]),
    ],
)
def test_shorter_responses_fire_and_noise_of_few_responses_does_not(first, then, expected):
    assert fired(watchdog(), *[first] * 2, *[then] * 2) == expected


def test_a_held_out_judge_fires_by_standard_errors_below_its_best():
    """Two windows of 128 scores, each +-1 around its mean: the difference's standard error is sqrt(2 / 127)."""
    one = math.sqrt(2 / 127)
    up = [{"judge": 0.0, "spread": 1.0}, *[{"judge": 2.0, "spread": 1.0}] * 2]
    for fall, expected in ((3.99 * one, []), (4.01 * one, [(5, "judge")])):
        assert fired(watchdog(), *up, *[{"judge": 2.0 - fall, "spread": 1.0}] * 2) == expected
    assert fired(watchdog(judge=3.0), *up, *[{"judge": 2.0 - 3.5 * one, "spread": 1.0}] * 2) == [(5, "judge")]
    assert fired(watchdog(judges=()), *up, *[{"judge": -9.0, "spread": 1.0}] * 4) == []
    few = {"judge": 3.0, "rows": 1}, {"judge": 2.0, "spread": 1.0}  # one score has no standard error
    assert fired(watchdog(window=1), *few, *[{"judge": -2.0, "spread": 1.0}] * 2) == [(3, "judge"), (4, "judge")]
    assert fired(watchdog(), *({"judge": 1.0 - step / 2, "spread": 0.1} for step in range(4)))[0] == (2, "judge")


def test_a_signal_that_lasts_fires_once_a_window():
    assert fired(watchdog(window=3), {"kl": 0.0}, *[{"kl": 2.0}] * 8) == [(3, "kl"), (6, "kl"), (9, "kl")]


BAD = {"length": 30, "kl": 2.0, "ended": 0.0, "repeated": 1.0, "judge": -1.0, "deviation": 5.0}


def test_an_alert_has_its_reading_its_reference_and_their_number():
    dog = watchdog(action="stop", actions={"length": "warn"})
    (alert,) = alerts(dog, {"length": 10}, {"length": 33.5})
    assert alert == Alert(2, "length", None, 21.75, 10.0, 2.0, "warn", 1)
    assert (
        alert.text == "step 2: the mean response length is 21.75 tokens, the initial policy's 10; limit: a factor of 2"
    )
    later = alerts(dog, *[{"length": 40, "kl": 2.0}] * 2)
    assert [(one.signal, one.action, one.times) for one in later] == [("kl", "stop", 1), ("length", "warn", 2)]
    texts = {alert.signal: alert.text for alert in alerts(watchdog(), {}, {}, BAD, BAD)}
    judge = "step 3: the mean of the held-out judge `gold` is -0.5, its best was 0; limit: 4 standard errors"
    eos = "step 3: 50.0% of the responses have a stop token, of the initial policy's 100.0%; limit: 20.0% less"
    assert (texts["judge"], texts["eos"]) == (judge, eos)
    assert texts.keys() == set(SIGNALS) == EXCEEDS.keys() == SIGNAL_MESSAGES.keys()


@pytest.mark.parametrize("signal", SIGNALS)
def test_null_turns_a_signal_off(signal):
    assert {name for _, name in fired(watchdog(**{signal: None}), {}, {}, BAD, BAD)} == set(SIGNALS) - {signal}


def test_signals_that_the_settings_make_unavailable():
    bad = {"length": 30, "ended": 0.0}
    assert fired(watchdog(stop_token="none"), *[{}] * 2, *[bad] * 2) == [(4, "length")]
    assert fired(watchdog(response_length={"min": 5, "max": 20}), *[{}] * 2, *[bad] * 2) == []
    off = Watchdog(PPOSettings(total_episodes=64, watchdog=None), ["gold"])
    assert fired(off, *[{}] * 5, *[BAD] * 5) == [] and off.state_dict()["watchdog"] == {}


def test_its_state_survives_json():
    """With a new watchdog from the state after each update: the same alerts."""
    updates = [{"judge": step / 9, "spread": 1.0, "kl": step / 5, "length": 10 + step} for step in range(9)]
    updates += [{"judge": -step / 3, "spread": 1.0, "kl": 1.0, "length": 30 - step} for step in range(9)]
    straight, found, state = fired(watchdog(), *updates), [], watchdog().state_dict()
    for step, changes in enumerate(updates, 1):
        dog = watchdog()
        dog.load_state_dict(json.loads(json.dumps(state)))
        found += [(alert.step, alert.signal) for alert in dog.check(step, update(**changes))]
        state = dog.state_dict()
    assert found == straight and len(straight) > 5


def test_repetition_is_the_share_of_repeated_3_grams():
    """5 5 5 5 2: 555 555 552, one of three repeated. 3 4 5 3 4 5 2: 345 453 534 345 452, one of five."""
    rows = Rollout.from_lists([[7]] * 4, [[5, 5, 5, 5, 2], [3, 4, 5, 3, 4, 5, 2], [4, 2], [3, 4, 5, 6, 2]])
    assert torch.allclose(rows.repetition, torch.tensor([1 / 3, 1 / 5, 0.0, 0.0]))


# Through `rlhf ppo`: a reward that pays for a letter, and a judge that likes it three times at most.

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


@pytest.mark.full
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
    made = manifest(run_folder)
    assert made["model_is"] == "the best step" and made["best"]["metric"] == "objective/score/gold"
    assert made["best"]["value"] > gold[0] and made["step"] == made["best"]["step"] < firing["step"]
    assert "held-out judge" in made["stopped"]
    must_succeed(ppo(run_folder), "finished already")


@pytest.mark.full
def test_an_alert_is_printed_once_per_signal_and_logged_each_time(run_folder):
    hackable(run_folder, kl=0.2, judge=None)
    result = must_succeed(ppo(run_folder))
    log = lines(run_folder / "ppo/watchdog.jsonl")
    by_signal = {name: [row for row in log if row["signal"] == name] for name in {row["signal"] for row in log}}
    assert {"kl", "repetition"} <= by_signal.keys() and len(by_signal["kl"]) > 2
    for name, rows in by_signal.items():
        assert [row["times"] for row in rows] == list(range(1, len(rows) + 1)), name
    assert result.stderr.count("warning[R13]") == len(by_signal)
    assert f"warning[R13]: step {by_signal['kl'][0]['step']}: KL to the SFT policy is" in result.stderr
    assert all(row["kl_coef"] == 1e-9 for row in log)


@pytest.mark.full
def test_raise_kl_coef_applies_from_the_next_update_and_survives_a_kill(run_folder, tmp_path_factory):
    """The process ends two updates after a checkpoint; the resumed run is the straight one, watchdog.jsonl too."""
    hackable(run_folder, kl=0.1, judge=None, repetition=None, actions={"kl": "raise_kl_coef"}, kl_factor=4.0)
    straight = tmp_path_factory.mktemp("straight")
    shutil.copytree(run_folder, straight, dirs_exist_ok=True)
    less = ("-s", f"ppo.total_episodes={32 * 12}", "-s", "output.save_steps=7")
    result = must_succeed(ppo(straight, *less))
    metrics, found = lines(straight / "ppo/metrics.jsonl"), lines(straight / "ppo/watchdog.jsonl")
    expected = [1e-9 * 4.0 ** sum(firing["step"] < row["step"] for firing in found) for row in metrics]
    assert [row["objective/kl_coef"] for row in metrics] == pytest.approx(expected) and len(found) > 2
    assert result.stderr.count("warning[R13]") == len(found) and "; kl_coef is 4e-09 from here on" in result.stderr

    died_at = found[1]["step"] + 1
    plain = PPORunner._update

    def dies(self, step):
        if step == died_at + 1:
            raise SystemExit(9)
        return plain(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPORunner, "_update", dies)
        assert ppo(run_folder, *less).exit_code == 9
    assert ppo(run_folder, *less).exit_code == 0
    for name in ("watchdog.jsonl", "model/model.safetensors", "value/model.safetensors"):
        assert (run_folder / "ppo" / name).read_bytes() == (straight / "ppo" / name).read_bytes(), name
    assert untimed(run_folder / "ppo/metrics.jsonl") == untimed(straight / "ppo/metrics.jsonl")
