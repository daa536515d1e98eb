"""The commands of `rlhf`, and the one place where errors become lines and exit codes.

Nothing heavy is imported at the top: `rlhf --help` answers at once, and each command imports what it needs.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf_cli import __version__, launch, processes, room, terminal
from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.signals import end_with

STAGES = {
    "sft": "Supervised fine-tuning: train a language model on examples.",
    "reward": "Train a reward model on pairs of a better and a worse answer.",
    "ppo": "Train the policy by PPO against the reward model.",
    "eval": "Compare the models on held-out prompts and write a report.",
}


TO_SPEAK = 5.0  # seconds that another process has to say what it found


class Terminated(BaseException):
    """SIGTERM, as an exception: what is open is closed on the way out."""


class Commands(TyperGroup):
    """All commands, inside the one error boundary."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit: 0 done, 2 wrong beforehand, 1 failed on the way, 130 and 143 by a signal."""
        arguments = list(sys.argv[1:] if args is None else args)
        code = 0
        terminal.forget_warnings()
        before = _on_sigterm(_raise_terminated)
        try:
            try:
                code = super().main(arguments, prog_name, complete_var, False, windows_expand_args, **extra) or 0
            except Exception as error:
                if "--debug" in arguments:
                    terminal.say_here(traceback.format_exc().rstrip())
                code = _explain(error)
        except Terminated:  # while it explained, too
            code = 143
        finally:
            _on_sigterm(before)
            if checkpoints := sys.modules.get("rlhf_cli.checkpoints"):
                checkpoints.release()
        if code in (129, 130, 143):
            terminal.say("stopped by a signal")
        sys.exit(code)


def _explain(error: Exception) -> int:
    """Say on stderr what is wrong, a line and a hint for each problem; returns the exit code."""
    if isinstance(error, RLHFError):
        if processes.count() == 1 or not _told_by_others(error):
            (terminal.say if processes.is_first() else terminal.say_here)(str(error))
        return error.exit_code
    if isinstance(error, typer.Abort):
        return 130
    if hasattr(error, "format_message"):  # typer's errors of usage
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "rlhf"
        terminal.say(str(RLHFError("C11", " ".join(error.format_message().split()), hint=f"{command} --help")))
        return 2
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    terminal.say_here(str(RLHFError("R00", text, hint="the same command with --debug shows where")))
    return 1


def _told_by_others(error: RLHFError) -> bool:
    """Of several processes, whether another one says it: who ends first has the launcher end the others.

    Most of what is wrong all find, and the first process says it. What another one found alone, that one says when the
    first has not ended. Who only knows that one is missing (R14) waits for it to speak, and to end first: the exit code
    of the group is that one's.
    """
    missing, first = error.problems[0].code == "R14", processes.is_first()
    try:
        if missing or not first:
            time.sleep(2 * TO_SPEAK if missing else TO_SPEAK)
    except Terminated:
        return not (missing and first)
    return missing and not first


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _on_sigterm(handler: Any) -> Any:
    """Set what SIGTERM does and return what it did before; only the main thread may, and None leaves it."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None


app = typer.Typer(
    name="rlhf",
    cls=Commands,
    help="RLHF from the shell: sft, reward, ppo, eval. One YAML each, chained by what they leave on disk.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The stage's YAML file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key by its full path; may be given again."),
]
Trailing = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="The same as --set.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let models run Python code from their own folders.")
]
Nproc = Annotated[
    str | None,
    typer.Option("--nproc", metavar="N", help="Run in N processes, one to a GPU; auto: as many as there are GPUs."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Step = Annotated[
    str, typer.Option("--step", metavar="last|selected|N", help="Of PPO's policies: the evaluation selects one.")
]


def _add_stage(stage: str, text: str) -> None:
    @app.command(stage, help=text)
    def command(
        config: ConfigFile,
        assignments: Trailing = None,
        set_: Set = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print the resolved config and what it would read and write.")
        ] = False,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Move the old output to RUN/.old/ and start over.")
        ] = False,
        nproc: Nproc = None,
        trust_remote_code: TrustRemoteCode = False,
        debug: Debug = False,
    ) -> None:
        from rlhf_cli.config import Options, load

        if os.path.isdir(config):
            raise _folder_for_a_file(stage, config)
        overrides = [*(set_ or []), *(assignments or [])]
        loaded = load(stage, config, overrides)
        options = Options(dry_run=dry_run, fresh=fresh, trust_remote_code=trust_remote_code, debug=debug)
        if dry_run:
            from rlhf_cli import pipeline

            pipeline.preview(loaded, fresh=fresh)
            return
        processes.check_group()
        if nproc and (count := launch.number(nproc)) > 1:
            from rlhf_cli import pipeline

            _, *arguments = pipeline.child_command(loaded, overrides, options, fresh=fresh)
            raise typer.Exit(launch.run(count, arguments))
        if processes.count() > 1:
            end_with(os.getppid())
            terminal.say(f"{stage:<8} {processes.count()} processes")
        with room.explained(loaded.folder):
            _runner(stage)(loaded, options)


for _stage, _text in STAGES.items():
    _add_stage(_stage, _text)


def _runner(stage: str) -> Callable[[Any, Any], None]:
    """The stage's `run(config, options)`: importing it is what brings in torch."""
    import importlib

    return importlib.import_module(f"rlhf_cli.stages.{stage}").run


def _folder_for_a_file(stage: str, folder: Path) -> RLHFError:
    inside = folder / f"{stage}.yaml"
    hint = f"--config {shown(inside)}" if inside.is_file() else "give the stage's YAML file"
    more = f"; for all stages: rlhf run {shown(folder)}" if inside.is_file() else ""
    return RLHFError("C09", f"{shown(folder)} is a folder, --config takes a file", hint=hint + more)


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds sft.yaml, reward.yaml, ppo.yaml, eval.yaml.")],
    assignments: Trailing = None,
    set_: Set = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STAGE", help="Nothing but this stage; may be given again.")
    ] = None,
    start: Annotated[str | None, typer.Option("--from", metavar="STAGE", help="This stage and those after it.")] = None,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="STAGE", help="Run this stage even if it is up to date; may be given again."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and why; run nothing.")] = False,
    nproc: Nproc = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Run the stages of a folder in order; skip what is up to date.

    A key given by --set goes to the stage that has its section; '*.seed=3' goes to every stage.
    """
    from rlhf_cli import pipeline
    from rlhf_cli.config import Options

    processes.refuse_several("run")
    selection = pipeline.Selection(tuple(only or ()), start, tuple(force or ()))
    options = Options(dry_run=dry_run, trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    raise typer.Exit(pipeline.run(folder, [*(set_ or []), *(assignments or [])], selection, options))


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A stage's YAML file, or a run's folder.")],
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


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A stage's YAML file, or a run's folder.")],
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
    from rlhf_cli import plan
    from rlhf_cli.config import Options

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    overrides = [*(set_ or []), *(assignments or [])]
    plan.run(path, overrides, options, mode=mode, prompt=prompt, flops=flops, gpu=gpu, processes=nproc, as_json=as_json)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, which holds ppo/.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=1, help="The update; the newest that can be made again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Make one update of a PPO run again, with a naive reference beside it, and show the largest differences.

    Exits with 1 where the two do not agree to 1e-6 in float64. Changes nothing in RUN.
    """
    from rlhf_cli import replay
    from rlhf_cli.config import Options

    with room.explained(folder):
        code = replay.run(folder, step, Options(trust_remote_code=trust_remote_code), as_json=as_json)
    raise typer.Exit(code)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or that of one of its stages.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write it: a new folder, or an empty one.")
    ],
    step: Step = "last",
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="STAGE", help="ppo, sft or reward; without it, PPO's policy or else SFT's."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="FORMAT", help="float32, bfloat16 or float16; without it, the run's own."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder: adapters merged, safetensors, tokenizer, a model card.

    What was written is loaded with transformers alone and must give the run's own logits; else nothing is left.
    """
    from rlhf_cli import export
    from rlhf_cli.config import Options

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    with room.explained(out):
        export.run(folder, out, options, stage=stage, step=step, dtype=dtype)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run's folder; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write it; RUN/eval/report.html, or ./report.html."),
    ] = None,
    step: Step = "last",
    debug: Debug = False,
) -> None:
    """Draw a run as one HTML page that loads nothing, and says which stage is bad; or compare several runs.

    What is not there yet is left out, so a run can be looked at while it runs.
    """
    from rlhf_cli import report

    with room.explained(out or folders[0]):
        report.run(folders, out, step)


@app.command()
def init(
    preset: Annotated[str | None, typer.Argument(metavar="PRESET", help="One of `rlhf init --list`.")] = None,
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
        typer.Option("--column", metavar="OURS=THEIRS", help="preferences: the data's name of a column of ours."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="preferences: keep texts as they are; use no chat template.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="N", min=1, help="preferences: time for the run; 30 on a CPU, else 480."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a ready folder of configs, with what they need."""
    from rlhf_cli import presets

    if list_:
        terminal.table(["preset", "what it is"], [list(row) for row in presets.available().items()])
        return
    if preset is None or folder is None:
        raise RLHFError("C11", "a preset and a folder are needed", hint="rlhf init demo runs/demo; rlhf init --list")
    if preset == "preferences":
        presets.init_preferences(
            folder, data=data, base=base, columns=column or [], plain=plain, minutes=minutes, seed=seed
        )
        return
    wishes = {"data": data, "base": base, "column": column, "plain": plain, "minutes": minutes}
    if preset in presets.PRESETS and (given := [name for name, value in wishes.items() if value]):
        raise RLHFError("C11", f"--{given[0]} belongs to `rlhf init preferences`", hint="leave it out")
    presets.init(preset, folder, seed=seed)


@app.command()
def schema(
    stage: Annotated[str | None, typer.Argument(metavar="STAGE", help="sft, reward, ppo or eval.")] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a stage's config, or of all of them."""
    import json

    from rlhf_cli import config

    if stage is not None and stage not in STAGES:
        near = nearest(stage, STAGES)
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"{stage}: not one of {', '.join(STAGES)}", hint=hint)
    terminal.out(json.dumps(config.schema(stage), indent=2))


@app.command()
def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="KEY|CODE", help="kl_coef, ppo.kl_coef, a section such as data, or D10.")
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


@app.command()
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


@app.callback(invoke_without_command=True)
def _no_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        terminal.out(f"rlhf {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        terminal.say(context.get_help())
        raise typer.Exit(2)
