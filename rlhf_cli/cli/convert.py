"""`rlhf convert`: convert TRL's PPO settings."""

from pathlib import Path
from typing import Annotated

from rlhf_cli.cli.options import Debug, Quiet, Verbose, argument, option


def convert(
    file: Annotated[Path, argument("FILE", "TRL PPO settings: a Python script, command line, YAML or JSON.")],
    folder: Annotated[Path, argument("DIR", "Folder to create, for ppo.yaml.")],
    trl: Annotated[
        str | None, option("--trl", "0.11|1.12", "TRL version of FILE. Default: detected from option names.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Convert TRL PPO settings to a ppo.yaml; the script is not run."""
    from rlhf_cli.commands.convert import write

    write.convert(file, folder, trl)
