"""Commands that prepare and train a run: write, convert, check and plan configs, one command per stage, and `run`."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_cli import distributed, system, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import (
    AsJson,
    ConfigFile,
    Debug,
    FileOrFolder,
    Nproc,
    Set,
    StageWords,
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

# `run(config, options)` of each stage is here; importing it loads torch.
STAGE_MODULES = {
    "sft": "rlhf_cli.stages.sft",
    "reward": "rlhf_cli.stages.reward",
    "dpo": "rlhf_cli.stages.dpo",
    "ppo": "rlhf_cli.stages.ppo.run",
    "eval": "rlhf_cli.stages.eval.run",
}
PRESET_TEXT = "Preset name; `rlhf init --list` shows them."
DATA_TEXT = "preferences: file, folder or hub dataset of preference pairs."
COLUMN_TEXT = "preferences: read NAME (prompt, chosen, rejected) from COLUMN. Repeatable."
ADAPTERS_TEXT = "Adapters of a large model: none, lora, qlora, or auto, what fits in memory first. Default: auto."
GPU_TEXT = "GPU that will run a large model, by name (h100, 4090) or GiB. Default: this machine."
BASELINES_TEXT = "Also write dpo.yaml and best_of/sft.yaml: DPO and best-of-n SFT, to compare PPO with."
BALANCE_TEXT = "preferences: drop pairs until length does not tell the chosen answer."
MINUTES_TEXT = "preferences: time budget of the run. Default: 30 on a CPU, 480 on a GPU."


def init(
    preset: Annotated[str | None, argument("PRESET", PRESET_TEXT, completion.presets)] = None,
    folder: Annotated[Path | None, argument("DIR", "Folder to create.")] = None,
    list_: Annotated[bool, flag("--list", "List the presets.")] = False,
    seed: Annotated[int, option("--seed", "N", "Random seed of the generated data and configs.", min=0)] = 0,
    data: Annotated[str | None, option("--data", "PAIRS", DATA_TEXT)] = None,
    base: Annotated[str | None, option("--base", "MODEL", "preferences: model to start from.")] = None,
    column: Annotated[list[str] | None, option("--column", "NAME=COLUMN", COLUMN_TEXT)] = None,
    plain: Annotated[bool, flag("--plain", "preferences: use the texts without a chat template.")] = False,
    balance_length: Annotated[bool, flag("--balance-length", BALANCE_TEXT)] = False,
    minutes: Annotated[float | None, option("--minutes", "N", MINUTES_TEXT, min=1)] = None,
    adapters: Annotated[str | None, option("--adapters", "KIND", ADAPTERS_TEXT)] = None,
    gpu: Annotated[str | None, option("--gpu", "NAME|GIB", GPU_TEXT)] = None,
    baselines: Annotated[bool, flag("--baselines", BASELINES_TEXT)] = False,
    from_trl: Annotated[Path | None, typer.Option("--from-trl", metavar="FILE", hidden=True)] = None,
    trl: Annotated[str | None, typer.Option("--trl", metavar="0.11|1.12", hidden=True)] = None,
    debug: Debug = False,
) -> None:
    """Create a run folder from a preset, or from your preference pairs."""
    from rlhf_cli.commands import init as presets

    preference_options = {
        "data": data, "base": base, "column": column, "plain": plain, "balance-length": balance_length,
        "minutes": minutes,
    }  # fmt: skip
    used = [name for name, value in preference_options.items() if value]
    if from_trl is not None or trl is not None:  # the old name of `rlhf convert FILE DIR`
        if from_trl is None or preset is None or folder is not None or used or adapters or gpu or seed or baselines:
            text = "--from-trl takes a file and a folder, and no other option than --trl"
            raise RLHFError("C11", text, hint="rlhf convert train.py runs/mine")
        convert(from_trl, Path(preset), trl)
        return
    if list_:
        terminal.table(["preset", "what it is"], [[name, each.description] for name, each in presets.PRESETS.items()])
        return
    if preset is None or (folder is None and preset not in presets.PRESETS):
        raise RLHFError("C11", "a preset and a folder are needed", hint="rlhf init demo runs/demo; rlhf init --list")
    if folder is None:
        example = "preferences --data pairs.jsonl --base MODEL runs/mine"
        hint = f"rlhf init {example if preset == 'preferences' else f'{preset} runs/{preset}'}"
        raise RLHFError("C11", "DIR is missing: the folder to create", hint=hint)
    if preset == "preferences":
        from rlhf_cli.commands.init import preferences

        preferences.init(
            folder, data=data, base=base, columns=column or [], plain=plain, balance_length=balance_length,
            minutes=minutes, adapters=adapters or "auto", gpu=gpu, baselines=baselines, seed=seed,
        )  # fmt: skip
        return
    if preset in presets.PRESETS and used:
        raise RLHFError("C11", f"--{used[0]} belongs to `rlhf init preferences`", hint="remove it")
    presets.init(preset, folder, seed=seed, adapters=adapters, gpu=gpu, baselines=baselines)


def convert(
    file: Annotated[Path, argument("FILE", "TRL PPO settings: a Python script, command line, YAML or JSON.")],
    folder: Annotated[Path, argument("DIR", "Folder to create, for ppo.yaml.")],
    trl: Annotated[
        str | None, option("--trl", "0.11|1.12", "TRL version of FILE. Default: detected from option names.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert TRL PPO settings to a ppo.yaml; the script is not run."""
    from rlhf_cli.commands import convert as commands_convert

    commands_convert.convert(file, folder, trl)


def check(
    path: FileOrFolder,
    assignments: Trailing = None,
    set_: Set = None,
    deep: Annotated[bool, flag("--deep", "Load the models as well.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, flag("--quiet -q", "Print only errors.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Validate configs, data, tokenizers and batch sizes.

    Nothing is trained. All errors are printed together. Exits with 2 if there are any.
    """
    from rlhf_cli.config.base import Options
    from rlhf_cli.pipeline import check

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    overrides = [*(set_ or []), *(assignments or [])]
    with system.translate_resource_errors(path):
        code = check.run(path, overrides, options, deep=deep, as_json=as_json, quiet=quiet)
    raise typer.Exit(code)


MODE_TEXT = "Compare another mode: full, lora or qlora. Default: the adapters of each config."


def plan(
    path: FileOrFolder,
    assignments: Trailing = None,
    set_: Set = None,
    mode: Annotated[str | None, option("--mode", "MODE", MODE_TEXT)] = None,
    prompt: Annotated[
        int | None, option("--prompt-length", "N", "Tokens of the longest prompt; the data is not read.", min=1)
    ] = None,
    flops: Annotated[
        float | None, option("--flops", "N", "Throughput in FLOP/s. Default: measured on this machine.", min=1)
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME|GIB", "GPU that need not be here: h100, 4090, ..., or GiB with --flops.")
    ] = None,
    nproc: Annotated[
        int, option("--nproc", "N", "Plan for N processes, one per GPU; figures are per process.", min=1)
    ] = 1,
    machines: Annotated[int, option("--machines", "N", "Their number of machines, for ppo.fsdp: hybrid.", min=1)] = 1,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Estimate memory and time of each stage without loading weights.

    If a stage does not fit, the plan lists the settings that save memory.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import plan

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    overrides = [*(set_ or []), *(assignments or [])]
    hardware: dict[str, Any] = {"flops": flops, "gpu": gpu, "processes": nproc, "machines": machines}
    plan.run(path, overrides, options, mode=mode, prompt=prompt, as_json=as_json, **hardware)


def stage_command(stage: str) -> Callable[..., None]:
    """Return the command function of one stage."""

    def command(
        config: ConfigFile = None,
        words: StageWords = None,
        set_: Set = None,
        dry_run: Annotated[bool, flag("--dry-run", "Print the resolved config, inputs and outputs, and exit.")] = False,
        fresh: Annotated[bool, flag("--fresh", "Move existing output to RUN/.old/ and start over.")] = False,
        nproc: Nproc = None,
        trust_remote_code: TrustRemoteCode = False,
        debug: Debug = False,
    ) -> None:
        from rlhf_cli.config.base import Options
        from rlhf_cli.config.eval import EvalConfig
        from rlhf_cli.config.machinery.loading import load

        file, assignments = _config_file(stage, config, words or [])
        overrides = [*(set_ or []), *assignments]
        loaded = load(stage, file, overrides)
        options = Options(dry_run=dry_run, fresh=fresh, trust_remote_code=trust_remote_code, debug=debug)
        if dry_run:
            from rlhf_cli.pipeline import run as pipeline

            pipeline.preview(loaded, fresh=fresh)
            return
        distributed.check_group()
        if nproc and (count := distributed.resolve_num_processes(nproc)) > 1:
            from rlhf_cli.pipeline import run as pipeline

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
                from rlhf_cli.commands.report.show import show_evaluation

                show_evaluation(loaded)

    return command


def _config_file(stage: str, config: Path | None, words: list[str]) -> tuple[Path, list[str]]:
    """Return the YAML file, of --config or of the first word, and the other words. Raises RLHFError C09, C11."""
    if config is None:
        if not words or ("=" in words[0] and not os.path.exists(words[0])):
            raise RLHFError("C11", "no FILE or RUN is given", hint=f"rlhf {stage} RUN, or rlhf {stage} --config FILE")
        config, words = Path(words[0]), words[1:]
        file = config_of(stage, config)
        if file is None and os.path.isdir(config):
            hint = f"name a run folder, or its file: rlhf {stage} FILE"
            raise RLHFError("C09", f"{shown(config)} has no {stage}.yaml", hint=hint)
        return file or config, words
    if os.path.isdir(config):
        hint, folder = "give the stage's YAML file", shell_path(config)
        if config_file := config_of(stage, config):
            hint = f"--config {shell_path(config_file)}; for all stages: rlhf run {folder}"
        raise RLHFError("C09", f"{shown(config)} is a folder, --config takes a file", hint=hint)
    return config, words


def _runner(stage: str) -> "Callable[[Config, Options], None]":
    """Import and return the `run(config, options)` of a stage. This import loads torch."""
    import importlib

    with heavy_imports(), redirect_stdout(io.StringIO()):  # transformers prints there that WANDB_MODE is offline
        stage_run: Callable[[Config, Options], None] = importlib.import_module(STAGE_MODULES[stage]).run
    return stage_run


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
    from rlhf_cli.config.base import Options
    from rlhf_cli.pipeline import run as pipeline

    distributed.require_single_process("run")
    options = Options(dry_run=dry_run, trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    with terminal.share_seen_messages():
        code = pipeline.run(folder, [*(set_ or []), *(assignments or [])], options, only or (), start, force or ())
    raise typer.Exit(code)
