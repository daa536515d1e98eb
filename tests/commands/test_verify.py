"""Trainer and float64 reference agree for every option; `rlhf verify` repeats a run's update to the last bit."""

import ast
import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
import yaml
from bad_inputs import replace
from ppo_folder import fails, lines, must_succeed, ppo, rlhf, settings

from rlhf_cli import jsonl
from rlhf_cli.commands import verify
from rlhf_cli.config.ppo import SCHEDULERS, PPOSettings
from rlhf_cli.models import forward, sharding
from rlhf_cli.ppo import losses
from rlhf_cli.ppo import trainer as trainer_module
from rlhf_cli.ppo.optimizer import WeightAverage
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.scores import RunningMeanStd
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward
from rlhf_cli.rewards.model import COMBINE, EnsembleReward, ModelReward
from tests.reference import comparison
from tests.reference.comparison import Quantity, compare_run, disagreements, only_rounding, relative_difference
from tests.reference.optimization import learning_rate

EXACT = 1e-9  # both sides are in float64; 1e-12 is usual, AdamW makes more of it where a gradient is near nothing
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "total_episodes": 20}
PTX = [([5, 6], [7, 3, 2]), ([4], [8, 8, 2]), ([9, 3, 4], [2])]


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [len(response.split()) / 3 + len(prompt) / 7 for prompt, response in zip(prompts, responses, strict=True)]


def every_other(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    scores = length(completions, completions)
    return [None if row % 2 else score + len(completion_ids[row]) for row, score in enumerate(scores)]


def trained(
    *, family: str = "", head: bool = False, both: bool = False, combine: str = "", steps: int = 1, **changes: Any
) -> PPOTrainer:
    """Return a trainer after some updates; `head`: a value head on the policy; `both`: a model and a function."""
    chosen = tiny.settings(**{**SIZES, **changes})
    like_ref = bool(chosen.num_shared_layers)  # else another: the KL is not 0
    sizes = {} if family or like_ref else {"num_hidden_layers": 1}  # two layers where it is about them
    causal, scored = (partial(make, family or "llama", **sizes) for make in (tiny.causal, tiny.scorer))
    policy, ref, scorer = causal(0 if like_ref else 3), causal(), scored()
    value = forward.ValueHead(policy) if head else scored(5) if chosen.needs_value_model else None
    stop = None if chosen.stop_token == "none" else chosen.stop_token_id or tiny.EOS
    sources: dict[str, Any] = {"model": ModelReward(scorer, 4)}
    if both:
        sources["words"] = FunctionReward("words", every_other, tiny.Words())
    if combine:
        members = {f"m{seed}": ModelReward(scored(seed), 4) for seed in (1, 6, 7)}
        sources["vote"] = EnsembleReward(members, combine, 0.3)
    trainer = PPOTrainer(
        policy, ref, value, sources, HFEngine(policy, stop, tiny.PAD, chosen.temperature), chosen,
        weights={"model": 0.7, "words": 1.3, "vote": 0.4}, clips={"model": 1.5, "vote": 2.0},
        ptx=PTX if chosen.ptx_coef else (), seed=4,
    )  # fmt: skip
    for step in range(steps):
        trainer.step(prompts(trainer, step))
    return trainer


def prompts(trainer: PPOTrainer, seed: int) -> Any:
    return tiny.prompts(trainer.settings.prompts_per_update, seed)


def compare_next_update(trainer: PPOTrainer, seed: int = 9) -> list[Quantity]:
    """Compare an update on responses of an engine whose log-probs are off; `seed` chooses the prompts."""
    rollout = trainer.generate(prompts(trainer, seed))
    noise = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(1)) / 3
    rollout = dataclasses.replace(rollout, logprobs=rollout.logprobs + noise)
    updates, stop = trainer.settings.num_updates(), trainer.engine.stop_token_id  # type: ignore[attr-defined]
    return comparison.compare_update(trainer, rollout, updates=updates, stop_token_id=stop)


def by_name(quantities: list[Quantity]) -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in quantities}


def apart(quantities: list[Quantity]) -> dict[str, float]:
    return disagreements(quantities, EXACT)


# Its chapters; comparison.py runs the trainer.
REFERENCE = sorted(set(Path(comparison.__file__).parent.glob("*.py")) - {Path(comparison.__file__)})

# The reference and the trainer agree for every option

CASES: dict[str, dict[str, Any]] = yaml.safe_load("""
as it comes: {}
first update: {steps: 0}
whitened rewards, advantages as they are: {whiten_rewards: true, advantage_norm: none, gamma: 0.9, lam: 0.7}
scores scaled: {use_score_scaling: true, steps: 2}
scores normed, clipped: {use_score_scaling: true, use_score_norm: true, score_clip: 0.8}
penalties: {missing_eos_penalty: 2.5, overlong_penalty: {tokens: 3, factor: 0.7}, response_length: 6}
lengths: {response_length: {min: 3, max: 9}, overlong_penalty: {tokens: 2, factor: 1.0}}
no stop token: {stop_token: none, response_length: 4}
two stop tokens: {stop_token_id: [5, 9], missing_eos_penalty: 2.5}
another stop token: {stop_token_id: 5, temperature: 1.3, missing_eos_penalty: null}
k2 in the reward: {kl_estimator: k2, kl_coef: 0.2}
k3 in the reward: {kl_estimator: k3, kl_coef: 0.2}
abs in the reward: {kl_estimator: abs, kl_coef: 0.2}
full in the reward: {kl_estimator: full, kl_coef: 0.2}
k2 in the loss: {kl_in: loss, kl_estimator: k2, kl_coef: 0.2}
k3 in the loss: {kl_in: loss, kl_estimator: k3, kl_coef: 0.2}
full in the loss: {kl_in: loss, kl_estimator: full, kl_coef: 0.2}
full in both: {kl_in: both, kl_estimator: full, kl_coef: 0.2, steps: 2}
full in both, advantages as they are: {kl_in: both, kl_estimator: full, kl_coef: 0.2, advantage_norm: none}
full in both, leave one out: {kl_in: both, kl_estimator: full, advantage: rloo, num_samples_per_prompt: 2}
a controlled coefficient: {adap_kl_ctrl: true, target: 3.0, horizon: 50, kl_coef: 0.2, steps: 2}
a controlled coefficient in the loss:
  {adap_kl_ctrl: true, target: 3.0, horizon: 50, kl_coef: 0.2, steps: 2, kl_in: loss, kl_estimator: k2}
clips: {cliprange: 0.05, cliprange_high: 0.3, cliprange_value: 0.05, num_ppo_epochs: 3}
weighted tokens: {rollout_correction: {mode: token_truncate, cap: 1.2}, cliprange: 0.05, entropy_coef: 0.1}
weighted responses: {rollout_correction: {mode: sequence_mask, cap: 1.2}, kl_in: loss, kl_estimator: k2}
dual clip: {dual_clip: 1.2, learning_rate: 0.05, ratio_threshold: null}
entropy: {entropy_coef: 0.3, vf_coef: 0.9}
no value loss: {vf_coef: 0.0, weight_decay: 0.1}
language model loss: {ptx_coef: 2.0, num_mini_batches: 2}
stopped early: {early_stopping: true, target_kl: 0.0001, num_ppo_epochs: 4, learning_rate: 0.03}
skipped minibatches: {ratio_threshold: 1.01, learning_rate: 0.05, num_mini_batches: 2, num_ppo_epochs: 3}
value rates: {value_learning_rate: 0.02, value_warmup_steps: 4, lr_scheduler_type: linear, warmup_steps: 2}
value alone: {value_only_updates: 2, ptx_coef: 1.0, weight_decay: 0.1, adap_kl_ctrl: true, horizon: 50}
value alone, and a schedule:
  {value_only_updates: 2, steps: 3, lr_scheduler_type: cosine, warmup_ratio: 0.3, adap_kl_ctrl: true}
value alone, on the policy: {value_only_updates: 2, head: true, vf_coef: 1.0}
a head on the policy: {head: true, vf_coef: 1.0}
shared layers: {num_shared_layers: 1}
shared layers and a head: {num_shared_layers: 1, head: true, vf_coef: 1.0}
samples of a prompt: {num_samples_per_prompt: 2, num_mini_batches: 4}
leave one out: {advantage: rloo, num_samples_per_prompt: 2, num_mini_batches: 2, entropy_coef: 0.1, ptx_coef: 1.0}
group relative: {advantage: grpo, num_samples_per_prompt: 4, kl_in: loss, kl_estimator: full}
group relative, as they are: {advantage: grpo, num_samples_per_prompt: 2, advantage_norm: none, num_shared_layers: 1}
averaged weights: {average: 0.8, steps: 2, num_mini_batches: 2}
adamw: {adam_beta1: 0.5, adam_beta2: 0.9, adam_epsilon: 0.001, weight_decay: 0.3, max_grad_norm: 0.05, steps: 2}
small micro-batches: {micro_batch_tokens: 10, gradient_checkpointing: true}
two sources: {both: true, use_score_scaling: true}
reasoning:
  {recipe: reasoning, num_mini_batches: 2, response_length: 8, learning_rate: 0.01,
   lr_scheduler_type: cosine_with_min_lr, warmup_ratio: 0.3}
""")
CASES |= {f"ensemble, {combine}": {"combine": combine, "num_ppo_epochs": 1} for combine in COMBINE}
CASES |= {family: {"family": family, "num_ppo_epochs": 1} for family in tiny.FAMILIES}
# Options that change no number of an update, except the number of rows and their forward passes.
NO_NUMBERS = {
    "total_episodes", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "micro_batch_tokens", "packing", "logits_at_a_time", "optim", "offload", "fsdp", "local_rollout_forward_batch_size",
    "num_sample_generations", "generate_ref_response", "gradient_checkpointing", "bf16",
    "fp16", "kl_stop", "max_logprob_gap", "push_to_hub_if_best", "recipe", "require_reward", "watchdog", "stop_token",
    "stop_token_id",
}  # fmt: skip


@cache
def result(case: str, seed: int = 9) -> list[Quantity]:
    return compare_next_update(trained(**CASES[case]), seed)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_reference_and_the_trainer_agree(case: str) -> None:
    quantities = result(case)
    assert not any(math.isnan(quantity.largest) for quantity in quantities)
    assert apart(quantities) == {}
    assert {quantity.name for quantity in quantities if quantity.error is None} == {"tokens/padded"}
    trained_models = ("policy",) if "advantage" in CASES[case] else ("value",)
    assert all(by_name(quantities)[f"{name} weights, change"].largest > 0 for name in trained_models)


@pytest.mark.full
def test_the_options_of_the_cases_take_effect() -> None:
    """A case whose limit is never reached would show nothing; one of ten updates reaches it, whatever is drawn."""

    def reached(case: str, name: str, low: float, high: float) -> bool:
        for seed in range(9, 19):
            quantities = result(case, seed)
            assert apart(quantities) == {}
            if low < by_name(quantities)[name].largest < high:
                return True
        return False

    assert reached("stopped early", "policy/epochs", 0, 4)
    assert reached("skipped minibatches", "policy/skipped_minibatches", 0, 6)
    assert reached("clips", "policy/clipfrac_avg", 0, 1) and reached("clips", "val/clipfrac_avg", 0, 1)
    assert by_name(result("value alone"))["policy weights, change"].largest == 0
    assert reached("adamw", "policy/grad_norm", 0.05, math.inf)
    for case in ("weighted tokens", "weighted responses"):
        assert reached(case, "rollout/correction_capped", 0, 1)
        assert reached(case, "rollout/logprob_gap", 0.1, math.inf)


@pytest.mark.full
@pytest.mark.parametrize("kind", get_args(SCHEDULERS))
def test_learning_rates_of_a_whole_run(kind: str) -> None:
    """Of policy and value at each of ten updates, with a warm-up each where the schedule takes one."""
    warm = {} if kind == "constant" else {"warmup_steps": 3, "value_warmup_steps": 0}
    for changes in ({}, warm):
        trainer = trained(steps=0, lr_scheduler_type=kind, value_learning_rate=0.03, total_episodes=40, **changes)
        start = comparison.copy_state(trainer, tiny.rollout(), updates=10, stop_token_id=tiny.EOS)
        for start.update in range(10):
            groups = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
            ours = {name: learning_rate(start, name) for name in ("policy", "value")}
            assert ours == pytest.approx({name: groups[name] for name in ours}, rel=1e-12, abs=1e-15)
            trainer.optimizer.step()
            trainer.scheduler.step()


def test_every_option_is_in_the_reference_and_in_a_case() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in REFERENCE)
    used = {key for case in CASES.values() for key in case} | {"lr_scheduler_type"}
    missing = [key for key in PPOSettings.model_fields if key not in NO_NUMBERS and not (key in text and key in used)]
    assert missing == []


def test_the_reference_shares_no_arithmetic_with_the_trainer() -> None:
    found = set()
    for node in [node for path in REFERENCE for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]:
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    shared = {name for name in found if name.startswith("rlhf_cli")}
    assert shared == {"rlhf_cli.data.sampling", "rlhf_cli.config.ppo"}
    assert not any(name.startswith(("torch.optim", "torch.nn.utils", "transformers")) for name in found)


# Planted errors: the first quantity that differs shows where to look


def at(place: Any, name: str, wrong: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace place.name with `wrong(place.name)`."""
    return lambda patch: patch.setattr(place, name, wrong(getattr(place, name)))


def keyed(purpose: str, change: Callable[..., tuple[int, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Draw for `purpose` with other keys."""

    def wrong(derive: Any) -> Any:
        return lambda seed, what, *keys: derive(seed, what, *(change(*keys) if what == purpose else keys))

    return at(trainer_module, "derive_seed", wrong)


def a_token_early(shape: Any) -> Any:
    def wrong(scores: Any, penalty: Any, mask: Any) -> Any:
        score = shape(scores, 0 * penalty, mask)
        return shape(scores, penalty, mask) - score + score.roll(-1, 1)

    return wrong


def a_smaller_lambda(rewards: Any, values: Any, mask: Any, gamma: float, lam: float) -> Any:
    return losses.gae(rewards, values, mask, gamma, lam * 0.999)


# error -> the first quantity that shows it, settings in which it does, how it is planted
ERRORS: dict[str, tuple[str, dict[str, Any], Callable[[pytest.MonkeyPatch], None]]] = {
    "lambda": ("advantages", {}, lambda patch: patch.setitem(losses.VALUE_ADVANTAGES, "gae", a_smaller_lambda)),
    "sign of the KL": ("kl", {}, lambda patch: patch.setitem(losses.KL_ESTIMATORS, "k1", lambda r: r)),
    "temperature left out": (
        "logprobs",
        {},
        at(losses, "token_logprobs", lambda logprobs: lambda logits, ids, _: logprobs(logits, ids, 1.0)),
    ),
    "score a token early": ("rewards", {}, at(losses, "compute_token_rewards", a_token_early)),
    "value of another token": (
        "values",
        {},
        at(forward, "response_values", lambda values: lambda *asked: values(*asked).roll(-1)),
    ),
    "no clipping of the ratio": (
        "loss/policy_avg, each step",
        {"cliprange": 0.05},
        at(losses, "policy_loss", lambda loss: lambda *x, **_: loss(*x, cliprange=0.99, cliprange_high=9.0)),
    ),
    "no clipping of the gradient": (
        "policy weights, change",
        {"max_grad_norm": 0.05, "num_ppo_epochs": 1},
        at(sharding, "clip_grad_norm", lambda clip: lambda weights, limit, all_reduce: clip(weights, 1e9, all_reduce)),
    ),
    "entropy as a cost": (
        "policy/grad_norm, each step",
        {"entropy_coef": 0.1, "num_ppo_epochs": 1},
        at(losses, "entropy", lambda entropy: lambda x: 2 * entropy(x).detach() - entropy(x)),
    ),
    "moments of this update alone": (
        "scores",
        {"use_score_scaling": True},
        at(RunningMeanStd, "__add__", lambda _: lambda self, scores: scores),
    ),
    "controller the wrong way": (
        "next kl_coef",
        {"adap_kl_ctrl": True},
        at(losses, "adapt_kl_coef", lambda adapt: lambda coef, kl, **rest: 2 * coef - adapt(coef, kl, **rest)),
    ),
    "average of the weights before": (
        "average weights, change",
        {"average": 0.8},
        at(WeightAverage, "update", lambda _: lambda self, update: None),
    ),
    "other minibatches": (
        "loss/policy_avg, each step",
        {"num_mini_batches": 2},
        keyed("minibatches", lambda update, epoch: (update, epoch, 1)),
    ),
    "noise of the next row": (
        "response tokens unexplained",
        {},
        keyed("sample", lambda update, row: (update, row + 1)),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, planted = ERRORS[error]
    trainer = trained(**changes)
    planted(monkeypatch)
    found = apart(compare_next_update(trainer))
    assert next(iter(found), None) == name
    assert max(found.values()) > 1e-4  # far from any tolerance


@pytest.mark.full
def test_a_change_of_a_frozen_model_and_a_scheduler_off_by_one_are_found() -> None:
    trained_ref, trained_reward = trained(), trained()
    trained_ref.ref.lm_head.weight = trained_ref.policy.lm_head.weight
    trained_reward.rewards["model"].model = trained_reward.value  # type: ignore[attr-defined]
    for trainer in (trained_ref, trained_reward):
        assert next(iter(apart(compare_next_update(trainer)))) == "frozen weights, change"
    trainer = trained(lr_scheduler_type="linear", warmup_steps=3)
    trainer.scheduler.step()
    assert {"lr", "policy weights, change"} <= apart(compare_next_update(trainer)).keys()


# Differences


def test_quantities_that_only_rounding_determines_are_not_compared() -> None:
    """All returns are equal: no variance to explain, and the sign of the advantages depends on the last bit."""
    same = {"gamma": 1.0, "lam": 1.0, "score_clip": 1e-3, "stop_token": "none", "head": True, "steps": 0}
    by_kl = {"kl_in": "loss", "kl_estimator": "k2", "kl_coef": 0.3, "vf_coef": 0.0}
    for changes, more in (by_kl, set()), ({"kl_coef": 0.0, "vf_coef": 0.0}, {"policy weights, change"}):
        trainer = trained(**same, **changes)
        trainer.rewards = {"words": FunctionReward("words", length, tiny.Words())}  # above score_clip, each of them
        found = by_name(compare_next_update(trainer))
        skipped = {name for name, quantity in found.items() if quantity.error is None}
        assert skipped >= {"val/explained_variance", "policy/clipfrac_avg", "policy/clipfrac_avg, each step", *more}
        assert ("policy weights, change" in skipped) is bool(more)
        assert disagreements(list(found.values())) == {}
    assert only_rounding({"returns": torch.tensor([1.0, 2.0]), "advantages": torch.tensor([1e-3, 0.0])}) == set()


@pytest.mark.parametrize(
    ("name", "values", "expected", "error"),
    [
        ("kl", [2.0, 1.0], [2.0, 1.5], 0.25),
        ("kl", [], [], 0.0),
        ("kl", [1.0], [1.0, 2.0], math.inf),
        ("kl", [math.nan], [1.0], math.inf),
        ("kl", [2e-9], [1e-9], 1e-6),  # values near 0 need not agree to a millionth of themselves
        ("policy weights, change", [2e-9], [1e-9], 1.0),  # but changes of weights must
        ("policy weights, change", [0.0], [0.0], 0.0),
        ("policy weights, change", [1e-12], [0.0], math.inf),
    ],
)
def test_an_error_is_relative_to_the_quantity(
    name: str, values: list[float], expected: list[float], error: float
) -> None:
    assert relative_difference(name, torch.tensor(values), torch.tensor(expected)) == pytest.approx(error)


# The command, on a run


@pytest.mark.parametrize(
    ("processes", "largest", "recorded", "agrees"),
    [
        (1, 1.0, 0.0, True),
        (1, 1.0, 1e-16, False),
        (2, 1.0, 9e-4, True),  # one process repeats what several did, and adds in another order
        (2, 1.0, 2e-3, False),
        (2, 50.0, 2e-3, True),
        (2, 1e-9, 9e-4, True),
    ],
)
def test_only_an_update_of_several_processes_may_differ_by_rounding(
    processes: int, largest: float, recorded: float, agrees: bool
) -> None:
    run = verify.PPORun(Path(), tiny.settings(), processes, lines={}, samples=())  # type: ignore[arg-type]
    compared = verify.Comparison(run, 1, [verify.Quantity("objective/kl", 1, largest, recorded)])
    assert compared.agrees is agrees


def verify_json(folder: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the report of a verified update, and the differences of its quantities by name."""
    result = must_succeed(rlhf("verify", folder, "--json", *(["--step", step] if step else [])))
    report = json.loads(result.stdout)
    return report, {quantity["name"]: quantity["recorded"] for quantity in report["quantities"]}


# first quantity that differs -> file, key and change of its values
CHANGED_VALUES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "objective/kl": ("metrics.jsonl", "objective/kl", lambda kl: math.nextafter(kl, math.inf)),
    "samples: response": ("samples.jsonl", "response", lambda text: text + " "),
    "samples: scores.short": ("samples.jsonl", "scores", lambda scores: scores | {"short": None}),
}


@pytest.mark.full
def test_verify_a_run(run_folder: Path) -> None:
    """Numbers, samples and weights of the run are repeated to the bit, and no file changes."""
    changes = ("output.save_steps=1", "output.keep=3", "rewards.reward={}", "rewards.short.function=judges:short")
    assert ppo(run_folder, *settings(*changes, "num_sample_generations=4")).exit_code == 0
    before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in run_folder.rglob("*")}
    for step in (1, 3, None):
        report, recorded = verify_json(run_folder, step)
        assert (report["step"], report["agrees"], report["exact"]) == (step or 4, True, True)
        assert set(recorded.values()) == {0}
        metrics = {name for name in lines(run_folder / "ppo/metrics.jsonl")[0] if not name.endswith("_s")} - {"step"}
        samples = {f"samples: {name}" for name in ("prompt", "response", "kl", "score", "scores.short")}
        assert metrics | samples <= recorded.keys()
        assert ("policy weights" in recorded) is (step != 1)  # state 1 was dropped
    after = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in run_folder.rglob("*")}
    assert after == before
    shown = rlhf("verify", run_folder / "ppo", "--step", 3).stdout
    assert f"update 3: all {len(recorded)} quantities equal the run's to the last bit" in shown
    assert "\npolicy weights  " in shown
    for step in (2, 99):
        fails(rlhf("verify", run_folder, "--step", step), "C06", "available steps: 1, 3, 4")
    assert disagreements(compare_run(run_folder, 3)) == {}
    for first, (name, key, change) in CHANGED_VALUES.items():
        path = run_folder / "ppo" / name
        rows = lines(path)
        changed = [row | {key: change(row[key])} for row in rows]
        jsonl.write_jsonl(path, changed)
        result = rlhf("verify", run_folder, "--step", 3)
        assert result.exit_code == 1 and f"update 3 differs: 1 of {len(recorded)} quantities" in result.stdout
        assert f"first {first} by " in result.stdout
        jsonl.write_jsonl(path, rows)


@pytest.mark.full
def test_verify_exits_with_1_and_names_the_first_difference(ppo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code was changed after the run: it repeats neither the run's numbers nor those of the reference."""
    monkeypatch.setitem(losses.VALUE_ADVANTAGES, "gae", lambda r, v, m, gamma, lam: losses.gae(r, v, m, gamma, 0.5))
    result = rlhf("verify", ppo_run)
    assert result.exit_code == 1
    assert "verify    update 3 differs: " in result.stdout
    assert "differ from the run's, first val/explained_variance by " in result.stdout
    assert "another machine, number of threads, or version of the code" in result.stdout
    assert next(iter(disagreements(compare_run(ppo_run)))) == "advantages"


@pytest.mark.full
def test_verify_a_run_with_many_options(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head on the policy, an ensemble, a language-model loss, shared layers, held-out samples, bfloat16."""
    monkeypatch.chdir(run_folder)  # paths of overrides are relative to it
    jsonl.write_jsonl(run_folder / "ptx.jsonl", [{"prompt": "a", "completion": f" moon of {n}"} for n in range(9)])
    vote = "rewards.vote={models: {a: reward_model, b: reward_model}, combine: mean_minus_std, clip: 1.0}"
    changes = ("rewards.short={function: 'judges:short', weight: 0.1}", "output.save_steps=1", "output.keep=4")
    changes += ("models.value=policy_head", "data.eval_prompts=heldout.jsonl", "data.ptx_data=ptx.jsonl")
    changes += ("average=0.5", "bf16=true", "ptx_coef=0.5", "num_shared_layers=1", "num_sample_generations=4")
    changes += ("generate_ref_response=true", "response_length={min: 4, max: 8}")
    assert ppo(run_folder, *settings(vote, *changes)).exit_code == 0
    report, recorded = verify_json(run_folder, 3)
    assert report["agrees"] and report["exact"]
    assert recorded.keys() >= {"samples: scores.vote", "policy weights", "value weights", "average weights"}
    compared = compare_run(run_folder, 3)
    assert apart(compared) == {} and by_name(compared)["loss/ptx_avg"].error is not None


@pytest.mark.full
def test_verify_an_unfinished_run(run_folder: Path) -> None:
    """Neither the manifest, a complete last line, the checkpoint after the update nor the hub is needed."""
    assert ppo(run_folder, "-s", "output.save_steps=1").exit_code == 0
    (run_folder / "ppo/manifest.json").unlink()
    replace(str(run_folder / "ppo/config.yaml"), "push_to_hub_if_best: null", "push_to_hub_if_best: me/it")
    with (run_folder / "ppo/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "objective/k')
    (run_folder / "ppo/state/step_000004/tensors.safetensors").write_bytes(b"half")
    result = rlhf("verify", run_folder)
    assert result.exit_code == 0 and "update 4: all" in result.stdout and "to the last bit" in result.stdout
    assert "warning[M05]" in result.stderr and "its weights are not compared" in result.stderr


@pytest.mark.full
def test_verify_refuses_damaged_checkpoints_and_changed_inputs(trained_folder: Path, origin: Path) -> None:
    fails(rlhf("verify", origin), "M01", "contains no PPO run")
    with (trained_folder / "ppo/state/step_000002/tensors.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"oops")
    fails(rlhf("verify", trained_folder, "--step", 3), "M05", "step_000002 is damaged", exit_code=1)
    assert rlhf("verify", trained_folder, "--step", 1).exit_code == 0
    (trained_folder / "prompts.jsonl").write_text('{"prompt": "another one"}\n' * 8)
    fails(rlhf("verify", trained_folder), "C15", "data.prompts: other content")
