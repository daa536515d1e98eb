"""The commands that look at what a run made, and carry it away."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import room
from rlhf_cli.cli.options import Debug, Step, TrustRemoteCode
from rlhf_cli.errors import RLHFError


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


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or that of one of its stages.")],
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

    What was written is loaded with transformers alone and must give the run's own logits; else nothing is left. With
    --push it is uploaded, as one commit; without --out nothing of it stays on this machine then.
    """
    if out is None and push is None:
        raise RLHFError(
            "C11", "a folder or a repository is needed", hint="rlhf export RUN --out DIR, --push OWNER/NAME"
        )
    if public and push is None:
        raise RLHFError("C11", "--public belongs to --push", hint="leave it out, or add --push OWNER/NAME")
    from rlhf_cli import export
    from rlhf_cli.config import Options

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    to = export.Repository(push, public) if push is not None else None
    with room.explained(out or folder):
        export.run(folder, out, options, stage=stage, step=step, dtype=dtype, to=to)


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
