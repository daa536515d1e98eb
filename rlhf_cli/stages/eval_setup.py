"""Set-up of `rlhf eval`: sampling settings, prompts, snapshots and judge functions."""

from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data, runs, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.paths import FUNCTION
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation.responses import SamplingParams, SnapshotSeries
from rlhf_cli.models import load
from rlhf_cli.rewards.function import load_function
from rlhf_cli.rewards.source import RewardFn
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import setup


def ppo_settings(ppo: Parent) -> PPOSettings | None:
    """Load the settings a policy was trained with; None for an external model."""
    return configs.load("ppo", ppo.path / "config.yaml").ppo if ppo.stage == "ppo" else None


def sampling_params(
    config: EvalConfig, settings: PPOSettings | None, path: Path, stop_token_id: int | None
) -> SamplingParams:
    """Return eval.yaml's sampling settings, else those PPO trained the policy at `path` with (C17 without either)."""
    temperature, length = config.eval.temperature, config.eval.response_length
    if settings:
        temperature, length = temperature or settings.temperature, length or settings.max_response_length
        if settings.stop_token == "none":
            return SamplingParams(temperature, length, None)
        stop_token_id = stop_token_id if settings.stop_token_id is None else settings.stop_token_id
    if temperature is None or length is None:
        raise RLHFError(
            "C17",
            f"{shown(path)} does not tell how its policy was sampled",
            where=config.where("models.ppo"),
            hint="set eval.temperature and eval.response_length",
        )
    return SamplingParams(temperature, length, stop_token_id)


def find_snapshots(config: EvalConfig, ppo: Parent) -> SnapshotSeries:
    """Find the snapshots of a PPO run if `eval.frontier` is set. Warns (M05) of corrupt ones."""
    if not config.eval.frontier:
        return SnapshotSeries()
    if ppo.stage != "ppo":
        return SnapshotSeries(missing=f"{shown(ppo.path)} is no folder that our PPO wrote")
    folder = ppo.path / runs.SNAPSHOTS
    valid = runs.valid_states(folder, instead="the frontier leaves it out")
    if not valid:
        return SnapshotSeries(missing=f"{shown(folder)} holds no policy on the way")
    last = ppo.manifest["step"]
    return SnapshotSeries(last, {step: path for step, path in valid.items() if step != last})


def warn_of_selection_by_reward(config: EvalConfig) -> None:
    """Warn (C18) if a policy is selected by the reward it was trained on."""
    if config.eval.selection and config.eval.selection.judge == "reward":
        text = "eval.select: the reward is what PPO was trained on, and rises on while the quality falls"
        hint = "select by a judge that PPO never saw (Gao et al. 2023, arXiv 2210.10760); docs/evaluation.md tells why"
        terminal.warn("C18", text, where=config.where("eval.select"), hint=hint)


def read_prompts(
    config: EvalConfig, tokenizer: Any, model_config: Any, response_length: int, *, sample: int | None = None
) -> data.Rows[data.Prompt]:
    """Read the prompts that leave room for a response in the model's context.

    Of more than `sample` rows only a sample is read. `model_config` None: unknown context. Warns D16. Raises RLHFError
    C13 if no prompt can fit, D01-D14, D16.
    """
    max_length = None
    if model_config is not None:
        max_length = load.max_prompt_tokens(model_config, response_length, config.where("eval.response_length"))
    read = partial(data.prompt_rows, config.sources()["data.prompts"], tokenizer, max_length=max_length, sample=sample)
    return setup.read_rows(config, "data.prompts", setup.longer_prompts_hint("eval", max_length, response_length), read)


def judge_functions(config: EvalConfig) -> dict[str, RewardFn]:
    """Load the judges that are Python functions, by name. Raises RLHFError C17."""
    return {
        name: load_function(spec, folder=config.file.parent, where=config.where(f"judges.{name}"))
        for name, spec in config.judges.items()
        if FUNCTION.fullmatch(spec)
    }
