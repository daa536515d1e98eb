"""Settings and inputs of an evaluation, also for `rlhf check` and `plan`."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import BuiltinJudge, EvalConfig
from rlhf_cli.config.machinery.paths import FUNCTION
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation.responses import EvalSampling, SnapshotSeries, group_rows
from rlhf_cli.models import interpolation
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.rewards import builtin
from rlhf_cli.rewards.function import RewardContext, load_function
from rlhf_cli.rewards.signature import RewardFn, check_columns, missing_column, named_columns
from rlhf_cli.runs.parents import Parent

MAX_GROUPS = 20  # values of `eval.by`


def ppo_settings(ppo: Parent) -> PPOSettings | None:
    """Load the settings a policy was trained with; None for an external model."""
    return configs.load("ppo", ppo.path / "config.yaml").ppo if ppo.stage == "ppo" else None


def sampling_params(
    config: EvalConfig, settings: PPOSettings | None, path: Path, stop_token_id: StopTokenId
) -> EvalSampling:
    """Return eval.yaml's sampling settings, else those PPO trained the policy at `path` with (C17 without either)."""
    temperature, length = config.eval.temperature, config.eval.response_length
    if settings:
        temperature, length = temperature or settings.temperature, length or settings.max_response_length
        if settings.stop_token == "none":
            return EvalSampling(temperature, length, None)
        stop_token_id = stop_token_id if settings.stop_token_id is None else settings.stop_token_id
    if temperature is None or length is None:
        text, hint = "does not record how its policy was sampled", "set eval.temperature and eval.response_length"
        raise RLHFError("C17", f"{shown(path)} {text}", where=config.where("models.ppo"), hint=hint)
    return EvalSampling(temperature, length, stop_token_id)


def missing_eos_penalty(settings: PPOSettings | None) -> float:
    """Return PPO's penalty of an answer that does not end; 0 for an external policy."""
    return settings.missing_eos_penalty or 0.0 if settings and settings.stop_token != "none" else 0.0


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
    last = ppo.manifest["step"]
    return SnapshotSeries(last, {step: path for step, path in valid.items() if step != last})


def check_interpolation(config: EvalConfig, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError C17 if `eval.interpolate` is set and the weights of PPO and SFT do not have the same shapes."""
    if config.eval.interpolate:
        with at_location(config.where("eval.interpolate")):
            models = parents["models.ppo"], parents["models.sft"]
            interpolation.check_interpolation(*models, options.trust_remote_code)


def warn_of_selection_by_reward(config: EvalConfig) -> None:
    """Warn (C18) if a policy is selected by the reward it was trained on."""
    if config.eval.selection and config.eval.selection.judge == "reward":
        text = "eval.select: the reward is what PPO was trained on, and keeps rising while the quality falls"
        hint = "select by a judge that PPO never saw (Gao et al. 2023, arXiv 2210.10760); see docs/evaluation.md"
        terminal.warn("C18", text, where=config.where("eval.select"), hint=hint)


def judge_functions(config: EvalConfig) -> dict[str, RewardFn]:
    """Load the judges that are Python or built-in functions, by name. Raises RLHFError C07, C17, E09."""
    functions: dict[str, RewardFn] = {}
    for name, judge in config.judges.items():
        key, folder = f"judges.{name}", config.file.parent
        if isinstance(judge, BuiltinJudge):
            functions[name] = builtin.make(judge, RewardContext(folder, partial(_where_option, config, key)))
        elif FUNCTION.fullmatch(judge):
            functions[name] = load_function(judge, folder=folder, where=config.where(key))
    return functions


def _where_option(config: EvalConfig, key: str, option: str) -> str:
    return config.where(f"{key}.{option}")


def check_columns_read(config: EvalConfig, judges: Mapping[str, RewardFn], prompts: data.Rows[data.Prompt]) -> None:
    """Check the columns that the functions among the judges and `eval.by` name.

    Raises RLHFError D02, D06, D12; C17 if `eval.by` has more than MAX_GROUPS values.
    """
    source, by, scored = prompts.source.shown(), config.eval.by, -(-config.eval.n // prompts.stride)
    check_columns(judges, prompts, source, lambda name: config.where(f"judges.{name}"), scored)
    if by is not None:
        where, known = config.where("eval.by"), dict.fromkeys(chain.from_iterable(each.columns for each in prompts))
        if by not in known:
            raise RLHFError.from_problems([missing_column("eval.by names", by, known, source, where)])
        if (count := len(group_rows(by, [each.columns for each in prompts]))) > MAX_GROUPS:
            text = f'eval.by: "{by}" has {count} different values, more than {MAX_GROUPS}'
            raise RLHFError("C17", text, where=where, hint="name a column that puts prompts into few groups")


def columns_read(
    config: EvalConfig, judges: Mapping[str, RewardFn], prompts: Sequence[data.Prompt]
) -> list[dict[str, Any]]:
    """Return of each prompt's row the columns that the judges and `eval.by` read."""
    names = [*named_columns(judges.values(), prompts), *([config.eval.by] if config.eval.by else [])]
    return [jsonl.values_of(prompt.columns, dict.fromkeys(names)) for prompt in prompts]
