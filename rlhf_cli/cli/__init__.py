"""The `rlhf` command line.

Heavy modules are imported inside the commands, so `rlhf --help` is fast.
"""

from collections.abc import Callable
from typing import Annotated

import typer

from rlhf_cli import __version__, terminal
from rlhf_cli.cli import inspect, train
from rlhf_cli.cli.errors import CommandGroup
from rlhf_cli.cli.options import STAGE_SUMMARIES

app = typer.Typer(
    name="rlhf",
    cls=CommandGroup,
    help="RLHF from the command line: SFT, reward model, PPO and evaluation, one YAML file each.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN: list[Callable[..., None]] = [train.init, train.convert, train.check, train.plan, train.run]
INSPECT: list[Callable[..., None]] = [inspect.status, inspect.ls, inspect.report, inspect.chat, inspect.verify]
INSPECT += [inspect.explain, inspect.schema, inspect.env]
for _command in TRAIN:
    app.command(rich_help_panel="Train")(_command)
for _stage, _text in STAGE_SUMMARIES.items():
    app.command(_stage, help=_text, rich_help_panel="Train")(train.stage_command(_stage))
for _command in INSPECT:
    app.command(rich_help_panel="Inspect")(_command)
for _command in (inspect.export, inspect.serve):
    app.command(rich_help_panel="Ship")(_command)
app.command("replay", hidden=True)(inspect.verify)  # the old name of verify


@app.callback(invoke_without_command=True)
def _no_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        terminal.out(f"rlhf {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        terminal.say(context.get_help())
        raise typer.Exit(2)
