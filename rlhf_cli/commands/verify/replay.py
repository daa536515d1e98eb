"""Open a PPO run, and repeat one of its updates in all three ways."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_cli import data, runs, terminal
from rlhf_cli.commands.verify import trace
from rlhf_cli.commands.verify.comparison import TOLERANCE, Quantity, compare, only_rounding, worst
from rlhf_cli.commands.verify.trace import Quantities
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.ppo import sample_tables, setup
from rlhf_cli.tracking.logs import read_log

# Rounding error to expect of a sampled token, in nats.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}


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
            state: dict[str, Any] = save.load_tree(folder)["trainer"]
        except OSError as error:  # a running stage deletes old checkpoints
            raise RLHFError("M05", f"{shown(folder)} no longer exists", hint="choose another step") from error
        return state

    def open_parents(self) -> dict[str, Parent]:
        """Open the run's input models. Raises RLHFError as a stage does, and C15 if they or the data have changed."""
        parents = runs.open_parents(self.config)
        logged = read_json_object(self.folder / "identity.json") or {}
        current = runs.compute_identity(self.config, parents, self.config.sources())
        changes = runs.identity_difference(_inputs_of(logged), _inputs_of(current))
        if changes:
            text = f"the inputs of {shown(self.folder)} have changed: {'; '.join(changes[:5])}"
            raise RLHFError("C15", text, hint="restore the inputs, or run the stage again and verify the new run")
        return parents


def _inputs_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: identity.get(key, {}) for key in ("parents", "data")}


def open_run(run: Path) -> PPORun:
    """Open the PPO run of a run folder or of RUN/ppo itself. Raises RLHFError M01 if there is none."""
    candidates = (run / "ppo", run)
    folder = next((path for path in candidates if (path / "identity.json").is_file()), None)
    if folder is None or not (folder / "config.yaml").is_file():
        raise RLHFError("M01", f"{shown(run)} contains no PPO run", hint="name a run folder with ppo/, e.g. runs/demo")
    config = setup.load_run_config(folder)
    settings = config.ppo.model_copy(update={"push_to_hub_if_best": None})  # a repeated update is not pushed
    config = config.model_copy(update={"ppo": settings})
    config = scale_to_world_size(config, runs.recorded_num_processes(folder))
    lines = {line["step"]: line for line in read_log(folder / "metrics.jsonl")}
    return PPORun(folder, config, lines, read_log(folder / "samples.jsonl"))


@dataclass(frozen=True)
class ReplayReport:
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


def verify_update(run: PPORun, step: int | None, options: Options) -> ReplayReport:
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
        rows = [row for row in run.samples if row["step"] == step]
        logged_samples, repeated_samples = _samples(components, rows)
        trainer.load_state_dict(start)
        float64, reference = trace.run_in_float64(
            trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id,
            near_tie=NEAR_TIE[dtype], tick=bar.advance,
        )  # fmt: skip

    quantities = compare(reference, float64, native=native | repeated_samples, recorded=recorded | logged_samples)
    return ReplayReport(
        run=shown(run.folder),
        step=step,
        dtype=dtype,
        quantities=quantities,
        only_rounding=only_rounding(reference),
        versions=_changed_versions(run.folder),
    )


def _changed_versions(folder: Path) -> list[str]:
    """Return the libraries whose version has changed since the run, as `name old -> new`."""
    manifest, _ = runs.read_manifest(folder)
    current = runs.versions()
    logged = manifest.versions.items()
    return [f"{name} {old} -> {current.get(name)}" for name, old in logged if current.get(name) != old]


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
    after = {name: _as_double(state[name], keys) for name, keys in before.items()}
    return quantities | trace.weight_changes(before, after)


def _as_double(weights: Mapping[str, Tensor], keys: Iterable[str]) -> dict[str, Tensor]:
    return {key: weights[key].double() for key in keys}


def _samples(components: setup.PPOComponents, rows: Sequence[Mapping[str, Any]]) -> tuple[Quantities, Quantities]:
    """Return the logged and the repeated values of the update's rows in samples.jsonl."""
    if not rows:
        return {}, {}
    experience = sample_tables.experience_to_show(components)
    repeated = [sample_tables.sample_row(components.tokenizer, experience, row["index"]) for row in rows]

    def quantities(table: Sequence[Mapping[str, Any]]) -> Quantities:
        columns = {
            "other texts": [_differ(row, logged) for row, logged in zip(table, rows, strict=True)],
            "kl": [row["kl"] for row in table],
            "score": [row["score"] for row in table],
        }
        for name in experience.score_result.raw:
            scores = [row["scores"][name] for row in table]
            columns[f"score {name}"] = [score for score in scores if score is not None]
        return {f"samples: {name}": trace.as_float64(values) for name, values in columns.items()}

    return quantities(rows), quantities(repeated)


def _differ(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(row[key] != other[key] for key in ("prompt", "response"))
