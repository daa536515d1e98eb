"""The app: all commands by group, and what `rlhf` without a command prints."""

from collections.abc import Callable
from typing import Annotated

import typer

from rlhf_cli import __version__, terminal
from rlhf_cli.cli import (
    chat,
    check,
    convert,
    env,
    explain,
    export,
    init,
    label,
    launch,
    plan,
    report,
    run,
    schema,
    serve,
    stage,
    status,
    verify,
)
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


def _add(panel: str, *commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(rich_help_panel=panel)(command)


_add("Train", init.init, convert.convert, check.check, plan.plan, run.run, launch.launch)
for _stage, _text in STAGE_SUMMARIES.items():
    app.command(_stage, help=_text, rich_help_panel="Train")(stage.stage_command(_stage))
_add("Inspect", status.status, status.ls, report.report, chat.chat, label.label, verify.verify)
_add("Inspect", explain.explain, schema.schema, env.env)
_add("Ship", export.export, serve.serve)
app.command("replay", hidden=True)(verify.verify)  # the old name of verify


@app.callback(invoke_without_command=True)
def _no_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        terminal.out(f"rlhf {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        terminal.error(context.get_help())
        raise typer.Exit(2)
