"""Report card of a reward model, on held-out pairs and probes, and the trainer's metrics of the saved files."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import softplus

from rlhf_cli import data, terminal
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.data.label_noise import label_noise
from rlhf_cli.data.tokens import header_of_answers
from rlhf_cli.errors import shown
from rlhf_cli.evaluation import length_bias, reward_model, reward_probes
from rlhf_cli.evaluation.length_bias import LengthTrend
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.evaluation.reward_probes import POLITE_ANSWER
from rlhf_cli.models import load
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress
from rlhf_cli.runs.report import LabelErrors, RewardModelCard
from rlhf_cli.stages.common.training_rows import PairRows
from rlhf_cli.stages.reward.scores import raw_scores, use_bf16


def make_report_card(
    config: RewardConfig,
    scorer: Any,
    tokenizer: Any,
    rows: PairRows,
    trend: LengthTrend | None,
    *,
    process_group: ProcessGroup,
) -> tuple[RewardModelCard | None, dict[str, float], list[ScoredPair]]:
    """Return the report card on the evaluation pairs, TRL's metrics, and the pairs; without pairs None, {} and [].

    The scores are raw. With `reward.length_debias` the card is of those without the `trend`, and the metrics of all, as
    in training.
    Warns R10-R12 of the card's flags. Raises RLHFError R01 if scores are not finite.
    """
    if not rows:
        terminal.say("reward   no report card: there are no evaluation pairs (data.eval or data.eval_fraction)")
        return None, {}, []

    probed = reward_probes.probe_rows(rows)
    context = load.context_length(scorer.config)
    probe_rows = [rows[i] for i in probed]
    probes = build_probes(tokenizer, probe_rows, context, config.seed)
    scores = _score_all(
        config,
        scorer,
        {
            "chosen_ids": [row["chosen_ids"] for row in rows],
            "rejected_ids": [row["rejected_ids"] for row in rows],
            **probes,
        },
        process_group,
    )
    pairs = scored_pairs(rows, scores.pop("chosen_ids"), scores.pop("rejected_ids"))

    judged = pairs
    applied = trend if config.reward.length_debias else None
    if applied:
        judged = length_bias.debias(pairs, applied)
        scores = {name: _without_trend(applied, scores[name], probe_rows, probes[name]) for name in probes}
    adversarial = reward_probes.score_probes(scores, [judged[i].chosen for i in probed])
    card = reward_model.make_card(judged, adversarial, seed=config.seed)
    if trend and (applied or reward_model.is_length_biased(card)):
        card = card.with_changes(length_debiasing=length_bias.compare(pairs, trend, applied=bool(applied)))
    problems = reward_model.find_problems(card)
    for problem in problems:
        terminal.warn(problem.code, problem.text, where=shown(config.folder), hint=problem.hint)
    card = reward_model.with_flags(card, problems)
    batch_size = config.reward.per_device_eval_batch_size * process_group.world_size
    metrics = {
        "loss": _evaluation_loss(config, pairs, [row.get("margin", 0.0) for row in rows]),
        "accuracy": sum(pair.right for pair in pairs) / len(pairs),
        "margin": sum(pair.margin for pair in pairs) / len(pairs),
        **_score_range(pairs, batch_size),
    }
    return card, metrics, pairs


def _score_all(
    config: RewardConfig, scorer: Any, answers: Mapping[str, list[list[int]]], process_group: ProcessGroup
) -> dict[str, list[float]]:
    """Return the raw scores of each list of answers, by name. Raises RLHFError R01 if one is not finite."""
    size = config.reward.per_device_eval_batch_size
    scores: dict[str, list[float]] = {}
    with Progress("reward: report card", len(answers), "pass", brief=True) as bar:
        for name, rows in answers.items():
            scores[name] = raw_scores(scorer, rows, size, process_group, bf16=use_bf16(config))
            bar.advance()
    return scores


def _without_trend(
    trend: LengthTrend, scores: Sequence[float], rows: PairRows, answers: Sequence[list[int]]
) -> list[float]:
    """Return the raw scores of answers, {prompt and answer ids} to the prompts of `rows`, without the trend."""
    lengths = [len(ids) - len(row["prompt_ids"]) for row, ids in zip(rows, answers, strict=True)]
    return list(map(trend.without, scores, lengths))


def scored_pairs(rows: PairRows, chosen: Sequence[float], rejected: Sequence[float]) -> list[ScoredPair]:
    """Return the pairs with their raw scores, as the report card reads them."""
    pairs = []
    for row, unit, chosen_score, rejected_score in zip(rows, _units(rows), chosen, rejected, strict=True):
        start = len(row["prompt_ids"])
        chosen_length = len(row["chosen_ids"]) - start
        rejected_length = len(row["rejected_ids"]) - start
        pairs.append(ScoredPair(chosen_score, rejected_score, chosen_length, rejected_length, unit))
    return pairs


def _units(rows: PairRows) -> list[Hashable]:
    """Return what was drawn for each pair: its prompt, or its two answers if all pairs have one prompt.

    Plain texts have a fixed prompt, such as "review:": what differs between the pairs is their answers.
    """
    prompts: list[Hashable] = [tuple(row["prompt_ids"]) for row in rows]
    if len(set(prompts)) > 1:
        return prompts
    return [frozenset([tuple(row["chosen_ids"]), tuple(row["rejected_ids"])]) for row in rows]


def label_errors(rows: PairRows) -> LabelErrors | None:
    """Return the share of wrong labels by the pairs that were labelled more than once."""
    labels = []
    for row in rows:
        chosen = tuple(row["chosen_ids"])
        rejected = tuple(row["rejected_ids"])
        labels.append((hash((chosen, rejected)), hash((rejected, chosen))))

    noise = label_noise(labels)
    if noise is None:
        return None
    return LabelErrors(repeats=noise.repeats, wrong=noise.wrong, wrong_ci95=list(noise.wrong_ci95))


def build_probes(tokenizer: Any, rows: PairRows, context: int | None, seed: int) -> dict[str, list[list[int]]]:
    """Return probe name -> token ids per row. The polite answer starts as the chosen one: by header and whitespace."""
    header = header_of_answers(tokenizer) if tokenizer.chat_template else ""
    answer_ids = [row["chosen_ids"][len(row["prompt_ids"]) :] for row in rows]
    texts = []
    for answer in tokenizer.batch_decode(answer_ids):
        text = answer.removeprefix(header).lstrip()
        beginning = answer[: len(answer) - len(text)]
        texts.append(beginning + POLITE_ANSWER)
    encoded = data.encode_many(tokenizer, [None] * len(texts), texts)
    polite = [ids[:-1] for _, ids in encoded]
    return reward_probes.build_probes(rows, polite, context=context, seed=seed)


def _score_range(pairs: Sequence[ScoredPair], batch_size: int) -> dict[str, float]:
    """Return minimum, mean and maximum score per batch, averaged over batches as TRL's reward trainer does."""
    batches = []
    for first in range(0, len(pairs), batch_size):
        batch = pairs[first : first + batch_size]
        batches.append(list(chain.from_iterable((pair.chosen, pair.rejected) for pair in batch)))
    return {
        "min_reward": fmean(map(min, batches)),
        "mean_reward": fmean(map(fmean, batches)),
        "max_reward": fmean(map(max, batches)),
    }


def _evaluation_loss(config: RewardConfig, pairs: Sequence[ScoredPair], row_margins: Sequence[float]) -> float:
    """Return the training loss: -log sigmoid(margin - the row's margin), plus center_rewards_coefficient's penalty."""
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    sums = torch.tensor([pair.chosen + pair.rejected for pair in pairs], dtype=torch.float64)
    excess = torch.tensor(row_margins) - margins
    penalties = (config.reward.center_rewards_coefficient or 0.0) * sums**2
    losses = softplus(excess) + penalties
    return float(losses.mean())
