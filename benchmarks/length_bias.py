"""Accuracy and length correlation of a finished reward model with `reward.length_debias`, by how the slope is found.

    python -m benchmarks.length_bias RUN --scores SCORES.json [--answers 256] [--set KEY=VALUE ...]

RUN has a finished reward stage with evaluation pairs, and is not changed. Two answers of its SFT model to each of some
training prompts, the answers of as many training pairs and the evaluation pairs are scored once and kept in
SCORES.json. The table has a row for each way to find the length's part of a score:

SFT's answers          as the stage does: least squares over the answers that ended
... Theil-Sen          the median slope of all pairs of answers, which outliers do not move
... within prompts     least squares over the differences of two answers to one prompt
... local              local linear regression, of Huang et al. 2024 (arXiv 2409.17407); constant beyond the answers
training pairs         least squares over the chosen and rejected answers of training pairs
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from rlhf_cli import config as configs
from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.evaluation.length_bias import LengthTrend, compare, fit_trend
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.models import devices, tokenizers
from rlhf_cli.models.load import load_reward_model
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.stages.common import trainable_model, training_rows
from rlhf_cli.stages.reward import normalize
from rlhf_cli.stages.reward.card import scored_pairs
from rlhf_cli.stages.reward.scores import raw_scores, use_bf16
from rlhf_cli.statistics import with_interval

SPAN = 0.5  # share of the answers that a local regression weighs at each length


@dataclass
class Answer:
    """A scored answer of the SFT model, or of a training pair."""

    prompt: str
    length: int
    ended: bool
    score: float


@dataclass(frozen=True)
class LocalTrend(LengthTrend):
    """Local linear regression: tricube weights over the nearest SPAN of the answers (LOWESS without robustness)."""

    answers: Sequence[Answer] = field(default=(), repr=False)

    def without(self, score: float, length: float) -> float:
        x = np.array([answer.length for answer in self.answers], dtype=np.float64)
        y = np.array([answer.score for answer in self.answers])
        at = float(np.clip(length, x.min(), x.max()))
        distance = np.abs(x - at)
        width = max(float(np.sort(distance)[int(SPAN * len(x))]), 1.0)
        weight = np.clip(1 - (distance / width) ** 3, 0, None) ** 3
        _, explained = np.polyfit(x - at, y, 1, w=np.sqrt(weight))
        return score - float(explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()

    if not arguments.scores.is_file():
        config = configs.load("reward", arguments.run / "reward.yaml", arguments.set)
        arguments.scores.write_text(json.dumps(score(config, arguments.answers)))
    print_table(json.loads(arguments.scores.read_text()))


# Scores


def score(config: RewardConfig, count: int) -> dict[str, Any]:
    """Return the scored answers and pairs of a run."""
    tokenizer = tokenizers.load_tokenizer(config.folder / "model")
    scorer = load_reward_model(config.folder / "model").eval()
    rows, eval_rows = training_rows.read_train_and_eval(config, tokenizer, scorer.config)
    sampled, ids = sample(config, tokenizer, rows, count)
    scorer = scorer.to(devices.device())

    def scores(answers: list[list[int]]) -> list[float]:
        size = config.reward.per_device_eval_batch_size
        return raw_scores(scorer, answers, size, bf16=use_bf16(config))

    for answer, found in zip(sampled, scores(ids), strict=True):
        answer.score = found

    some = rows[:: max(1, len(rows) // count)]
    trained = []
    for side in ("chosen_ids", "rejected_ids"):
        for row, found in zip(some, scores([row[side] for row in some]), strict=True):
            length = len(row[side]) - len(row["prompt_ids"])
            trained.append(Answer(prompt_key(row), length, ended=True, score=found))

    chosen = scores([row["chosen_ids"] for row in eval_rows])
    rejected = scores([row["rejected_ids"] for row in eval_rows])
    pairs = scored_pairs(eval_rows, chosen, rejected)
    named = [{**asdict(pair), "prompt": prompt_key(row)} for pair, row in zip(pairs, eval_rows, strict=True)]
    return {"sampled": list(map(asdict, sampled)), "trained": list(map(asdict, trained)), "pairs": named}


def prompt_key(row: Any) -> str:
    return " ".join(map(str, row["prompt_ids"]))


def sample(config: RewardConfig, tokenizer: Any, rows: Any, count: int) -> tuple[list[Answer], list[list[int]]]:
    """Return two answers of the SFT model to each of some prompts, without scores, and their ids with the prompt's."""
    parent = runs.open_parents(config)["model.path"]
    sft_model = trainable_model.load_sft_model(config, Options(), parent, tokenizer)
    by_prompt: dict[str, Any] = {}
    longest = max(rows, key=lambda row: len(row["chosen_ids"]) - len(row["prompt_ids"]))  # limits the answers' length
    for row in (longest, *rows):
        by_prompt.setdefault(prompt_key(row), row)
    some = list(by_prompt.values())[: count // 2]

    settings = config.reward.model_copy(update={"normalize_samples": 2 * len(some)})
    twice = config.model_copy(update={"reward": settings})
    sampled = normalize.sample_answers(twice, sft_model, parent, tokenizer, some, SINGLE_PROCESS)
    answers = []
    for each in sampled:
        prompt = " ".join(map(str, each.prompt))
        answers.append(Answer(prompt, len(each.response), each.ended, score=0.0))
    return answers, [each.ids for each in sampled]


# Ways to find the length's part


def least_squares(answers: Sequence[Answer]) -> LengthTrend:
    trend = fit_trend(
        [answer.score for answer in answers],
        [answer.length for answer in answers],
        [answer.ended for answer in answers],
    )
    assert trend is not None, "too few answers, or all of one length"
    return trend


def theil_sen(answers: Sequence[Answer]) -> LengthTrend:
    slope, *_ = theilslopes([answer.score for answer in answers], [answer.length for answer in answers])
    return LengthTrend(float(slope), 0.0)


def within_prompts(answers: Sequence[Answer]) -> LengthTrend:
    by_prompt = defaultdict(list)
    for answer in answers:
        by_prompt[answer.prompt].append(answer)
    both = [found for found in by_prompt.values() if len(found) == 2]
    lengths = np.array([one.length - other.length for one, other in both], dtype=np.float64)
    scores = np.array([one.score - other.score for one, other in both])
    return LengthTrend(float(lengths @ scores) / float(lengths @ lengths), 0.0)


# Results


def print_table(scores: dict[str, Any]) -> None:
    sampled = [Answer(**answer) for answer in scores["sampled"]]
    ended = [answer for answer in sampled if answer.ended]
    trained = [Answer(**answer) for answer in scores["trained"]]
    pairs = [ScoredPair(**pair) for pair in scores["pairs"]]
    of_pairs = [pair.chosen_length for pair in pairs] + [pair.rejected_length for pair in pairs]
    print(
        f"{len(pairs)} pairs, {len({pair.prompt for pair in pairs})} prompts; tokens of an answer {quantiles(of_pairs)}"
    )
    print(f"{len(ended)} of {len(sampled)} answers of SFT ended; tokens {quantiles([each.length for each in ended])}\n")

    on_sft = least_squares(sampled)
    trends = {
        "nothing": LengthTrend(0.0, 0.0),
        "SFT's answers": on_sft,
        "... Theil-Sen": theil_sen(ended),
        "... within prompts": within_prompts(ended),
        "... local": LocalTrend(on_sft.slope, 0.0, ended),
        "training pairs": least_squares(trained),
    }
    print("| length's part by | score per token | accuracy | more than without | correlation with the length |")
    print("|---|---|---|---|---|")
    for name, trend in trends.items():
        found = compare(pairs, trend, applied=True)
        debiased = found.debiased
        cells = [
            name,
            f"{trend.slope:.4f}",
            with_interval(debiased.accuracy, debiased.accuracy_ci95),
            with_interval(found.accuracy_difference, found.accuracy_difference_ci95, sign="+"),
            with_interval(debiased.length_correlation, debiased.length_correlation_ci95),
        ]
        print(f"| {' | '.join(cells)} |")


def quantiles(lengths: Sequence[int]) -> str:
    return " / ".join(f"{length:.0f}" for length in np.percentile(lengths, [5, 50, 95]))


if __name__ == "__main__":
    main()
