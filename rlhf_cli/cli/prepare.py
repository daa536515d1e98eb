"""Commands that prepare a run: write, convert, check, plan and explain configs."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import system, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import STAGES, Debug, FileOrFolder, Set, Trailing, TrustRemoteCode, heavy_imports
from rlhf_cli.errors import RLHFError, closest_match


def init(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET", help="Preset name; `rlhf init --list` shows them.", autocompletion=completion.presets
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Folder to create.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Random seed of the generated data and configs.")
    ] = 0,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PAIRS", help="preferences: file, folder or hub dataset of preference pairs."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="preferences: model to start from.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=COLUMN",
            help="preferences: read NAME (prompt, chosen, rejected) from COLUMN. Repeatable.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="preferences: use the texts without a chat template.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            metavar="N",
            min=1,
            help="preferences: time budget of the run. Default: 30 on a CPU, 480 on a GPU.",
        ),
    ] = None,
    from_trl: Annotated[Path | None, typer.Option("--from-trl", metavar="FILE", hidden=True)] = None,
    trl: Annotated[str | None, typer.Option("--trl", metavar="0.11|1.12", hidden=True)] = None,
    debug: Debug = False,
) -> None:
    """Create a run folder from a preset, or from your preference pairs."""
    preference_options = {"data": data, "base": base, "column": column, "plain": plain, "minutes": minutes}
    if from_trl is not None or trl is not None:
        conflicts = [name for name, value in {**preference_options, "seed": seed}.items() if value]
        if from_trl is None or preset is None or folder is not None or conflicts:
            text = (
                f"--from-trl does not go with --{conflicts[0]}"
                if conflicts
                else "--from-trl takes a file, and a folder alone"
            )
            raise RLHFError("C11", text, hint="rlhf convert train.py runs/mine")
        convert(from_trl, Path(preset), trl)
        return
    from rlhf_cli.commands import init as presets

    if list_:
        terminal.table(["preset", "what it is"], [list(row) for row in presets.available().items()])
        return
    if preset is None or (folder is None and preset not in presets.PRESETS):
        raise RLHFError("C11", "a preset and a folder are needed", hint="rlhf init demo runs/demo; rlhf init --list")
    if folder is None:
        required = " --data pairs.jsonl --base MODEL" if preset == "preferences" else ""
        name = "mine" if required else preset
        raise RLHFError("C11", "DIR is missing: the folder to create", hint=f"rlhf init {preset}{required} runs/{name}")
    if preset == "preferences":
        presets.init_preferences(
            folder, data=data, base=base, columns=column or [], plain=plain, minutes=minutes, seed=seed
        )
        return
    if preset in presets.PRESETS and (unused := [name for name, value in preference_options.items() if value]):
        raise RLHFError("C11", f"--{unused[0]} belongs to `rlhf init preferences`", hint="leave it out")
    presets.init(preset, folder, seed=seed)


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TRL PPO settings: a Python script, command line, YAML or JSON.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create, for ppo.yaml.")],
    trl: Annotated[
        str | None,
        typer.Option("--trl", metavar="0.11|1.12", help="TRL version of FILE. Default: detected from option names."),
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
    deep: Annotated[bool, typer.Option("--deep", help="Load the models as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Validate configs, data, tokenizers and batch sizes.

    Nothing is trained. All errors are printed together. Exits with 2 if there are any.
    """
    from rlhf_cli.commands import check
    from rlhf_cli.config.base import Options

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    overrides = [*(set_ or []), *(assignments or [])]
    with system.translate_resource_errors(path):
        code = check.run(path, overrides, options, deep=deep, as_json=as_json, quiet=quiet)
    raise typer.Exit(code)


def plan(
    path: FileOrFolder,
    assignments: Trailing = None,
    set_: Set = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="Compare another mode: full, lora, qlora or one-base. Default: the adapters of each config.",
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt-length", metavar="N", min=1, help="Tokens of the longest prompt; the data is not read."),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option("--flops", metavar="N", help="Throughput in FLOP/s. Default: measured on this machine."),
    ] = None,
    gpu: Annotated[
        float | None,
        typer.Option("--gpu", metavar="GIB", min=0.001, help="Memory of each GPU in GiB; needs --flops."),
    ] = None,
    nproc: Annotated[
        int,
        typer.Option("--nproc", metavar="N", min=1, help="Plan for N processes, one per GPU; figures are per process."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    plan.run(path, overrides, options, mode=mode, prompt=prompt, flops=flops, gpu=gpu, processes=nproc, as_json=as_json)


def schema(
    stage: Annotated[
        str | None,
        typer.Argument(metavar="STAGE", help="sft, reward, ppo or eval.", autocompletion=completion.stages),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a config, for editors."""
    from rlhf_cli.config import json_schema

    if stage is not None and stage not in STAGES:
        near = closest_match(stage, STAGES)
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"{stage}: not one of {', '.join(STAGES)}", hint=hint)
    terminal.out(json_schema.schema_text(stage).rstrip())


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|CODE",
            help="Key (kl_coef, ppo.kl_coef), section (data) or error code (D10).",
            autocompletion=completion.keys_and_codes,
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All keys and all error codes.")] = False,
    debug: Debug = False,
) -> None:
    """Explain a config key (meaning, default, source) or an error code."""
    from rlhf_cli.commands import explain

    if (name is None) != all_:
        raise RLHFError("C11", "a key or a code is needed, or --all alone", hint="rlhf explain kl_coef")
    if name is None:
        explain.explain_all()
    else:
        explain.explain(name)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Print versions and devices, for a bug report."""
    import json
    import os
    import platform

    import torch

    from rlhf_cli import runs

    facts: dict[str, str | int] = {
        **runs.versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    if as_json:
        terminal.out(json.dumps(facts, indent=2))
    else:
        terminal.table(["what", "value"], [[name, str(value)] for name, value in facts.items()])
