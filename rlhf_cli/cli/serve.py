"""`rlhf serve`: serve a model with vLLM."""

from typing import Annotated

from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import (
    Debug,
    ModelStage,
    Quiet,
    StageFolder,
    Step,
    TrustRemoteCode,
    Verbose,
    flag,
    heavy_imports,
)
from rlhf_cli.errors import RLHFError


def serve(
    folder: StageFolder = None,
    step: Step = None,
    stage: ModelStage = None,
    rollouts: Annotated[bool, flag("--rollouts", "The server that models.engine of ppo.yaml samples from.")] = False,
    execute: Annotated[bool, flag("--exec", "Start it. Default: only print the command.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Print the vLLM command that serves a model, or start it."""
    from rlhf_cli.config.base import Options

    if rollouts and (stage or step):
        raise RLHFError("C11", "--rollouts serves models.sft of ppo.yaml", hint="omit --stage and --step")
    run = folder or only_run()
    with heavy_imports():
        from rlhf_cli.commands import serve

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    serve.run(run, options, stage=stage, step=step, rollouts=rollouts, execute=execute)
