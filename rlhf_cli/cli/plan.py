"""`rlhf plan`: estimate memory and time."""

from typing import Annotated

from rlhf_cli.cli.options import (
    AsJson,
    Debug,
    FileOrFolder,
    Quiet,
    Set,
    Trailing,
    TrustRemoteCode,
    Verbose,
    heavy_imports,
    option,
    path_and_overrides,
)

MODE_TEXT = "Compare another mode: full, lora or qlora. Default: the adapters of each config."


def plan(
    path: FileOrFolder = None,
    assignments: Trailing = None,
    set_: Set = None,
    mode: Annotated[str | None, option("--mode", "MODE", MODE_TEXT)] = None,
    prompt: Annotated[
        int | None, option("--prompt-length", "N", "Tokens of the longest prompt; the data is not read.", min=1)
    ] = None,
    flops: Annotated[
        float | None, option("--flops", "N", "Throughput in FLOP/s. Default: measured on this machine.", min=1)
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME|GIB", "GPU that need not be here: h100, 4090, ..., or GiB with --flops.")
    ] = None,
    nproc: Annotated[
        int, option("--nproc", "N", "Plan for N processes, one per GPU; figures are per process.", min=1)
    ] = 1,
    machines: Annotated[int, option("--machines", "N", "Their number of machines, for ppo.fsdp: hybrid.", min=1)] = 1,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Estimate memory and time of each stage without loading weights.

    If a stage does not fit, the plan lists the settings that save memory.
    """
    from rlhf_cli.config.base import Options

    place, overrides = path_and_overrides(path, set_, assignments)
    with heavy_imports():
        from rlhf_cli.commands.common.plan.run_plan import PlanOptions
        from rlhf_cli.commands.plan.run import print_plan

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    choices = PlanOptions(mode=mode, prompt=prompt, flops=flops, gpu=gpu, processes=nproc, machines=machines)
    print_plan(place, overrides, options, choices, as_json=as_json)
