"""Commands that inspect a finished or running run, and export its model."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import system
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import Debug, Set, Step, Trailing, TrustRemoteCode, heavy_imports
from rlhf_cli.errors import RLHFError


def ls(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="Folders to search. Default: ./runs if it exists, else the working directory."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the runs below a folder with stages, results and sizes."""
    from rlhf_cli.commands import status

    status.list_runs(folders or [], as_json=as_json)


def status(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run folder. Default: the only run here.", autocompletion=completion.runs),
    ] = None,
    assignments: Trailing = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show the progress and results of each stage, and what comes next."""
    from rlhf_cli.commands import status

    status.show(folder or only_run(), [*(set_ or []), *(assignments or [])], as_json=as_json)


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Run folder; several are compared. Default: the only run here.",
            autocompletion=completion.runs,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="HTML file. Default: RUN/eval/report.html; ./report.html for several runs."
        ),
    ] = None,
    step: Step = "last",
    debug: Debug = False,
) -> None:
    """Write an HTML report that diagnoses each stage, or compares runs.

    The file is self-contained. It covers the stages that exist so far, so a running run can be inspected.
    """
    from rlhf_cli.commands import report

    run_folders = folders or [only_run()]
    with system.translate_resource_errors(out or run_folders[0]):
        report.run(run_folders, out, step)


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run folder, or folder of one of its stages.", autocompletion=completion.runs
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="New or empty folder to write to."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Hub repository to upload to; created as private."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: create a public repository.")] = False,
    step: Step = "last",
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="ppo, sft or reward. Default: the PPO policy, or SFT if there is none.",
            autocompletion=completion.stages,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: the dtype of the run."),
    ] = None,
    show_prompt: Annotated[
        bool,
        typer.Option("--show-prompt", help="Show a held-out prompt of your data in the model card."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write a plain Hugging Face model folder, or push it to the Hub.

    Adapters are merged. The export is loaded with transformers and must reproduce the logits of the run, or it is
    deleted. --push uploads it as one commit and, without --out, keeps no local copy.
    """
    if out is None and push is None:
        raise RLHFError(
            "C11", "a folder or a repository is needed", hint="rlhf export RUN --out DIR, --push OWNER/NAME"
        )
    if public and push is None:
        raise RLHFError("C11", "--public belongs to --push", hint="leave it out, or add --push OWNER/NAME")
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import export

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    repository = export.Repository(push, public) if push is not None else None
    with system.translate_resource_errors(out or folder):
        export.run(
            folder, out, options, stage=stage, step=step, dtype=dtype, repository=repository, show_prompt=show_prompt
        )


def chat(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run folder, or folder of its SFT or PPO stage.", autocompletion=completion.runs
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="ppo or sft. Default: the PPO policy, or SFT if there is none.",
            autocompletion=completion.chat_stages,
        ),
    ] = None,
    step: Step = "last",
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="sft,ppo",
            help="Let both models answer each prompt, with the same random numbers.",
            autocompletion=completion.chat_pairs,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="X",
            min=0.0,
            help="Sampling temperature; 0 is greedy. Default: the temperature of PPO.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Maximum tokens of a reply. Default: the response length of PPO.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Random seed of the replies.")
    ] = 0,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Chat with the model of a run; see the reward and KL of each reply.

    /help lists the commands. From a pipe, each line is a prompt; replies go to stdout, numbers to stderr.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import chat

    chat_options = chat.ChatOptions(stage, step, compare, temperature, max_new_tokens, seed)
    with system.translate_resource_errors(folder):
        chat.run(folder, chat_options, Options(trust_remote_code=trust_remote_code, debug=debug))


def verify(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run folder with ppo/.", autocompletion=completion.runs),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", min=1, help="Update to repeat. Default: the newest with a checkpoint before it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Repeat one PPO update and compare it with a float64 reference.

    Exits with 1 if the two differ by more than 1e-6 in float64. RUN is not modified.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import verify as verify_command

    with system.translate_resource_errors(folder):
        code = verify_command.run(folder, step, Options(trust_remote_code=trust_remote_code), as_json=as_json)
    raise typer.Exit(code)
