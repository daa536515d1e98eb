"""Options shared by several commands, and the stages with their summaries."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_cli import terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.completion import ignore_errors
from rlhf_cli.cli.errors import only_run
from rlhf_cli.distributed import NPROC_VARIABLE

STAGE_SUMMARIES = {
    "sft": "Fine-tune a language model on example answers (SFT).",
    "reward": "Train a reward model on preference pairs.",
    "dpo": "Train a policy on the pairs with DPO, a baseline (optional).",
    "ppo": "Train the policy with PPO against the reward model.",
    "eval": "Compare the models on held-out prompts and write a report.",
}
Complete = Callable[..., list[str]]


def option(name: str, metavar: str, text: str, complete: Complete | None = None, **more: Any) -> Any:
    """Declare an option with a value; `more` are its limits, min and max, and its environment variable, envvar."""
    return typer.Option(*name.split(), metavar=metavar, help=text, autocompletion=ignore_errors(complete), **more)


def flag(name: str, text: str, **more: Any) -> Any:
    """Declare an option without a value; `more` is its environment variable, envvar."""
    return typer.Option(*name.split(), help=text, **more)


def _mode(name: str, mode: terminal.Mode, text: str) -> Any:
    """Declare an option on what the command prints. The terminal knows it; no command has to pass it on."""

    def set_mode(value: bool) -> bool:
        if value:
            terminal.set_mode(mode)
        return value

    return typer.Option(*name.split(), help=text, callback=set_mode)


def argument(metavar: str, text: str, complete: Complete | None = None) -> Any:
    """Declare a positional argument."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=ignore_errors(complete))


def config_of(stage: str, path: Path) -> Path | None:
    """Return the YAML file of a stage: the path itself, or STAGE.yaml in that folder."""
    return next((file for file in (path, path / f"{stage}.yaml") if file.is_file()), None)


def tracker_overrides(report_to: str | None, *, prefix: str = "") -> list[str]:
    """Return the override of output.report_to for `--report-to NAME,NAME`; --set goes before it."""
    return [f"{prefix}output.report_to=[{report_to}]"] if report_to is not None else []


def is_assignment(word: str) -> bool:
    """Return True for KEY=VALUE where a path may stand."""
    return "=" in word and not os.path.exists(word)


def path_and_overrides(
    path: str | None, set_: list[str] | None, assignments: list[str] | None
) -> tuple[Path, list[str]]:
    """Return the path on the command line, or the only run here, and the overrides.

    A KEY=VALUE in the place of the path is an override. Raises RunNotGiven.
    """
    overrides = overrides_of(set_, assignments)
    if path is None:
        return only_run(has_configs=True), overrides
    if is_assignment(path):
        return only_run(has_configs=True), overrides_of(set_, [path, *(assignments or [])])
    return Path(path), overrides


def overrides_of(set_: list[str] | None, assignments: list[str] | None) -> list[str]:
    """Return the overrides of --set, then those at the end of the command line."""
    return [*(set_ or []), *(assignments or [])]


ConfigFile = Annotated[Path | None, option("--config -c", "FILE", "YAML file of the stage.", completion.config)]
ONLY_RUN = "Default: the only run here."
FileOrFolder = Annotated[
    str | None,
    argument("FILE|DIR", f"YAML file of a stage, or run folder. {ONLY_RUN}", completion.runs_and_configs),
]
Set = Annotated[
    list[str] | None,
    option("--set -s", "KEY=VALUE", "Override a config key by its full path. Repeatable.", completion.assignments),
]
Trailing = Annotated[list[str] | None, argument("KEY=VALUE", "Same as --set.", completion.assignments)]
StageWords = Annotated[
    list[str] | None,
    argument("[FILE|RUN] [KEY=VALUE]", "The file or its run, if no --config; same as --set.", completion.words),
]
TRUST_TEXT = "Allow models to run the Python code in their folders."
TrustRemoteCode = Annotated[bool, flag("--trust-remote-code", TRUST_TEXT, envvar="RLHF_TRUST_REMOTE_CODE")]
NPROC_TEXT = "Number of processes, one per GPU. auto: one for each GPU."
Nproc = Annotated[str | None, option("--nproc", "N", NPROC_TEXT, envvar=NPROC_VARIABLE)]
REPORT_TO_TEXT = "Trackers for output.report_to, e.g. wandb,tensorboard."
ReportTo = Annotated[str | None, option("--report-to", "NAMES", REPORT_TO_TEXT, envvar="RLHF_REPORT_TO")]
STAGE_FOLDER_TEXT = f"Run folder, or folder of one of its stages. {ONLY_RUN}"
StageFolder = Annotated[Path | None, argument("RUN", STAGE_FOLDER_TEXT, completion.runs)]
Quiet = Annotated[bool, _mode("--quiet -q", "quiet", "Print only errors and the path of the result.")]
Verbose = Annotated[bool, _mode("--verbose -v", "verbose", "Print the log of the libraries, too.")]
JsonAtEnd = Annotated[bool, _mode("--json", "json", "Print the result as one JSON object; tables go to stderr.")]
MARKDOWN_TEXT = "Print a summary as Markdown, in GitHub Actions to the job's summary, too."
Markdown = Annotated[bool, _mode("--markdown", "markdown", MARKDOWN_TEXT)]
AsJson = Annotated[bool, flag("--json", "Print JSON.")]
Debug = Annotated[bool, flag("--debug", "Print tracebacks of errors.")]
STAGE_TEXT = "ppo, sft, dpo or reward. Default: the PPO policy, or SFT if there is none."
ModelStage = Annotated[str | None, option("--stage", "STAGE", STAGE_TEXT, completion.stages)]
STEP_TEXT = "PPO policy: the last, the one that the evaluation recommends, or update N. Default: recommended."
Step = Annotated[str | None, option("--step", "last|recommended|N", STEP_TEXT, completion.steps)]


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Disable garbage collection during imports and exclude the imported objects from later collections.

    These million objects are never garbage. Traversing them took a sixth of the CPU time of a tiny chain.
    """
    num_modules = len(sys.modules)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # otherwise live objects belong to a caller of several commands
            gc.freeze()
        if was_enabled:
            gc.enable()
