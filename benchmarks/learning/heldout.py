"""Saved policies on held-out prompts: score, KL to SFT and a judge's win rate, a line each in OUT/heldout.jsonl.

The score is the reward model's, less 1 where an answer does not end; the KL is that of the policy's own answers, in
nats a response. The judge, TF-IDF and logistic regression on the film reviews, compares with SFT's answer to the same
prompt from the same seed. An episode is an answer that the reward model scored in training. Lines with
`weights` are of averaged weights, those with a `share` of policies between SFT (0) and the policy after these episodes
(1), by interpolation.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning import curves, train
from benchmarks.speed.workload import Reference, prompts, sentences
from rlhf_cli import statistics
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.data.sampling import derive_seed
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
EPISODES = (3840, 7680)
SHARES = tuple(percent / 100 for percent in (*range(20, 95, 5), *range(110, 160, 10)))  # 1 is the policy itself
WIN_RATE, MAX_KL = 0.90, 10.0  # the judge's goal, and the KL within which it counts

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


def load_saved(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).to(train.DEVICE).eval()


evaluator = cache(Evaluator)


def evaluate_runs(
    shared: Path, out: Path, recipe: str, folders: Mapping[int, Path], settings: PPOSettings, progress: Callable
) -> list[Line]:
    """Evaluate the saved policies of each seed that OUT/heldout.jsonl does not have yet; return all its lines.

    The last policies within EPISODES are interpolated towards SFT, too: the averaged ones of a recipe with averages.
    """
    path = out / "heldout.jsonl"
    lines = curves.read_lines(path)
    known = {_key(line) for line in lines}
    for seed, folder in folders.items():
        for place, point in _points(folder, settings):
            key = {"recipe": recipe, "seed": seed} | point
            if _key(key) in known:
                continue
            progress("held out: " + ", ".join(f"{name} {value}" for name, value in key.items()))
            result = evaluator(shared).line(load_saved(place), point.get("share", 1.0))
            lines.append(key | {name: round(value, 4) for name, value in result.items()})
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    return lines


def _points(folder: Path, settings: PPOSettings) -> Iterator[tuple[Path, Line]]:
    """Yield (folder, {episodes}) of each saved policy; of its average with `weights`, of those to SFT with `share`."""
    places = sorted(place for place in (folder / "points").iterdir() if place.name.isdigit())
    episodes = [int(place.name) * settings.episodes_per_update for place in places]
    ends = {max((count for count in episodes if count <= most), default=None) for most in EPISODES}
    for count, place in zip(episodes, places, strict=True):
        policy, point = place / "policy", {"episodes": count}
        yield policy, point
        if (place / "average").exists():
            policy, point = place / "average", {**point, "weights": "average"}
            yield policy, point
        for share in SHARES if count in ends else ():
            yield policy, {**point, "share": share}


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in ("recipe", "seed", "episodes", "weights", "share"))


def cheapest(lines: Iterable[Line], score: float, episodes: int) -> float | None:
    """Return the lowest KL of a policy of at most `episodes` episodes with that score; None without one."""
    return min((line["kl"] for line in lines if line["score"] >= score and line["episodes"] <= episodes), default=None)


def best_judge(lines: Iterable[Line]) -> float | None:
    """Return the judge's highest win rate within MAX_KL; None without a policy there."""
    return max((line["judge"] for line in lines if line["kl"] <= MAX_KL), default=None)


def cells(values: Iterable[float | None]) -> list[str]:
    """Return numbers as cells of a table."""
    return ["-" if value is None else f"{value:.2f}" for value in values]


def table(lines: Sequence[Line]) -> list[str]:
    """Return the KL at each target score, by recipe and seed, beside TRL's, the goals and the limit.

    A recipe has up to three rows a seed: the policies of training, those of averaged weights, and all with those
    between them and SFT.
    """
    columns = [f"{score:g}, {episodes} episodes" for score in TARGETS for episodes in EPISODES]
    rows = [f"| held out: KL for score | {' | '.join(columns)} | best judge within {MAX_KL:g} nats |"]
    rows.append("|---" * (len(columns) + 2) + "|")
    for (recipe, seed), group in groupby(sorted(lines, key=_run), key=_run):
        points = list(group)
        trained = [line for line in points if "share" not in line]
        averaged = [line for line in trained if "weights" in line]
        plain = [line for line in trained if "weights" not in line]
        for name, chosen in (("", plain), (", averaged", averaged), (", interpolated", points)):
            if not chosen:
                continue
            found = [cheapest(chosen, score, episodes) for score in TARGETS for episodes in EPISODES]
            rows.append(f"| {recipe}, seed {seed}{name} | {' | '.join(cells((*found, best_judge(chosen))))} |")
    for name, known, judge in (("TRL 1.12, training", TRL, ""), ("goal", TARGETS, WIN_RATE), ("limit", LIMIT, "")):
        figures = [f"{known[score]:g}" for score in TARGETS for _ in EPISODES]
        rows.append(f"| {name} | {' | '.join(figures)} | {judge} |")
    return rows


def _run(line: Line) -> tuple[str, int]:
    return line["recipe"], line["seed"]
