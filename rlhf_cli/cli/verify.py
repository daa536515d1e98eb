"""`rlhf verify`: repeat a PPO update."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import system
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import (
    ONLY_RUN,
    AsJson,
    Debug,
    Quiet,
    TrustRemoteCode,
    Verbose,
    argument,
    heavy_imports,
    option,
)


def verify(
    folder: Annotated[Path | None, argument("RUN", f"Run folder with ppo/. {ONLY_RUN}", completion.runs)] = None,
    step: Annotated[
        int | None, option("--step", "N", "Update to repeat. Default: the newest with a checkpoint before it.", min=1)
    ] = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Repeat one PPO update and compare it with the run, bit for bit.

    Exits with 1 if a number differs. RUN is not modified.
    """
    from rlhf_cli.config.base import Options

    run = folder or only_run()
    with heavy_imports():
        from rlhf_cli.commands import verify

    with system.translate_resource_errors(run):
        code = verify.run(run, step, Options(trust_remote_code=trust_remote_code), as_json=as_json)
    raise typer.Exit(code)
