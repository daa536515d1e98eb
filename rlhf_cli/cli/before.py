"""The commands that help before a run: configs, what is wrong with them, what they need and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import room, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.imports import heavy_imports
from rlhf_cli.cli.options import STAGES, Debug, FileOrFolder, Set, Trailing, TrustRemoteCode
from rlhf_cli.errors import RLHFError, nearest


def init(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET", help="One of `rlhf init --list`.", autocompletion=completion.presets),
    ] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Where to write it.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of its data and of its configs.")] = 0,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PAIRS", help="preferences: a file, folder or hub dataset of pairs."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="preferences: the model to start from.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="OURS=THEIRS",
            help="preferences: the data's name of a column of ours; may be given again.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="preferences: keep texts as they are; use no chat template.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="N", min=1, help="preferences: time for the run; 30 on a CPU, else 480."),
    ] = None,
    from_trl: Annotated[
        Path | None,
        typer.Option("--from-trl", metavar="FILE", help="Write DIR/ppo.yaml from what TRL's PPO was told in FILE."),
    ] = None,
    trl: Annotated[
        str | None, typer.Option("--trl", metavar="0.11|1.12", help="--from-trl: which TRL; seen by its names.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a ready folder of configs, with what they need."""
    wishes = {"data": data, "base": base, "column": column, "plain": plain, "minutes": minutes}
    if from_trl is not None or trl is not None:
        others = [name for name, value in {**wishes, "seed": seed}.items() if value]
        if from_trl is None or preset is None or folder is not None or others:
            text = (
                f"--from-trl does not go with --{others[0]}"
                if others
                else "--from-trl takes a file, and a folder alone"
            )
            raise RLHFError("C11", text, hint="rlhf init --from-trl train.py runs/mine")
        from rlhf_cli import from_trl as moving

        moving.init(from_trl, Path(preset), trl)
        return
    from rlhf_cli import presets

    if list_:
        terminal.table(["preset", "what it is"], [list(row) for row in presets.available().items()])
        return
    if preset is None or (folder is None and preset not in presets.PRESETS):
        raise RLHFError("C11", "a preset and a folder are needed", hint="rlhf init demo runs/demo; rlhf init --list")
    if folder is None:
        words = " --data pairs.jsonl --base MODEL" if preset == "preferences" else ""
        name = "mine" if words else preset
        raise RLHFError("C11", "DIR is missing: where to write it", hint=f"rlhf init {preset}{words} runs/{name}")
    if preset == "preferences":
        presets.init_preferences(
            folder, data=data, base=base, columns=column or [], plain=plain, minutes=minutes, seed=seed
        )
        return
    if preset in presets.PRESETS and (given := [name for name, value in wishes.items() if value]):
        raise RLHFError("C11", f"--{given[0]} belongs to `rlhf init preferences`", hint="leave it out")
    presets.init(preset, folder, seed=seed)


def check(
    path: FileOrFolder,
    assignments: Trailing = None,
    set_: Set = None,
    deep: Annotated[bool, typer.Option("--deep", help="Load the models too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors alone, and the exit code.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Look at configs, files, every row of data, tokenizers and batch sizes; show all that is wrong, train nothing."""
    from rlhf_cli import check
    from rlhf_cli.config import Options

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    overrides = [*(set_ or []), *(assignments or [])]
    with room.explained(path):
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
            help="full, lora, qlora or one-base, for comparison; without it, each stage as its adapters say.",
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt-length", metavar="N", min=1, help="Tokens of the longest prompt; no data is read then."),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option("--flops", metavar="N", help="Operations a second of a machine; this one's are measured."),
    ] = None,
    gpu: Annotated[
        float | None,
        typer.Option("--gpu", metavar="GIB", min=0.001, help="For GPUs of so much memory; with --flops."),
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", metavar="N", min=1, help="For N processes, one to a GPU; the plan is of each.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Estimate memory and time of each stage, loading no weights, and say what to change where it does not fit."""
    from rlhf_cli.config import Options

    with heavy_imports():
        from rlhf_cli import plan

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
    """Print the JSON Schema of a stage's config, or of all of them."""
    from rlhf_cli.config import json_schema

    if stage is not None and stage not in STAGES:
        near = nearest(stage, STAGES)
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"{stage}: not one of {', '.join(STAGES)}", hint=hint)
    terminal.out(json_schema.as_text(stage).rstrip())


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|CODE",
            help="kl_coef, ppo.kl_coef, a section such as data, or D10.",
            autocompletion=completion.keys_and_codes,
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every key of every file, and every code.")] = False,
    debug: Debug = False,
) -> None:
    """Tell what a config key does, its default and where that comes from; or what an error code means."""
    from rlhf_cli import explain

    if (name is None) != all_:
        raise RLHFError("C11", "a key or a code is needed, or --all alone", hint="rlhf explain kl_coef")
    if name is None:
        explain.explain_all()
    else:
        explain.explain(name)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show versions and devices, for a bug report."""
    import json
    import os
    import platform

    import torch

    from rlhf_cli import checkpoints

    facts: dict[str, str | int] = {
        **checkpoints.versions(),
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
