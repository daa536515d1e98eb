"""`rlhf verify RUN`: repeat one PPO update with the trainer and with a naive reference, and compare them.

The update runs three times from a checkpoint: by the trainer as in the run, by the trainer in float64, and by
`reference`, plain loops in float64. The first must repeat the run's values, the last two must agree to 1e-6.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import data, runs, terminal
from rlhf_cli.commands.verify import trace
from rlhf_cli.commands.verify.trace import Quantities
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.ppo import samples, setup
from rlhf_cli.tracking import read_log

TOLERANCE = 1e-6
FLOOR = 1e-3  # least denominator of a relative difference
ZERO = 1e-9  # smaller values are rounding errors
BY_COUNT = ("response tokens",)  # ids: the number that differ
# Rounding errors to expect: of a sampled token, in nats; of a quantity, relative (larger ones are reported).
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}
ROUNDING = {"float32": 0.05, "bfloat16": 0.5}


# Differences


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

    def relative(self, difference: float | None) -> float:
        """Return a difference divided by the quantity's largest value, or by FLOOR if that is larger."""
        if not difference or self.name in BY_COUNT or "unexplained" in self.name:
            return difference or 0.0
        scale = self.largest if self.name.endswith(", change") else max(self.largest, FLOOR)
        return difference / scale if scale else math.inf

    @property
    def error(self) -> float:
        """Return the relative float64 difference, which decides if the quantity agrees."""
        return self.relative(self.float64)


def difference(name: str, values: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, or the number of differing ids; inf for nan or different shapes."""
    if values.shape != expected.shape:
        return math.inf
    if name in BY_COUNT:
        return float((values != expected).sum())
    deviation = (values - expected).abs()
    return _largest(torch.where(torch.isnan(deviation), math.inf, deviation))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def compare(
    reference: Quantities, float64: Quantities, native: Quantities | None = None, recorded: Quantities | None = None
) -> list[Quantity]:
    """Return the comparison of each quantity, in the order in which an update computes them.

    `float64` is the trainer in float64, `native` the trainer in the run's dtype, `recorded` from the run's files.
    The quantities of `only_rounding` are not compared in float64.
    """
    native, recorded = native or {}, recorded or {}
    not_compared = {*BY_COUNT, *only_rounding(reference)}

    def between(name: str, values: Quantities, expected: Quantities) -> float | None:
        return difference(name, values[name], expected[name]) if name in values and name in expected else None

    quantities = []
    for name, values in {**reference, **float64, **recorded, **native, **reference}.items():
        exact = None if name in not_compared else between(name, float64, reference)
        again, rounding = between(name, recorded, native), between(name, native, reference)
        quantities.append(Quantity(name, len(values), _largest(values), again, exact, rounding))
    return quantities


def only_rounding(reference: Quantities) -> dict[str, str]:
    """Return the quantities determined only by rounding in this update, with the reason.

    Two correct implementations may differ in them.
    """
    reasons = {}
    returns, norms = reference.get("returns"), reference.get("policy/grad_norm", torch.ones(1))
    if returns is not None and returns.std(unbiased=False) <= ZERO * _largest(returns):
        reasons["val/explained_variance"] = "all returns are equal"
    if _largest(reference["advantages"]) < ZERO:
        reason = "all advantages are 0"
        reasons |= {"policy/clipfrac_avg": reason, "policy/clipfrac_avg, each step": reason}
        if _largest(norms) < ZERO:  # no other term of the loss moves the policy either
            prefixes = ("policy", "average", "loss/policy", "val/ratio", "ratio_")
            reasons |= {name: reason for name in reference if name.startswith(prefixes)}
    return reasons


def worst(quantities: Sequence[Quantity]) -> Quantity:
    """Return the quantity with the largest relative float64 difference."""
    return max(quantities, key=lambda quantity: quantity.error)


# The run


@dataclass(frozen=True)
class PPORun:
    """RUN/ppo, which may still be training: its config, its lines of metrics.jsonl by step, and samples.jsonl."""

    folder: Path
    config: PPOConfig
    lines: Mapping[int, Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]

    def choose_step(self, step: int | None) -> int:
        """Return `step`, by default the newest that can be repeated: the first update, or one after a checkpoint.

        Raises RLHFError C06 if it cannot be repeated.
        """
        steps = sorted({1, *(saved + 1 for saved in runs.state_steps(self.folder / "state"))} & self.lines.keys())
        if not steps:
            text = f"{shown(self.folder)} has no update yet"
            raise RLHFError("C06", text, hint="wait for the first line of its metrics.jsonl")
        if step is not None and step not in steps:
            reason = "there is no checkpoint before it" if step in self.lines else "the run has no such update"
            text = f"--step {step} of {shown(self.folder)} cannot be repeated: {reason}"
            available = f"available steps: {', '.join(map(str, steps))}"
            raise RLHFError("C06", text, hint=f"{available}; output.keep and output.save_steps keep more checkpoints")
        return steps[-1] if step is None else step

    def load_state(self, step: int) -> dict[str, Any]:
        """Load the trainer's state after update `step`. Raises RLHFError M05 if it is damaged or missing."""
        folder = runs.state_at(self.folder / "state", step)
        try:
            return save.load_tree(folder)["trainer"]
        except OSError as error:  # a running stage deletes old checkpoints
            raise RLHFError("M05", f"{shown(folder)} no longer exists", hint="choose another step") from error

    def open_parents(self) -> dict[str, Parent]:
        """Open the run's input models. Raises RLHFError as a stage does, and C15 if they or the data have changed."""
        parents = runs.open_parents(self.config)
        logged = read_json_object(self.folder / "identity.json") or {}
        current = runs.compute_identity(self.config, parents, self.config.sources())
        old, new = ({key: identity.get(key, {}) for key in ("parents", "data")} for identity in (logged, current))
        if changes := runs.identity_difference(old, new):
            text = f"the inputs of {shown(self.folder)} have changed: {'; '.join(changes[:5])}"
            raise RLHFError("C15", text, hint="restore the inputs, or run the stage again and verify the new run")
        return parents


def open_run(run: Path) -> PPORun:
    """Open the PPO run of a run folder or of RUN/ppo itself. Raises RLHFError M01 if there is none."""
    folder = next((path for path in (run / "ppo", run) if (path / "identity.json").is_file()), None)
    if folder is None or not (folder / "config.yaml").is_file():
        raise RLHFError("M01", f"{shown(run)} contains no PPO run", hint="name a run folder with ppo/, e.g. runs/demo")
    config = setup.load_run_config(folder)
    settings = config.ppo.model_copy(update={"push_to_hub_if_best": None})  # a repeated update is not pushed
    config = config.model_copy(update={"ppo": settings})
    config = scale_to_world_size(config, runs.recorded_num_processes(folder))
    lines = {line["step"]: line for line in read_log(folder / "metrics.jsonl")}
    return PPORun(folder, config, lines, read_log(folder / "samples.jsonl"))


# The update


@dataclass(frozen=True)
class Report:
    """The comparison of one update."""

    run: str
    step: int
    dtype: str  # of the run's computations
    quantities: list[Quantity]
    only_rounding: dict[str, str]  # quantities determined only by rounding, and why
    versions: list[str]  # libraries whose version has changed since the run

    @property
    def agrees(self) -> bool:
        return worst(self.quantities).error <= TOLERANCE


def run(folder: Path, step: int | None, options: Options, *, as_json: bool) -> int:
    """Compare, print, and return 0 if the float64 values agree, else 1.

    Raises RLHFError C06 for a step that cannot be repeated or ppo.optim adamw_8bit, M01 if there is no run, C15 if its
    inputs changed, M05 for a damaged checkpoint, and as `rlhf ppo` does for its models and data.
    """
    with no_bytecode_files():
        report = verify_update(open_run(folder), step, options)
    if as_json:
        terminal.out(json.dumps(_as_json(report), indent=2))
        return 0 if report.agrees else 1
    rows = []
    for quantity in report.quantities:
        differences = (quantity.recorded, quantity.float64, quantity.rounding)
        cells = ["" if x is None else "0" if x == 0 else f"{x:.1e}" for x in differences]
        rows.append([quantity.name, str(quantity.count), f"{quantity.largest:.4g}", *cells])
    columns = ["quantity", "numbers", "largest", "recorded", "float64", report.dtype]
    terminal.table(columns, rows, title=f"update {report.step} of {report.run}: largest differences")
    terminal.out()
    for line in summary_lines(report):
        terminal.out(line)
    return 0 if report.agrees else 1


def verify_update(run: PPORun, step: int | None, options: Options) -> Report:
    """Repeat update `step` of a run in all three ways, and compare them."""
    step = run.choose_step(step)
    config, settings = run.config, run.config.ppo
    if settings.optim == "adamw_8bit":
        text = "an update with 8-bit optimizer states cannot be repeated in float64"
        raise RLHFError("C06", text, where=config.where("ppo.optim"), hint="verify a run with another ppo.optim")
    with terminal.muted_warnings():  # already printed by `rlhf ppo`
        components = setup.load_components(config, options, run.open_parents())
    trainer = components.trainer
    trace.cache_reward_fns(trainer)
    if step > 1:
        trainer.load_state_dict(run.load_state(step - 1))
    start = copy.deepcopy(trainer.state_dict())
    before = trace.weights_of(trainer)
    picked = data.prompt_batch(len(components.prompts), step, settings.prompts_per_update, config.seed)
    dtype = "bfloat16" if settings.bf16 else str(trainer.policy.dtype).removeprefix("torch.")
    with Progress("verify", settings.episodes_per_update * (2 + settings.num_ppo_epochs), "row") as bar:
        rollout = trainer.generate(Prompts.of([components.prompts[i] for i in picked]))
        native = trace.run_update(trainer, rollout)
        native |= trace.weight_changes(before, trace.weights_of(trainer))
        recorded = _recorded(run, step, before)
        logged, repeated = _samples(components, [row for row in run.samples if row["step"] == step])
        recorded, native = recorded | logged, native | repeated
        trainer.load_state_dict(start)
        float64, reference = trace.run_in_float64(
            trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id,
            near_tie=NEAR_TIE[dtype], tick=bar.advance,
        )  # fmt: skip
    quantities = compare(reference, float64, native, recorded)
    logged, current = (read_json_object(run.folder / "manifest.json") or {}).get("versions", {}), runs.versions()
    changed = [f"{name} {old} -> {current.get(name)}" for name, old in logged.items() if current.get(name) != old]
    return Report(shown(run.folder), step, dtype, quantities, only_rounding(reference), changed)


def _recorded(run: PPORun, step: int, before: trace.Weights) -> Quantities:
    """Return the update's values in the run's files: its line of metrics.jsonl, and the checkpoint after it."""
    logged = {name: value for name, value in run.lines[step].items() if name != "step" and not name.endswith("_s")}
    quantities = {name: trace.as_float64([value]) for name, value in logged.items()}
    if step not in runs.state_steps(run.folder / "state"):
        return quantities
    try:
        state = run.load_state(step)
    except RLHFError as error:
        terminal.warn(error.problems[0].code, f"{error.problems[0].text}; its weights are not compared")
        return quantities
    after = {name: {key: state[name][key].double() for key in keys} for name, keys in before.items()}
    return quantities | trace.weight_changes(before, after)


def _samples(components: setup.PPOComponents, rows: Sequence[Mapping[str, Any]]) -> tuple[Quantities, Quantities]:
    """Return the logged and the repeated values of the update's rows in samples.jsonl."""
    if not rows:
        return {}, {}
    experience = samples.experience_to_show(components)
    repeated = [samples.sample_row(components.tokenizer, experience, row["index"]) for row in rows]

    def quantities(table: Sequence[Mapping[str, Any]]) -> Quantities:
        texts = [
            any(row[key] != old[key] for key in ("prompt", "response")) for row, old in zip(table, rows, strict=True)
        ]
        columns = {"other texts": texts} | {name: [row[name] for row in table] for name in ("kl", "score")}
        for name in experience.score_result.raw:
            columns[f"score {name}"] = [s for row in table if (s := row["scores"][name]) is not None]
        return {f"samples: {name}": trace.as_float64(values) for name, values in columns.items()}

    return quantities(rows), quantities(repeated)


# The report


def summary_lines(report: Report) -> list[str]:
    """Return the results of the three comparisons as lines of text."""
    quantities, bound = report.quantities, ROUNDING[report.dtype]
    compared = [quantity for quantity in quantities if quantity.recorded is not None]
    changed = [quantity for quantity in compared if quantity.recorded]
    recorded = f"all {len(compared)} quantities equal the run's to the last bit"
    if changed:
        reason = ", ".join(report.versions) or "another machine, number of threads, or version of the code"
        first = f"first {changed[0].name} by {changed[0].recorded:.1e}"
        recorded = f"{len(changed)} of {len(compared)} quantities differ from the run's, {first}: {reason}"
    # not the average: its change may be as small as float32's step of a weight
    rounding_errors = [each for each in quantities if each.rounding and not each.name.startswith("average")]
    rounded = {quantity.name: quantity.relative(quantity.rounding) for quantity in rounding_errors}
    rounding = "no rounding error"
    if large := [name for name, error in rounded.items() if error > bound]:
        rounding = f"rounding changes {large[0]} by {rounded[large[0]]:.1e} of its size: more than expected"
    elif rounded:
        name, error = max(rounded.items(), key=lambda item: item[1])
        rounding = f"rounding changes a quantity by at most {error:.1e} of its size ({name})"
    skipped = [f"skipped   {name}: {why}, only rounding decides it" for name, why in report.only_rounding.items()]
    errors, largest = [quantity.name for quantity in quantities if quantity.error > TOLERANCE], worst(quantities)
    result = f"agrees to {TOLERANCE:g}: at most {largest.error:.1e} of a quantity's size ({largest.name})"
    if errors:
        result = f"differs: {errors[0]} is the first of {len(errors)} quantities that do not agree to {TOLERANCE:g}"
    lines = [f"recorded  {recorded}", f"{report.dtype:9} {rounding}", *skipped]
    return [*lines, f"verify    update {report.step} {result}"]


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "run": report.run,
        "step": report.step,
        "agrees": report.agrees,
        "exact": not any(quantity.recorded for quantity in report.quantities),  # the run's values, to the last bit
        "tolerance": TOLERANCE,
        "number_format": report.dtype,
        "told": summary_lines(report),
        "quantities": [  # infinities and nan as text, which JSON cannot represent as numbers
            {
                name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in each.items()
                if x is not None
            }
            for each in (asdict(quantity) | {"error": quantity.error} for quantity in report.quantities)
        ],
    }
