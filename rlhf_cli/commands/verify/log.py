"""What a PPO run has left of one of its updates. Reads only, while the run may still be going."""

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
    """RUN/ppo: its config, and its lines of metrics.jsonl and rows of samples.jsonl by step."""

    folder: Path
    config: PPOConfig
    lines: dict[int, dict[str, Any]]
    samples: dict[int, list[dict[str, Any]]]

    def steps(self) -> list[int]:
        """The updates that can be made again: the first, and those after a kept state."""
        after = {1, *(step + 1 for step in runs.state_steps(self.folder / "state"))}
        return sorted(after & self.lines.keys())

    def choose(self, step: int | None) -> int:
        """`step`, or the newest that can be made again. Raises RLHFError C06 with those that can."""
        possible = self.steps()
        if not possible:
            text = f"{shown(self.folder)} has made no update yet"
            raise RLHFError("C06", text, hint="wait for the first line of its metrics.jsonl")
        if step is None:
            return possible[-1]
        if step not in possible:
            names = ", ".join(map(str, possible))
            why = "an update starts from the state before it" if step in self.lines else "the run has no such update"
            text = f"--step {step} of {shown(self.folder)} cannot be made again: {why}"
            raise RLHFError("C06", text, hint=f"steps that can: {names}; output.keep and output.save_steps make more")
        return step

    def state(self, step: int) -> dict[str, Any]:
        """The trainer's state after update `step`. Raises RLHFError M05 where it is damaged, or gone."""
        folder = runs.state_at(self.folder / "state", step)
        try:
            return save.load_tree(folder)["trainer"]
        except OSError as error:  # a run that is going on drops old states
            raise RLHFError("M05", f"{shown(folder)} is gone", hint="take another step") from error

    def state_after(self, step: int) -> dict[str, Any] | None:
        """`state`, None where none was kept, or where it is damaged: then with a warning, M05."""
        if step not in runs.state_steps(self.folder / "state"):
            return None
        try:
            return self.state(step)
        except RLHFError as error:
            (problem,) = error.problems
            terminal.warn(problem.code, f"{problem.text}; its weights are not compared")
            return None

    def parents(self) -> dict[str, Parent]:
        """The run's parents. Raises RLHFError as a stage does, and C15 where they, or the data, are not the run's."""
        parents = runs.open_parents(self.config)
        made = read_json_object(self.folder / "identity.json") or {}
        now = runs.compute_identity(self.config, parents, self.config.sources())
        then, today = ({key: side.get(key, {}) for key in ("parents", "data")} for side in (made, now))
        if other := runs.identity_difference(then, today):
            text = f"{shown(self.folder)} was made from other inputs: {'; '.join(other[:5])}"
            raise RLHFError("C15", text, hint="put back what it was made from; or run the stage again, then replay it")
        return parents


def open_run(run: Path) -> Run:
    """The PPO run in a run's folder, or of RUN/ppo itself. Raises RLHFError M01 where there is none."""
    folder = next((path for path in (run / "ppo", run) if (path / "identity.json").is_file()), None)
    if folder is None or not (folder / "config.yaml").is_file():
        hint = "name the folder of a run that holds ppo/, e.g. runs/demo"
        raise RLHFError("M01", f"{shown(run)} holds no PPO run", hint=hint)
    config = load_run_config(folder)
    # What a replay makes stays here: no hub is needed.
    settings = config.ppo.model_copy(update={"push_to_hub_if_best": None})
    config = scale_to_world_size(config.model_copy(update={"ppo": settings}), runs.recorded_num_processes(folder))
    samples: dict[int, list[dict[str, Any]]] = {}
    for row in read_log(folder / "samples.jsonl"):
        samples.setdefault(row["step"], []).append(row)
    return Run(folder, config, {line["step"]: line for line in read_log(folder / "metrics.jsonl")}, samples)
