"""`rlhf plan FILE|DIR`: estimate the memory and time of each stage from its config, without loading weights."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.commands import run as pipeline
from rlhf_cli.commands.plan.duration import estimate_duration
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load, stage_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.models import devices
from rlhf_cli.progress import Progress
from rlhf_cli.stages.plan_estimate import Estimate, estimate_stage
from rlhf_cli.stages.plan_inputs import ModelResolver
from rlhf_cli.stages.plan_models import Target
from rlhf_cli.stages.plan_phases import KINDS, MODES

# Freed memory that glibc's malloc keeps, as a share of the tensors; 4 to 75 % were measured (docs/scaling.md).
FRAGMENTATION = 0.3
TRL_BYTES = 220_000_000  # that TRL and datasets add to torch and transformers
GENERATING = ("ppo", "eval")
STEP = {"sft": "a step", "reward": "a step", "ppo": "an update", "eval": "an evaluation"}


def run(
    path: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    mode: str | None = None,
    prompt: int | None = None,
    flops: float | None = None,
    gpu: float | None = None,
    processes: int = 1,
    as_json: bool = False,
) -> None:
    """Print the estimate of each stage, with settings that save memory if it does not fit.

    `mode` replaces that of the configs. `prompt` is the length of the longest prompt, instead of reading the data.
    `flops` is the throughput in FLOP/s of another machine, `gpu` the memory of its GPUs in GiB.
    Raises RLHFError as `rlhf check` does, C07 for an unknown mode, C11 for `gpu` without `flops`.
    """
    if gpu is not None and flops is None:
        text = "--gpu plans for a GPU that need not be here, whose rate cannot be measured"
        raise RLHFError("C11", text, hint="give --flops too, e.g. 4e14: 40 % of an H100's 989e12 in bfloat16")
    if mode is not None and mode not in MODES:
        near = closest_match(mode, MODES)
        raise RLHFError("C07", f"--mode {mode}: not one of {', '.join(MODES)}", hint=near and f"did you mean {near}?")
    target = Target.of(gpu, processes)
    load_seconds = None if gpu else time.process_time()
    configs, routed = _load_configs(path, overrides)
    chain = ModelResolver(configs, options, prompt)
    plans = []
    with Progress("plan", len(configs), "stage", brief=True) as bar:
        stages = [estimate_stage(config, chain, mode, target) for config in configs]
        libraries = 0 if target.gpu else system.process_memory()  # before measurements use memory
        for stage in stages:
            plans.append(_plan(stage, flops, routed[stage.config.stage], chain, libraries))
            bar.advance()
    total = _total(plans, load_seconds)
    if as_json:
        terminal.out(json.dumps({**asdict(target), "device": target.name, "stages": plans, "total": total}, indent=2))
        return
    for plan in plans:
        show(plan, target)
    if len(plans) > 1:
        _show_total(total)


def _load_configs(path: Path, overrides: Sequence[str]) -> tuple[list[Config], dict[str, list[str]]]:
    """Return the configs of a file or folder, and the overrides of each stage."""
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):
        stage = stage_of(path)
        return [load(stage, path, overrides)], {stage: list(overrides)}
    files = pipeline.find_configs(path)
    routed = pipeline.route_overrides(overrides, list(files))
    return list(pipeline.load_all(files, routed).values()), routed


def _plan(
    stage: Estimate, flops: float | None, overrides: Sequence[str], chain: ModelResolver, libraries: int
) -> dict[str, Any]:
    """Return the plan of a stage, as printed by --json."""
    config, name, data, gpu = stage.config, stage.config.stage, stage.data, stage.target.gpu
    libraries += TRL_BYTES if name in ("sft", "reward") and not gpu else 0
    holes = 0 if gpu else round(FRAGMENTATION * stage.peak.total)
    needed = stage.peak.total + holes + libraries
    fits = needed <= stage.target.memory
    time_s = estimate_duration(stage, flops)
    return {
        "stage": name,
        "mode": stage.mode,
        "file": shown(config.file),
        "parameters": stage.parameters,
        "prompt_tokens": data.lengths.prompt,
        "response_tokens": data.lengths.response,
        "phases": [
            {"name": phase.name, "rows": phase.rows, "bytes": phase.bytes, "total": phase.total, "flops": phase.flops}
            for phase in stage.phases
        ],
        "fullest": stage.peak.name,
        "holes": holes,
        "libraries": libraries,
        "needed": needed,
        "fits": fits,
        "seconds": time_s.phases,
        "run": time_s.run,
        "share": time_s.share,
        "unit": data.unit,
        "rows": data.rows,
        "left_out": data.left_out,
        "asked": data.asked,
        "rows_are": data.how,
        "steps": stage.steps,
        "steps_are": stage.steps_are,
        "hours": sum(time_s.phases.values()) * stage.steps / 3600,
        "advice": [] if fits else savings(stage, overrides, chain),
    }


def savings(stage: Estimate, overrides: Sequence[str], chain: ModelResolver) -> list[dict[str, Any]]:
    """Return {set, saves}: settings, and the bytes they save at the peak, the largest saving first."""
    advice = []
    for changes in _candidate_changes(stage):
        try:
            config = load(stage.config.stage, stage.config.file, [*overrides, *changes])
            smaller = estimate_stage(config, chain, stage.mode, stage.target)
        except RLHFError:  # a value that does not go with the others
            continue
        saved = stage.peak.total - smaller.peak.total
        if saved > 0.01 * stage.peak.total:
            advice.append({"set": " ".join(changes), "saves": saved})
    return sorted(advice, key=lambda each: -each["saves"])


def _candidate_changes(stage: Estimate) -> Iterator[list[str]]:
    config, name = stage.config, stage.config.stage
    settings: Any = getattr(config, name)
    if isinstance(config, EvalConfig):
        yield [f"eval.per_device_batch_size={max(1, settings.per_device_batch_size // 2)}"]
        return
    if not settings.gradient_checkpointing:
        yield [f"{name}.gradient_checkpointing=true"]
    rows, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if rows % 2 == 0:
        half = f"{name}.per_device_train_batch_size={rows // 2}"
        yield [half, f"{name}.gradient_accumulation_steps={2 * parts}"]
    if not settings.bf16 and stage.target.computes_in_bf16(True):
        yield [f"{name}.bf16=true"]
    if not isinstance(config, PPOConfig):
        yield ["trainer.optim=adamw_8bit"]
        yield [f"{name}.max_length={settings.max_length // 2}"]
        return
    yield ["ppo.optim=adamw_8bit"]
    yield [f"ppo.micro_batch_tokens={max(1, rows // 2) * stage.data.lengths.row}"]
    at_once = settings.local_rollout_forward_batch_size or settings.episodes_per_update
    yield [f"ppo.local_rollout_forward_batch_size={max(1, at_once // 2)}"]
    if not config.models.adapters:
        yield ["ppo.offload=true"]
        yield ["ppo.fsdp=true"]
    if config.models.value != "policy_head":
        yield ["models.value=policy_head"]
    if not settings.num_shared_layers and stage.policy.layers > 1:
        yield [f"ppo.num_shared_layers={stage.policy.layers // 2}"]
    yield ["ppo.logits_at_a_time=64"]
    if isinstance(settings.response_length, int):
        yield [f"ppo.response_length={max(1, settings.response_length // 2)}"]


def _total(plans: Sequence[dict[str, Any]], load_seconds: float | None) -> dict[str, Any]:
    """Return the total of all stages. `load_seconds`: how long the libraries took to load on this machine."""
    fullest = max(plans, key=lambda plan: plan["needed"])
    return {
        "hours": sum(plan["hours"] for plan in plans),
        "run": all(plan["run"] for plan in plans),
        "starts": len(plans),
        "load_seconds": load_seconds,
        "needed": fullest["needed"],
        "fullest": fullest["stage"],
        "fits": all(plan["fits"] for plan in plans),
    }


def show(plan: dict[str, Any], target: Target) -> None:
    """Print the plan of a stage: a table of memory by phase and kind, then totals, time and rows."""
    size, phases, seconds = system.format_bytes, plan["phases"], plan["seconds"]
    kinds = [kind for kind in KINDS if any(phase["bytes"].get(kind) for phase in phases)]
    rows = [[kind, *(size(phase["bytes"].get(kind, 0)) for phase in phases)] for kind in kinds]
    rows.append(["total", *(size(phase["total"]) for phase in phases)])
    columns = [f"{phase['name']}, {phase['rows']} rows" if phase["rows"] else phase["name"] for phase in phases]
    terminal.table(["", *columns], rows, title=_title(plan, target))
    others = [("libraries", plan["libraries"]), ("what malloc keeps", plan["holes"])]
    extra = "".join(f", {name} {size(count)}" for name, count in others if count)
    verdict = "fits" if plan["fits"] else "does not fit"
    needed = f"{size(plan['needed'])} in {plan['fullest']}{extra}"
    terminal.out(f"memory   {needed}; {target.name} has {size(target.memory)}: {verdict}")
    for advice in plan["advice"]:
        terminal.out(f"         {advice['set']} saves {size(advice['saves'])}")
    step = sum(seconds.values())
    parts = " + ".join(f"{name} {terminal.duration(each)}" for name, each in seconds.items())
    terminal.out(f"time     {STEP[plan['stage']]}: {parts if len(seconds) > 1 else terminal.duration(step)}")
    count = f"{'' if plan['steps_are'] == 'exact' else plan['steps_are'] + ' '}{plan['steps']}"
    limit = ", with all responses at their limit" if plan["stage"] in GENERATING else ""
    total = f"{_bound(plan)} {terminal.duration(step * plan['steps'])}{limit}"
    terminal.out(f"         {count} x {terminal.duration(step)}: {total}")
    if plan["share"] < devices.MIN_CPU_SHARE:
        idle = terminal.duration(step * plan["steps"] * plan["share"])
        terminal.out(f"         other processes leave {plan['share']:.0%} of the processor now; alone about {idle}")
    terminal.out(f"data     {_rows(plan)}")
    terminal.out()


def _title(plan: dict[str, Any], target: Target) -> str:
    models = ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items())
    prompt, response = plan["prompt_tokens"], plan["response_tokens"]
    lengths = f"rows of {prompt + response} tokens"
    if plan["stage"] in GENERATING:
        lengths = f"prompts of {prompt} tokens, responses of {response}"
    mode = "" if plan["mode"] == "full" else f"; mode {plan['mode']}"
    processes = f"; each of {target.processes} processes" if target.processes > 1 else ""
    return f"{plan['stage']}: {models} parameters; {lengths}{mode}{processes}"


def _rows(plan: dict[str, Any]) -> str:
    """Describe how many rows are used and how many are dropped."""
    if plan["rows_are"] != "exact" and not plan["rows"]:
        return "not read"
    certainty = "" if plan["rows_are"] == "exact" else f"{plan['rows_are']} "
    dropped, asked = plan["left_out"], plan["asked"]
    note = f"; {certainty}{dropped} of {asked} rows dropped ({dropped / asked:.1%})" if dropped else ""
    return f"{certainty}{plan['rows']} {plan['unit']}{note}"


def _show_total(total: dict[str, Any]) -> None:
    verdict = "fits" if total["fits"] else "does not fit"
    memory = f"at most {system.format_bytes(total['needed'])} of memory, in {total['fullest']}: {verdict}"
    hours = terminal.duration(3600 * total["hours"])
    terminal.out(f"in all   {_bound(total)} {hours} for {total['starts']} stages; {memory}")
    loads = total["load_seconds"]
    loading = f" (some {terminal.duration(loads)} here, longer with TRL)" if loads else ""
    terminal.out(f"         on top: {total['starts']} starts{loading}, evaluations, report card and states")


def _bound(times: dict[str, Any]) -> str:
    """Return "about" for measured times, "at least" for those of matrix products only."""
    return "about" if times["run"] else "at least"
