"""The commands of `rlhf`.

Nothing heavy is imported at the top: `rlhf --help` answers at once, and each command imports what it needs.
"""

from typing import Annotated

import typer

from rlhf_cli import __version__, terminal
from rlhf_cli.cli import after, before, training
from rlhf_cli.cli.boundary import Commands
from rlhf_cli.cli.options import STAGES

app = typer.Typer(
    name="rlhf",
    cls=Commands,
    help="RLHF from the shell: sft, reward, ppo, eval. One YAML each, chained by what they leave on disk.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order of `rlhf --help`.
for _stage, _text in STAGES.items():
    app.command(_stage, help=_text)(training.stage_command(_stage))
for _command in (
    training.run,
    before.init,
    before.check,
    before.plan,
    after.ls,
    after.status,
    after.report,
    after.chat,
    after.export,
    after.replay,
    before.explain,
    before.schema,
    before.env,
):
    app.command()(_command)


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
