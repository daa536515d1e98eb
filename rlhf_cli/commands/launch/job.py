"""What the file of a scheduler says about a run: its stages, nodes and processes, and sizes from its plan."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import torch

from rlhf_cli.commands.common.plan.inputs import ModelResolver
from rlhf_cli.commands.common.plan.run_plan import PlanOptions, RunPlan, plan_run
from rlhf_cli.commands.common.plan.stage_plan import StagePlan
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.distributed import CHECKPOINT_RATE, SECONDS_TO_STOP
from rlhf_cli.errors import UNPRINTABLE, RLHFError, shell_path, shell_word
from rlhf_cli.pipeline.load import find_configs, load_all, select_stages
from rlhf_cli.planning.target import Target, gpu_table
from rlhf_cli.system import format_bytes

GIB = 2**30
CPUS_PER_GPU = 8
LAUNCHER_BYTES = 2 * GIB  # of a node: torchrun, the file cache, and what an estimate misses
BYTES_PER_PARAMETER = 4  # a process with a GPU has the weights of a stage in float32 in CPU memory while it loads them
STEP_MARGIN = 3  # a step may take longer than planned, most of all on a GPU
SERVER_PORT = 8000


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `rlhf launch`."""

    nodes: int = 1
    gpus: int | None = None  # on each node; None: those of this machine, or one if `gpu` names a GPU
    servers: int = 0  # nodes that run a rollout server
    cpus: int | None = None  # on each node
    only: tuple[str, ...] = ()  # stages
    gpu: str | None = None  # the name of the nodes' GPUs, or their memory in GiB
    flops: float | None = None  # of each of them
    image: str | None = None
    partition: str | None = None


@dataclass(frozen=True)
class RolloutServer:
    """The vLLM servers of models.engine in ppo.yaml, and of eval.yaml if it names some.

    `starts_first`: they serve a model that exists before PPO starts. Otherwise PPO writes it and waits for them.
    """

    port: int
    starts_first: bool
    stages: Sequence[str]  # that sample from them


@dataclass(frozen=True)
class Job:
    """The values that the templates use. Sizes are of one node."""

    command: str  # that printed the file
    name: str
    run: Path
    python: str  # the program
    stages: Sequence[str]
    nodes: int  # that train
    servers: int  # further nodes
    server: RolloutServer | None
    gpus: int
    gpu: str | None  # its name in gpus.toml
    cpus: int
    memory_gib: int
    planned_seconds: float
    is_bound: bool  # the seconds are a lower bound
    is_measured: bool  # on the machine that prints the file
    stop_seconds: int  # from TERM to the end: for a step and a checkpoint
    image: str | None
    partition: str | None
    trust_remote_code: bool = False

    @property
    def processes(self) -> int:
        """Processes on a node: one for each GPU, or one on the CPU."""
        return max(1, self.gpus)

    @property
    def threads(self) -> int:
        """CPU threads of a process."""
        return max(1, self.cpus // self.processes)


def make_job(engine: str, folder: Path, options: Options, choices: LaunchOptions) -> Job:
    """Return the values for the stages of a run on the chosen nodes.

    Raises RLHFError as `rlhf plan` does, C07 and C09 for an unknown stage, C11 for servers or GPUs that cannot be, E03
    for a stage that does not fit, S03 for names that do not fit on a line.
    """
    _require_one_line(str(folder.absolute()), choices.image, choices.partition)
    files = select_stages(find_configs(folder), folder, only=choices.only, start=None, force=())
    configs = load_all(files, {})
    server = _rollout_server(configs, options, choices)

    gpus = _gpus_per_node(choices)
    trainers = choices.nodes - choices.servers
    planned = PlanOptions(gpu=choices.gpu, flops=choices.flops, processes=trainers * max(1, gpus), machines=trainers)
    plan = plan_run(folder, [], options, planned)
    stages = [stage for stage in plan.stages if stage.stage in files]
    for stage in stages:
        _require_fits(stage, plan, folder)

    return Job(
        command=_command(engine, folder, options, choices),
        name=_name(folder),
        run=folder.absolute(),
        python=sys.executable,
        stages=list(files),
        nodes=trainers,
        servers=choices.servers,
        server=server,
        gpus=gpus,
        gpu=choices.gpu.lower() if choices.gpu and choices.gpu.lower() in gpu_table() else None,
        cpus=choices.cpus or (CPUS_PER_GPU * gpus if gpus else os.cpu_count() or 1),
        memory_gib=math.ceil(max(_host_bytes(stage, gpus) for stage in stages) / GIB),
        planned_seconds=sum(stage.seconds for stage in stages),
        is_bound=any(stage.is_bound for stage in stages),
        is_measured=all(stage.run for stage in stages),
        stop_seconds=max(_seconds_to_stop(stage, configs[stage.stage], planned.processes) for stage in stages),
        image=choices.image,
        partition=choices.partition,
        trust_remote_code=options.trust_remote_code,
    )


def _require_one_line(*names: str | None) -> None:
    """Raise RLHFError S03 for a name with control characters, which would end a comment of the file."""
    for name in names:
        if name and UNPRINTABLE.search(name):
            raise RLHFError("S03", f"{name!r} has characters that cannot be printed", hint="rename it")


def _rollout_server(configs: Mapping[str, Config], options: Options, choices: LaunchOptions) -> RolloutServer | None:
    """Return the servers that --servers asks for. Raises RLHFError C11 unless configs and nodes are for them."""
    if not choices.servers:
        return None
    if choices.servers >= choices.nodes:
        text = f"--servers {choices.servers} of --nodes {choices.nodes}: no node is left to train"
        raise RLHFError("C11", text, hint=f"--nodes counts both: at least {choices.servers + 1}")
    ppo = configs.get("ppo")
    if not isinstance(ppo, PPOConfig) or ppo.models.server is None:
        text = f"--servers {choices.servers}: no stage that is launched samples from a server"
        raise RLHFError("C11", text, hint="set models.engine: {vllm: {url: http://127.0.0.1:8000}} in ppo.yaml")

    body = ModelResolver([ppo], options, prompt=1).start(ppo, "models.sft").body
    is_tied = body.get_text_config().tie_word_embeddings
    starts_first = not (is_tied and ppo.models.server_sync == "disk")
    sft = configs.get("sft")
    if starts_first and isinstance(sft, SFTConfig) and sft.model.adapters:
        text = "--servers: SFT trains adapters, and vLLM needs a whole model"
        raise RLHFError("C11", text, where=sft.where("model.adapters"), hint="train SFT without adapters")
    evaluation = configs.get("eval")
    stages = ["ppo"]
    if isinstance(evaluation, EvalConfig) and evaluation.models.server:
        stages.append("eval")
    port = urlsplit(ppo.models.server.url[0]).port or SERVER_PORT
    return RolloutServer(port, starts_first, stages)


def _gpus_per_node(choices: LaunchOptions) -> int:
    """Return the number of GPUs on a node, which must be what is planned for. Raises RLHFError C11."""
    has_gpu = Target.of(choices.gpu, 1).gpu
    if choices.gpus is None:
        return max(1, torch.cuda.device_count()) if has_gpu else 0
    if choices.gpus and not has_gpu:
        text = f"--gpus {choices.gpus}: this machine has no GPU to plan for"
        raise RLHFError("C11", text, hint="name the GPU of the nodes, e.g. --gpu h100")
    if has_gpu and not choices.gpus:
        hint = "omit --gpu; CUDA_VISIBLE_DEVICES= hides the GPUs of this machine"
        raise RLHFError("C11", "--gpus 0: the plan is for a GPU", hint=hint)
    return choices.gpus


def _require_fits(stage: StagePlan, plan: RunPlan, folder: Path) -> None:
    """Raise RLHFError E03 for a stage that does not fit, with the settings with which it does."""
    if stage.fits is not False:
        return
    needed = f"{format_bytes(stage.memory_bytes)} in {stage.fullest}"
    text = f"{stage.stage} needs {needed}; {plan.target.name} has {format_bytes(plan.target.memory)}"
    fitting = next((each.set for each in stage.advice if each.fits), None)
    hint = f"it fits with {fitting}" if fitting else f"`rlhf plan {shell_path(folder)}` lists settings that save memory"
    raise RLHFError("E03", text, where=stage.file, hint=hint)


def _command(engine: str, folder: Path, options: Options, choices: LaunchOptions) -> str:
    """Return the command that prints the file again."""
    words = ["rlhf", "launch", engine, shell_path(folder)]
    for option in fields(choices):
        value = getattr(choices, option.name)
        if value != option.default:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{option.name} {shell_word(str(each))}" for each in values]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    return " ".join(words)


def _name(folder: Path) -> str:
    """Return the name of the job: that of the run, in the characters and the length that Kubernetes allows."""
    letters = [letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.absolute().name.lower()]
    return f"rlhf-{''.join(letters)}"[:40].rstrip("-")


def _host_bytes(stage: StagePlan, gpus: int) -> float:
    """Return the CPU memory of a node."""
    if not gpus:
        return stage.memory_bytes + LAUNCHER_BYTES
    weights = BYTES_PER_PARAMETER * sum(stage.parameters.values())
    return gpus * (weights + LAUNCHER_BYTES) + LAUNCHER_BYTES


def _seconds_to_stop(stage: StagePlan, config: Config, processes: int) -> int:
    """Return the time for the end of a step and for a checkpoint, which has at most the weights and their moments."""
    step = STEP_MARGIN * sum(stage.step_seconds.values())
    checkpoint = max(each.bytes.get("weights", 0) + each.bytes.get("optimizer", 0) for each in stage.phases)
    if isinstance(config, PPOConfig):
        if config.models.server:
            step += config.models.server.timeout  # of a rollout, which the plan does not count
        if config.ppo.fsdp:
            checkpoint *= processes  # the plan counts one process's part
    return math.ceil(SECONDS_TO_STOP + step + checkpoint / CHECKPOINT_RATE)
