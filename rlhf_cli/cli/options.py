"""The options that several commands take, and the stages."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.cli import completion

STAGES = {
    "sft": "Supervised fine-tuning: train a language model on examples.",
    "reward": "Train a reward model on pairs of a better and a worse answer.",
    "ppo": "Train the policy by PPO against the reward model.",
    "eval": "Compare the models on held-out prompts and write a report.",
}


def config_of(stage: str, place: Path) -> Path | None:
    """The stage's YAML that a path stands for: the file itself, or the one in that folder."""
    return next((file for file in (place, place / f"{stage}.yaml") if file.is_file()), None)


ConfigFile = Annotated[
    Path,
    typer.Option("--config", "-c", metavar="FILE", help="The stage's YAML file.", autocompletion=completion.config),
]
FileOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|DIR",
        help="A stage's YAML file, or a run's folder.",
        autocompletion=completion.runs_and_configs,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a key by its full path; may be given again.",
        autocompletion=completion.assignments,
    ),
]
Trailing = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="The same as --set.", autocompletion=completion.assignments),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let models run Python code from their own folders.")
]
Nproc = Annotated[
    str | None,
    typer.Option("--nproc", metavar="N", help="Run in N processes, one to a GPU; auto: as many as there are GPUs."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Step = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="last|selected|N",
        help="Of PPO's policies: the evaluation selects one.",
        autocompletion=completion.steps,
    ),
]
