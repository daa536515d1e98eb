"""The first screen of the page: whether PPO is better than SFT, and at what price."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_cli.evaluation.report_text import is_own_reward, is_people, limit_of_ppo, reward_name, significance
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.report import terms
from rlhf_cli.report.diagnosis import Diagnosis, Grade
from rlhf_cli.report.formats import count, interval_text, number, percent, rated
from rlhf_cli.report.svg import sparkline
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.runs.report import LimitPoint, PolicyScores, RecommendedPolicy, Report, WinRate, policy_label
from rlhf_cli.statistics import last_quarter

Points = Sequence[tuple[float, float]]
GRADES: Mapping[str, Grade] = {"better": "good", "undecided": "look", "worse": "bad"}
COMPARED = {
    "better": "PPO is better than SFT",
    "undecided": "PPO and SFT are not distinguishable",
    "worse": "PPO is worse than SFT",
}
LEADS = {
    "better": "Better",
    "undecided": "Undecided, so not shown to be worth its KL",
    "worse": "Worse, so not worth its KL",
}
LONGER = ", but not clearly at equal length"
# PPO over SFT's best of n: what it says of the KL, and of both.
WORTH = {
    "better": ("Better, and worth its KL", "it is better than"),
    "undecided": ("Better, but not clearly worth its KL", "it is not distinguishable from"),
    "worse": ("Better, but not worth its KL", "it is worse than"),
}


# The verdict


@dataclass(frozen=True)
class Verdict:
    """The result of a run in one sentence after a few words, and its grade."""

    grade: Grade
    lead: str
    sentence: str


def verdict(run: Run, found: Diagnosis) -> Verdict:
    """Return whether PPO is better than SFT, and worth its KL: whether it is better than SFT's best of n, too."""
    report = run.outcome
    if run.stages["eval"].outdated:
        return Verdict("stale", "Out of date", "The evaluation used models that have changed: run `rlhf eval` again.")
    if report is None or not run.rates:
        return Verdict("open", "Not known yet", "No evaluation compares PPO and SFT so far.")

    judge = deciding_judge(run.rates)
    result = significance(run.rates[judge])
    length = _at_equal_length(run.rates[judge]) if result == "better" else ""
    sentence = f"{COMPARED[result]}, judged by {judge}{length}{_price(report)}"
    if found.hacking:
        return Verdict("bad", "Worse, while the reward rose: reward hacking", f"{sentence}.")
    if result == "better" and is_own_reward(report, judge):
        return Verdict("look", "Better by its own reward, which proves little", f"{sentence}.")

    lead = LEADS[result]
    grade = GRADES[result]
    beside = _over_best_of(report, judge)
    if result == "better" and beside:
        baseline, rate = beside
        against = significance(rate)
        lead, compared = WORTH[against]
        sentence += f"; {compared} {baseline}, chosen by {reward_name(report)}"
        grade = GRADES["better" if against == "better" else "undecided"]
    if length == LONGER:
        lead = "Better, but perhaps only longer"
        grade = "look"
    return Verdict(grade, lead, f"{sentence}.")


def _at_equal_length(rate: WinRate) -> str:
    """Return whether PPO is better at equal length, too; empty if it is not known."""
    interval = rate.length_controlled_ci95
    if interval is None:
        return ""
    return ", also at equal length" if interval[0] > 0.5 else LONGER


def _price(report: Report) -> str:
    """Return PPO's KL and its overhead as text."""
    kl = report.models["ppo"].kl
    if kl is None:
        return ""
    overhead = _overhead(limit_of_ppo(report))
    return f", at a KL of {number(kl)} nats{f', {overhead}' if overhead else ''}"


def _overhead(point: LimitPoint | None) -> str:
    """Return PPO's KL as a multiple of what its score needs; empty if it is not known."""
    if point is None:
        return ""
    if point.overhead is not None:
        return f"{number(point.overhead)} times what its reward needs"
    if point.overhead_at_least is not None:
        return f"at least {number(point.overhead_at_least)} times what its reward needs"
    return ""


def _over_best_of(report: Report, judge: str) -> tuple[str, WinRate] | None:
    """Return the name of SFT's largest best of n, and PPO's win rate over it."""
    if not report.best_of:
        return None
    largest = report.best_of[-1]
    rate = (largest.ppo_win_rate or {}).get(judge)
    return (f"SFT's best of {largest.n}", rate) if rate else None


def recommendation(run: Run) -> str:
    """Return the recommended policy and its figures as sentences if the page shows another one; empty otherwise."""
    report = run.outcome
    if report is None or report.recommended is None:
        return ""
    shown = report.models["ppo"]
    if report.is_recommended(shown):
        return ""
    is_last = shown.step is None and shown.share is None
    instead = "the last policy" if is_last else policy_label(shown.step, shown.share)
    taken = f"The policy to take is {report.recommendation}, not {instead}, whose figures and answers are below."
    return taken + _figures_of(report.recommended)


def _figures_of(policy: RecommendedPolicy) -> str:
    """Return the win rate and the KL of a recommended policy as a sentence; empty for SFT, and if one is not known."""
    rate = (policy.win_rate or {}).get(policy.judge)
    if policy.is_sft or rate is None or policy.kl is None:
        return ""
    prompts = f", on {count(policy.reported_on, 'prompt')} that had no part in the choice" if policy.reported_on else ""
    name = policy_label(policy.step, policy.share)
    return f" {name[0].upper()}{name[1:]} wins {rated(rate)} by {policy.judge}, at {number(policy.kl)} nats{prompts}."


# The three large figures


@dataclass(frozen=True)
class KeyFigure:
    """A large number with what belongs to it, and its course over the snapshots or updates."""

    title: str
    value: str
    unit: str = ""
    notes: Sequence[str] = ()
    grade: Grade | None = None
    spark: Markup | None = None
    over: str = ""  # what the sparkline shows
    term: terms.Term | None = None


def key_figures(run: Run) -> list[KeyFigure]:
    """Return win rate, KL and length; before an evaluation what PPO's log has of them."""
    report = run.outcome
    if report and run.rates:
        return [_win_rate(report), _kl(report), _length(report)]
    return list(_in_training(run.stages["ppo"]))


def _win_rate(report: Report) -> KeyFigure:
    judge = deciding_judge(report.ppo_over_sft)
    rate = report.ppo_over_sft[judge]
    answered = rate.n or report.n
    notes = [f"95 % interval{interval_text(rate.ci95)}" if rate.ci95 else "without an interval"]
    if rate.length_controlled is not None:
        equal = f"{percent(rate.length_controlled)}{interval_text(rate.length_controlled_ci95)}"
        notes.append(f"at equal length {equal}")
    near_greedy = report.greedy.ppo_over_sft if report.greedy else {}
    if judge in near_greedy:
        notes.append(f"near-greedy {rated(near_greedy[judge])}")
    of_what = "label" if is_people(report, judge) else "prompt"
    notes.append(f"of {count(answered, of_what)}")

    points: list[tuple[float, float]] = []
    for each in report.frontier or []:
        if judge in each.win_rate:
            points.append((each.step, each.win_rate[judge].value))
    return KeyFigure(
        f"PPO wins, by {judge}",
        percent(rate.value),
        notes=notes,
        grade=GRADES[significance(rate)],
        spark=sparkline("Win rate", ("", "update", "win rate"), [(0, 0.5), *points] if points else []),
        over=_over_snapshots(percent(0.5), points),
        term=terms.win(judge),
    )


def _kl(report: Report) -> KeyFigure:
    ppo = report.models["ppo"]
    notes = []
    if ppo.kl is not None and ppo.kl_ci95:
        low, high = ppo.kl_ci95
        notes.append(f"95 % interval [{number(low)}, {number(high)}]")
    overhead = _overhead(limit_of_ppo(report))
    if overhead:
        notes.append(overhead)
    judge = deciding_judge(report.ppo_over_sft)
    notes += _worth(report, judge)

    points = [(each.step, each.kl) for each in report.frontier or []]
    return KeyFigure(
        "KL from SFT, the price",
        "not known" if ppo.kl is None else number(ppo.kl),
        unit="" if ppo.kl is None else "nats",
        notes=notes,
        spark=sparkline("KL", ("", "update", "KL"), [(0, 0.0), *points] if points else []),
        over=_over_snapshots("0", points),
        term=None if ppo.kl is None else terms.kl(judge, ppo.kl),
    )


def _worth(report: Report, judge: str) -> Iterator[str]:
    """Yield what PPO must beat to be worth its KL: SFT's best of n, and how far that goes."""
    beside = _over_best_of(report, judge)
    if beside is None:
        return
    baseline, rate = beside
    yield f"worth it if better than {baseline}: PPO wins {rated(rate)}"

    largest = (report.best_of or [])[-1]
    over_sft = (largest.win_rate_vs_sft or {}).get(judge)
    if over_sft:
        yield f"best of {largest.n} wins {percent(over_sft.value)} over SFT, at {number(largest.kl_bound)} nats or less"


def _length(report: Report) -> KeyFigure:
    ppo = report.models["ppo"]
    sft = report.models["sft"]
    points = [(each.step, each.response_length_mean) for each in report.frontier or []]
    return KeyFigure(
        "Length of PPO's answers",
        number(ppo.response_length_mean),
        unit="tokens",
        notes=[f"SFT's have {number(sft.response_length_mean)}", f"{_ends(ppo)} of them end, {_ends(sft)} of SFT's"],
        spark=sparkline("Length", ("", "update", "tokens"), [(0, sft.response_length_mean), *points] if points else []),
        over=_over_snapshots(number(sft.response_length_mean), points),
        term=terms.ENDS,
    )


def _ends(scores: PolicyScores) -> str:
    return f"{scores.eos_fraction:.0%}".replace("%", " %")  # as the table of the policies


def _over_snapshots(start: str, points: Points) -> str:
    """Return where a sparkline starts."""
    return f"{count(len(points), 'snapshot')}, from SFT's {start}" if points else ""


LOGGED = (
    ("Reward score in training", "objective/scores", ""),
    ("KL from SFT in training", "objective/kl_k1", "nats"),
    ("Length of PPO's answers in training", "objective/response_length", "tokens"),
)


def _in_training(ppo: Stage) -> Iterator[KeyFigure]:
    """Yield the means of the last quarter of the updates."""
    for title, key, unit in LOGGED:
        points = ppo.series(key)
        if not points:
            continue
        end = last_quarter([value for _, value in points])
        yield KeyFigure(
            title,
            number(sum(end) / len(end)),
            unit=unit,
            notes=[f"mean of the last {count(len(end), 'update')}"],
            spark=sparkline(title, ("", "update", "value"), points),
            over=count(len(points), "update"),
        )
