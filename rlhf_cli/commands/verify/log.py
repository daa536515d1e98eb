"""A PPO run's logged metrics, samples and checkpoints. Read-only: the run may still be training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import save
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.ppo_setup import load_run_config, scale_to_world_size
from rlhf_cli.tracking.metrics_log import read_log


@dataclass(frozen=True)
class Run:
    """RUN/ppo: its config, its lines of metrics.jsonl and its rows of samples.jsonl, by step."""

    folder: Path
    config: PPOConfig
    lines: dict[int, dict[str, Any]]
    samples: dict[int, list[dict[str, Any]]]

    def steps(self) -> list[int]:
        """Return the updates that can be repeated: the first, and those after a checkpoint."""
        after = {1, *(step + 1 for step in runs.state_steps(self.folder / "state"))}
        return sorted(after & self.lines.keys())

    def choose(self, step: int | None) -> int:
        """Return `step`, by default the newest that can be repeated. Raises RLHFError C06 if it cannot be repeated."""
        steps = self.steps()
        if not steps:
            text = f"{shown(self.folder)} has no update yet"
            raise RLHFError("C06", text, hint="wait for the first line of its metrics.jsonl")
        if step is None:
            return steps[-1]
        if step not in steps:
            names = ", ".join(map(str, steps))
            reason = "there is no checkpoint before it" if step in self.lines else "the run has no such update"
            text = f"--step {step} of {shown(self.folder)} cannot be repeated: {reason}"
            hint = f"available steps: {names}; output.keep and output.save_steps keep more checkpoints"
            raise RLHFError("C06", text, hint=hint)
        return step

    def state(self, step: int) -> dict[str, Any]:
        """Load the trainer's state after update `step`. Raises RLHFError M05 if it is damaged or missing."""
        folder = runs.state_at(self.folder / "state", step)
        try:
            return save.load_tree(folder)["trainer"]
        except OSError as error:  # a running stage deletes old checkpoints
            raise RLHFError("M05", f"{shown(folder)} no longer exists", hint="choose another step") from error

    def state_after(self, step: int) -> dict[str, Any] | None:
        """Load a state; return None if there is none, or if it is damaged (warns with M05)."""
        if step not in runs.state_steps(self.folder / "state"):
            return None
        try:
            return self.state(step)
        except RLHFError as error:
            (problem,) = error.problems
            terminal.warn(problem.code, f"{problem.text}; its weights are not compared")
            return None

    def parents(self) -> dict[str, Parent]:
        """Open the run's input models. Raises RLHFError as a stage does, and C15 if they or the data have changed."""
        parents = runs.open_parents(self.config)
        logged = read_json_object(self.folder / "identity.json") or {}
        current = runs.compute_identity(self.config, parents, self.config.sources())
        old, new = ({key: identity.get(key, {}) for key in ("parents", "data")} for identity in (logged, current))
        if changes := runs.identity_difference(old, new):
            text = f"the inputs of {shown(self.folder)} have changed: {'; '.join(changes[:5])}"
            raise RLHFError("C15", text, hint="restore the inputs, or run the stage again and verify the new run")
        return parents


def open_run(run: Path) -> Run:
    """Open the PPO run of a run folder or of RUN/ppo itself. Raises RLHFError M01 if there is none."""
    folder = next((path for path in (run / "ppo", run) if (path / "identity.json").is_file()), None)
    if folder is None or not (folder / "config.yaml").is_file():
        hint = "name a run folder with ppo/, e.g. runs/demo"
        raise RLHFError("M01", f"{shown(run)} contains no PPO run", hint=hint)
    config = load_run_config(folder)
    # A repeated update is not pushed to the hub.
    settings = config.ppo.model_copy(update={"push_to_hub_if_best": None})
    config = scale_to_world_size(config.model_copy(update={"ppo": settings}), runs.recorded_num_processes(folder))
    samples: dict[int, list[dict[str, Any]]] = {}
    for row in read_log(folder / "samples.jsonl"):
        samples.setdefault(row["step"], []).append(row)
    return Run(folder, config, {line["step"]: line for line in read_log(folder / "metrics.jsonl")}, samples)
