"""Commands that train and evaluate: one per stage, and `run` for the whole chain."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli import distributed, system, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import (
    ConfigFile,
    Debug,
    Nproc,
    Set,
    Trailing,
    TrustRemoteCode,
    argument,
    config_of,
    flag,
    heavy_imports,
    option,
)
from rlhf_cli.errors import RLHFError, shell_path, shown
from rlhf_cli.system import die_with_parent

if TYPE_CHECKING:
    from rlhf_cli.config.base import Config, Options


def stage_command(stage: str) -> Callable[..., None]:
    """Return the command function of one stage."""

    def command(
        config: ConfigFile,
        assignments: Trailing = None,
        set_: Set = None,
        dry_run: Annotated[bool, flag("--dry-run", "Print the resolved config, inputs and outputs, and exit.")] = False,
        fresh: Annotated[bool, flag("--fresh", "Move existing output to RUN/.old/ and start over.")] = False,
        nproc: Nproc = None,
        trust_remote_code: TrustRemoteCode = False,
        debug: Debug = False,
    ) -> None:
        from rlhf_cli.config.base import Options
        from rlhf_cli.config.eval import EvalConfig
        from rlhf_cli.config.loading import load

        if os.path.isdir(config):
            raise _folder_given_error(stage, config)
        overrides = [*(set_ or []), *(assignments or [])]
        loaded = load(stage, config, overrides)
        options = Options(dry_run=dry_run, fresh=fresh, trust_remote_code=trust_remote_code, debug=debug)
        if dry_run:
            from rlhf_cli.commands import run as pipeline

            pipeline.preview(loaded, fresh=fresh)
            return
        distributed.check_group()
        if nproc and (count := distributed.resolve_num_processes(nproc)) > 1:
            from rlhf_cli.commands import run as pipeline

            _, *arguments = pipeline.child_command(loaded, overrides, options, fresh=fresh)
            from rlhf_cli.runs.resolve import weights_bytes

            raise typer.Exit(distributed.launch_group(count, arguments, weights_bytes=weights_bytes(loaded)))
        if distributed.world_size() > 1:
            die_with_parent(os.getppid())
            terminal.say(f"{stage:<8} {distributed.world_size()} processes")
        from rlhf_cli import runs

        with system.translate_resource_errors(loaded.folder), runs.detect_moved_folder(loaded.folder):
            _runner(stage)(loaded, options)
            if isinstance(loaded, EvalConfig):
                from rlhf_cli.commands.report import show_evaluation

                show_evaluation(loaded)

    return command


def _runner(stage: str) -> "Callable[[Config, Options], None]":
    """Import and return the `run(config, options)` of a stage. This import loads torch."""
    import importlib

    with heavy_imports(), redirect_stdout(io.StringIO()):  # transformers prints there that WANDB_MODE is offline
        stage_run: Callable[[Config, Options], None] = importlib.import_module(f"rlhf_cli.stages.{stage}").run
    return stage_run


def _folder_given_error(stage: str, folder: Path) -> RLHFError:
    hint = "give the stage's YAML file"
    if config_file := config_of(stage, folder):
        hint = f"--config {shell_path(config_file)}; for all stages: rlhf run {shell_path(folder)}"
    return RLHFError("C09", f"{shown(folder)} is a folder, --config takes a file", hint=hint)


def run(
    folder: Annotated[
        Path, argument("DIR", "Run folder with sft.yaml, reward.yaml, ppo.yaml, eval.yaml.", completion.runs)
    ],
    assignments: Trailing = None,
    set_: Set = None,
    only: Annotated[
        list[str] | None, option("--only", "STAGE", "Run only this stage. Repeatable.", completion.stages)
    ] = None,
    start: Annotated[str | None, option("--from", "STAGE", "Start at this stage.", completion.stages)] = None,
    force: Annotated[
        list[str] | None,
        option("--force", "STAGE", "Run this stage even if it is up to date. Repeatable.", completion.stages),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print which stages would run, and why.")] = False,
    nproc: Nproc = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Run all stages of a folder that are not up to date.

    --set applies a key to the stage that has its section; '*.seed=3' applies to every stage.
    """
    from rlhf_cli.commands import run as pipeline
    from rlhf_cli.config.base import Options

    distributed.require_single_process("run")
    stage_filter = pipeline.StageFilter(tuple(only or ()), start, tuple(force or ()))
    options = Options(dry_run=dry_run, trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    with terminal.share_seen_messages():
        code = pipeline.run(folder, [*(set_ or []), *(assignments or [])], stage_filter, options)
    raise typer.Exit(code)
