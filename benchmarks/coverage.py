"""How often the 95 % intervals of the report and of the reward model's card cover the truth, in simulated evaluations.

    python -m benchmarks.coverage [--runs 100] [--only card]

Each world draws answers whose truth is known, makes the section of report.json or the card by the functions of a real
run, and yields whether each of its intervals covers. Rows of one prompt depend on one another. The table is in
docs/report-json.md; tests/benchmarks/test_coverage.py holds a part of it.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtr
from scipy.stats import rankdata

from rlhf_cli import statistics
from rlhf_cli.evaluation import comparison, limit, reward_model, reward_probes, selection
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.runs.report import Adversarial, RewardModelCard

Rng = np.random.Generator
MANY = 40_000  # prompts of which a truth is the mean


class Found(NamedTuple):
    """An interval that was printed."""

    covers: bool
    width: float = np.nan  # of a statement that is no interval


Covered = Iterator[tuple[str, Found | None]]  # by the name of the interval; None: it was not printed


class Coverage(NamedTuple):
    """What the runs found of an interval."""

    printed: float  # share of the runs
    covers: float  # share of those that printed it
    width: float  # median


@dataclass(frozen=True)
class World:
    """A kind of evaluation: draws one and yields which of its intervals cover."""

    name: str  # as in the table
    draw: Callable[..., Covered]
    options: Mapping[str, Any] = field(default_factory=dict)
    runs: int = 1000

    def coverage(self, runs: int | None = None) -> dict[str, Coverage]:
        """Return what was found of each interval that at least one run printed."""
        runs = runs or self.runs
        found = defaultdict(list)
        for run in range(runs):
            for name, interval in self.draw(np.random.default_rng([run, 7]), **self.options):
                if interval is not None:
                    found[name].append(interval)
        return {name: _summary(intervals, runs) for name, intervals in found.items()}


def _summary(found: Sequence[Found], runs: int) -> Coverage:
    covers = np.mean([each.covers for each in found])
    width = np.median([each.width for each in found])
    return Coverage(len(found) / runs, float(covers), float(width))


def includes(bounds: Any, truth: float) -> Found | None:
    """Return whether an interval includes the truth, to within rounding; None without an interval."""
    if bounds is None:
        return None
    low, high = bounds
    return Found(bool(low - 1e-9 <= truth <= high + 1e-9), high - low)


# Means, win rates and differences

SCORES: dict[str, Callable[[Any], Any]] = {
    "continuous": lambda z: z,
    "whole": np.round,  # ties
    "skewed": lambda z: np.exp(0.8 * z),
    "coarse": lambda z: np.select([z < -2.6, z < -1.9], [1.0, 4.0], 5.0),  # nearly all answers have the best rating
    "rare": lambda z: (z > 2.2) * 1.0,  # 0 or 1
}


def drawn(rng: Rng, prompts: int, rows: int, kind: str) -> dict[str, Any]:
    """Draw scores of two policies, their KL, and a result that depends on the length, (prompts, rows) each."""
    size, hard = (prompts, rows), rng.normal(size=(prompts, 1))
    alike = 0.6 * rng.normal(size=(prompts, 1)) + 0.8 * rng.normal(size=size)  # of one prompt, in part
    theirs = 0.6 * hard + 0.8 * rng.normal(size=size)
    ours = 0.6 * hard + 0.3 + 0.9 * rng.normal(size=(prompts, 1)) + 0.4 * rng.normal(size=size)
    reward = [0.5 * score + rng.normal(size=size) for score in (theirs, ours)]
    longer = np.round(5 + 10 * rng.normal(size=size))
    won = ndtr(alike) < expit(0.2 + 0.8 * np.tanh(longer / 10))
    result = np.where(rng.random(size) < 0.1, 0.5, won)
    kl = rng.gamma(2.0, size=size) * np.exp(0.5 * hard) - 0.2
    scores = {name: SCORES[kind](score) for name, score in (("theirs", theirs), ("ours", ours))}
    return {**scores, "reward": reward, "longer": longer, "result": result, "kl": kl}


@cache
def truth(prompts_rows: int, kind: str) -> dict[str, float]:
    """Return the means over many prompts of `drawn`."""
    table = drawn(np.random.default_rng(1), MANY, prompts_rows, kind)
    ours, theirs = table["ours"], table["theirs"]
    decided = ours != theirs
    agreed = (ours > theirs) == (table["reward"][1] > table["reward"][0])
    return {
        "mean": ours.mean(),
        "win rate": ((ours > theirs) + 0.5 * (ours == theirs)).mean(),
        "difference": (ours - theirs).mean(),
        "agreement": agreed[decided].mean(),
        "KL": table["kl"].mean(),
        "length-controlled": 0.9 * expit(0.2) + 0.05,
    }


def evaluated(scores: Mapping[str, Any], lengths: Any, kl: Any) -> EvalResponses:
    """Return responses whose scores are (prompts, rows)."""
    prompts = [str(prompt) for prompt, row in enumerate(lengths) for _ in row]
    columns = {judge: np.ravel(table).astype(float).tolist() for judge, table in scores.items()}
    text, ended = [""] * len(prompts), [True] * len(prompts)
    return EvalResponses(
        "", "sampled", prompts, text, ended, np.ravel(lengths).tolist(), columns, np.ravel(kl).tolist()
    )


def policies(rng: Rng, *, prompts: int, rows: int, kind: str) -> Covered:
    """The means of a policy, and its comparison with SFT."""
    table, true = drawn(rng, prompts, rows, kind), truth(rows, kind)
    zeros, (theirs, ours) = np.zeros_like(table["kl"]), table["reward"]
    other = evaluated({"reward": theirs, "judge": table["theirs"], "length": zeros + 0.5}, zeros, zeros)
    scores = {"reward": ours, "judge": table["ours"], "length": table["result"]}
    policy = evaluated(scores, table["longer"], table["kl"])
    means = comparison.policy_means(policy)
    rates = comparison.win_rates(policy, other)
    yield "mean", includes(means["judges"]["judge"].ci95, true["mean"])
    yield "win rate", includes(rates["judge"].ci95, true["win rate"])
    yield "difference", includes(rates["judge"].difference_ci95, true["difference"])
    if kind == "continuous":
        yield "KL", includes(means["kl_ci95"], true["KL"])
        yield "agreement", includes(rates["judge"].agrees_with_reward_ci95, true["agreement"])
        yield "length-controlled", includes(rates["length"].length_controlled_ci95, true["length-controlled"])


def one_sided(rng: Rng, *, prompts: int, shift: float, jump: bool = False) -> Covered:
    """Answers that are longer by `shift` standard deviations; the effect of the length is linear, or a `jump` at 0."""
    longer = np.round(10 * (shift + rng.normal(size=(prompts, 1))))
    won = rng.random(longer.shape) < expit(0.2 + 1.5 * (np.sign(longer) if jump else longer / 10))
    zeros = np.zeros_like(longer)
    policy, other = evaluated({"judge": won}, longer, zeros), evaluated({"judge": zeros + 0.5}, zeros, zeros)
    rate = comparison.win_rates(policy, other)["judge"]
    yield "length-controlled", includes(rate.length_controlled_ci95, float(expit(0.2)))


# The recommended policy

WORTH: dict[str, Callable[[int], Any]] = {
    "all equal": np.zeros,
    "one is best": lambda count: 0.2 * (np.arange(count) == 3),
}


def recommended(rng: Rng, *, prompts: int, rows: int, count: int, worth: str) -> Covered:
    """The recommended one of `count` policies: its mean and win rate are those on new prompts."""
    means, size = WORTH[worth](count), (prompts, rows)
    hard = rng.normal(size=(prompts, 1))
    sft_scores = hard + rng.normal(size=size)
    common, lengths = hard + 0.5 * rng.normal(size=size), np.ones(size)
    apart = [0.6 * rng.normal(size=(prompts, 1)) + 0.625 * rng.normal(size=size) for _ in range(count)]
    made = [
        replace(evaluated({"judge": common + noise + mean}, lengths, np.full(size, 1.0 + step)), step=step)
        for step, (noise, mean) in enumerate(zip(apart, means, strict=True))
    ]
    sft = replace(evaluated({"judge": sft_scores}, lengths, np.zeros(size)), model="sft")
    own = selection.recommend(made, sft, selection.Rule("judge", None))
    true = 0.0 if own.is_sft else means[own.step]
    deviation = np.sqrt(1 + 0.25 + 0.36 + 0.625**2)
    yield "recommended, mean", includes(own.judges["judge"].ci95, true)
    if not own.is_sft:
        yield "recommended, win rate", includes(own.win_rate["judge"].ci95, float(ndtr(true / deviation)))
    tied = statistics.within_noise({each.step: each.scores["judge"] for each in made}, sft.prompts)
    yield "within noise has the best", Found(int(np.argmax(means)) in tied)


# The reward model's card


def card_pairs(rng: Rng, prompts: int, answers: int, unequal: bool) -> list[ScoredPair]:
    """Draw all pairs of answers to each prompt; their scores depend on length and prompt, and have ties."""
    pairs = []
    for prompt in range(prompts):
        count = int(rng.choice([2, 2, 3, answers])) if unequal else answers
        easy = rng.normal()
        length = np.round(8 + 3 * rng.normal() + 4 * rng.normal(size=count)).astype(int)
        quality = rng.normal(size=count)
        score = np.round(2 * (0.1 * length + (1 + 0.5 * easy) * quality + 0.7 * rng.normal(size=count) + easy)) / 2
        for first in range(count):
            for second in range(first):
                better, worse = (first, second) if quality[first] > quality[second] else (second, first)
                pairs.append(ScoredPair(score[better], score[worse], length[better], length[worse], prompt))
    return pairs


@cache
def card_truth(answers: int, unequal: bool) -> dict[str, float]:
    pairs = card_pairs(np.random.default_rng(1), 6000, answers, unequal)
    longer = reward_model.longer_answer_preference(pairs)
    sides = [[(pair.chosen, pair.rejected), (pair.chosen_length, pair.rejected_length)] for pair in pairs]
    scores, lengths = (rankdata([value for pair in sides for value in pair[side]]) for side in (0, 1))
    return {
        "accuracy": np.mean([pair.right for pair in pairs]),
        "length correlation": np.corrcoef(scores, lengths)[0, 1],
        "longer answer": longer.preferred,
    }


def card_of(pairs: list[ScoredPair]) -> RewardModelCard:
    return reward_model.make_card(pairs, Adversarial(n=1, probes={}))


def card(rng: Rng, *, prompts: int, answers: int, unequal: bool = False) -> Covered:
    """A card of several pairs of each prompt."""
    pairs, true = card_pairs(rng, prompts, answers, unequal), card_truth(answers, unequal)
    found = card_of(pairs)
    yield "accuracy", includes(found.accuracy_ci95, true["accuracy"])
    yield "length correlation", includes(found.length_correlation_ci95, true["length correlation"])
    yield "longer answer", includes(found.longer_answer.ci95, true["longer answer"])


def lopsided(rng: Rng, *, prompts: int) -> Covered:
    """A card in which a few prompts have most of the pairs, and all pairs of one of 20 prompts are wrong."""
    counts, wrong = rng.choice([1, 1, 2, 3, 6, 15, 36], size=prompts), rng.random(prompts) < 0.05
    pairs = [
        ScoredPair(1.0 - 2.0 * wrong[prompt], 0.0, 2, 1, prompt)
        for prompt in range(prompts)
        for _ in range(counts[prompt])
    ]
    yield "accuracy", includes(card_of(pairs).accuracy_ci95, 0.95)


def probed(rng: Rng, *, prompts: int) -> Covered:
    """Probes of rows of which three have the same prompt."""
    rows = [{"prompt_ids": [prompt]} for prompt in range(prompts) for _ in range(3)]
    beats = np.repeat(rng.random(prompts) < 0.2, 3) * 1.0
    chosen = beats[reward_probes.probe_rows(rows)]
    found = reward_probes.score_probes({"empty": chosen.tolist()}, [0.5] * len(chosen))
    yield "probe", includes(found.probes["empty"].ci95, 0.2)


# The limit


@cache
def limit_truth(spread: float, skewed: bool) -> Any:
    """Return KL and score, (2, M), of SFT tilted by growing 1 / beta; a prompt's deviation is exp(spread z)."""
    deviations = np.exp(spread * np.random.default_rng(1).normal(size=200_000 if spread else 1))
    if not skewed:
        square = (deviations**2).mean()
        inverse = np.linspace(0.0, 4.0, 400)
        return np.stack([inverse**2 * square / 2, inverse * square])
    share = np.linspace(0.0, 0.95, 400)  # of a gamma distribution with shape 4, by its cumulants
    return np.stack([4 * (share / (1 - share) + np.log1p(-share)), 2 * (1 / (1 - share) - 1)])


def limited(rng: Rng, *, prompts: int, samples: int, spread: float, skewed: bool = False) -> Covered:
    """The limit of SFT's scores, and policies that pay twice the KL that it needs for their score."""
    kl, score = limit_truth(spread, skewed)
    noise = rng.normal(size=(prompts, samples)) if not skewed else rng.gamma(4.0, 0.5, (prompts, samples)) - 2.0
    level = rng.normal(size=(prompts, 1))
    scores = level + np.exp(spread * rng.normal(size=(prompts, 1))) * noise
    own = {}
    for needed in (0.1, 0.4, 1.0):
        gained = level[:, 0] + np.interp(np.sqrt(needed), np.sqrt(kl), score) + rng.normal(size=prompts)
        own[str(needed)] = (gained.tolist(), [2 * needed] * prompts)
    selections = [2**power for power in range(1, samples.bit_length())]
    section = limit.make_limit(scores, own, selections)
    for number, name in ((8, "limit, middle"), (16, "limit, end")):
        point = section.points[number] if len(section.points) > number else None
        if point is not None:
            yield name, includes(point.score_ci95, float(np.interp(np.sqrt(point.kl), np.sqrt(kl), score)))
    for name, row in section.policies.items():
        if row.overhead is not None:
            low, high = row.needed_kl_ci95
            yield "needed KL", includes((low, np.inf if high is None else high), float(name))
            OVERHEADS.append(row.overhead)
        elif row.overhead_at_least is not None:
            yield "overhead at least", Found(row.overhead_at_least <= 2)


OVERHEADS: list[float] = []  # printed ones; 2 is true


def answers_of(prompts: int, rows: int) -> str:
    return f"{prompts} prompts" + (f", {rows} answers each" if rows > 1 else "")


WORLDS = [
    *(
        World(f"{kind} scores, {answers_of(prompts, rows)}", policies, {"prompts": prompts, "rows": rows, "kind": kind})
        for kind in SCORES
        for prompts, rows in ((30, 1), (200, 1), (30, 4), (100, 4))
    ),
    *(
        World(f"longer on {share} of {prompts} prompts", one_sided, {"prompts": prompts, "shift": shift})
        for prompts in (100, 512)
        for share, shift in (("69 %", 0.5), ("90 %", 1.28), ("99 %", 2.33))
    ),
    World("the effect of length jumps, 512 prompts", one_sided, {"prompts": 512, "shift": 0.5, "jump": True}),
    *(
        World(
            f"best of {count} policies, {worth}, {answers_of(prompts, rows)}",
            recommended,
            {"prompts": prompts, "rows": rows, "count": count, "worth": worth},
        )
        for prompts, rows in ((64, 1), (256, 1), (30, 4))
        for count in (8, 16)
        for worth in WORTH
    ),
    *(
        World(f"{answers} answers to each of {prompts} prompts", card, {"prompts": prompts, "answers": answers})
        for prompts, answers in ((30, 2), (200, 2), (15, 9), (60, 9))
    ),
    World("2 to 9 answers to each of 60 prompts", card, {"prompts": 60, "answers": 9, "unequal": True}),
    World("1 to 36 pairs of each of 100 prompts, rarely wrong", lopsided, {"prompts": 100}),
    *(World(f"probes of {prompts} prompts, 3 pairs each", probed, {"prompts": prompts}) for prompts in (30, 128)),
    *(
        World(
            f"limit of {prompts} prompts, 64 samples, {shape}",
            limited,
            {"prompts": prompts, "samples": 64, **options},
            runs,
        )
        for prompts, runs in ((64, 300), (256, 100))
        for shape, options in (
            ("normal scores", {"spread": 0.0}),
            ("skewed scores", {"spread": 0.0, "skewed": True}),
            ("spreads differ by 0.35", {"spread": 0.35}),
            ("spreads differ by 0.7", {"spread": 0.7}),
        )
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, help="of each world; by default 1000, and 300 or 100 of the limit")
    parser.add_argument("--only", default="", help="part of the names or kinds of the worlds")
    arguments = parser.parse_args()
    reward_model.NUM_RESAMPLES = 20  # of the calibration error, which is not an interval
    print("| evaluation | interval | printed | covers | median width |\n|---|---|---|---|---|", flush=True)
    for world in WORLDS:
        if arguments.only not in f"{world.draw.__name__} {world.name}":
            continue
        OVERHEADS.clear()
        for name, (printed, covers, width) in world.coverage(arguments.runs).items():
            shown = "" if np.isnan(width) else f"{width:.3g}"
            print(f"| {world.name} | {name} | {printed:.0%} | {covers:.1%} | {shown} |", flush=True)
        if OVERHEADS:
            print(f"| {world.name} | overhead: true 2 | median {np.median(OVERHEADS):.2f} | | |")


if __name__ == "__main__":
    main()
