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
from rlhf_cli.commands.plan import duration, estimate
from rlhf_cli.commands.plan.estimate import Estimate
from rlhf_cli.commands.plan.measure import KINDS
from rlhf_cli.commands.plan.memory import Target
from rlhf_cli.commands.plan.meta import MODES
from rlhf_cli.commands.plan.models import ModelResolver
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load, stage_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, closest_match, shown
from rlhf_cli.models import devices
from rlhf_cli.progress import Progress


def savings(stage_estimate: Estimate, overrides: Sequence[str], chain: ModelResolver) -> list[tuple[str, int]]:
    """Return (settings, bytes saved at the peak) of settings that save memory, the largest saving first."""
    saved = []
    for changes in _candidate_changes(stage_estimate):
        try:
            config = load(stage_estimate.config.stage, stage_estimate.config.file, [*overrides, *changes])
            smaller = estimate.estimate_stage(config, chain, stage_estimate.mode, stage_estimate.target)
        except RLHFError:  # a value that does not go with the others
            continue
        gain = stage_estimate.peak.total - smaller.peak.total
        if gain > 0.01 * stage_estimate.peak.total:
            saved.append((" ".join(changes), gain))
    return sorted(saved, key=lambda saving: -saving[1])


def _candidate_changes(stage_estimate: Estimate) -> Iterator[list[str]]:
    config, stage = stage_estimate.config, stage_estimate.config.stage
    settings: Any = getattr(config, stage)
    if isinstance(config, EvalConfig):
        yield [f"eval.per_device_batch_size={max(1, settings.per_device_batch_size // 2)}"]
        return
    if not settings.gradient_checkpointing:
        yield [f"{stage}.gradient_checkpointing=true"]
    rows, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if rows % 2 == 0:
        half = f"{stage}.per_device_train_batch_size={rows // 2}"
        yield [half, f"{stage}.gradient_accumulation_steps={2 * parts}"]
    if not settings.bf16 and stage_estimate.target.computes_in_bf16(True):
        yield [f"{stage}.bf16=true"]
    key = "ppo.optim" if isinstance(config, PPOConfig) else "trainer.optim"
    yield [f"{key}=adamw_8bit"]
    if not isinstance(config, PPOConfig):
        yield [f"{stage}.max_length={settings.max_length // 2}"]
        return
    yield [f"ppo.micro_batch_tokens={max(1, rows // 2) * stage_estimate.lengths.row}"]
    at_once = settings.local_rollout_forward_batch_size or settings.episodes_per_update
    yield [f"ppo.local_rollout_forward_batch_size={max(1, at_once // 2)}"]
    if not config.models.adapters:
        yield ["ppo.offload=true"]
        yield ["ppo.fsdp=true"]
    if config.models.value != "policy_head":
        yield ["models.value=policy_head"]
    if not settings.num_shared_layers and stage_estimate.layers > 1:
        yield [f"ppo.num_shared_layers={stage_estimate.layers // 2}"]
    yield ["ppo.logits_at_a_time=64"]
    if isinstance(settings.response_length, int):
        yield [f"ppo.response_length={max(1, settings.response_length // 2)}"]


# Freed memory that glibc's malloc keeps, as a share of the tensors; 4 to 75 % were measured (docs/scaling.md).
FRAGMENTATION = 0.3
TRL_BYTES = 220_000_000  # that TRL and datasets add to torch and transformers


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
    target = Target.of(gpu, processes)
    if mode is not None and mode not in MODES:
        near = closest_match(mode, MODES)
        raise RLHFError("C07", f"--mode {mode}: not one of {', '.join(MODES)}", hint=near and f"did you mean {near}?")
    loaded = time.process_time()
    configs, routed = _configs(path, overrides)
    chain = ModelResolver(configs, options, prompt)
    plans = []
    with Progress("plan", len(configs), "stage", brief=True) as bar:
        estimates = [estimate.estimate_stage(config, chain, mode, target) for config in configs]
        libraries = 0 if target.gpu else system.process_memory()  # before phases run and use memory
        for stage_estimate in estimates:
            plans.append(_plan(stage_estimate, flops, routed[stage_estimate.config.stage], chain, libraries))
            bar.advance()
    total = _total(plans, None if gpu else loaded)
    if as_json:
        told = {**asdict(target), "device": target.name, "stages": plans, "total": total}
        terminal.out(json.dumps(told, indent=2))
        return
    for plan in plans:
        _show(plan, target)
    if len(plans) > 1:
        _show_total(total)


def _configs(path: Path, overrides: Sequence[str]) -> tuple[list[Config], dict[str, list[str]]]:
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml"):
        stage = stage_of(path)
        return [load(stage, path, overrides)], {stage: list(overrides)}
    files = pipeline.find_configs(path)
    routed = pipeline.route_overrides(overrides, list(files))
    return list(pipeline.load_all(files, routed).values()), routed


def _plan(
    stage_estimate: Estimate, flops: float | None, overrides: Sequence[str], chain: ModelResolver, libraries: int
) -> dict[str, Any]:
    """Return the plan of a stage, as printed by --json."""
    config, stage = stage_estimate.config, stage_estimate.config.stage
    libraries += TRL_BYTES if stage in ("sft", "reward") and not stage_estimate.target.gpu else 0
    holes = 0 if stage_estimate.target.gpu else round(FRAGMENTATION * stage_estimate.peak.total)
    needed = stage_estimate.peak.total + holes + libraries
    fits = needed <= stage_estimate.target.memory
    suggestions = [] if fits else savings(stage_estimate, overrides, chain)
    stage_duration = duration.estimate_duration(stage_estimate, flops)
    return {
        "stage": stage,
        "mode": stage_estimate.mode,
        "file": shown(config.file),
        "parameters": stage_estimate.parameters,
        "prompt_tokens": stage_estimate.lengths.prompt,
        "response_tokens": stage_estimate.lengths.response,
        "phases": [
            {"name": phase.name, "rows": phase.rows, "bytes": phase.bytes, "total": phase.total, "flops": phase.work}
            for phase in stage_estimate.phases
        ],
        "fullest": stage_estimate.peak.name,
        "holes": holes,
        "libraries": libraries,
        "needed": needed,
        "fits": fits,
        "seconds": stage_duration.phases,
        "run": stage_duration.run,
        "share": stage_duration.share,
        "unit": stage_estimate.remaining.unit,
        "rows": stage_estimate.remaining.rows,
        "left_out": stage_estimate.remaining.left_out,
        "asked": stage_estimate.remaining.asked,
        "rows_are": stage_estimate.remaining.how,
        "steps": stage_estimate.steps,
        "steps_are": stage_estimate.steps_are,
        "hours": sum(stage_duration.phases.values()) * stage_estimate.steps / 3600,
        "advice": [{"set": settings, "saves": saved} for settings, saved in suggestions],
    }


def _total(plans: Sequence[dict[str, Any]], loaded: float | None) -> dict[str, Any]:
    """Return the total of all stages. `loaded`: seconds that the libraries took to load on this machine."""
    fullest = max(plans, key=lambda plan: plan["needed"])
    return {
        "hours": sum(plan["hours"] for plan in plans),
        "run": all(plan["run"] for plan in plans),
        "starts": len(plans),
        "load_seconds": loaded,
        "needed": fullest["needed"],
        "fullest": fullest["stage"],
        "fits": all(plan["fits"] for plan in plans),
    }


WRITES = ("ppo", "eval")
STEP = {"sft": "a step", "reward": "a step", "ppo": "an update", "eval": "an evaluation"}


def _show(plan: dict[str, Any], target: Target) -> None:
    phases = plan["phases"]
    kinds = [kind for kind in KINDS if any(phase["bytes"].get(kind) for phase in phases)]
    rows = [[kind, *(system.format_bytes(phase["bytes"].get(kind, 0)) for phase in phases)] for kind in kinds]
    rows.append(["total", *(system.format_bytes(phase["total"]) for phase in phases)])
    terminal.table(["", *(_column(phase) for phase in phases)], rows, title=_title(plan, target))
    needed, there = system.format_bytes(plan["needed"]), system.format_bytes(target.memory)
    others = [("libraries", plan["libraries"]), ("what malloc keeps", plan["holes"])]
    libraries = "".join(f", {name} {system.format_bytes(count)}" for name, count in others if count)
    verdict = "fits" if plan["fits"] else "does not fit"
    text = f"memory   {needed} in {plan['fullest']}{libraries}; {target.name} has {there}: {verdict}"
    terminal.out(text)
    for each in plan["advice"]:
        terminal.out(f"         {each['set']} saves {system.format_bytes(each['saves'])}")
    whole = sum(plan["seconds"].values())
    parts = " + ".join(f"{name} {terminal.duration(seconds)}" for name, seconds in plan["seconds"].items())
    parts = parts if len(plan["seconds"]) > 1 else terminal.duration(whole)
    terminal.out(f"time     {STEP[plan['stage']]}: {parts}")
    in_all = terminal.duration(whole * plan["steps"])
    writes = ", with all responses at their limit" if plan["stage"] in WRITES else ""
    steps = f"{'' if plan['steps_are'] == 'exact' else plan['steps_are'] + ' '}{plan['steps']}"
    terminal.out(f"         {steps} x {terminal.duration(whole)}: {_about(plan)} {in_all}{writes}")
    if plan["share"] < devices.MIN_CPU_SHARE:
        alone = terminal.duration(whole * plan["steps"] * plan["share"])
        terminal.out(f"         other work leaves {plan['share']:.0%} of the processor just now; alone some {alone}")
    terminal.out(f"data     {_rows(plan)}")
    terminal.out()


def _rows(plan: dict[str, Any]) -> str:
    """Describe how many rows are used and how many are dropped."""
    if plan["rows_are"] != "exact" and not plan["rows"]:
        return "not read"
    true = "" if plan["rows_are"] == "exact" else f"{plan['rows_are']} "
    left_out, asked = plan["left_out"], plan["asked"]
    told = f"; {true}{left_out} of {asked} rows left out ({left_out / asked:.1%})" if left_out else ""
    return f"{true}{plan['rows']} {plan['unit']}{told}"


def _show_total(total: dict[str, Any]) -> None:
    verdict = "fits" if total["fits"] else "does not fit"
    memory = f"at most {system.format_bytes(total['needed'])} of memory, in {total['fullest']}: {verdict}"
    terminal.out(
        f"in all   {_about(total)} {terminal.duration(3600 * total['hours'])} for {total['starts']} stages; {memory}"
    )
    loads = total["load_seconds"]
    stage_duration = f" (some {terminal.duration(loads)} here, longer with TRL)" if loads else ""
    terminal.out(f"         on top: {total['starts']} starts{stage_duration}, evaluations, report card and states")


def _about(totals: dict[str, Any]) -> str:
    """Return "about" for measured times, "at least" for those of matrix products only."""
    return "about" if totals["run"] else "at least"


def _title(plan: dict[str, Any], target: Target) -> str:
    models = ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items())
    prompt, response = plan["prompt_tokens"], plan["response_tokens"]
    lengths = f"prompts of {prompt} tokens, responses of {response}"
    lengths = lengths if plan["stage"] in WRITES else f"rows of {prompt + response} tokens"
    mode = "" if plan["mode"] == "full" else f"; mode {plan['mode']}"
    each = f"; each of {target.processes} processes" if target.processes > 1 else ""
    return f"{plan['stage']}: {models} parameters; {lengths}{mode}{each}"


def _column(phase: dict[str, Any]) -> str:
    return f"{phase['name']}, {phase['rows']} rows" if phase["rows"] else phase["name"]
