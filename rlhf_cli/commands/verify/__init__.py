"""`rlhf verify RUN`: repeat one PPO update with the trainer and with a naive reference, and compare them.

The update runs three times from a checkpoint: by the trainer as in the run, by the trainer in float64, and by
`reference`, plain loops in float64. The first must repeat the run's values, the last two must agree to 1e-6.
"""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import data, runs, terminal
from rlhf_cli.commands.verify import trace
from rlhf_cli.commands.verify.log import Run, open_run
from rlhf_cli.commands.verify.trace import Quantities
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import read_json_object
from rlhf_cli.models.batch import Prompts
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.stages import ppo_samples, ppo_setup

TOLERANCE = 1e-6
FLOOR = 1e-3  # least denominator of a relative difference
ZERO = 1e-9  # smaller values are rounding errors
BY_COUNT = ("response tokens",)  # ids: the number that differ


@dataclass(frozen=True)
class Quantity:
    """A quantity of the update, with its largest absolute difference in three comparisons.

    A difference is None if that comparison does not have the quantity.
    """

    name: str
    count: int
    largest: float
    recorded: float | None  # the run's files against the trainer now
    float64: float | None  # the trainer against the reference, both in float64
    rounding: float | None  # the trainer in the run's dtype against the float64 reference

    def relative(self, difference: float) -> float:
        """Return a difference divided by the quantity's largest value, or by FLOOR if that is larger."""
        if self.name in BY_COUNT or "unexplained" in self.name:
            return difference
        scale = self.largest if self.name.endswith(", change") else max(self.largest, FLOOR)
        return difference / scale if scale else math.inf if difference else 0.0

    @property
    def error(self) -> float:
        """Return the relative float64 difference, which decides if the quantity agrees."""
        return 0.0 if self.float64 is None else self.relative(self.float64)


def difference(name: str, values: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, or the number of differing ids; inf for nan or different shapes."""
    if values.shape != expected.shape:
        return math.inf
    if name in BY_COUNT:
        return float((values != expected).sum())
    deviation = (values - expected).abs()
    return float(torch.where(torch.isnan(deviation), math.inf, deviation).max()) if len(deviation) else 0.0


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def compare(
    reference: Mapping[str, Tensor],
    float64: Mapping[str, Tensor],
    native: Mapping[str, Tensor] | None = None,
    recorded: Mapping[str, Tensor] | None = None,
) -> list[Quantity]:
    """Return the comparison of each quantity, in the order in which an update computes them.

    `float64` is the trainer in float64, `native` the trainer in the run's dtype, `recorded` from the run's files.
    The quantities of `only_rounding` are not compared in float64.
    """
    native, recorded = native or {}, recorded or {}
    not_compared = {*BY_COUNT, *only_rounding(reference)}
    quantities = []
    for name in dict.fromkeys([*reference, *float64, *native, *recorded]):
        values = next(side[name] for side in (reference, native, float64, recorded) if name in side)
        quantities.append(
            Quantity(
                name,
                len(values),
                largest(values),
                _between(name, recorded, native),
                _between(name, float64, reference) if name not in not_compared else None,
                _between(name, native, reference),
            )
        )
    return quantities


def only_rounding(reference: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the quantities determined only by rounding in this update, with the reason.

    Two correct implementations may differ in them.
    """
    reasons = {}
    returns, norms = reference["returns"], reference.get("policy/grad_norm", torch.ones(1))
    if returns.std(unbiased=False) <= ZERO * largest(returns):
        reasons["val/explained_variance"] = "all returns are equal"
    if largest(reference["advantages"]) < ZERO:
        reason = "all advantages are 0"
        reasons |= {"policy/clipfrac_avg": reason, "policy/clipfrac_avg, each step": reason}
        if largest(norms) < ZERO:  # no other term of the loss moves the policy either
            prefixes = ("policy", "loss/policy", "val/ratio", "ratio_")
            reasons |= {name: reason for name in reference if name.startswith(prefixes)}
    return reasons


def _between(name: str, values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float | None:
    return difference(name, values[name], expected[name]) if name in values and name in expected else None


def worst(quantities: list[Quantity]) -> Quantity:
    """Return the quantity with the largest relative float64 difference."""
    return max(quantities, key=lambda quantity: quantity.error)


# Rounding errors to expect: of a sampled token, in nats; of a quantity, relative (larger ones are reported).
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
ROUNDING = {torch.float32: 0.05, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Report:
    """The comparison of one update."""

    run: str
    step: int
    dtype: torch.dtype  # of the run's computations
    quantities: list[Quantity]
    only_rounding: dict[str, str]  # quantities determined only by rounding, and why
    versions: list[str]  # libraries whose version has changed since the run

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def agrees(self) -> bool:
        return worst(self.quantities).error <= TOLERANCE

    @property
    def exact(self) -> bool:
        """Return True if the trainer repeats the run's values to the last bit."""
        return not any(quantity.recorded for quantity in self.quantities)


def run(folder: Path, step: int | None, options: Options, *, as_json: bool) -> int:
    """Compare, print, and return 0 if the float64 values agree, else 1.

    Raises RLHFError C06 for a step that cannot be repeated or ppo.optim adamw_8bit, M01 if there is no run, C15 if its
    inputs changed, M05 for a damaged checkpoint, and as `rlhf ppo` does for its models and data.
    """
    with no_bytecode_files():
        report = verify_update(open_run(folder), step, options)
    if as_json:
        terminal.out(json.dumps(_as_json(report), indent=2))
    else:
        _show(report)
    return 0 if report.agrees else 1


def verify_update(run: Run, step: int | None, options: Options) -> Report:
    """Repeat update `step` of a run in all three ways, and compare them."""
    step = run.choose(step)
    config, settings = run.config, run.config.ppo
    if settings.optim == "adamw_8bit":
        text = "an update with 8-bit optimizer states cannot be repeated in float64"
        raise RLHFError("C06", text, where=config.where("ppo.optim"), hint="verify a run with another ppo.optim")
    with terminal.muted_warnings():  # already printed by `rlhf ppo`
        components = ppo_setup.load_components(config, options, run.parents())
    trainer = components.trainer
    trace.cache_reward_fns(trainer)
    if step > 1:
        trainer.load_state_dict(run.state(step - 1))
    start = copy.deepcopy(trainer.state_dict())
    before = trace.copy_weights(trainer.policy, trainer.value)
    picked = data.prompt_batch(len(components.prompts), step, settings.prompts_per_update, config.seed)
    dtype = torch.bfloat16 if settings.bf16 else trainer.policy.dtype
    with Progress("verify", settings.episodes_per_update * (2 + settings.num_ppo_epochs), "row") as bar:
        rollout = trainer.generate(Prompts.from_lists([components.prompts[i].ids for i in picked]))
        native, _ = trace.run_update(trainer, rollout)
        native |= trace.weight_changes(before, trace.copy_weights(trainer.policy, trainer.value))
        recorded = _recorded(run, step, before)
        for name, (logged, repeated) in _samples(components, run.samples.get(step, [])).items():
            recorded[name], native[name] = trace.flatten(logged), trace.flatten(repeated)
        trainer.load_state_dict(start)
        float64, reference = trace.run_in_float64(
            trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id,
            near_tie=NEAR_TIE[dtype], tick=bar.advance,
        )  # fmt: skip
    quantities = compare(reference, float64, native, recorded)
    return Report(runs.shown(run.folder), step, dtype, quantities, only_rounding(reference), _changed_versions(run))


def _recorded(run: Run, step: int, before: trace.Weights) -> Quantities:
    """Return the update's values in the run's files: its line of metrics.jsonl, and the checkpoint after it."""
    quantities = {
        name: trace.flatten([value])
        for name, value in run.lines[step].items()
        if name != "step" and not name.endswith("_s")
    }
    if state := run.state_after(step):
        after = {name: {key: state[name][key].double() for key in keys} for name, keys in before.items()}
        quantities |= trace.weight_changes(before, after)
    return quantities


def _samples(
    components: ppo_setup.PPOComponents, rows: list[dict[str, Any]]
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the logged and the repeated values of the update's rows in samples.jsonl, by quantity."""
    if not rows:
        return {}
    experience = ppo_samples.experience_to_show(components)
    repeated = [ppo_samples.sample_row(components.tokenizer, experience, row["index"]) for row in rows]
    pairs = zip(rows, repeated, strict=True)
    differs = [float(any(old[key] != new[key] for key in ("prompt", "response"))) for old, new in pairs]
    columns = {"samples: other texts": ([0.0] * len(rows), differs)}
    for name in ("kl", "score"):
        columns[f"samples: {name}"] = ([row[name] for row in rows], [row[name] for row in repeated])
    for name in experience.score_result.raw:
        scores = [[row["scores"][name] for row in table] for table in (rows, repeated)]
        columns[f"samples: score {name}"] = (scores[0], scores[1])
    return columns


def _changed_versions(run: Run) -> list[str]:
    """Return the libraries whose version has changed since a finished run."""
    manifest = read_json_object(run.folder / "manifest.json") or {}
    current = runs.versions()
    logged = manifest.get("versions", {}).items()
    return [f"{name} {version} -> {current.get(name)}" for name, version in logged if current.get(name) != version]


def _show(report: Report) -> None:
    columns = ["quantity", "numbers", "largest", "recorded", "float64", report.dtype_name]
    rows = [
        [quantity.name, str(quantity.count), f"{quantity.largest:.4g}"]
        + [_cell(x) for x in (quantity.recorded, quantity.float64, quantity.rounding)]
        for quantity in report.quantities
    ]
    terminal.table(columns, rows, title=f"update {report.step} of {report.run}: largest differences")
    terminal.out()
    for line in summary_lines(report):
        terminal.out(line)


def _cell(difference: float | None) -> str:
    return "" if difference is None else "0" if difference == 0 else f"{difference:.1e}"


def summary_lines(report: Report) -> list[str]:
    """Return the results of the three comparisons as lines of text."""
    errors = [quantity for quantity in report.quantities if quantity.error > TOLERANCE]
    largest_error = worst(report.quantities)
    if errors:
        result = (
            f"differs: {errors[0].name} is the first of {len(errors)} quantities that do not agree to {TOLERANCE:g}"
        )
    else:
        size = f"at most {largest_error.error:.1e} of a quantity's size ({largest_error.name})"
        result = f"agrees to {TOLERANCE:g}: {size}"
    skipped = [f"skipped   {name}: {why}, only rounding decides it" for name, why in report.only_rounding.items()]
    return [_recorded_line(report), _rounding_line(report), *skipped, f"verify    update {report.step} {result}"]


def _recorded_line(report: Report) -> str:
    recorded = [quantity for quantity in report.quantities if quantity.recorded is not None]
    changed = [quantity for quantity in recorded if quantity.recorded]
    if not changed:
        return f"recorded  the run's own numbers came again to the last bit: {len(recorded)} quantities"
    reason = ", ".join(report.versions) or "another machine, number of threads, or version of the code"
    return (
        f"recorded  {len(changed)} of {len(recorded)} quantities are not the run's own, first {changed[0].name} "
        f"by {changed[0].recorded:.1e}: {reason}"
    )


def _rounding_line(report: Report) -> str:
    bound = ROUNDING[report.dtype]
    errors = [(quantity, quantity.relative(quantity.rounding)) for quantity in report.quantities if quantity.rounding]
    large = [(quantity, error) for quantity, error in errors if error > bound]
    if not errors:
        return f"{report.dtype_name:9} moved nothing"
    if large:
        quantity, error = large[0]
        return f"{report.dtype_name:9} moved {quantity.name} by {error:.1e} of its size: more than rounding should"
    quantity, error = max(errors, key=lambda pair: pair[1])
    return f"{report.dtype_name:9} moved a quantity by at most {error:.1e} of its size ({quantity.name})"


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "run": report.run,
        "step": report.step,
        "agrees": report.agrees,
        "exact": report.exact,
        "tolerance": TOLERANCE,
        "number_format": report.dtype_name,
        "told": summary_lines(report),
        "quantities": [
            {name: _finite(x) for name, x in asdict(quantity).items() if x is not None}
            | {"error": _finite(quantity.error)}
            for quantity in report.quantities
        ],
    }


def _finite(value: Any) -> Any:
    """Return infinities and nan as text, which JSON cannot represent as numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
