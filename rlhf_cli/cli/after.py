"""The commands that look at what a run made, and carry it away."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import room
from rlhf_cli.cli import completion
from rlhf_cli.cli.boundary import only_run
from rlhf_cli.cli.imports import heavy_imports
from rlhf_cli.cli.options import Debug, Set, Step, Trailing, TrustRemoteCode
from rlhf_cli.errors import RLHFError


def ls(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Where to look; `runs` where that is there, or here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the runs below a folder, newest first: which stages are done, what came out, when, how large."""
    from rlhf_cli import status

    status.list_runs(folders or [], as_json=as_json)


def status(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="A run's folder; needed where there are several.", autocompletion=completion.runs
        ),
    ] = None,
    assignments: Trailing = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Tell how far each stage of a run is, what came out, and what `rlhf run` would do next. Changes nothing."""
    from rlhf_cli import status

    status.show(folder or only_run(), [*(set_ or []), *(assignments or [])], as_json=as_json)


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="A run's folder, needed where there are several; several are compared.",
            autocompletion=completion.runs,
        ),
    ] = None,
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

    named = folders or [only_run()]
    with room.explained(out or named[0]):
        report.run(named, out, step)


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder, or that of one of its stages.", autocompletion=completion.runs
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write it: a new folder, or an empty one."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="A repository of the hub to upload it to, private if new."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: to a repository that all can see.")] = False,
    step: Step = "last",
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="ppo, sft or reward; without it, PPO's policy or else SFT's.",
            autocompletion=completion.stages,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="FORMAT", help="float32, bfloat16 or float16; without it, the run's own."),
    ] = None,
    show_prompt: Annotated[
        bool,
        typer.Option(
            "--show-prompt", help="Put a held-out prompt of your data into the card's example, for all to read."
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder: adapters merged, safetensors, tokenizer, a model card.

    What was written is loaded with transformers alone and must give the run's own logits; else nothing is left. With
    --push it is uploaded, as one commit; without --out nothing of it stays on this machine then.
    """
    if out is None and push is None:
        raise RLHFError(
            "C11", "a folder or a repository is needed", hint="rlhf export RUN --out DIR, --push OWNER/NAME"
        )
    if public and push is None:
        raise RLHFError("C11", "--public belongs to --push", hint="leave it out, or add --push OWNER/NAME")
    from rlhf_cli.config import Options

    with heavy_imports():
        from rlhf_cli import export

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    to = export.Repository(push, public) if push is not None else None
    with room.explained(out or folder):
        export.run(folder, out, options, stage=stage, step=step, dtype=dtype, to=to, show_prompt=show_prompt)


def chat(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder, or that of its SFT or PPO stage.", autocompletion=completion.runs
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="ppo or sft; without it, PPO's policy or else SFT's.",
            autocompletion=completion.talking,
        ),
    ] = None,
    step: Step = "last",
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="sft,ppo",
            help="Both answer each prompt, with the same draws.",
            autocompletion=completion.compared,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="X", min=0.0, help="0: the most likely tokens; without it, PPO's."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", metavar="N", min=1, help="Of a reply; without it, as many as PPO's."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Of the draws.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Talk to what a run made; below each reply stand its reward, and its KL from the SFT model.

    /help lists the commands. From a pipe each line is a prompt: replies go to stdout, numbers to stderr.
    """
    from rlhf_cli.config import Options

    with heavy_imports():
        from rlhf_cli import chat

    wishes = chat.Wishes(stage, step, compare, temperature, max_new_tokens, seed)
    with room.explained(folder):
        chat.run(folder, wishes, Options(trust_remote_code=trust_remote_code, debug=debug))


def replay(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder, which holds ppo/.", autocompletion=completion.runs),
    ],
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
    from rlhf_cli.config import Options

    with heavy_imports():
        from rlhf_cli import replay

    with room.explained(folder):
        code = replay.run(folder, step, Options(trust_remote_code=trust_remote_code), as_json=as_json)
    raise typer.Exit(code)
