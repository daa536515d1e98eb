"""`rlhf launch`: print the file of a scheduler."""

from pathlib import Path
from typing import Annotated

from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import (
    ONLY_RUN,
    Debug,
    Quiet,
    TrustRemoteCode,
    Verbose,
    argument,
    heavy_imports,
    option,
)
from rlhf_cli.commands.launch.engines import ENGINES

ENGINE_TEXT = f"The scheduler: {', '.join(ENGINES)}."
RUN_TEXT = f"Run folder, on a disk that all nodes share. {ONLY_RUN}"
GPUS_TEXT = "GPUs of a node; 0: one process on the CPU. Default: those of this machine; 1 with --gpu."


def launch(
    engine: Annotated[str, argument("ENGINE", ENGINE_TEXT, completion.one_of(ENGINES))],
    folder: Annotated[Path | None, argument("RUN", RUN_TEXT, completion.runs)] = None,
    nodes: Annotated[int, option("--nodes", "N", "Nodes, with those of --servers.", min=1)] = 1,
    gpus: Annotated[int | None, option("--gpus", "G", GPUS_TEXT, min=0)] = None,
    servers: Annotated[int, option("--servers", "M", "Nodes that run a rollout server of vLLM.", min=0)] = 0,
    cpus: Annotated[int | None, option("--cpus", "C", "CPU cores of a node. Default: 8 for each GPU.", min=1)] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME|GIB", "GPU of the nodes: h100, 4090, ..., or GiB with --flops.")
    ] = None,
    flops: Annotated[float | None, option("--flops", "N", "FLOP/s of a GPU whose GiB --gpu gives.", min=1)] = None,
    only: Annotated[
        list[str] | None, option("--only", "STAGE", "Run only this stage. Repeatable.", completion.stages)
    ] = None,
    image: Annotated[str | None, option("--image", "IMAGE", "Container image with rlhf.")] = None,
    partition: Annotated[str | None, option("--partition", "NAME", "Partition of Slurm.")] = None,
    out: Annotated[Path | None, option("--out -o", "FILE", "New file to write. Default: print it.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Print the file that runs the stages on several machines.

    It is for a scheduler: read it, edit it, and submit it with the scheduler's own tool.
    """
    from rlhf_cli.config.base import Options

    run = folder or only_run(has_configs=True)
    with heavy_imports():
        from rlhf_cli.commands.launch.job import LaunchOptions
        from rlhf_cli.commands.launch.run import print_file

    choices = LaunchOptions(
        nodes=nodes,
        gpus=gpus,
        servers=servers,
        cpus=cpus,
        only=tuple(only or ()),
        gpu=gpu,
        flops=flops,
        image=image,
        partition=partition,
    )
    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    print_file(engine, run, options, choices, out=out)
