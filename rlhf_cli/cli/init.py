"""`rlhf init`: create a run folder."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import Debug, JsonAtEnd, Quiet, Verbose, argument, flag, option
from rlhf_cli.errors import RLHFError

PRESET_TEXT = "Preset name; `rlhf init --list` shows them."
DATA_TEXT = "preferences: file, folder or hub dataset of preference pairs."
COLUMN_TEXT = "preferences: read NAME (prompt, chosen, rejected) from COLUMN. Repeatable."
PAIRS_TEXT = "preferences: pairs of a prompt's rated answers: one or all. Default: one."
GAP_TEXT = "preferences: least difference of the ratings of a pair."
MARGIN_TEXT = "preferences: margin of the reward model's loss for each point between two ratings."
ADAPTERS_TEXT = "Adapters of a large model: none, lora, qlora, or auto, what fits in memory first. Default: auto."
GPU_TEXT = "GPU that will run a large model, by name (h100, 4090) or GiB. Default: this machine."
BASELINES_TEXT = "Also write dpo.yaml and best_of/sft.yaml: DPO and best-of-n SFT, to compare PPO with."
BALANCE_TEXT = "preferences: drop pairs until length does not tell the chosen answer."
LABELS_TEXT = "next: labels to train on, from RUN/labels/NAME,... Default: all but those of --compare."
MINUTES_TEXT = "preferences: time budget of the run. Default: 30 on a CPU, 480 on a GPU."


def init(
    preset: Annotated[str | None, argument("PRESET", PRESET_TEXT, completion.presets)] = None,
    folder: Annotated[Path | None, argument("DIR", "Folder to create. next: the finished run.")] = None,
    target: Annotated[Path | None, argument("NEW", "next: folder to create.")] = None,
    list_: Annotated[bool, flag("--list", "List the presets.")] = False,
    seed: Annotated[int, option("--seed", "N", "Random seed of the generated data and configs.", min=0)] = 0,
    data: Annotated[str | None, option("--data", "PAIRS", DATA_TEXT)] = None,
    base: Annotated[str | None, option("--base", "MODEL", "preferences: model to start from.")] = None,
    column: Annotated[list[str] | None, option("--column", "NAME=COLUMN", COLUMN_TEXT)] = None,
    plain: Annotated[bool, flag("--plain", "preferences: use the texts without a chat template.")] = False,
    pairs_per_prompt: Annotated[str | None, option("--pairs-per-prompt", "one|all", PAIRS_TEXT)] = None,
    min_rating_gap: Annotated[float | None, option("--min-rating-gap", "N", GAP_TEXT, min=0)] = None,
    margin_per_point: Annotated[float | None, option("--margin-per-point", "N", MARGIN_TEXT, min=0)] = None,
    balance_length: Annotated[bool, flag("--balance-length", BALANCE_TEXT)] = False,
    minutes: Annotated[float | None, option("--minutes", "N", MINUTES_TEXT, min=1)] = None,
    adapters: Annotated[str | None, option("--adapters", "KIND", ADAPTERS_TEXT)] = None,
    gpu: Annotated[str | None, option("--gpu", "NAME|GIB", GPU_TEXT)] = None,
    baselines: Annotated[bool, flag("--baselines", BASELINES_TEXT)] = False,
    labels: Annotated[str | None, option("--labels", "NAMES", LABELS_TEXT)] = None,
    from_trl: Annotated[Path | None, typer.Option("--from-trl", metavar="FILE", hidden=True)] = None,
    trl: Annotated[str | None, typer.Option("--trl", metavar="0.11|1.12", hidden=True)] = None,
    as_json: JsonAtEnd = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Create a run folder from a preset, from pairs, or from a run.

    On a terminal it asks for the arguments that are missing.
    """
    from rlhf_cli.commands.init import presets

    if terminal.is_interactive() and not (list_ or from_trl or trl or as_json):
        from rlhf_cli.commands.init import dialogue

        answers = dialogue.ask_missing(dialogue.InitArguments(preset, _text(folder), _text(target), data, base, gpu))
        preset, folder, target = answers.preset, _path(answers.folder), _path(answers.target)
        data, base, gpu = answers.data, answers.base, answers.gpu

    for_preferences = {
        "data": data, "base": base, "column": column, "plain": plain, "balance-length": balance_length,
        "minutes": minutes, "pairs-per-prompt": pairs_per_prompt, "min-rating-gap": min_rating_gap,
        "margin-per-point": margin_per_point,
    }  # fmt: skip
    used = [name for name, value in for_preferences.items() if value]
    if from_trl is not None or trl is not None:
        has_others = bool(folder is not None or used or adapters or gpu or seed or baselines)
        _convert_by_old_name(preset, from_trl, trl, has_others=has_others)
        return
    if preset == "next":
        has_others = bool(used or adapters or gpu or seed or baselines)
        _init_next(folder, target, labels, has_others=has_others)
        return
    if target is not None or labels is not None:
        text = f"{'--labels' if labels else target} belongs to `rlhf init next RUN DIR`"
        raise RLHFError("C11", text, hint="remove it")
    if list_:
        presets.print_list()
        return

    if preset is None:
        raise RLHFError("C11", "a preset and a folder are needed", hint="rlhf init demo runs/demo; rlhf init --list")
    presets.require_known(preset)
    if folder is None:
        is_own = preset == "preferences"
        example = "preferences --data pairs.jsonl --base MODEL runs/mine" if is_own else f"{preset} runs/{preset}"
        raise RLHFError("C11", "DIR is missing: the folder to create", hint=f"rlhf init {example}")
    if preset == "preferences":
        from rlhf_cli.commands.init import preferences

        options = preferences.PreferencesOptions(
            data=data,
            base=base,
            columns=column or [],
            plain=plain,
            pairs_per_prompt=pairs_per_prompt,
            min_rating_gap=min_rating_gap,
            margin_per_point=margin_per_point,
            balance_length=balance_length,
            minutes=minutes,
            adapters=adapters or "auto",
            gpu=gpu,
            baselines=baselines,
            seed=seed,
        )
        preferences.init(folder, options)
        return
    if used:
        raise RLHFError("C11", f"--{used[0]} belongs to `rlhf init preferences`", hint="remove it")
    presets.init(preset, folder, seed=seed, adapters=adapters, gpu=gpu, baselines=baselines)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _init_next(run: Path | None, folder: Path | None, labels: str | None, *, has_others: bool) -> None:
    """Run `rlhf init next RUN DIR`."""
    from rlhf_cli.commands.init import next_round

    if run is None or folder is None or has_others:
        text = "next takes the folder of a run and the one to create, and no other option than --labels"
        raise RLHFError("C11", text, hint="rlhf init next runs/round1 runs/round2")
    next_round.init(run, folder, labels.split(",") if labels else [])


def _convert_by_old_name(folder: str | None, file: Path | None, version: str | None, *, has_others: bool) -> None:
    """Run `rlhf init --from-trl FILE DIR`, the old name of `rlhf convert FILE DIR`."""
    if file is None or folder is None or has_others:
        text = "--from-trl takes a file and a folder, and no other option than --trl"
        raise RLHFError("C11", text, hint="rlhf convert train.py runs/mine")

    from rlhf_cli.commands.convert import write

    write.convert(file, Path(folder), version)
