"""`rlhf verify RUN`: repeat one PPO update with the trainer and with a naive reference, and compare them.

The update is made three times from what the run kept: by the trainer as it ran, by the trainer in float64, and by
`naive`, plain loops in float64. The first must give the run's own numbers, the last two the same to 1e-6.
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
from rlhf_cli.commands.verify.trace import Numbers
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import read_json_object
from rlhf_cli.models.batch import Prompts
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.stages import ppo_samples, ppo_setup

TOLERANCE = 1e-6
FLOOR = 1e-3  # numbers smaller than this are compared as if they were as large
NOTHING = 1e-9
BY_COUNT = ("response tokens",)  # ids: how many differ


@dataclass(frozen=True)
class Quantity:
    """How many numbers, how large the largest, and the largest absolute difference in three comparisons.

    None where a comparison does not have the quantity.
    """

    name: str
    count: int
    largest: float
    recorded: float | None  # the run's own files, against the trainer now
    float64: float | None  # the trainer, against the naive update, both in float64
    rounding: float | None  # the trainer in the run's number format, against the naive update

    def relative(self, difference: float) -> float:
        """A difference as a share of the quantity's largest number, or of FLOOR where that is smaller."""
        if self.name in BY_COUNT or "unexplained" in self.name:
            return difference
        scale = self.largest if self.name.endswith(", change") else max(self.largest, FLOOR)
        return difference / scale if scale else math.inf if difference else 0.0

    @property
    def error(self) -> float:
        """What the quantity is judged by: the float64 difference, relative."""
        return 0.0 if self.float64 is None else self.relative(self.float64)


def difference(name: str, ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference, or how many differ; inf where they are not as many, or not numbers."""
    if ours.shape != theirs.shape:
        return math.inf
    if name in BY_COUNT:
        return float((ours != theirs).sum())
    apart = (ours - theirs).abs()
    return float(torch.where(torch.isnan(apart), math.inf, apart).max()) if len(apart) else 0.0


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def side_by_side(
    naive: Mapping[str, Tensor],
    wide: Mapping[str, Tensor],
    now: Mapping[str, Tensor] | None = None,
    recorded: Mapping[str, Tensor] | None = None,
) -> list[Quantity]:
    """Quantity by quantity, in the order in which an update makes them.

    `wide` is the trainer in float64, `now` the trainer in the run's number format, `recorded` what the run left.
    What `only_rounding` names is not compared in float64.
    """
    now, recorded = now or {}, recorded or {}
    unjudged = only_rounding(naive)
    found = []
    for name in dict.fromkeys([*naive, *wide, *now, *recorded]):
        shown = next(side[name] for side in (naive, now, wide, recorded) if name in side)
        found.append(
            Quantity(
                name,
                len(shown),
                largest(shown),
                _between(name, recorded, now),
                _between(name, wide, naive) if name not in {*BY_COUNT, *unjudged} else None,
                _between(name, now, naive),
            )
        )
    return found


def only_rounding(naive: Mapping[str, Tensor]) -> dict[str, str]:
    """Quantities that rounding alone decides in this update, and why: two right ways need not agree on them."""
    found = {}
    returns, norms = naive["returns"], naive.get("policy/grad_norm", torch.ones(1))
    if returns.std(unbiased=False) <= NOTHING * largest(returns):
        found["val/explained_variance"] = "all returns are equal"
    if largest(naive["advantages"]) < NOTHING:
        why = "all advantages are 0"
        found |= {"policy/clipfrac_avg": why, "policy/clipfrac_avg, each step": why}
        if largest(norms) < NOTHING:  # nor does anything else move the policy
            found |= {name: why for name in naive if name.startswith(("policy", "loss/policy", "val/ratio", "ratio_"))}
    return found


def _between(name: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float | None:
    return difference(name, ours[name], theirs[name]) if name in ours and name in theirs else None


def worst(quantities: list[Quantity]) -> Quantity:
    """The quantity with the largest relative float64 difference."""
    return max(quantities, key=lambda quantity: quantity.error)


# What rounding may do to a draw, in nats, and to a quantity as a share of it before it is pointed out.
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
ROUNDING = {torch.float32: 0.05, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Report:
    """The comparison of one update."""

    run: str
    step: int
    number_format: torch.dtype  # of the run: what its models calculated in
    quantities: list[Quantity]
    unjudged: dict[str, str]  # quantities that rounding alone decides, and why
    versions: list[str]  # what of the run's libraries is another one now

    @property
    def rounded(self) -> str:
        return str(self.number_format).removeprefix("torch.")

    @property
    def agrees(self) -> bool:
        return worst(self.quantities).error <= TOLERANCE

    @property
    def exact(self) -> bool:
        """Whether the trainer's numbers now are the run's own, to the last bit."""
        return not any(quantity.recorded for quantity in self.quantities)


def run(folder: Path, step: int | None, options: Options, *, as_json: bool) -> int:
    """Compare, show, and return 0 where the float64 numbers agree, else 1.

    Raises RLHFError C06 for a step that cannot be made again, M01 where there is no run, C15 where its inputs changed,
    M05 for a damaged state, C06 for ppo.optim adamw_8bit, and what `rlhf ppo` raises for its parents and data.
    """
    with no_bytecode_files():
        report = replay(open_run(folder), step, options)
    if as_json:
        terminal.out(json.dumps(_as_json(report), indent=2))
    else:
        _show(report)
    return 0 if report.agrees else 1


def replay(run: Run, step: int | None, options: Options) -> Report:
    """Make update `step` of a run again, in all three ways."""
    step = run.choose(step)
    config, settings = run.config, run.config.ppo
    if settings.optim == "adamw_8bit":
        text = "an update with averages in 8 bits cannot be made again in float64: they are rounded on the way"
        raise RLHFError("C06", text, where=config.where("ppo.optim"), hint="replay a run with another ppo.optim")
    with terminal.muted_warnings():  # `rlhf ppo` has said them
        components = ppo_setup.load_components(config, options, run.parents())
    trainer = components.trainer
    trace.remember(trainer)
    if step > 1:
        trainer.load_state_dict(run.state(step - 1))
    start = copy.deepcopy(trainer.state_dict())
    before = trace.weights(trainer.policy, trainer.value)
    picked = data.prompt_batch(len(components.prompts), step, settings.prompts_per_update, config.seed)
    rounded = torch.bfloat16 if settings.bf16 else trainer.policy.dtype
    with Progress("replay", settings.episodes_per_update * (2 + settings.num_ppo_epochs), "row") as bar:
        rollout = trainer.generate(Prompts.from_lists([components.prompts[i].ids for i in picked]))
        now, _ = trace.observe(trainer, rollout)
        now |= trace.changes(before, trace.weights(trainer.policy, trainer.value))
        left = _recorded(run, step, before)
        for name, (then, today) in _samples(components, run.samples.get(step, [])).items():
            left[name], now[name] = trace.numbers(then), trace.numbers(today)
        trainer.load_state_dict(start)
        wide, naive = trace.in_float64(
            trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id,
            near_tie=NEAR_TIE[rounded], tick=bar.advance,
        )  # fmt: skip
    quantities = side_by_side(naive, wide, now, left)
    return Report(runs.shown(run.folder), step, rounded, quantities, only_rounding(naive), _versions(run))


def _recorded(run: Run, step: int, before: trace.Weights) -> Numbers:
    """What the run itself has left of the update: its line of metrics.jsonl, and the state after it."""
    found = {
        name: trace.numbers([number])
        for name, number in run.lines[step].items()
        if name != "step" and not name.endswith("_s")
    }
    if state := run.state_after(step):
        after = {name: {key: state[name][key].double() for key in keys} for name, keys in before.items()}
        found |= trace.changes(before, after)
    return found


def _samples(
    components: ppo_setup.PPOComponents, rows: list[dict[str, Any]]
) -> dict[str, tuple[list[float], list[float]]]:
    """The run's sample table of the update, and what the trainer, just after it, makes of the same rows."""
    if not rows:
        return {}
    experience = ppo_samples.experience_to_show(components)
    today = [ppo_samples.sample_row(components.tokenizer, experience, row["index"]) for row in rows]
    pairs = list(zip(rows, today, strict=True))
    other = [float(any(then[key] != now[key] for key in ("prompt", "response"))) for then, now in pairs]
    found = {"samples: other texts": ([0.0] * len(rows), other)}
    for name in ("kl", "score"):
        found[f"samples: {name}"] = ([then[name] for then, _ in pairs], [now[name] for _, now in pairs])
    for name in experience.score_result.raw:
        scores = [(then["scores"][name], now["scores"][name]) for then, now in pairs]
        found[f"samples: score {name}"] = ([then for then, _ in scores], [now for _, now in scores])
    return found


def _versions(run: Run) -> list[str]:
    """The libraries that were others when the run was made, for a finished run."""
    manifest = read_json_object(run.folder / "manifest.json") or {}
    now = runs.versions()
    return [
        f"{name} {was} -> {now.get(name)}" for name, was in manifest.get("versions", {}).items() if now.get(name) != was
    ]


def _show(report: Report) -> None:
    columns = ["quantity", "numbers", "largest", "recorded", "float64", report.rounded]
    rows = [
        [quantity.name, str(quantity.count), f"{quantity.largest:.4g}"]
        + [_cell(x) for x in (quantity.recorded, quantity.float64, quantity.rounding)]
        for quantity in report.quantities
    ]
    terminal.table(columns, rows, title=f"update {report.step} of {report.run}: largest differences")
    terminal.out()
    for line in told(report):
        terminal.out(line)


def _cell(difference: float | None) -> str:
    return "" if difference is None else "0" if difference == 0 else f"{difference:.1e}"


def told(report: Report) -> list[str]:
    """The three comparisons in a line each, and the verdict."""
    apart = [quantity for quantity in report.quantities if quantity.error > TOLERANCE]
    most = worst(report.quantities)
    if apart:
        verdict = f"differs: {apart[0].name} is the first of {len(apart)} quantities that do not agree to {TOLERANCE:g}"
    else:
        verdict = f"agrees to {TOLERANCE:g}: at most {most.error:.1e} of a quantity's size ({most.name})"
    aside = [f"aside     {name}: {why}, rounding alone decides it" for name, why in report.unjudged.items()]
    return [_recorded_line(report), _rounding_line(report), *aside, f"replay    update {report.step} {verdict}"]


def _recorded_line(report: Report) -> str:
    found = [quantity for quantity in report.quantities if quantity.recorded is not None]
    other = [quantity for quantity in found if quantity.recorded]
    if not other:
        return f"recorded  the run's own numbers came again to the last bit: {len(found)} quantities"
    why = ", ".join(report.versions) or "another machine, number of threads, or version of the code"
    return (
        f"recorded  {len(other)} of {len(found)} quantities are not the run's own, first {other[0].name} "
        f"by {other[0].recorded:.1e}: {why}"
    )


def _rounding_line(report: Report) -> str:
    bound = ROUNDING[report.number_format]
    found = [(quantity, quantity.relative(quantity.rounding)) for quantity in report.quantities if quantity.rounding]
    large = [(quantity, share) for quantity, share in found if share > bound]
    if not found:
        return f"{report.rounded:9} moved nothing"
    if large:
        quantity, share = large[0]
        return f"{report.rounded:9} moved {quantity.name} by {share:.1e} of its size: more than rounding should"
    quantity, share = max(found, key=lambda pair: pair[1])
    return f"{report.rounded:9} moved a quantity by at most {share:.1e} of its size ({quantity.name})"


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "run": report.run,
        "step": report.step,
        "agrees": report.agrees,
        "exact": report.exact,
        "tolerance": TOLERANCE,
        "number_format": report.rounded,
        "told": told(report),
        "quantities": [
            {name: _finite(x) for name, x in asdict(quantity).items() if x is not None}
            | {"error": _finite(quantity.error)}
            for quantity in report.quantities
        ],
    }


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
