"""The plan of a stage, and of all stages of a run, as `rlhf plan` prints them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_cli.commands.common.plan.advice import Advice, advise, overhead_of, verdict
from rlhf_cli.commands.common.plan.inputs import ModelResolver
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import shown
from rlhf_cli.judges.costs import MostCost, most_costs
from rlhf_cli.planning.duration import estimate_duration
from rlhf_cli.planning.estimate import Estimate
from rlhf_cli.stages.ppo import reward_judges


@dataclass(frozen=True)
class PhasePlan:
    """Memory of a phase at its peak, and its operations."""

    name: str
    rows: int  # at a time
    bytes: dict[str, int]  # by kind
    total: int
    flops: float


@dataclass(frozen=True)
class StagePlan:
    """Plan of a stage; the fields are the keys of --json."""

    stage: str
    mode: str
    file: str
    parameters: dict[str, int]  # by model
    prompt_tokens: int
    response_tokens: int
    mean_response_tokens: float | None  # as PPO measured it
    phases: list[PhasePlan]
    fullest: str  # phase
    holes: int  # bytes that malloc keeps
    libraries: int
    memory_bytes: int
    fits: bool | None  # None: with another optimizer, it may
    step_seconds: dict[str, float]  # by phase
    once_seconds: dict[str, float]
    seconds: float
    run: bool  # whether passes were measured
    is_bound: bool  # the seconds are a lower bound, of matrix products only
    share: float  # of the processor, which the measurement had
    unit: str
    rows: int
    left_out: int
    asked: int
    rows_are: str
    steps: int
    steps_are: str
    advice: list[Advice]
    judges: dict[str, MostCost]  # by name


@dataclass(frozen=True)
class TotalPlan:
    """Plan of all stages of a run; the fields are the keys of --json."""

    seconds: float
    run: bool
    is_bound: bool
    starts: int
    load_seconds: float | None  # that the libraries took to load on this machine
    memory_bytes: int
    fullest: str  # stage
    fits: bool | None


def plan_stage(
    stage: Estimate, flops: float | None, overrides: Sequence[str], *, chain: ModelResolver, process: int
) -> StagePlan:
    """Return the plan of a stage. `process`: bytes of this process before it computes."""
    overhead = overhead_of(stage, process)
    needed = stage.peak.total + overhead.total
    fits = verdict(stage, needed)

    time = estimate_duration(stage, flops)
    once = {phase.name for phase in stage.phases if phase.once}
    once_s = {name: seconds for name, seconds in time.phases.items() if name in once}
    step_s = {name: seconds for name, seconds in time.phases.items() if name not in once}

    data = stage.data
    return StagePlan(
        stage=stage.config.stage,
        mode=stage.mode,
        file=shown(stage.config.file),
        parameters=stage.parameters,
        prompt_tokens=data.lengths.prompt,
        response_tokens=data.lengths.response,
        mean_response_tokens=data.lengths.response_mean or None,
        phases=[PhasePlan(each.name, each.rows, each.bytes, each.total, flops=each.flops) for each in stage.phases],
        fullest=stage.peak.name,
        holes=overhead.holes,
        libraries=overhead.libraries,
        memory_bytes=needed,
        fits=fits,
        step_seconds=step_s,
        once_seconds=once_s,
        seconds=sum(step_s.values()) * stage.steps + sum(once_s.values()),
        run=time.run,
        is_bound=time.is_bound,
        share=time.share,
        unit=data.unit,
        rows=data.rows,
        left_out=data.left_out,
        asked=data.asked,
        rows_are=data.how,
        steps=stage.steps,
        steps_are=stage.steps_are,
        advice=[] if fits else advise(stage, overrides, chain, process),
        judges=_judge_costs(stage),
    )


def _judge_costs(stage: Estimate) -> dict[str, MostCost]:
    """Return what the language models that compare answers cost at most, of an evaluation or as rewards of PPO."""
    config = stage.config
    num_pairs = stage.data.rows
    if not isinstance(config, PPOConfig | EvalConfig):
        return {}
    if isinstance(config, PPOConfig):
        num_pairs = reward_judges.most_pairs(scale_to_world_size(config, stage.target.processes), num_pairs)
    lengths = stage.data.lengths
    return most_costs(
        config,
        num_pairs,
        prompt_tokens=lengths.prompt_mean or lengths.prompt,
        response_tokens=lengths.response_mean or lengths.response,
    )


def plan_total(plans: Sequence[StagePlan], load_seconds: float | None) -> TotalPlan:
    """Return the total of all stages."""
    fullest = max(plans, key=lambda plan: plan.memory_bytes)
    verdicts = {plan.fits for plan in plans}
    return TotalPlan(
        seconds=sum(plan.seconds for plan in plans),
        run=all(plan.run for plan in plans),
        is_bound=any(plan.is_bound for plan in plans),
        starts=len(plans),
        load_seconds=load_seconds,
        memory_bytes=fullest.memory_bytes,
        fullest=fullest.stage,
        fits=next(fits for fits in (False, None, True) if fits in verdicts),
    )
