"""What chance alone does to a series of numbers, from one update or evaluation to the next."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

from rlhf_cli.commands.report.runs import at, is_number, said
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.config.ppo_options import PPOSettings

FEWEST = 8  # values from which on noise can be told from a course
ERROR = 0.025  # on each side: two-sided 95 % intervals


@dataclass(frozen=True)
class Spread:
    """The standard deviation of one value by chance, and the degrees of freedom that it was estimated with."""

    sd: float
    freedom: float

    def bound(self, share: float, searched: int = 1) -> float:
        """How far from 0 chance brings a sum of values whose variance is `share` times that of one.

        One side of a 95 % interval; of `searched` such sums together (Bonferroni).
        """
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1 - ERROR / searched)) * self.sd * math.sqrt(share)


def spread(values: Sequence[float]) -> Spread:
    """By the differences of neighbours, which a slow course hardly touches: sum d^2 / (2 (n - 1)).

    Its variance has 2 (n - 1)^2 / (3 n - 4) degrees of freedom (von Neumann et al. 1941, Annals of Mathematical
    Statistics 12(2)).
    """
    n = len(values)
    steps = [after - before for before, after in itertools.pairwise(values)]
    return Spread(math.sqrt(fmean(step * step for step in steps) / 2), 2 * (n - 1) ** 2 / (3 * n - 4))


def smooth_spread(values: Sequence[float]) -> Spread:
    """By second differences, which a course that bends slowly hardly touches: sum d^2 / (6 (n - 2)).

    18 (n - 2) / 35 degrees of freedom (Gasser et al. 1986, Biometrika 73(3)).
    """
    steps = [after - before for before, after in itertools.pairwise(values)]
    bends = [after - before for before, after in itertools.pairwise(steps)]
    return Spread(math.sqrt(fmean(bend * bend for bend in bends) / 6), 18 * len(bends) / 35)


def last_quarter(values: Sequence[float]) -> Sequence[float]:
    """The values that stand for a run's end: one update is of few responses."""
    return values[-max(1, len(values) // 4) :]


def at_the_end(values: Sequence[float], of_the_first: float = 0.0) -> float:
    """How far chance alone may bring the mean of the last quarter, half of its 95 % interval. At least FEWEST values.

    The noise is that of the last half. `of_the_first`: what it is held against is so many times the first value, and
    has that value's noise.
    """
    half = spread(values[len(values) // 2 :])
    return half.bound(1 / len(last_quarter(values)) + of_the_first**2)


def gained(values: Sequence[float]) -> tuple[float, float]:
    """By how much the last quarter is above the first tenth, and half the 95 % interval of that. At least FEWEST."""
    head, tail = values[: max(1, len(values) // 10)], last_quarter(values)
    return fmean(tail) - fmean(head), spread(values).bound(1 / len(head) + 1 / len(tail))


def rose_again(values: Sequence[float]) -> bool:
    """Whether the last of at least FEWEST values is surely above the lowest, which any before it might have been."""
    return values[-1] - min(values) > smooth_spread(values).bound(2, searched=len(values) - 1)


Way = Literal["raise", "lower", "set"]
# PPO's metrics, those first whose advice counts before that of the others: a policy that is not read as it wrote;
# updates that go too far; a value model that explains nothing; a policy that goes where it should not. A score that
# does not rise is last, since each of the others may be why. docs/tuning.md has the same order.
CAUSES = (
    "policy/first_ratio_error",
    "policy/skipped_minibatches", "val/ratio", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/grad_norm",
    "loss/value_avg", "value/grad_norm", "val/explained_variance",
    "objective/kl_k1", "policy/entropy_avg", "objective/disagreement/NAME", "objective/repetition",
    "objective/eos_fraction", "objective/response_length",
    "objective/scores",
)  # fmt: skip


@dataclass(frozen=True)
class Move:
    """A key by its whole path, and which way it should go; `to` is what it should be set to."""

    way: Way
    key: str
    to: str = ""


@dataclass(frozen=True)
class Advice:
    """What to do: keys, each of which may help, the likeliest first, and what is to be done beside.

    `after` names the finding that comes first, where this one had wanted the opposite.
    """

    moves: tuple[Move, ...] = ()
    beside: str = ""
    after: str = ""

    def __bool__(self) -> bool:
        return bool(self.moves or self.beside)

    def text(self, config: Mapping[str, Any] | None) -> str:
        """In words, with the values that the keys have in this config."""
        told = [way + " " + " or ".join(_key(move, config) for move in moves) for way, moves in _by_way(self.moves)]
        text = "; ".join(filter(None, [", or ".join(told), self.beside]))
        first = f"\N{LEFT DOUBLE QUOTATION MARK}{self.after}\N{RIGHT DOUBLE QUOTATION MARK} comes first: "
        return first + text if self.after else text


NONE = Advice()


def _by_way(moves: Sequence[Move]) -> Iterator[tuple[str, list[Move]]]:
    for way, together in groupby(moves, key=lambda move: move.way):
        yield way, list(together)


def _key(move: Move, config: Mapping[str, Any] | None) -> str:
    now = at(config, move.key)
    if move.to:
        return f"{move.key}: {move.to}"
    return move.key if now is None or isinstance(now, Mapping) else f"{move.key} (here {said(now)})"


def one_voice(wishes: Sequence[tuple[str, Advice]]) -> list[Advice]:
    """What to do about each finding, given what it is called and what it wants alone, those that count most first.

    One that would move a key against an earlier one waits for that.
    """
    decided: dict[str, tuple[str, Move]] = {}
    heard = []
    for name, advice in wishes:
        against = (decided[move.key] for move in advice.moves if move.key in decided)
        wanted = {move.key: move.way for move in advice.moves}
        if other := next((found for found in against if found[1].way != wanted[found[1].key]), None):
            advice = Advice((other[1],), after=other[0])
        for move in advice.moves:
            decided.setdefault(move.key, (name, move))
        heard.append(advice)
    return heard


# What a bound counts in: the metric itself, the first value (times or plus it), response tokens, max_grad_norm.
Of = Literal["itself", "first times", "first plus", "tokens", "max_grad_norm"]


@dataclass(frozen=True)
class Rule:
    """A metric's healthy range, and what to do below and above it; a bound that is None is open.

    `watchdog` names the key of ppo.watchdog that is the bound. Beyond an `alarm` a single update is one too many.
    In fewer than `early` updates nothing is concluded from values outside of the range. `exact` is of a number that is
    counted or computed, not drawn: no noise is allowed for. `rises` is of a metric without a range, whose way is all
    that counts: `if_low` is for one that falls, and for one that stands still `if_near` where the policy is still near
    the SFT policy, `if_far` where it is not.
    """

    key: str
    title: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    of: Of = "itself"
    watchdog: str | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    rises: bool = False
    early: int = FEWEST
    exact: bool = False
    if_low: Advice = NONE
    if_high: Advice = NONE
    if_near: Advice = NONE
    if_far: Advice = NONE


@dataclass(frozen=True)
class Band:
    """A rule's range in one run: bounds for each update, and the range in words."""

    low: list[float] | None
    high: list[float] | None
    words: str


LOWER_RATE, RAISE_KL_COEF = Move("lower", "ppo.learning_rate"), Move("raise", "ppo.kl_coef")
FEWER_EPOCHS = Move("lower", "ppo.num_ppo_epochs")
TOO_FAR = Advice((LOWER_RATE, FEWER_EPOCHS))
RULES = (
    Rule(
        "objective/scores", "Reward score in training", rises=True,
        if_low=Advice((LOWER_RATE,), "a policy that follows its reward earns more of it, not less"),
        if_near=Advice(
            (Move("raise", "ppo.learning_rate"), Move("lower", "ppo.kl_coef")),
            "or make more updates; or look at the reward model: it may see no difference between these answers",
        ),
        if_far=Advice(
            (Move("raise", "ppo.gradient_accumulation_steps"),),
            "more episodes an update are less noise; it moves, and not to where the reward is",
        ),
    ),
    Rule(
        "objective/kl_k1", "KL to the SFT policy", "nats a response", 0.0, of="tokens", watchdog="kl",
        if_low=Advice(beside="a mean below 0 is noise, or the policy is not the one that wrote the responses: see R04"),
        if_high=Advice(
            (RAISE_KL_COEF, LOWER_RATE, Move("set", "ppo.kl_stop")), "read samples.jsonl of PPO for what pays"
        ),
    ),
    Rule(
        "objective/response_length", "Length of a response", "tokens", of="first times", watchdog="length",
        if_low=Advice((RAISE_KL_COEF,), "the reward pays for short answers: mend it"),
        if_high=Advice((Move("set", "ppo.overlong_penalty"),), "the reward pays for length: mend it"),
    ),
    Rule(
        "objective/eos_fraction", "Responses that end by themselves", "share", of="first plus", watchdog="eos",
        alarm_low=0.05,
        if_low=Advice(
            (Move("raise", "ppo.response_length"), Move("raise", "ppo.missing_eos_penalty")),
            "check that SFT's rows end with the stop token",
        ),
    ),
    Rule(
        "objective/repetition", "Repeated runs of three tokens", "share", of="first plus", watchdog="repetition",
        if_high=Advice(beside="the policy says one thing over and over because it pays: mend the reward"),
    ),
    Rule(
        "objective/disagreement/NAME", "Disagreement of the reward models", "score", of="first times",
        watchdog="disagreement",
        if_high=Advice(
            (Move("set", "rewards.NAME.combine", "mean_minus_std"), RAISE_KL_COEF),
            "the policy leaves what the reward models know",
        ),
    ),
    Rule(
        "policy/entropy_avg", "Entropy of the policy", "nats a token", 0.1, of="first times",
        if_low=Advice(
            (RAISE_KL_COEF, LOWER_RATE, Move("set", "ppo.entropy_coef")), "all responses become alike"
        ),
    ),
    Rule(
        "val/explained_variance", "Explained variance of the value model", "", 0.0, 1.0, early=20,
        if_low=Advice(
            (Move("raise", "ppo.value_only_updates"), Move("raise", "ppo.value_learning_rate")),
            "the value model is no better than a constant",
        ),
    ),
    Rule(
        "loss/value_avg", "Loss of the value model", "score squared", None, 1.0, of="first times",
        if_high=Advice((Move("lower", "ppo.value_learning_rate"), Move("set", "ppo.score_clip"))),
    ),
    Rule(
        "policy/approxkl_avg", "How far an update goes (approximate KL)", "nats a token", 0.0, 0.03, alarm_high=0.3,
        if_high=TOO_FAR,
    ),
    Rule("policy/clipfrac_avg", "Tokens whose ratio is clipped", "share", 0.0, 0.04, if_high=TOO_FAR),
    Rule(
        "val/ratio", "Mean ratio of new to old policy", "", 0.9, 1.1, alarm_low=0.1, alarm_high=2.0,
        if_low=TOO_FAR, if_high=TOO_FAR,
    ),
    Rule(
        "policy/first_ratio_error", "First ratio's distance from 1", "", 0.0, 1e-3, early=1, exact=True,
        if_high=Advice((Move("set", "ppo.bf16", "false"), Move("set", "models.attn_implementation", "sdpa"))),
    ),
    Rule(
        "policy/grad_norm", "Gradient norm of the policy", "", None, 2.0, of="max_grad_norm",
        if_high=Advice((LOWER_RATE,)),
    ),
    Rule(
        "value/grad_norm", "Gradient norm of the value model", "", None, 2.0, of="max_grad_norm",
        if_high=Advice(
            (Move("set", "reward.normalize", "sft"), Move("set", "ppo.use_score_scaling", "true")),
            "the scores are large",
        ),
    ),
    Rule(
        "policy/skipped_minibatches", "Minibatches that were skipped", "", None, 0.0, early=1, exact=True,
        if_high=TOO_FAR,
    ),
)  # fmt: skip


def limit_of(rule: Rule, config: Mapping[str, Any] | None) -> float | None:
    """The watchdog's limit of the rule's signal in this config; the default's where it is not watched."""
    assert rule.watchdog is not None
    found = at(config, f"ppo.watchdog.{rule.watchdog}")
    return float(found) if is_number(found) else WatchdogSettings.model_fields[rule.watchdog].default


def band(rule: Rule, values: list[float], lengths: list[float], config: Mapping[str, Any] | None) -> Band | None:
    """The range of a metric's values; None where it has none. `lengths` are the updates' mean response lengths."""
    if rule.rises or (rule.watchdog in ("length", "eos") and isinstance(at(config, "ppo.response_length"), list)):
        return None
    first, low, high = values[0], rule.low, rule.high
    words = ""
    if rule.watchdog:
        low, high, words = _of_watchdog(rule, limit_of(rule, config) or 0.0, first)
    if rule.of == "tokens":
        assert high is not None
        return Band([0.0] * len(values), [high * length for length in lengths], words)
    if rule.of == "first times" and not rule.watchdog:
        low, high = (None if bound is None else bound * first for bound in (low, high))
        words = f"{'above' if high is None else 'up to'} {_share(rule)} first value"
    if rule.of == "max_grad_norm":
        most = at(config, "ppo.max_grad_norm")
        most = float(most) if is_number(most) else PPOSettings.model_fields["max_grad_norm"].default
        assert high is not None
        high, words = high * most, f"up to {high:g} times max_grad_norm"
    return Band(_line(low, values), _line(high, values), words or span(low, high))


def _of_watchdog(rule: Rule, limit: float, first: float) -> tuple[float | None, float | None, str]:
    """(low, high, words) of a range that the watchdog's limit makes."""
    return {
        "kl": (0.0, limit, f"up to {limit:g} nats a token"),
        "length": (first / limit, first * limit, f"within a factor {limit:g} of the first value"),
        "eos": (first - limit, None, f"at most {limit:g} below the first value"),
        "repetition": (None, first + limit, f"at most {limit:g} above the first value"),
        "disagreement": (None, first * limit, f"up to {limit:g} times the first value"),
    }[rule.watchdog or ""]


def _share(rule: Rule) -> str:
    """The bound of a range of the first value, in words."""
    return "the" if rule.high == 1 else f"{rule.low:g} times the"


def span(low: float | None, high: float | None) -> str:
    """A fixed range in words."""
    if low is None:
        return f"up to {high:g}" if high else "0"
    return f"above {low:g}" if high is None else f"{low:g} to {high:g}"


def _line(bound: float | None, values: list[float]) -> list[float] | None:
    return None if bound is None else [bound] * len(values)
