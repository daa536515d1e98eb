"""`rlhf sft`, `reward`, `dpo`, `ppo` and `eval`: run one stage."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli import distributed, system, terminal
from rlhf_cli.cli.options import (
    ConfigFile,
    Debug,
    Nproc,
    Quiet,
    ReportTo,
    Set,
    StageWords,
    TrustRemoteCode,
    Verbose,
    config_of,
    flag,
    heavy_imports,
    is_assignment,
    overrides_of,
    tracker_overrides,
)
from rlhf_cli.errors import RLHFError, shell_path, shown
from rlhf_cli.system import die_with_parent

if TYPE_CHECKING:
    from rlhf_cli.config.base import Config, Options


# `run(config, options)` of each stage is here; importing it loads torch.
STAGE_MODULES = {
    "sft": "rlhf_cli.stages.sft",
    "reward": "rlhf_cli.stages.reward.run",
    "dpo": "rlhf_cli.stages.dpo",
    "ppo": "rlhf_cli.stages.ppo.run",
    "eval": "rlhf_cli.stages.eval.run",
}


def stage_command(stage: str) -> Callable[..., None]:
    """Return the command function of one stage."""

    def command(
        config: ConfigFile = None,
        words: StageWords = None,
        set_: Set = None,
        dry_run: Annotated[bool, flag("--dry-run", "Print the resolved config, inputs and outputs, and exit.")] = False,
        fresh: Annotated[bool, flag("--fresh", "Move existing output to RUN/.old/ and start over.")] = False,
        nproc: Nproc = None,
        report_to: ReportTo = None,
        trust_remote_code: TrustRemoteCode = False,
        quiet: Quiet = False,
        verbose: Verbose = False,
        debug: Debug = False,
    ) -> None:
        from rlhf_cli.config.base import Options
        from rlhf_cli.config.loading import load

        file, assignments = _config_file(stage, config, words or [])
        overrides = [*tracker_overrides(report_to), *overrides_of(set_, assignments)]
        loaded = load(stage, file, overrides)
        options = Options(dry_run=dry_run, fresh=fresh, trust_remote_code=trust_remote_code, debug=debug)
        if dry_run:
            from rlhf_cli.pipeline.preview import preview_stage

            preview_stage(loaded, fresh=fresh)
            return

        distributed.check_group()
        if nproc and (processes := distributed.resolve_num_processes(nproc)) > 1:
            raise typer.Exit(_launch(processes, loaded, overrides, options))
        _run_here(loaded, options)

    return command


def _launch(processes: int, config: "Config", overrides: list[str], options: "Options") -> int:
    """Start the stage in a group of processes, and return its exit code."""
    from rlhf_cli.pipeline.children import child_command
    from rlhf_cli.runs.resolve import weights_bytes

    _, *arguments = child_command(config, overrides, options, fresh=options.fresh)
    return distributed.launch_group(processes, arguments, weights_bytes=weights_bytes(config))


def _run_here(config: "Config", options: "Options") -> None:
    """Run the stage in this process, which may be one of a group, and print the results of an evaluation."""
    if distributed.world_size() > 1:
        die_with_parent(os.getppid())
        terminal.say(f"{config.stage:<8} {distributed.world_size()} processes")

    from rlhf_cli import runs
    from rlhf_cli.config.eval import EvalConfig

    with system.translate_resource_errors(config.folder), runs.detect_moved_folder(config.folder):
        _runner(config.stage)(config, options)
        if isinstance(config, EvalConfig):
            from rlhf_cli.report.show import show_evaluation

            show_evaluation(config)
        terminal.conclude(shown(config.folder), {})


def _config_file(stage: str, config: Path | None, words: list[str]) -> tuple[Path, list[str]]:
    """Return the YAML file, of --config or of the first word, and the other words. Raises RLHFError C09, C11."""
    if config is not None:
        _refuse_folder(stage, config)
        if words and "=" not in words[0]:
            hint = f"omit one of them: rlhf {stage} {shell_path(Path(words[0]))}"
            raise RLHFError("C11", f"--config {shown(config)} and {words[0]} name a config each", hint=hint)
        return config, words
    if not words or is_assignment(words[0]):
        raise RLHFError("C11", "no FILE or RUN is given", hint=f"rlhf {stage} RUN, or rlhf {stage} --config FILE")

    path = Path(words[0])
    file = config_of(stage, path)
    if file is None and os.path.isdir(path):
        hint = f"name a run folder, or its file: rlhf {stage} FILE"
        raise RLHFError("C09", f"{shown(path)} has no {stage}.yaml", hint=hint)
    return file or path, words[1:]


def _refuse_folder(stage: str, config: Path) -> None:
    """Raise RLHFError C09 if --config is a folder."""
    if not os.path.isdir(config):
        return
    hint = "give the stage's YAML file"
    if file := config_of(stage, config):
        hint = f"--config {shell_path(file)}; for all stages: rlhf run {shell_path(config)}"
    raise RLHFError("C09", f"{shown(config)} is a folder, --config takes a file", hint=hint)


def _runner(stage: str) -> "Callable[[Config, Options], None]":
    """Import and return the `run(config, options)` of a stage. This import loads torch."""
    import importlib

    with heavy_imports(), redirect_stdout(io.StringIO()):  # transformers prints there that WANDB_MODE is offline
        stage_run: Callable[[Config, Options], None] = importlib.import_module(STAGE_MODULES[stage]).run
    return stage_run
