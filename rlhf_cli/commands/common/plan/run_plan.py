"""Memory and time of each stage of a run, or of one, from configs alone: no weights are loaded."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli import system
from rlhf_cli.commands.common.plan.inputs import ModelResolver
from rlhf_cli.commands.common.plan.stage_plan import StagePlan, TotalPlan, plan_stage, plan_total
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.loading import load, stage_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import MODES, TRLConfig
from rlhf_cli.errors import RLHFError, did_you_mean
from rlhf_cli.models import lora
from rlhf_cli.pipeline.load import find_configs, load_all, route_overrides
from rlhf_cli.planning.estimate import estimate_stage
from rlhf_cli.planning.target import Target
from rlhf_cli.progress import Progress
from rlhf_cli.runs.resolve import models_in_memory


@dataclass(frozen=True)
class PlanOptions:
    """Options of `rlhf plan`."""

    mode: str | None = None  # instead of that of each config
    prompt: int | None = None  # tokens of the longest prompt, instead of reading the data
    flops: float | None = None  # FLOP/s of another machine
    gpu: str | None = None  # the name of its GPUs, or their memory in GiB
    processes: int = 1
    machines: int = 1


@dataclass(frozen=True)
class RunPlan:
    """Plans of the stages of a run, or of one, and their total."""

    target: Target
    stages: list[StagePlan]
    total: TotalPlan


def plan_run(path: Path, overrides: Sequence[str], options: Options, choices: PlanOptions) -> RunPlan:
    """Return the estimate of each stage of a file or folder.

    Raises RLHFError as `rlhf check` does, C07 for an unknown mode or GPU or a number of machines that does not divide
    the processes, C11 for a size in GiB without FLOP/s.
    """
    target = _target(choices.gpu, choices.processes, choices.machines)
    if target.planned and not (target.card or choices.flops):
        text = "--gpu plans for a GPU that need not be here, whose rate cannot be measured"
        raise RLHFError("C11", text, hint="name the GPU, e.g. --gpu h100, or give --flops too, e.g. 4e14")
    mode = "lora" if choices.mode == "one-base" else choices.mode  # its former name for PPO
    if mode is not None and mode not in MODES:
        raise RLHFError("C07", f"--mode {mode}: not one of {', '.join(MODES)}", hint=did_you_mean(mode, MODES))

    load_seconds = None if choices.gpu else time.process_time()
    configs, routed = _load_configs(path, overrides)
    chain = ModelResolver(configs, options, choices.prompt)
    plans = []
    with Progress("plan", len(configs), "stage", brief=True) as bar:
        stages = [estimate_stage(each, chain.stage_inputs(each, mode, target), mode, target) for each in configs]
        process = 0 if target.gpu else system.process_memory()  # before measurements use memory
        for stage in stages:
            if isinstance(stage.config, TRLConfig | PPOConfig):
                start = models_in_memory(stage.config)[0]
                lora.check_adapters(stage.config, chain.start(stage.config, start.key).body)
            plans.append(plan_stage(stage, choices.flops, routed[stage.config.stage], chain=chain, process=process))
            bar.advance()
    return RunPlan(target, plans, plan_total(plans, load_seconds))


def _target(gpu: str | None, processes: int, machines: int) -> Target:
    if processes % machines:
        text = f"--machines {machines}: {processes} processes cannot be the same number on each"
        raise RLHFError("C07", text, hint=f"give all processes of all machines, e.g. --nproc {8 * machines}")
    return Target.of(gpu, processes, sharing=processes // machines)


def _load_configs(path: Path, overrides: Sequence[str]) -> tuple[list[Config], dict[str, list[str]]]:
    """Return the configs of a file or folder, and the overrides of each stage."""
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):
        stage = stage_of(path)
        return [load(stage, path, overrides)], {stage: list(overrides)}
    files = find_configs(path)
    routed = route_overrides(overrides, list(files))
    configs = load_all(files, routed)
    return list(configs.values()), routed
