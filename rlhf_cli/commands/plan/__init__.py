"""`rlhf plan FILE|DIR`: estimate the memory and time of each stage from its config, without loading weights."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load, stage_of
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.errors import RLHFError, did_you_mean, shell_word, shown
from rlhf_cli.models import devices, lora
from rlhf_cli.pipeline.load import find_configs, load_all, route_overrides
from rlhf_cli.planning.duration import estimate_duration
from rlhf_cli.planning.estimate import Estimate, estimate_stage, overhead_bytes
from rlhf_cli.planning.phase_memory import KINDS, MODES
from rlhf_cli.planning.stage_inputs import ModelResolver
from rlhf_cli.planning.stage_models import Target, models_in_memory
from rlhf_cli.progress import Progress

ATTAINED = 0.4  # of a GPU's peak FLOP/s, assumed for a GPU that is not here
GENERATING = ("ppo", "eval")
VERDICTS = {True: "fits", False: "does not fit", None: "may fit with its optimizer"}
BOUNDS = {True: "about", False: "at least"}  # of measured times, and of those of matrix products only
STEP = {"sft": "a step", "reward": "a step", "dpo": "a step", "ppo": "an update", "eval": "an evaluation"}


def run(
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
    if processes % machines:
        text = f"--machines {machines}: {processes} processes cannot be the same number on each"
        raise RLHFError("C07", text, hint=f"give all processes of all machines, e.g. --nproc {8 * machines}")
    target = Target.of(gpu, processes, sharing=processes // machines)
    if target.planned and not (flops := flops or ATTAINED * (target.peak_flops or 0)):
        text = "--gpu plans for a GPU that need not be here, whose rate cannot be measured"
        raise RLHFError("C11", text, hint="name the GPU, e.g. --gpu h100, or give --flops too, e.g. 4e14")
    mode = "lora" if mode == "one-base" else mode  # its former name for PPO
    if mode is not None and mode not in MODES:
        raise RLHFError("C07", f"--mode {mode}: not one of {', '.join(MODES)}", hint=did_you_mean(mode, MODES))
    load_seconds = None if gpu else time.process_time()
    configs, routed = _load_configs(path, overrides)
    chain = ModelResolver(configs, options, prompt)
    plans = []
    with Progress("plan", len(configs), "stage", brief=True) as bar:
        stages = [estimate_stage(config, chain, mode, target) for config in configs]
        process = 0 if target.gpu else system.process_memory()  # before measurements use memory
        for stage in stages:
            if isinstance(stage.config, TRLConfig | PPOConfig):
                start = models_in_memory(stage.config)[0]
                lora.check_adapters(stage.config, chain.start(stage.config, start.key).body)
            plans.append(_plan(stage, flops, routed[stage.config.stage], chain, process))
            bar.advance()
    total = _total(plans, load_seconds)
    if as_json:
        known = {**asdict(target), "device": target.name, "stages": {plan["stage"]: plan for plan in plans}}
        terminal.out(json.dumps({**known, "total": total}, indent=2))
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
    files = find_configs(path)
    routed = route_overrides(overrides, list(files))
    return list(load_all(files, routed).values()), routed


def _plan(
    stage: Estimate, flops: float | None, overrides: Sequence[str], chain: ModelResolver, process: int
) -> dict[str, Any]:
    """Return the plan of a stage, as printed by --json."""
    config, name, data = stage.config, stage.config.stage, stage.data
    overhead = overhead_bytes(name, stage.peak.total, stage.target, process)
    needed = stage.peak.total + sum(overhead.values())
    time_s = estimate_duration(stage, flops)
    once = {phase.name for phase in stage.phases if phase.once}
    once_s, step_s = ({n: s for n, s in time_s.phases.items() if (n in once) == part} for part in (True, False))
    return {
        "stage": name,
        "mode": stage.mode,
        "file": shown(config.file),
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
        "fits": fits(stage, needed),
        "step_seconds": step_s,
        "once_seconds": once_s,
        "seconds": sum(step_s.values()) * stage.steps + sum(once_s.values()),
        "run": time_s.run,
        "share": time_s.share,
        **{name: getattr(data, name) for name in ("unit", "rows", "left_out", "asked")},
        "rows_are": data.how,
        "steps": stage.steps,
        "steps_are": stage.steps_are,
        "advice": [] if needed <= stage.target.memory else advice(stage, overrides, chain, process),
    }


def fits(stage: Estimate, needed: int) -> bool | None:
    """Return whether a stage fits its target; None if its optimizer may take less than the AdamW that was counted."""
    if needed <= stage.target.memory:
        return True
    optimizer = getattr(stage.config, "trainer", {}).get("optim", "adamw")
    return False if optimizer.startswith(("adamw", "paged_adamw")) else None


def advice(stage: Estimate, overrides: Sequence[str], chain: ModelResolver, process: int) -> list[dict[str, Any]]:
    """Return {set, memory_bytes, fits}: combinations of settings, with adapters first and then without.

    Settings are added, one after the other if it saves memory, until the stage fits; if none fits, both go to the end.
    Rows are cut, which loses data, only if what is in memory beside their activations fits.
    """
    found: dict[bool, dict[str, Any]] = {}
    for adapters in (True, False):
        chosen, peak = list[str](), stage.peak
        for changes in _candidate_changes(stage, adapters=adapters):
            fixed = sum(peak.bytes.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
            if changes[0].partition("=")[0].endswith("_length") and fixed > stage.target.memory:
                break
            kept = [text for text in chosen if text.partition("=")[0] not in {c.partition("=")[0] for c in changes}]
            try:
                config = load(stage.config.stage, stage.config.file, [*overrides, *kept, *changes])
                smaller = estimate_stage(config, chain.with_adapters(config), None, stage.target)
            except RLHFError:  # a value that does not go with the others
                continue
            if smaller.peak.total < 0.99 * peak.total:
                chosen, peak = [*kept, *changes], smaller.peak
                needed = peak.total + sum(overhead_bytes(config.stage, peak.total, stage.target, process).values())
                verdict = fits(smaller, needed)
                found[adapters] = {"set": " ".join(map(shell_word, chosen)), "memory_bytes": needed, "fits": verdict}
                if verdict:
                    break
    return list(found.values())


def memory_savings(stage: str) -> dict[str, tuple[str, Any]]:
    """Return the settings that save memory with whole weights, each with its key and value, in the order to try them.

    Checkpointing takes time, 8-bit AdamW rounds its moments, offload takes time in PPO. A value head on the policy
    changes the algorithm, so it comes last.
    """
    savings: dict[str, tuple[str, Any]] = {
        "gradient checkpointing": (f"{stage}.gradient_checkpointing", True),
        "8-bit AdamW": ("ppo.optim" if stage == "ppo" else "trainer.optim", "adamw_8bit"),
    }
    if stage == "ppo":
        savings |= {"offload in PPO": ("ppo.offload", True), "policy_head in PPO": ("models.value", "policy_head")}
    return savings


def _candidate_changes(stage: Estimate, *, adapters: bool) -> Iterator[list[str]]:
    """Yield settings in the order in which they are tried: what costs least quality and time first."""
    config, name = stage.config, stage.config.stage
    settings: Any = getattr(config, name)
    if isinstance(config, EvalConfig) and adapters:
        return
    if settings.bf16 is False and stage.target.computes_in_bf16(True):
        yield [f"{name}.bf16=true"]
    if isinstance(config, EvalConfig):
        for rows in _halves(settings.per_device_batch_size):
            yield [f"eval.per_device_batch_size={rows}"]
        return
    section = "models" if isinstance(config, PPOConfig) else "model"
    ppo, has_adapters = isinstance(config, PPOConfig), getattr(config, section).adapters
    rows, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if adapters and not has_adapters:
        unusable = [key for key in ("offload", "fsdp") if ppo and getattr(settings, key)]
        yield [f"{section}.adapters={{kind: lora}}", *(f"ppo.{key}=false" for key in unusable)]
    if isinstance(config, SFTConfig) and config.best_of:
        for at_once in _halves(config.best_of.per_device_batch_size):
            yield [f"best_of.per_device_batch_size={at_once}"]
    savings = [[f"{key}={to_yaml(value)}"] for key, value in memory_savings(name).values()]
    yield from savings[: 1 if adapters or has_adapters else None]
    if ppo:
        for at_once in _halves(settings.local_rollout_forward_batch_size or settings.episodes_per_update):
            yield [f"ppo.local_rollout_forward_batch_size={at_once}"]
    for fewer in _halves(rows):
        batch = f"{name}.per_device_train_batch_size={fewer}"
        yield [batch, f"{name}.gradient_accumulation_steps={parts * rows // fewer}"]
    if ppo:
        yield ["ppo.logits_at_a_time=64"]
    if adapters:
        yield [f"{section}.adapters.kind=qlora" if has_adapters else f"{section}.adapters={{kind: qlora}}"]
    length = settings.response_length if ppo else settings.max_length
    for tokens in _halves(length)[:3] if isinstance(length, int) else ():
        yield [f"{name}.{'response_length' if ppo else 'max_length'}={tokens}"]


def _halves(size: int) -> list[int]:
    """Return half of a size, a quarter, and so on, down to 1."""
    return [size >> shift for shift in range(1, size.bit_length()) if size % (1 << shift) == 0]


def _total(plans: Sequence[dict[str, Any]], load_seconds: float | None) -> dict[str, Any]:
    """Return the total of all stages. `load_seconds`: how long the libraries took to load on this machine."""
    fullest = max(plans, key=lambda plan: plan["memory_bytes"])
    known = [plan["fits"] for plan in plans]
    return {
        "seconds": sum(plan["seconds"] for plan in plans),
        "run": all(plan["run"] for plan in plans),
        "starts": len(plans),
        "load_seconds": load_seconds,
        "memory_bytes": fullest["memory_bytes"],
        "fullest": fullest["stage"],
        "fits": False if False in known else None if None in known else True,
    }


def show(plan: dict[str, Any], target: Target) -> None:
    """Print the plan of a stage: a table of memory by phase and kind, then totals, time and rows."""
    size, phases, seconds = system.format_bytes, plan["phases"], plan["step_seconds"]
    kinds = [kind for kind in KINDS if any(phase["bytes"].get(kind) for phase in phases)]
    rows = [[kind, *(size(phase["bytes"].get(kind, 0)) for phase in phases)] for kind in kinds]
    rows.append(["total", *(size(phase["total"]) for phase in phases)])
    columns = [f"{phase['name']}, {phase['rows']} rows" if phase["rows"] else phase["name"] for phase in phases]
    models = ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items())
    prompt, response = plan["prompt_tokens"], plan["response_tokens"]
    rows_text, generated = f"rows of {prompt + response} tokens", f"prompts of {prompt} tokens, responses of {response}"
    mode = "" if plan["mode"] == "full" else f"; mode {plan['mode']}"
    processes = f"; each of {target.processes} processes" if target.processes > 1 else ""
    title = f"{plan['stage']}: {models} parameters; {generated if _generates(plan) else rows_text}{mode}{processes}"
    terminal.table(["", *columns], rows, title=title)
    others = [("libraries", plan["libraries"]), ("what malloc keeps", plan["holes"])]
    extra = "".join(f", {name} {size(count)}" for name, count in others if count)
    needed = f"{size(plan['memory_bytes'])} in {plan['fullest']}{extra}"
    terminal.out(f"memory   {needed}; {target.name} has {size(target.memory)}: {VERDICTS[plan['fits']]}")
    for each in plan["advice"]:
        terminal.out(f"         {size(each['memory_bytes'])}, {VERDICTS[each['fits']]}, with {each['set']}")
    if any("models.adapters" in each["set"] for each in plan["advice"]):
        terminal.out("         adapters in PPO share one base if reward.yaml has model.adapters, too")
    step = sum(seconds.values())
    parts = " + ".join(f"{name} {terminal.duration(each)}" for name, each in seconds.items())
    terminal.out(f"time     {STEP[plan['stage']]}: {parts if len(seconds) > 1 else terminal.duration(step)}")
    count = f"{'' if plan['steps_are'] == 'exact' else plan['steps_are'] + ' '}{plan['steps']}"
    total = f"{BOUNDS[plan['run']]} {terminal.duration(plan['seconds'])}{_assumptions(plan)}"
    once = "".join(f" + {name} {terminal.duration(each)}" for name, each in plan["once_seconds"].items())
    terminal.out(f"         {count} x {terminal.duration(step)}{once}: {total}")
    if plan["share"] < devices.MIN_CPU_SHARE:
        idle = terminal.duration(plan["seconds"] * plan["share"])
        terminal.out(f"         other processes leave {plan['share']:.0%} of the processor now; alone about {idle}")
    terminal.out(f"data     {_rows(plan)}")
    terminal.out()


def _generates(plan: dict[str, Any]) -> bool:
    return plan["stage"] in GENERATING or "rollout" in plan["once_seconds"]


def _assumptions(plan: dict[str, Any]) -> str:
    """Describe what the time of a stage that generates assumes."""
    if not _generates(plan):
        return ""
    mean = plan["mean_response_tokens"]
    text = f", with responses of {mean:.0f} tokens as PPO measured" if mean else ", with all responses at their limit"
    without_server = plan["stage"] == "ppo" and "rollout" not in plan["step_seconds"]
    return text + (", without the rollouts of the server" if without_server else "")


def _rows(plan: dict[str, Any]) -> str:
    """Describe how many rows are used and how many are dropped."""
    if plan["rows_are"] != "exact" and not plan["rows"]:
        return "not read"
    certainty = "" if plan["rows_are"] == "exact" else f"{plan['rows_are']} "
    dropped, asked = plan["left_out"], plan["asked"]
    note = f"; {certainty}{dropped} of {asked} rows dropped ({dropped / asked:.1%})" if dropped else ""
    return f"{certainty}{plan['rows']} {plan['unit']}{note}"


def _show_total(total: dict[str, Any]) -> None:
    size, verdict = system.format_bytes(total["memory_bytes"]), VERDICTS[total["fits"]]
    memory = f"at most {size} of memory, in {total['fullest']}: {verdict}"
    terminal.out(
        f"in all   {BOUNDS[total['run']]} {terminal.duration(total['seconds'])} for {total['starts']} stages; {memory}"
    )
    loads = total["load_seconds"]
    loading = f" (some {terminal.duration(loads)} here, longer with TRL)" if loads else ""
    terminal.out(f"         on top: {total['starts']} starts{loading}, evaluations, report card and states")
