"""A Report as tables and sentences, the same in the terminal, on the page and in a model card. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.runs.report import (
    PPO_OVER_SFT,
    BestOfN,
    JudgeMean,
    LimitPoint,
    PolicyScores,
    PromptGroup,
    PromptGroups,
    Report,
    WinRate,
    WinRates,
)
from rlhf_cli.statistics import with_interval

MODEL_LABELS = {"sft": "SFT", "ppo": "PPO"}
# Responses that a reward is the mean of.
LAST_UPDATE = "in the last update"  # sampled
TRAINING = "on training prompts"  # new ones of the final policy
HELD_OUT = "held-out prompts"
UNPENALISED = "before the KL penalty"
OWN_REWARD = "the reward that PPO was trained on, which proves little"
HALF = 0.5
GUESSING = 0.5  # share of the pairs on which both orders agree by a judge that guesses among two
LOW = 2 / 3  # two judges agree on so many pairs if each is right on 0.79 of them and they err independently
Significance = Literal["better", "undecided", "worse"]
AGAINST = {"better": ": PPO is better", "undecided": ", not distinguishable", "worse": ": PPO is worse"}
RESULTS = {
    "better": "PPO beats SFT: win rate",
    "undecided": "PPO and SFT are not distinguishable: win rate",
    "worse": "PPO loses to SFT: win rate",
}
Table = tuple[list[str], list[list[str]]]  # columns and rows


# Policies


def format_reward(metrics: Mapping[str, Any], responses: str) -> str:
    """Return PPO's reward, before the KL penalty, as text: `reward 1.757 on training prompts`."""
    return f"reward {metrics['objective/scores']:.3f} {responses}"


def model_label(model: str) -> str:
    """Return the display name of a policy in the report."""
    share = model.removeprefix("interpolated_")  # no other policy has such a name
    return MODEL_LABELS.get(model, model) if share == model else f"share {share}"


def _best_of_label(best_of_n: BestOfN) -> str:
    return f"SFT, best of {best_of_n.n}"


def policies_table(report: Report) -> Table:
    """Return a row for each policy and for each best of n of the SFT policy, with its mean score by each judge."""
    near_greedy = report.greedy.models if report.greedy else {}
    policies: list[tuple[str, PolicyScores]] = [
        *((model_label(name), scores) for name, scores in report.models.items()),
        *((f"{model_label(name)}, near-greedy", scores) for name, scores in near_greedy.items()),
        *((_best_of_label(each), each) for each in report.best_of or []),
    ]
    _, first = policies[0]
    judges = list(first.judges)
    rows = []
    for name, scores in policies:
        length = f"{scores.response_length_mean:.1f}"
        ended = f"{scores.eos_fraction:.0%}"
        means = [mean_text(scores.judges[judge]) for judge in judges]
        rows.append([name, _kl(scores), length, ended, *means])
    return ["model", "KL", "length", "ended", *judges], rows


def mean_text(mean: JudgeMean) -> str:
    """Return a judge's mean with its interval as text; there is none if all answers have the same score."""
    text = with_interval(mean.mean, mean.ci95)
    return text if mean.ci95 else f"{text}, no interval"


def _kl(scores: PolicyScores) -> str:
    if scores.kl_bound is not None:
        return _at_most(scores.kl_bound)
    return "-" if scores.kl is None else _kl_with_interval(scores.kl, scores.kl_ci95)


def _at_most(kl_bound: float) -> str:
    return f"<= {kl_bound:.2f}"


def _kl_with_interval(kl: float, interval: Sequence[float] | None) -> str:
    low, high = interval or (kl, kl)
    text = f"{kl:z.2f}"
    return f"{text} [{low:z.2f}, {high:z.2f}]" if low < high else text


# Win rates


def significance(rate: WinRate) -> Significance:
    """Return the result of a win rate; `undecided` if its interval contains one half."""
    return _against_half(rate.ci95 or (0.0, 1.0))


def _against_half(interval: Sequence[float]) -> Significance:
    low, high = interval
    if low > HALF:
        return "better"
    return "worse" if high < HALF else "undecided"


def rate_text(rate: WinRate) -> str:
    """Return a win rate with its interval, and whether it is undecided, as text."""
    text = with_interval(rate.value, rate.ci95)
    return f"{text}, undecided" if significance(rate) == "undecided" else text


def pair_label(pair: str) -> str:
    """Return the display name of a comparison: `PPO over SFT` for `ppo_vs_sft`."""
    policy, _, baseline = pair.partition("_vs_")
    return f"{model_label(policy)} over {model_label(baseline)}"


class RateRow(NamedTuple):
    """A win rate of the report, and the names of its comparison and judge."""

    pair: str
    judge: str
    rate: WinRate


def win_rate_rows(report: Report) -> list[RateRow]:
    """Return every win rate, sampled ones first."""
    near_greedy = report.greedy.win_rate if report.greedy else {}
    rows = []
    for pair, rates in report.win_rate.items():
        rows += _rate_rows(pair_label(pair), rates)
    for pair, rates in near_greedy.items():
        rows += _rate_rows(f"{pair_label(pair)}, near-greedy", rates)
    for each in report.best_of or []:
        rows += _rate_rows(f"PPO over SFT's best of {each.n}", each.ppo_win_rate or {})
    return rows


def _rate_rows(pair: str, rates: WinRates) -> list[RateRow]:
    return [RateRow(pair, judge, rate) for judge, rate in rates.items()]


def win_rate_table(report: Report) -> Table:
    """Return a row for each win rate."""
    rows = []
    for pair, judge, rate in win_rate_rows(report):
        rows.append([pair, judge, rate_text(rate), _length_controlled(rate), _count(rate.ties), _count(rate.n)])
    return ["win rate", "judge", "value", "length-controlled", "ties", "n"], rows


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


def _length_controlled(rate: WinRate) -> str:
    return "-" if rate.length_controlled is None else f"{rate.length_controlled:.3f}"


def worth_sentences(report: Report) -> Iterator[str]:
    """Yield what PPO was worth against each policy beside it, with the KL of both, and a `disagreement`.

    Of the judges the deciding one is taken.
    """
    if rates := report.ppo_over_sft:
        judge = deciding_judge(rates)
        yield from disagreement(reward_name(report), judge, rates[judge])

    for name in other_policies(report):
        if rates := report.win_rate.get(f"ppo_vs_{name}", {}):
            judge = deciding_judge(rates)
            rate = rates[judge]
            ours, theirs = (f"{report.models[model].kl:z.2f} nats" for model in ("ppo", name))
            value = f"{with_interval(rate.value, rate.ci95)} at {ours} against {theirs}"
            yield f"PPO over {name} by judge {judge}: {value}{AGAINST[significance(rate)]}"


def disagreement(reward: str, judge: str, rate: WinRate) -> Iterator[str]:
    """Yield a sentence if all of the interval of a judge's agreement with `reward` is below LOW."""
    share = rate.agrees_with_reward
    interval = rate.agrees_with_reward_ci95
    if share is not None and interval and interval[1] < LOW:
        yield (
            f"{reward.capitalize()} and judge {judge} prefer the same of PPO's and SFT's answers on "
            f"{with_interval(share, interval)} of the prompts that both decide, fewer than two of three: more training "
            "on this reward may not please this judge"
        )


def pairwise_sentences(report: Report) -> Iterator[str]:
    """Yield for each judge that compared answers how far its win rate can be believed, and what it cost."""
    for judge, rate in report.ppo_over_sft.items():
        cost = (report.judge_costs or {}).get(judge)
        if is_people(report, judge):
            parts = [f"{rate.n} labels of other answers of these models", *_pairwise_parts(rate)]
            yield f"Judge {judge}: {'; '.join(parts)}"
        elif cost is not None:
            parts = list(_pairwise_parts(rate))
            if cost.too_long:
                parts.append(f"too long for it, and not counted: {cost.too_long:,} of {report.n:,} pairs")
            tokens = cost.prompt_tokens + cost.completion_tokens
            took = f"{cost.answers:,} answers took {cost.calls:,} calls{f' and {tokens:,} tokens' if tokens else ''}"
            yield f"Judge {judge}, {cost.model}: {'; '.join([*parts, took])}"


def _pairwise_parts(rate: WinRate) -> Iterator[str]:
    """Yield what a judge that compared answers does in both orders, with the first place, and beside other judges."""
    if rate.consistency is not None:
        share = with_interval(rate.consistency, rate.consistency_ci95)
        guesses = rate.consistency_ci95 is not None and rate.consistency_ci95[1] < GUESSING
        verdict = ", fewer than by guessing: its rate says nothing about the answers" if guesses else ""
        yield f"both orders agree on {share} of the pairs{verdict}"
    if rate.first_slot is not None:
        yield f"the answer shown first wins {with_interval(rate.first_slot, rate.first_slot_ci95)}"
    for other, agreed in (rate.agreement or {}).items():
        yield f"it agrees with {other} on {with_interval(agreed.value, agreed.ci95)}"


def is_people(report: Report, judge: str) -> bool:
    """Return True if a judge is labels of people."""
    return (report.judge_kinds or {}).get(judge) == "people"


def other_policies(report: Report) -> list[str]:
    """Return the names of the policies that were compared beside base, SFT and PPO."""
    compared = {pair.removesuffix("_vs_sft") for pair in report.win_rate} - {"ppo"}
    return [name for name, scores in report.models.items() if name in compared and scores.kl is not None]


# Frontier


class Compared(NamedTuple):
    """A policy of the frontier, and its win rates over SFT."""

    name: str
    scores: PolicyScores
    over_sft: WinRates


def has_frontier(report: Report) -> bool:
    """Return True if there is a limit, or a policy with another KL than SFT and PPO."""
    return bool(report.frontier or report.interpolated or report.limit or other_policies(report))


def ppo_points(report: Report) -> list[Compared]:
    """Return PPO's policies by step, named by it; without snapshots the finished policy only, as `PPO`."""
    if report.frontier:
        return [Compared(str(point.step), point, point.win_rate) for point in report.frontier]
    ppo = report.models.get("ppo")
    return [Compared("PPO", ppo, report.ppo_over_sft)] if ppo and report.ppo_over_sft else []


def other_points(report: Report) -> list[Compared]:
    """Return the policies between SFT and PPO, then those beside them."""
    between = [Compared(f"share {each.share:g}", each, each.win_rate) for each in report.interpolated or []]
    beside = [Compared(name, report.models[name], report.win_rate[f"{name}_vs_sft"]) for name in other_policies(report)]
    return between + beside


def frontier_table(report: Report) -> Table:
    """Return a row for each policy of the frontier and each best of n; the last columns are of the deciding judge."""
    judges = list(report.models["sft"].judges)
    judge = report.selected.judge if report.selected else deciding_judge(judges)
    others = [name for name in judges if name != judge]

    policies = ppo_points(report) + other_points(report)
    policies += [Compared(f"best of {each.n}", each, each.win_rate_vs_sft or {}) for each in report.best_of or []]
    rows = []
    for name, scores, rates in policies:
        rate = rates[judge]
        rows.append(
            [
                name,
                f"{scores.kl:z.2f}" if scores.kl_bound is None else _at_most(scores.kl_bound),
                *(f"{scores.judges[other].mean:.3f}" for other in others),
                mean_text(scores.judges[judge]),
                with_interval(rate.value, rate.ci95),
                _length_controlled(rate),
                "*" if report.is_recommended(scores) else "",
            ]
        )
    return ["update", "KL", *others, judge, f"win rate, {judge}", "length-controlled", ""], rows


def recommendation_lines(report: Report) -> Iterator[str]:
    """Yield the recommended policy and why, and its figures on the prompts that had no part in the choice."""
    recommended = report.recommended
    if recommended is None:
        return
    yield f"recommended: {report.recommendation}"

    judge = recommended.judge
    if recommended.judges and recommended.win_rate and not recommended.is_sft:
        rate = recommended.win_rate[judge]
        kl = "" if recommended.kl is None else f", {_kl_with_interval(recommended.kl, recommended.kl_ci95)} nats"
        prompts = f"{recommended.reported_on} other prompts" if recommended.reported_on else "other prompts"
        yield (
            f"  on {prompts}: {judge} {mean_text(recommended.judges[judge])}, "
            f"win rate over SFT {with_interval(rate.value, rate.ci95)}{kl}"
        )
    if recommended.over_last:
        rates = [f"{rate_text(rate)} by {name}" for name, rate in recommended.over_last.items()]
        yield f"  win rate over the last policy: {'; '.join(rates)}"
    if is_own_reward(report, judge):
        yield f"  {judge} is {OWN_REWARD}; add a judge in eval.yaml"


def is_own_reward(report: Report, judge: str) -> bool:
    """Return True for the reward that PPO was trained on, unless it is a verifier, which knows the right answers."""
    return judge == "reward" and (report.judge_kinds or {}).get(judge) != "verifier"


def reward_name(report: Report) -> str:
    """Return the judge `reward` in words: it is the reward model, unless eval.yaml has a function of this name."""
    kind = (report.judge_kinds or {}).get("reward", "model")
    return "the reward model" if kind == "model" else "the judge reward"


# Groups of prompts


def groups_table(by: PromptGroups) -> Table:
    """Return a row for each value of `eval.by`: each policy's mean by the deciding judge, and PPO's gain over SFT."""
    first = by.groups[0]
    judge = _groups_judge(by)
    names = [model_label(name) for name in first.models]
    names += map(_best_of_label, first.best_of or [])
    rows = [_group_row(group, judge) for group in by.groups]
    return [by.column, "n", *names, "PPO - SFT"], rows


def _group_row(group: PromptGroup, judge: str) -> list[str]:
    policies: list[PolicyScores] = [*group.models.values(), *(group.best_of or [])]
    means = [mean_text(each.judges[judge]) for each in policies]

    rate = group.win_rate[PPO_OVER_SFT][judge]
    assert rate.difference is not None
    gain = with_interval(rate.difference, rate.difference_ci95)
    return [group.value, str(group.n), *means, gain]


def groups_title(by: PromptGroups) -> str:
    """Return the title of `groups_table`."""
    return f"Mean by {_groups_judge(by)} for each {by.column}"


def _groups_judge(by: PromptGroups) -> str:
    return deciding_judge(by.groups[0].models["sft"].judges)


# Limit


def limit_score(report: Report) -> str:
    """Return the score of the limit as text."""
    penalty = report.limit.missing_eos_penalty if report.limit else None
    less = f", less {penalty:g} for an answer that does not end" if penalty else ""
    return f"score by {reward_name(report)}{less}"


def limit_table(report: Report) -> Table:
    """Return a row for each policy: the KL that it pays, the KL that the limit needs for its score, and their ratio."""
    best_of_labels = {f"best_of_{each.n}": _best_of_label(each) for each in report.best_of or []}
    rows = []
    for name, point in report.limit.policies.items() if report.limit else ():
        if name in best_of_labels:
            label = best_of_labels[name]
            paid = _at_most(point.kl)
        else:
            is_snapshot = point.step is not None and name != "ppo"
            label = f"PPO, update {point.step}" if is_snapshot else model_label(name)
            paid = _kl_with_interval(point.kl, point.kl_ci95)
        rows.append([label, paid, with_interval(point.score, point.score_ci95), *_overhead(point)])
    return ["policy", "KL", "score", "KL needed", "overhead"], rows


def _overhead(point: LimitPoint) -> tuple[str, str]:
    """Return the needed KL and the overhead of a policy as text."""
    if point.needed_kl_at_most is not None and point.overhead_at_least is not None:
        return f"at most {point.needed_kl_at_most:.2f}", f"at least {point.overhead_at_least:.1f}"

    overhead = f"none, {point.no_overhead}" if point.overhead is None else f"{point.overhead:.1f}"
    if point.needed_kl is None:
        return "unknown", overhead
    low, high = point.needed_kl_ci95 or (None, None)
    if low is None:
        return f"{point.needed_kl:.2f}", overhead
    return f"{point.needed_kl:.2f} [{low:.2f}, {'?' if high is None else f'{high:.2f}'}]", overhead


def limit_lines(report: Report) -> Iterator[str]:
    """Yield the overhead of PPO as text, if it is known how far the limit goes."""
    point = limit_of_ppo(report)
    if point:
        yield overhead_sentence(point)


def limit_of_ppo(report: Report) -> LimitPoint | None:
    """Return PPO's policy beside the limit; a snapshot if the report is that of `--step`."""
    ppo = report.models.get("ppo")
    step = ppo.step if ppo else None
    policies = report.limit.policies if report.limit else {}
    if step is None:
        return policies.get("ppo")
    return next((point for point in policies.values() if point.step == step), None)


def overhead_sentence(point: LimitPoint) -> str:
    """Return the overhead of a policy of PPO as text."""
    needed, overhead = _overhead(point)
    paid = f"PPO pays {point.kl:z.2f} nats"
    if overhead.startswith("none"):
        return f"{paid}; it has no KL overhead, since {point.no_overhead}"
    return f"{paid} for a score that {needed} nats could buy: overhead {overhead}"


# Summary


def summary_sentence(report: Report) -> str | None:
    """Summarise PPO against SFT by the deciding judge and the reward model; None without a comparison."""
    rates = report.ppo_over_sft
    if not rates:
        return None
    judge = deciding_judge(rates)
    text = _result(report, judge, rates[judge])
    if is_own_reward(report, judge):
        return f"{text}: {OWN_REWARD}; add a judge in eval.yaml"
    if "reward" in rates and judge != "reward":
        return text + _by_reward(report, judge, rates)
    return text


def _result(report: Report, judge: str, rate: WinRate) -> str:
    """Return the win rate by the deciding judge, and whether answer lengths may explain it."""
    result = significance(rate)
    n = report.n if rate.n is None else rate.n
    by_people = is_people(report, judge)
    count = f"{n} labels of {HELD_OUT}" if by_people else f"{n} {HELD_OUT}"
    text = f"{RESULTS[result]} {with_interval(rate.value, rate.ci95)} on {count}, judged by {judge}"

    kl = report.models["ppo"].kl
    if kl is not None:
        text += f", at a KL of {kl:z.2f}"
    if result == "undecided":
        text += f" ({'label more pairs' if by_people else 'raise eval.n'} for narrower intervals)"

    interval = rate.length_controlled_ci95
    if result == "better" and interval and rate.length_controlled is not None:
        equal = _against_half(interval)
        if equal != "better":
            text += f"; length-controlled {with_interval(rate.length_controlled, interval)}, {equal}"
    if rate.no_length_controlled:
        text += f"; no length-controlled rate: {rate.no_length_controlled}"
    return text


def _by_reward(report: Report, judge: str, rates: WinRates) -> str:
    """Return PPO's win rate by the reward model, and whether the deciding judge confirms it."""
    own = rates["reward"]
    result = significance(rates[judge])
    text = f"; by {reward_name(report)} {with_interval(own.value, own.ci95)}"
    if significance(own) == "better" and result == "worse":
        return f"{text}: reward hacking (docs/reward-hacking.md)"
    if significance(own) == "better" and result == "undecided":
        return f"{text}, which {judge} does not confirm"
    return text
