"""`rlhf verify RUN`: make one PPO update again, and compare it with the run's files to the last bit.

The trainer starts from the checkpoint before the update, or from the models of the config. What it gives must equal the
update's line of metrics.jsonl, its rows of samples.jsonl, and the weights of the checkpoint after it, as far as there
are any. RUN is not modified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_cli import runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import devices, save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import no_bytecode_files
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.ppo import prompt_rows, rollout_engine, sample_tables, setup
from rlhf_cli.tracking.logs import read_log
from rlhf_cli.trees import flatten

# Of a quantity's size, or of 1 if that is larger: what a run of several processes may differ by. One process repeats
# it, which adds in another order.
ROUNDING = 1e-3


def run(folder: Path, step: int | None, options: Options, *, as_json: bool) -> int:
    """Repeat update `step`, by default the newest possible, and print the comparison; return 0 if it agrees, else 1.

    Raises RLHFError M01 if there is no run, C06 for a step that cannot be repeated, C15 if the run's inputs changed,
    M05 for a damaged checkpoint, and as `rlhf ppo` does for its models and data.
    """
    with no_bytecode_files():
        ppo_run = open_run(folder)
        step = ppo_run.choose_step(step)
        comparison = Comparison(ppo_run, step, repeat_update(ppo_run, step, options))

    if as_json:
        comparison.print_json()
    else:
        comparison.print()
    return 0 if comparison.agrees else 1


# The run


@dataclass(frozen=True)
class PPORun:
    """RUN/ppo, which may still be training: its config, its lines of metrics.jsonl by step, and samples.jsonl."""

    folder: Path
    config: PPOConfig
    num_processes: int
    lines: Mapping[int, Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]

    def choose_step(self, step: int | None) -> int:
        """Return `step`, by default the newest that can be repeated: the first update, or one after a checkpoint.

        Raises RLHFError C06 if it cannot be repeated.
        """
        after_checkpoints = {saved + 1 for saved in runs.state_steps(self.folder / "state")}
        steps = sorted({1, *after_checkpoints} & self.lines.keys())
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
        state: dict[str, Any] = save.load_tree(runs.state_at(self.folder / "state", step))["trainer"]
        return state

    def open_parents(self) -> dict[str, Parent]:
        """Open the run's input models. Raises RLHFError as a stage does, and C15 if they or the data have changed."""
        parents = runs.open_parents(self.config)
        recorded = read_json_object(self.folder / "identity.json") or {}
        current = runs.compute_identity(self.config, parents, self.config.sources())
        inputs = {key: recorded.get(key, {}) for key in ("parents", "data")}
        changes = runs.identity_difference(inputs, {key: current[key] for key in inputs})
        if changes:
            text = f"the inputs of {shown(self.folder)} have changed: {'; '.join(changes[:5])}"
            raise RLHFError("C15", text, hint="restore the inputs, or run the stage again and verify the new run")
        return parents


def open_run(run: Path) -> PPORun:
    """Open the PPO run of a run folder or of RUN/ppo itself. Raises RLHFError M01 if there is none."""
    folder = run if (run / "identity.json").is_file() else run / "ppo"
    if not all((folder / name).is_file() for name in ("identity.json", "config.yaml")):
        raise RLHFError("M01", f"{shown(run)} contains no PPO run", hint="name a run folder with ppo/, e.g. runs/demo")

    num_processes = runs.recorded_num_processes(folder)
    config = setup.load_run_config(folder)
    settings = config.ppo.model_copy(update={"push_to_hub_if_best": None})  # a repeated update is not pushed
    config = scale_to_world_size(config.model_copy(update={"ppo": settings}), num_processes)
    lines = {line["step"]: line for line in read_log(folder / "metrics.jsonl")}
    return PPORun(folder, config, num_processes, lines, samples=read_log(folder / "samples.jsonl"))


# The update


def repeat_update(run: PPORun, step: int, options: Options) -> list["Quantity"]:
    """Make update `step` again, and compare what it gives with the run's files, in the order of an update."""
    components, prompts = load_before(run, step, options)
    trainer = components.trainer
    stats = trainer.step(prompts)
    return [
        *_compare_metrics(stats, run.lines[step]),
        *_compare_samples(components, [row for row in run.samples if row["step"] == step]),
        *_compare_weights(trainer, run, step),
    ]


def load_before(run: PPORun, step: int, options: Options) -> tuple[setup.PPOComponents, Prompts]:
    """Load the run as it was before update `step`, and the prompts of that update."""
    with terminal.muted_warnings():  # already printed by `rlhf ppo`
        parents = run.open_parents()
        components = setup.load_components(run.config, options, parents)
        rollout_engine.set_rollout_rows(run.config, parents, components.trainer, components.prompts)
    if step > 1:
        components.trainer.load_state_dict(run.load_state(step - 1))

    return components, Prompts.of(prompt_rows.prompts_of_update(run.config, components.prompts, step))


def _compare_metrics(stats: Mapping[str, float], line: Mapping[str, Any]) -> list["Quantity"]:
    """Compare the metrics of the update, without the times."""
    names = [name for name in line if name in stats and not name.endswith("_s")]
    return [Quantity.of_values(name, [stats[name]], [line[name]]) for name in names]


def _compare_samples(components: setup.PPOComponents, rows: Sequence[Mapping[str, Any]]) -> list["Quantity"]:
    """Compare the update's rows of samples.jsonl, if it has any, column by column."""
    if not rows:
        return []
    experience = sample_tables.experience_to_show(components)
    samples = [sample_tables.sample_row(components.tokenizer, experience, row["index"]) for row in rows]
    repeated = [flatten(sample) for sample in samples]
    recorded = [flatten(row) for row in rows]

    def compare(name: str) -> Quantity:
        others = [row.get(name) for row in recorded]
        return Quantity.of_values(f"samples: {name}", [row[name] for row in repeated], others)

    return [compare(name) for name in repeated[0]]


def _compare_weights(trainer: PPOTrainer, run: PPORun, step: int) -> list["Quantity"]:
    """Compare policy, value model and average with the checkpoint after the update. Warns M05 if it is damaged."""
    if step not in runs.state_steps(run.folder / "state"):
        return []
    try:
        recorded = run.load_state(step)
    except RLHFError as error:
        terminal.warn(error.problems[0].code, f"{error.problems[0].text}; its weights are not compared")
        return []
    repeated = trainer.state_dict()
    names = [name for name in ("policy", "value", "average") if name in repeated]
    return [Quantity.of_weights(f"{name} weights", repeated[name], recorded[name]) for name in names]


# The comparison


@dataclass(frozen=True)
class Quantity:
    """A quantity of the update, and its largest absolute difference from the run's files."""

    name: str
    count: int  # of the compared values
    largest: float  # absolute value
    recorded: float  # the difference: 0 if all values are equal to the last bit; of another text 1

    @classmethod
    def of_values(cls, name: str, repeated: Sequence[Any], recorded: Sequence[Any]) -> "Quantity":
        """Compare numbers or texts."""
        sizes = [float(abs(value)) for value in repeated if isinstance(value, int | float)]
        differences = [_difference(value, other) for value, other in zip(repeated, recorded, strict=True)]
        return cls(name, len(repeated), max(sizes, default=0.0), max(differences))

    @classmethod
    def of_weights(cls, name: str, repeated: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> "Quantity":
        """Compare tensors of the same names."""
        count = 0
        largest = []
        differences = []
        for key, weight in repeated.items():
            count += weight.numel()
            largest.append(float(weight.abs().max()))
            difference = weight.cpu().double() - recorded[key].double()
            differences.append(float(difference.abs().max()))
        return cls(name, count, max(largest), max(differences))


def _difference(value: Any, other: Any) -> float:
    are_numbers = isinstance(value, int | float) and isinstance(other, int | float)
    return float(abs(value - other) if are_numbers else value != other)


@dataclass(frozen=True)
class Comparison:
    """The comparison of an update with the run's files."""

    run: PPORun
    step: int
    quantities: Sequence[Quantity]

    @property
    def tolerance(self) -> float:
        return ROUNDING if self.run.num_processes > 1 else 0.0

    @property
    def agrees(self) -> bool:
        return all(each.recorded <= self.tolerance * max(each.largest, 1.0) for each in self.quantities)

    @property
    def changed(self) -> list[Quantity]:
        return [quantity for quantity in self.quantities if quantity.recorded]

    def result(self) -> str:
        """Return the result as a line of text, with the first quantity that differs."""
        changed = self.changed
        count = len(self.quantities)
        if not changed:
            return f"verify    update {self.step}: all {count} quantities equal the run's to the last bit"
        verdict = "agrees up to rounding" if self.agrees else "differs"
        changes = ", ".join(runs.environment_changes(self.run.folder, devices.device_name()))
        reason = changes or "another machine, number of threads, or version of the code"
        return (
            f"verify    update {self.step} {verdict}: {len(changed)} of {count} quantities differ from the run's, "
            f"first {changed[0].name} by {changed[0].recorded:.1e}: {reason}"
        )

    def print(self) -> None:
        """Print a table of the quantities, and the result."""
        rows = []
        for each in self.quantities:
            difference = f"{each.recorded:.1e}" if each.recorded else "0"
            rows.append([each.name, str(each.count), f"{each.largest:.4g}", difference])
        title = f"update {self.step} of {shown(self.run.folder)}: largest differences"
        terminal.table(["quantity", "numbers", "largest", "recorded"], rows, title=title)
        terminal.out()
        show = terminal.out if self.agrees else terminal.answer
        show(self.result())

    def print_json(self) -> None:
        values = {
            "run": shown(self.run.folder),
            "step": self.step,
            "agrees": self.agrees,
            "exact": not self.changed,
            "tolerance": self.tolerance,
            "told": [self.result()],
            "quantities": [asdict(quantity) for quantity in self.quantities],
        }
        terminal.print_json(values)
