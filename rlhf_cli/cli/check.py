"""`rlhf check`: validate configs and their inputs."""

from typing import Annotated

import typer

from rlhf_cli import system
from rlhf_cli.cli.options import AsJson, Debug, FileOrFolder, Nproc, Set, Trailing, TrustRemoteCode, flag, overrides_of


def check(
    path: FileOrFolder,
    assignments: Trailing = None,
    set_: Set = None,
    deep: Annotated[bool, flag("--deep", "Load the models as well.")] = False,
    nproc: Nproc = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, flag("--quiet -q", "Print only errors.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Validate configs, data, tokenizers and batch sizes.

    Nothing is trained. All errors are printed together. Exits with 2 if there are any.
    """
    from rlhf_cli.config.base import Options
    from rlhf_cli.pipeline.check import check_configs

    options = Options(trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    overrides = overrides_of(set_, assignments)
    with system.translate_resource_errors(path):
        code = check_configs(path, overrides, options, deep=deep, as_json=as_json, quiet=quiet)
    raise typer.Exit(code)
