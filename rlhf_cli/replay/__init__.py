"""`rlhf verify RUN`: repeat one PPO update with the trainer and with a naive reference, and compare them.

The update is made three times from what the run kept: by the trainer as it ran, by the trainer in float64, and by
`naive`, plain loops in float64. The first must give the run's own numbers, the last two the same to 1e-6.
"""

import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.config import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Prompts
from rlhf_cli.progress import Progress
from rlhf_cli.replay import observe
from rlhf_cli.replay.compare import TOLERANCE, Quantity, only_rounding, side_by_side, worst
from rlhf_cli.replay.observe import Numbers
from rlhf_cli.replay.recorded import Run, open_run
from rlhf_cli.rewards import no_bytecode_files
from rlhf_cli.stages import ppo_samples, ppo_setup

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
    observe.remember(trainer)
    if step > 1:
        trainer.load_state_dict(run.state(step - 1))
    start = copy.deepcopy(trainer.state_dict())
    before = observe.weights(trainer.policy, trainer.value)
    picked = data.prompt_batch(len(components.prompts), step, settings.prompts_per_update, config.seed)
    rounded = torch.bfloat16 if settings.bf16 else trainer.policy.dtype
    with Progress("replay", settings.episodes_per_update * (2 + settings.num_ppo_epochs), "row") as bar:
        rollout = trainer.generate(Prompts.from_lists([components.prompts[i].ids for i in picked]))
        now, _ = observe.observe(trainer, rollout)
        now |= observe.changes(before, observe.weights(trainer.policy, trainer.value))
        left = _recorded(run, step, before)
        for name, (then, today) in _samples(components, run.samples.get(step, [])).items():
            left[name], now[name] = observe.numbers(then), observe.numbers(today)
        trainer.load_state_dict(start)
        wide, naive = observe.in_float64(
            trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id,
            near_tie=NEAR_TIE[rounded], tick=bar.advance,
        )  # fmt: skip
    quantities = side_by_side(naive, wide, now, left)
    return Report(checkpoints.shown(run.folder), step, rounded, quantities, only_rounding(naive), _versions(run))


def _recorded(run: Run, step: int, before: observe.Weights) -> Numbers:
    """What the run itself has left of the update: its line of metrics.jsonl, and the state after it."""
    found = {
        name: observe.numbers([number])
        for name, number in run.lines[step].items()
        if name != "step" and not name.endswith("_s")
    }
    if state := run.state_after(step):
        after = {name: {key: state[name][key].double() for key in keys} for name, keys in before.items()}
        found |= observe.changes(before, after)
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
    manifest = read_object(run.folder / "manifest.json") or {}
    now = checkpoints.versions()
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
