"""Options shared by several commands, and the stages with their summaries."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.cli import completion

STAGES = {
    "sft": "Fine-tune a language model on example answers (SFT).",
    "reward": "Train a reward model on preference pairs.",
    "ppo": "Train the policy with PPO against the reward model.",
    "eval": "Compare the models on held-out prompts and write a report.",
}


def config_of(stage: str, path: Path) -> Path | None:
    """Return the YAML file of a stage: the path itself, or STAGE.yaml in that folder."""
    return next((file for file in (path, path / f"{stage}.yaml") if file.is_file()), None)


ConfigFile = Annotated[
    Path,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file of the stage.", autocompletion=completion.config),
]
FileOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|DIR",
        help="YAML file of a stage, or run folder.",
        autocompletion=completion.runs_and_configs,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a config key by its full path. Repeatable.",
        autocompletion=completion.assignments,
    ),
]
Trailing = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Same as --set.", autocompletion=completion.assignments),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow models to run the Python code in their folders.")
]
Nproc = Annotated[
    str | None,
    typer.Option("--nproc", metavar="N", help="Number of processes, one per GPU. auto: one for each GPU."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")]
Step = Annotated[
    str,
    typer.Option(
        "--step",
        metavar="last|selected|N",
        help="PPO policy: the last, the one that evaluation selected, or update N.",
        autocompletion=completion.steps,
    ),
]


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Disable garbage collection during imports and exclude the imported objects from later collections.

    These million objects are never garbage. Traversing them took a sixth of the CPU time of a tiny chain.
    """
    num_modules, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # otherwise live objects belong to a caller of several commands
            gc.freeze()
        if was_enabled:
            gc.enable()
