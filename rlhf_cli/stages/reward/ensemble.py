"""Members of an ensemble: their entries in the manifest, and their scores of the held-out pairs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.errors import shown
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.models import forward, load
from rlhf_cli.runs.parents import parent_entry
from rlhf_cli.runs.report import EnsembleCard
from rlhf_cli.stages.common import lifecycle, trl_training
from rlhf_cli.stages.common.training_rows import PairRows
from rlhf_cli.stages.reward.card import scored_pairs
from rlhf_cli.stages.reward.scores import raw_scores, use_bf16


def train_other_members(
    config: RewardConfig,
    stage: lifecycle.StageRun,
    train: Callable[[RewardConfig, lifecycle.StageRun], None],
) -> None:
    """Train the members but the first, each as a separate stage, while the first is started: a stop resumes them."""
    for number, member in enumerate(config.other_members, start=2):
        terminal.say(f"reward   member {number} of {config.reward.ensemble}: {shown(member.folder)}")
        lifecycle.run_stage_in(stage.process_group, member, stage.options, train)


def open_members(config: RewardConfig) -> dict[str, Any]:
    """Return the manifest's entries of the other members, by number. Raises RLHFError M10 if one was damaged since."""
    members = {}
    for number, member in enumerate(config.other_members, start=2):
        parent = runs.open_parent(
            str(member.folder), expect=("reward",), key="reward.ensemble", where=config.where("reward.ensemble")
        )
        members[str(number)] = parent_entry(parent, config.folder).model_dump(exclude_none=True)
    return members


def measure_ensemble(
    config: RewardConfig, stage: lifecycle.StageRun, scorer: Any, rows: PairRows, pairs: Sequence[ScoredPair]
) -> EnsembleCard:
    """Score the held-out pairs by the other members, and compare the scores with those by `scorer` in `pairs`."""
    size = config.reward.per_device_eval_batch_size

    def score(member: Any, name: str) -> list[float]:
        return raw_scores(member, [row[name] for row in rows], size, stage.process_group, bf16=use_bf16(config))

    scores = [_scaled_scores(scorer.config, pairs)]
    for member in config.other_members:
        other = trl_training.load_saved_model(load.load_reward_model, member, stage.options, base=None)
        others = scored_pairs(rows, score(other, "chosen_ids"), score(other, "rejected_ids"))
        scores.append(_scaled_scores(other.config, others))
        del other  # before the next one is in memory
    return reward_model.compare_members(scores)


def _scaled_scores(model_config: Any, pairs: Sequence[ScoredPair]) -> list[float]:
    """Return the scores as PPO sees them: of the chosen answers, then of the rejected ones."""
    scale = partial(forward.scale_scores, model_config)
    chosen = [scale(pair.chosen, pair.chosen_length) for pair in pairs]
    return chosen + [scale(pair.rejected, pair.rejected_length) for pair in pairs]
