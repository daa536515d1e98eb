"""`rlhf check`: validate configs and their inputs."""

from typing import Annotated

import typer

from rlhf_cli import system
from rlhf_cli.cli.options import (
    AsJson,
    Debug,
    FileOrFolder,
    Nproc,
    Quiet,
    Set,
    Trailing,
    TrustRemoteCode,
    Verbose,
    flag,
    path_and_overrides,
)


def check(
    path: FileOrFolder = None,
    assignments: Trailing = None,
    set_: Set = None,
    deep: Annotated[bool, flag("--deep", "Load the models as well.")] = False,
    nproc: Nproc = None,
    as_json: AsJson = False,
    before_run: Annotated[bool, typer.Option("--before-run", hidden=True)] = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Validate configs, data, tokenizers and batch sizes.

    Nothing is trained. All errors are printed together. Exits with 2 if there are any.
    """
    from rlhf_cli.config.base import Options
    from rlhf_cli.pipeline.check import check_configs

    options = Options(trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    place, overrides = path_and_overrides(path, set_, assignments)
    with system.translate_resource_errors(place):
        code = check_configs(place, overrides, options, deep=deep, as_json=as_json, quiet=quiet or before_run)
    raise typer.Exit(code)
