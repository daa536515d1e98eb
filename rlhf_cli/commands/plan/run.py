"""`rlhf plan FILE|DIR`: estimate the memory and time of each stage from its config, without loading weights."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.commands.plan.advice import advice, fits, overhead_of
from rlhf_cli.commands.plan.inputs import ModelResolver
from rlhf_cli.commands.plan.show import show, show_total
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load, stage_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import MODES, TRLConfig
from rlhf_cli.errors import RLHFError, did_you_mean, shown
from rlhf_cli.models import lora
from rlhf_cli.pipeline import run as pipeline
from rlhf_cli.planning.duration import estimate_duration
from rlhf_cli.planning.estimate import Estimate, estimate_stage
from rlhf_cli.planning.target import Target
from rlhf_cli.progress import Progress
from rlhf_cli.runs.resolve import models_in_memory
from rlhf_cli.stages.eval import pairwise_judges

ATTAINED = 0.4  # of a GPU's peak FLOP/s, assumed for a GPU that is not here


def print_plan(
    path: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    mode: str | None = None,
    prompt: int | None = None,
    flops: float | None = None,
    gpu: str | None = None,
    processes: int = 1,
    machines: int = 1,
    as_json: bool = False,
) -> None:
    """Print the estimate of each stage, with settings that save memory if it does not fit.

    `mode` replaces that of the configs. `prompt` is the length of the longest prompt, instead of reading the data.
    `flops` is the throughput in FLOP/s of another machine, `gpu` the name of its GPUs or their memory in GiB.
    Raises RLHFError as `rlhf check` does, C07 for an unknown mode or GPU or a number of `machines` that does not divide
    `processes`, C11 for a size in GiB without `flops`.
    """
    target = _target(gpu, processes, machines)
    if target.planned and not flops:
        flops = _attained_flops(target)
    mode = "lora" if mode == "one-base" else mode  # its former name for PPO
    if mode is not None and mode not in MODES:
        raise RLHFError("C07", f"--mode {mode}: not one of {', '.join(MODES)}", hint=did_you_mean(mode, MODES))

    load_seconds = None if gpu else time.process_time()
    configs, routed = _load_configs(path, overrides)
    chain = ModelResolver(configs, options, prompt)
    plans = []
    with Progress("plan", len(configs), "stage", brief=True) as bar:
        stages = [estimate_stage(each, chain.stage_inputs(each, mode, target), mode, target) for each in configs]
        process = 0 if target.gpu else system.process_memory()  # before measurements use memory
        for stage in stages:
            if isinstance(stage.config, TRLConfig | PPOConfig):
                start = models_in_memory(stage.config)[0]
                lora.check_adapters(stage.config, chain.start(stage.config, start.key).body)
            plans.append(_plan(stage, flops, routed[stage.config.stage], chain=chain, process=process))
            bar.advance()

    total = _total(plans, load_seconds)
    if as_json:
        known = {**asdict(target), "device": target.name, "stages": {plan["stage"]: plan for plan in plans}}
        terminal.out(json.dumps({**known, "total": total}, indent=2))
        return
    for plan in plans:
        show(plan, target)
    if len(plans) > 1:
        show_total(total)


def _target(gpu: str | None, processes: int, machines: int) -> Target:
    if processes % machines:
        text = f"--machines {machines}: {processes} processes cannot be the same number on each"
        raise RLHFError("C07", text, hint=f"give all processes of all machines, e.g. --nproc {8 * machines}")
    return Target.of(gpu, processes, sharing=processes // machines)


def _attained_flops(target: Target) -> float:
    """Return the rate that a GPU which need not be here is assumed to reach. Raises RLHFError C11."""
    if target.peak_flops is None:
        text = "--gpu plans for a GPU that need not be here, whose rate cannot be measured"
        raise RLHFError("C11", text, hint="name the GPU, e.g. --gpu h100, or give --flops too, e.g. 4e14")
    return ATTAINED * target.peak_flops


def _load_configs(path: Path, overrides: Sequence[str]) -> tuple[list[Config], dict[str, list[str]]]:
    """Return the configs of a file or folder, and the overrides of each stage."""
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):
        stage = stage_of(path)
        return [load(stage, path, overrides)], {stage: list(overrides)}
    files = pipeline.find_configs(path)
    routed = pipeline.route_overrides(overrides, list(files))
    return list(pipeline.load_all(files, routed).values()), routed


def _plan(
    stage: Estimate, flops: float | None, overrides: Sequence[str], *, chain: ModelResolver, process: int
) -> dict[str, Any]:
    """Return the plan of a stage, as printed by --json."""
    data = stage.data
    overhead = overhead_of(stage, process)
    needed = stage.peak.total + sum(overhead.values())
    verdict = fits(stage, needed)
    time_s = estimate_duration(stage, flops)
    once = {phase.name for phase in stage.phases if phase.once}
    once_s = {name: seconds for name, seconds in time_s.phases.items() if name in once}
    step_s = {name: seconds for name, seconds in time_s.phases.items() if name not in once}
    return {
        "stage": stage.config.stage,
        "mode": stage.mode,
        "file": shown(stage.config.file),
        "parameters": stage.parameters,
        "prompt_tokens": data.lengths.prompt,
        "response_tokens": data.lengths.response,
        "mean_response_tokens": data.lengths.response_mean or None,
        "phases": [
            {"name": phase.name, "rows": phase.rows, "bytes": phase.bytes, "total": phase.total, "flops": phase.flops}
            for phase in stage.phases
        ],
        "fullest": stage.peak.name,
        **overhead,
        "memory_bytes": needed,
        "fits": verdict,
        "step_seconds": step_s,
        "once_seconds": once_s,
        "seconds": sum(step_s.values()) * stage.steps + sum(once_s.values()),
        "run": time_s.run,
        "share": time_s.share,
        "unit": data.unit,
        "rows": data.rows,
        "left_out": data.left_out,
        "asked": data.asked,
        "rows_are": data.how,
        "steps": stage.steps,
        "steps_are": stage.steps_are,
        "advice": [] if verdict else advice(stage, overrides, chain, process),
        **_judges(stage),
    }


def _judges(stage: Estimate) -> dict[str, Any]:
    """Return what the judges that compare answers cost at most, by name; nothing without any."""
    config = stage.config
    data = stage.data
    if not isinstance(config, EvalConfig) or not config.pairwise_judges:
        return {}
    prompt_tokens = data.lengths.prompt_mean or data.lengths.prompt
    response_tokens = data.lengths.response_mean or data.lengths.response
    judges = {}
    for name, settings in config.pairwise_judges.items():
        tokens = pairwise_judges.most_tokens(settings, data.rows, prompt_tokens, response_tokens)
        judges[name] = {"calls": pairwise_judges.most_calls(settings, data.rows), "tokens": tokens}
    return {"judges": judges}


def _total(plans: Sequence[dict[str, Any]], load_seconds: float | None) -> dict[str, Any]:
    """Return the total of all stages. `load_seconds`: how long the libraries took to load on this machine."""
    fullest = max(plans, key=lambda plan: plan["memory_bytes"])
    verdicts = [plan["fits"] for plan in plans]
    fits_all: bool | None = True
    if False in verdicts:
        fits_all = False
    elif None in verdicts:
        fits_all = None
    return {
        "seconds": sum(plan["seconds"] for plan in plans),
        "run": all(plan["run"] for plan in plans),
        "starts": len(plans),
        "load_seconds": load_seconds,
        "memory_bytes": fullest["memory_bytes"],
        "fullest": fullest["stage"],
        "fits": fits_all,
    }
