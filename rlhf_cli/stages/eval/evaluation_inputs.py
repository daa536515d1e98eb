"""Settings and inputs of an evaluation, also for `rlhf check` and `plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import AVERAGE_SHARES, SHARES, EvalConfig
from rlhf_cli.config.machinery.paths import FUNCTION
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation.responses import EvalSampling, SnapshotSeries, group_rows
from rlhf_cli.models import interpolation, load
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.rewards import builtin
from rlhf_cli.rewards.function import RewardContext, load_function
from rlhf_cli.rewards.signature import RewardFn, check_columns, missing_column, named_columns
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import started_from
from rlhf_cli.stages.common import lifecycle, model_loading, reading
from rlhf_cli.stages.eval.people_judges import PeopleJudge, read_people

MAX_GROUPS = 20  # values of `eval.by`
MAX_LOGPROB_GAP: float = PPOSettings.model_fields["max_logprob_gap"].default


@dataclass(frozen=True)
class EvaluationInputs:
    """What an evaluation reads besides its models."""

    tokenizer: Any
    sampling: EvalSampling
    prompts: list[data.Prompt]
    columns: list[dict[str, Any]]  # of each prompt's row, those that judges and `eval.by` read
    functions: dict[str, RewardFn]  # judges that are functions
    series: SnapshotSeries
    shares: list[float]  # of policies between SFT and PPO
    missing_eos_penalty: float
    people: dict[str, PeopleJudge]
    max_logprob_gap: float  # of a server


def load_inputs(config: EvalConfig, stage: lifecycle.StageRun) -> EvaluationInputs:
    """Load and check the inputs.

    Raises RLHFError C07, C13, C17, D01-D14, D16, E09, M01, M08, T04, T05.
    """
    options = stage.options
    sft = stage.parents["models.sft"]
    ppo = stage.parents["models.ppo"]
    model_loading.check_same_tokenization(config, options, stage.parents)
    shares = shares_between(config, options, stage.parents)

    tokenizer = model_loading.load_tokenizer(config, options, sft)
    model_config = load.read_config(sft.model, options.trust_remote_code)
    stop_id = model_loading.stop_token_id(tokenizer, sft, model_config.get_text_config().vocab_size)
    settings = ppo_settings(ppo)
    sampling = sampling_params(config, settings, ppo.path, stop_id)

    with stage.process_group.main_process_first():
        usable = reading.read_prompts(config, "data.prompts", tokenizer, model_config, sampling.response_length)
    if usable.num_dropped or len(usable) < config.eval.n:
        terminal.say(f"eval     {reading.describe_rows(usable, 'held-out prompts')}; eval.n is {config.eval.n}")
    functions = judge_functions(config)
    check_columns_read(config, functions, usable)
    warn_of_selection_by_reward(config)

    prompts = usable[: config.eval.n]
    return EvaluationInputs(
        tokenizer=tokenizer,
        sampling=sampling,
        prompts=prompts,
        columns=columns_read(config, functions, prompts),
        functions=functions,
        series=find_snapshots(config, ppo),
        shares=shares,
        missing_eos_penalty=missing_eos_penalty(settings),
        people=read_people(config, stage.parents, usable),
        max_logprob_gap=settings.max_logprob_gap if settings else MAX_LOGPROB_GAP,
    )


def ppo_settings(ppo: Parent) -> PPOSettings | None:
    """Load the settings a policy was trained with; None for an external model."""
    return configs.load("ppo", ppo.path / "config.yaml").ppo if ppo.stage == "ppo" else None


def sampling_params(
    config: EvalConfig, settings: PPOSettings | None, path: Path, stop_token_id: StopTokenId
) -> EvalSampling:
    """Return eval.yaml's sampling settings, else those PPO trained the policy at `path` with (C17 without either)."""
    temperature = config.eval.temperature
    length = config.eval.response_length
    if settings:
        temperature = temperature or settings.temperature
        length = length or settings.max_response_length
        if settings.stop_token == "none":
            stop_token_id = None
        elif settings.stop_token_id is not None:
            stop_token_id = settings.stop_token_id
    if temperature is None or length is None:
        text = f"{shown(path)} does not record how its policy was sampled"
        hint = "set eval.temperature and eval.response_length"
        raise RLHFError("C17", text, where=config.where("models.ppo"), hint=hint)
    return EvalSampling(temperature, length, stop_token_id)


def missing_eos_penalty(settings: PPOSettings | None) -> float:
    """Return PPO's penalty of an answer that does not end; 0 for an external policy."""
    if settings is None or settings.stop_token == "none":
        return 0.0
    return settings.missing_eos_penalty or 0.0


def find_snapshots(config: EvalConfig, ppo: Parent) -> SnapshotSeries:
    """Find the snapshots of a PPO run if `eval.frontier` is set. Warns (M05) of corrupt ones."""
    if not config.eval.frontier:
        return SnapshotSeries()
    if ppo.stage != "ppo":
        return SnapshotSeries(missing=f"{shown(ppo.path)} was not written by `rlhf ppo`")
    folder = ppo.path / runs.SNAPSHOTS
    valid = runs.valid_states(folder, instead="the frontier omits it")
    if not valid:
        return SnapshotSeries(missing=f"{shown(folder)} contains no snapshot")
    last = ppo.manifest.step
    return SnapshotSeries(last, {step: path for step, path in valid.items() if step != last})


def shares_between(config: EvalConfig, options: Options, parents: Mapping[str, Parent]) -> list[float]:
    """Return the shares of the policies between SFT and PPO; by default none if PPO did not start from this SFT model.

    Raises RLHFError C17 for those of `eval.interpolate` if the weights of PPO and SFT do not have the same shapes.
    """
    ppo = parents["models.ppo"]
    sft = parents["models.sft"]
    if config.eval.interpolate is None:
        if not started_from(ppo, sft):
            return []
        settings = ppo_settings(ppo)
        return list(AVERAGE_SHARES if settings and settings.average else SHARES)

    if config.eval.interpolate:
        with at_location(config.where("eval.interpolate")):
            interpolation.check_interpolation(ppo, sft, options.trust_remote_code)
    return sorted(set(config.eval.interpolate))


def warn_of_selection_by_reward(config: EvalConfig) -> None:
    """Warn (C18) if a policy is selected by the reward it was trained on."""
    if config.eval.selection and config.eval.selection.judge == "reward":
        text = "eval.select: the reward is what PPO was trained on, and keeps rising while the quality falls"
        hint = "select by a judge that PPO never saw (Gao et al. 2023, arXiv 2210.10760); see docs/frontier.md"
        terminal.warn("C18", text, where=config.where("eval.select"), hint=hint)


def judge_functions(config: EvalConfig) -> dict[str, RewardFn]:
    """Load the judges that are Python or built-in functions, by name. Raises RLHFError C07, C17, E09."""
    folder = config.file.parent
    functions: dict[str, RewardFn] = {}
    for name, judge in config.judges.items():
        key = f"judges.{name}"
        if isinstance(judge, str):
            if FUNCTION.fullmatch(judge):
                functions[name] = load_function(judge, folder=folder, where=config.where(key))
        elif judge.builtin is not None:
            context = RewardContext(folder, partial(_where_option, config, key))
            functions[name] = builtin.make(judge, context)
    return functions


def _where_option(config: EvalConfig, key: str, option: str) -> str:
    return config.where(f"{key}.{option}")


def check_columns_read(config: EvalConfig, judges: Mapping[str, RewardFn], prompts: data.Rows[data.Prompt]) -> None:
    """Check the columns that the functions among the judges and `eval.by` name.

    Raises RLHFError D02, D06, D12; C17 if `eval.by` has more than MAX_GROUPS values.
    """
    source = prompts.source.shown()
    num_scored = -(-config.eval.n // prompts.stride)
    check_columns(judges, prompts, source, lambda name: config.where(f"judges.{name}"), num_scored)
    if config.eval.by is not None:
        _check_groups(config.eval.by, prompts, source, config.where("eval.by"))


def _check_groups(column: str, prompts: Sequence[data.Prompt], source: str, where: str) -> None:
    """Raise RLHFError if the column of `eval.by` is missing or has too many values."""
    known = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    if column not in known:
        raise RLHFError.from_problems([missing_column("eval.by names", column, known, source, where)])
    count = len(group_rows(column, [prompt.columns for prompt in prompts]))
    if count > MAX_GROUPS:
        text = f'eval.by: "{column}" has {count} different values, more than {MAX_GROUPS}'
        raise RLHFError("C17", text, where=where, hint="name a column that puts prompts into few groups")


def columns_read(
    config: EvalConfig, judges: Mapping[str, RewardFn], prompts: Sequence[data.Prompt]
) -> list[dict[str, Any]]:
    """Return of each prompt's row the columns that the judges and `eval.by` read."""
    names = dict.fromkeys(named_columns(judges.values(), prompts))
    if config.eval.by:
        names[config.eval.by] = None
    return [jsonl.values_of(prompt.columns, names) for prompt in prompts]
