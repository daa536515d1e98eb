"""Start and completion of a stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf_cli import data, runs, system, terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.models import devices, tokenizers
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import machine

Check = Callable[[Mapping[str, Parent]], None]
C = TypeVar("C", SFTConfig, RewardConfig, DPOConfig, PPOConfig, EvalConfig)


@dataclass(frozen=True)
class StageRun:
    """A stage that was started by `run_stage`."""

    config: Config
    options: Options
    parents: dict[str, Parent]
    process_group: ProcessGroup
    identity: dict[str, Any]
    resumes: bool  # False: it starts over
    memory: str  # line about the memory that it needs, "" if unknown

    def find_checkpoint(self, prefix: str, last_step: int) -> Path | None:
        """Return the newest valid checkpoint in state/; None without one, or if the stage starts over.

        Checkpoints are named by `prefix` and a step up to `last_step`. Raises RLHFError C15 if one is of another run.
        """
        folder = self.config.folder / "state"

        def find() -> Path | None:
            runs.require_free(folder, prefix, last_step)
            return runs.latest_state(folder) if self.resumes else None

        checkpoint: Path | None = self.process_group.run_on_main(find)  # on a network drive ranks might differ
        return checkpoint

    def begin_training(self) -> None:
        """Check the parents once they are loaded, and print the memory. Raises as `runs.require_unchanged`."""
        runs.require_unchanged(self.parents)
        if self.memory:
            terminal.say(f"{self.config.stage:<8} {self.memory}")

    def complete(self, fields: Mapping[str, Any]) -> None:
        """Write the manifest with these fields, which completes the stage."""
        fields = {**fields, "trust_remote_code": self.options.trust_remote_code}
        self.process_group.run_on_main(
            lambda: runs.complete_stage(self.config, self.identity, parents=self.parents, fields=fields)
        )


def run_stage(config: C, options: Options, train: Callable[[C, StageRun], None], check: Check | None = None) -> None:
    """Start a stage on all ranks and call `train`, unless the stage is finished already.

    `check` is called before --fresh archives anything. Warns as `system.remove_accelerate_variables`. Raises RLHFError
    E04 and R14 as `ProcessGroup` does, and as `run_stage_in`.
    """
    system.remove_accelerate_variables()
    with open_process_group() as process_group:
        run_stage_in(process_group, config, options, train, check)


def run_stage_in(
    process_group: ProcessGroup,
    config: C,
    options: Options,
    train: Callable[[C, StageRun], None],
    check: Check | None = None,
) -> None:
    """Start a stage as `run_stage`, on the ranks of this process group.

    Raises RLHFError as `runs.start_stage` and as `machine.check`.
    """
    parents = runs.open_parents(config)
    identity = runs.compute_identity(config, parents, config.sources())

    if check and (options.fresh or runs.stage_status(config, identity).state != "finished"):
        check(parents)
    status = process_group.run_on_main(
        partial(runs.start_stage, config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"{config.stage:<8} finished already: {runs.shown(config.folder)}")
        return

    memory = machine.check(config, parents)
    stage = StageRun(
        config=config,
        options=options,
        parents=parents,
        process_group=process_group,
        identity=identity,
        resumes=status == "resume",
        memory=memory,
    )
    with process_group.translate_dist_errors():
        train(config, stage)


def manifest_fields(rows: data.Rows[Any], tokenizer: Any, stop_token_id: StopTokenId) -> dict[str, Any]:
    """Return the manifest's fields about the tokenizer and the form of the prompts that the stage trained on."""
    return {**tokenizers.manifest_fields(tokenizer, stop_token_id), "prompt_form": rows.prompt_form}
