"""Policies between SFT and a trained one, and beyond it, on held-out prompts: score, KL to SFT, a judge's win rate.

Of each seed, and of the mean of all seeds' weights: SFT + share * (policy - SFT), a line each in OUT/heldout.jsonl. The
policy is the last one (`weights` is "policy") or the average of a run (`weights` is "average", ppo.average). The mean:
Ramé et al. 2024 (WARP, arXiv 2406.16768, section 3.2, with the mean in place of SLERP). Shares above 1: Zheng et al.
2024 (arXiv 2404.16792). The score is the reward model's, less 1 where an answer does not end; the KL is that of the
policy's own answers, in nats a response. The judge, TF-IDF and logistic regression on the film reviews, compares with
SFT's answer to the same prompt from the same seed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning import curves, train
from benchmarks.speed.workload import Reference, prompts, sentences
from rlhf_cli import statistics
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.evaluation.limit import crossing
from rlhf_cli.models import interpolation
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.scores import apply_penalties
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl

SAMPLES = 8  # answers to each held-out prompt
ROWS = 512 if train.DEVICE.type == "cuda" else 64  # of a batch
TARGETS = {0.72: 1.0, 1.72: 3.0, 2.43: 5.0}  # score -> KL, in nats, at which a recipe should have reached it
LIMIT = {0.72: 0.3, 1.72: 1.0, 2.43: 1.7}  # KL that SFT tilted by exp(score / beta) needs for it
TRL = {0.72: 5, 1.72: 10, 2.43: 15}  # KL that TRL 1.12's PPO paid for it in training, mean of three seeds
WIN_RATE, MAX_KL = 0.90, 10.0  # the judge's goal, and the KL within which it counts
SHARES = (0.0, 0.3, 0.45, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0)  # until the KL is above MAX_KL

Line = dict[str, Any]


class Evaluator:
    """Samples answers of a policy to the held-out prompts, and scores them."""

    def __init__(self, shared: Path) -> None:
        self.reference, self.settings = Reference.shared(shared), PPOSettings(**train.WORKLOAD)
        self.sft = train.load_policy(shared).eval()
        self.reward = ModelReward(train.load_scorer(shared).eval(), ROWS)
        self.tokenizer = AutoTokenizer.from_pretrained(self.reference.sft)
        rows = [row for row in prompts(self.reference)[: train.HELD_OUT] for _ in range(SAMPLES)]
        seeds = tuple(derive_seed(0, "held out", row) for row in range(len(rows)))
        length = self.settings.max_response_length
        self.prompts = replace(Prompts.from_lists(rows), seeds=seeds, response_length=length)

    @cached_property
    def judge(self) -> Callable[[list[str]], Sequence[float]]:
        """The probability that a text is positive, by TF-IDF and logistic regression on all film reviews."""
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        positive, negative = sentences(self.reference.positive), sentences(self.reference.negative)
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
        model = make_pipeline(words, LogisticRegression(C=4, max_iter=1000))
        model.fit(positive + negative, [1] * len(positive) + [0] * len(negative))
        return lambda texts: model.predict_proba(texts)[:, 1].tolist()

    @torch.no_grad()
    def evaluate(self, policy: Any) -> tuple[Line, list[str]]:
        """Return {score, kl, n} of a policy, and the texts of prompts and answers."""
        rollout = HFEngine(policy, train.STOP, train.PAD, batch_size=ROWS, bf16=False).generate(self.prompts)
        scores = apply_penalties(self.reward(rollout), rollout, self.prompts.response_length, self.settings)
        kl = sequence_kl(policy, self.sft, rollout, self.settings.temperature, max_rows=ROWS)
        texts = ["".join(pair) for pair in zip(*rollout.texts(self.tokenizer), strict=True)]
        return {"score": float(scores.mean()), "kl": mean(kl), "n": len(rollout)}, texts

    @cached_property
    def sft_scores(self) -> Sequence[float]:
        """The judge's scores of SFT's answers."""
        return self.judge(self.evaluate(self.sft)[1])

    def line(self, policy: Any, share: float = 1.0) -> Line:
        """Return {score, kl, n, judge} of SFT + share * (policy - SFT), which replaces the policy's weights."""
        if share != 1:
            interpolation.interpolate(policy, self.sft, share)
        result, texts = self.evaluate(policy)
        return result | {"judge": statistics.win_rate(self.judge(texts), self.sft_scores)["value"]}


evaluator = cache(Evaluator)


def load_mean(places: Sequence[Path]) -> Any:
    """Return a policy whose weights are the means of those of saved policies."""
    policy, *others = (AutoModelForCausalLM.from_pretrained(place).to(train.DEVICE).eval() for place in places)
    with torch.no_grad():
        for weights in zip(policy.parameters(), *(other.parameters() for other in others), strict=True):
            weights[0].copy_(torch.stack(weights).mean(0))
    return policy


def evaluate_runs(shared: Path, out: Path, recipe: str, folders: Mapping[int, Path], progress: Callable) -> list[Line]:
    """Evaluate what OUT/heldout.jsonl does not have yet, of each seed and of their mean; return all its lines."""
    file = out / "heldout.jsonl"
    lines = curves.read_lines(file)
    groups = [[seed] for seed in folders]
    if len(folders) > 1:
        groups.append(list(folders))

    for weights, seeds in product(("policy", "average"), groups):
        places = [folders[seed] / "trained" / weights for seed in seeds]
        if not places[0].exists():
            continue
        policy = {"recipe": recipe, "seeds": " ".join(map(str, seeds)), "weights": weights}
        for line in _new_lines(policy, places, lines, shared, progress):
            lines.append(line)
            with file.open("a", encoding="utf-8") as output:
                output.write(json.dumps(line) + "\n")
    return lines


def _new_lines(
    policy: Line, places: Sequence[Path], known: Sequence[Line], shared: Path, progress: Callable
) -> Iterator[Line]:
    """Yield the lines of a policy's shares that are not known yet, until the KL is above MAX_KL."""
    for share in SHARES:
        key = {**policy, "share": share}
        line = next((line for line in known if key.items() <= line.items()), None)
        if line is None:
            progress("held out: " + ", ".join(f"{name} {value}" for name, value in key.items()))
            result = evaluator(shared).line(load_mean(places), share)
            line = key | {name: round(value, 4) for name, value in result.items()}
            yield line
        if line["kl"] > MAX_KL:
            return


def paths(lines: Sequence[Line]) -> dict[tuple[str, str, str], list[Line]]:
    """Return the lines of each policy, from SFT on, by (recipe, weights, seeds), as a table has them."""
    result: dict[tuple[str, str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["share"]):
        result.setdefault((line["recipe"], line["weights"], line["seeds"]), []).append(line)
    return dict(sorted(result.items(), key=lambda item: _order(*item[0])))


def _order(recipe: str, weights: str, seeds: str) -> tuple[Any, ...]:
    return recipe, weights == "average", " " in seeds, seeds


def kl_for(path: Sequence[Line], score: float) -> float | None:
    """Return the KL at which a path first has a score, None if it does not: the root of KL is interpolated."""
    root = np.sqrt([max(0.0, line["kl"]) for line in path])  # a sampled KL may be below 0
    gaps = np.array([line["score"] - score for line in path])
    kl = crossing(root, gaps)
    return None if math.isinf(kl) else kl


def table(lines: Sequence[Line]) -> list[str]:
    """Return the KL at each target score, by recipe, seeds and weights, beside TRL's, the goals and the limit."""
    columns = [f"KL for {score:g}" for score in TARGETS]
    rows = [f"| held out | {' | '.join(columns)} | best judge within {MAX_KL:g} nats | share: score, KL |"]
    rows.append("|---" * (len(columns) + 3) + "|")
    for (recipe, weights, seeds), path in paths(lines).items():
        found = [kl_for(path, score) for score in TARGETS]
        judge = max(line["judge"] for line in path if line["kl"] <= MAX_KL)
        cells = ["-" if value is None else f"{value:.2f}" for value in (*found, judge)]
        each = "; ".join(f"{line['share']:g}: {line['score']:.2f}, {line['kl']:.2f}" for line in path)
        rows.append(f"| {title(recipe, weights, seeds)} | {' | '.join(cells)} | {each} |")
    for name, known, goal in (("TRL 1.12, training", TRL, ""), ("goal", TARGETS, WIN_RATE), ("limit", LIMIT, "")):
        rows.append(f"| {name} | {' | '.join(f'{known[score]:g}' for score in TARGETS)} | {goal} | |")
    return rows


def title(recipe: str, weights: str, seeds: str) -> str:
    of = f"mean of seeds {seeds}" if " " in seeds else f"seed {seeds}"
    return ", ".join([recipe, of, *["average"] * (weights == "average")])
