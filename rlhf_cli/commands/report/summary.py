"""The answer in one glance: how each stage fared, which one is bad, and what came out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli.commands.report.findings import Finding, Grade, blamed, found_out, of_eval, of_ppo, of_reward, of_sft
from rlhf_cli.commands.report.health import ILL
from rlhf_cli.commands.report.rules import NONE, one_voice
from rlhf_cli.commands.report.runs import Run, Stage, at, is_number
from rlhf_cli.commands.report.tables import bounds, count, number, percent, rated
from rlhf_cli.evaluation.render import OWN_REWARD, deciding_judge, significance

ORDER: tuple[Grade, ...] = ("good", "early", "stale", "look", "bad")


@dataclass(frozen=True)
class Badge:
    """How a stage fared, and why: the gravest of its findings first. `todo` is what to do first, empty for nothing."""

    stage: str
    grade: Grade
    reasons: tuple[str, ...]
    todo: str = ""


def badges(run: Run) -> list[Badge]:
    """A badge for each of the four stages."""
    return [_badge(stage, findings(run, name)) for name, stage in run.stages.items()]


def findings(run: Run, stage: str) -> list[Finding]:
    """What is to be said of one of the four stages, the gravest first."""
    looks = {"sft": of_sft, "reward": of_reward, "ppo": of_ppo, "eval": of_eval}
    problem, shut = run.stages[stage].problem, run.stages[stage].state == "unreadable"
    damaged = [Finding("bad", problem if shut else f"damaged: {problem}")] if problem else []
    stale = [Finding("stale", f"made from {what}") for what in run.stages[stage].outdated]
    return sorted([*damaged, *stale, *looks[stage](run)], key=lambda finding: -ORDER.index(finding.grade))


def _badge(stage: Stage, found: list[Finding]) -> Badge:
    if not stage.there:
        return Badge(stage.name, "open", ("not there yet",))
    reasons = tuple(finding.text for finding in found)
    grade = found[0].grade if found else "good"
    todo = _todo(stage, [finding for finding in found if finding.grade in ILL])
    if stage.state == "begun":
        return Badge(stage.name, grade if grade in ILL else "open", (_progress(stage), *reasons), todo)
    return Badge(stage.name, grade, reasons, todo)


def _todo(stage: Stage, found: list[Finding]) -> str:
    """What to do about a stage's findings, the gravest first: one thing, since it may be the cause of the others.

    A key that can be moved is told before a file that can be read.
    """
    heard = [advice for advice in one_voice([(finding.name, finding.advice) for finding in found]) if advice]
    first = next((advice for advice in heard if advice.moves), heard[0] if heard else NONE)
    return first.text(stage.config)


def _progress(stage: Stage) -> str:
    steps = [row["step"] for row in stage.metrics]
    return f"begun, not finished: {count(max(steps), 'step')} so far" if steps else "begun, not finished"


def suspect(run: Run, found: list[Badge]) -> str:
    """Which stage to look at first, as `_by_need` has it, and what is out of date, a sentence each."""
    return " ".join([_suspect(run, found), *stale(run)])


def stale(run: Run) -> list[str]:
    """A sentence for each stage that was made from what is no longer there."""
    return [
        f"Out of date: {stage.name}, made from {', and from '.join(stage.outdated)}."
        for stage in run.stages.values()
        if stage.outdated
    ]


def _suspect(run: Run, found: list[Badge]) -> str:
    if judge := found_out(run):
        stage, text = blamed(run), f"PPO raised the reward and lost by {judge}"
        why = (
            "went farther than its reward model is right"
            if stage == "ppo"
            else "found what the reward model gets wrong"
        )
        return f"{text}: it {why}. The stage to mend first: {stage}."
    first = _by_need(run, found)[0]
    if first.grade == "bad" and first.stage == "eval":
        return "The training stages look healthy, the outcome does not: look at the samples, and at the reward model."
    if first.grade in ILL:
        lead = "The stage to mend first" if first.grade == "bad" else "No stage is bad. Worth a look first"
        if first.grade == "look" and found[-1].grade == "bad":
            lead = "The outcome is bad, no training stage is. Worth a look first"
        why = next(each for each in first.reasons if not each.startswith("begun"))
        return f"{lead}: {first.stage}. {why[:1].upper()}{why[1:]}."
    if early := [badge.stage for badge in found if badge.grade == "early"]:
        return f"No stage looks bad so far; of {early[0]} it is too early to tell."
    return "No stage looks bad." if any(badge.grade != "open" for badge in found) else "Nothing can be told yet."


def todo(run: Run, found: list[Badge]) -> list[Badge]:
    """The badges that say what to do about their stage, one thing each, in the order in which it is to be done."""
    return [badge for badge in _by_need(run, found) if badge.todo]


def _by_need(run: Run, found: list[Badge]) -> list[Badge]:
    """What is to be mended first: bad stages, then those worth a look, the earliest first, for what follows builds on
    it, and after them the evaluation, which only tells of them. What needs nothing is last.

    Except that what is to blame for a policy that won by the reward and lost by a better judge comes before all.
    """
    first = blamed(run)

    def need(badge: Badge) -> tuple[bool, bool, bool, bool]:
        return badge.stage != first, badge.grade not in ILL, badge.stage == "eval", badge.grade != "bad"

    return sorted(found, key=need)


def sentences(run: Run) -> list[str]:
    """What came out, in plain sentences, as far as it is there."""
    report = run.outcome
    if run.stages["eval"].outdated:
        return [
            "The evaluation is of what is no longer there. What came out is known when it is made again: rlhf eval."
        ]
    if report is None:
        ppo = run.stages["ppo"]
        end = [f"PPO has made {count(ppo.metrics[-1]['step'], 'update')}."] if ppo.metrics else []
        return [*end, "There is no evaluation yet: whether PPO is better than SFT is not known."]
    return list(_outcome(run, report))


def _outcome(run: Run, report: Mapping[str, Any]) -> Iterator[str]:
    rates = run.rates
    kl = at(report, "models.ppo.kl")
    if rates:
        judge = deciding_judge(rates)
        rate = rates[judge]
        far = f", at {number(kl)} nats from it" if is_number(kl) else ""
        caveat = f": {OWN_REWARD}" if judge == "reward" else ""
        n = f"{rate.get('n', report['n']):,} held-out prompts"
        yield f"PPO {_beats(rate)} on {rated(rate)} of {n} by {judge}{far}{caveat}."
        if judge != "reward" and "reward" in rates:
            own = rates["reward"]
            trained = any(key.startswith("rewards.") for key in run.stages["ppo"].told("parents"))
            which = (
                ", which it was trained on, it wins {}: alone that would prove nothing" if trained else " it wins {}"
            )
            yield f"By the reward model{which.format(rated(own))}."
        yield from _length(report, rate)
    for row in report.get("best_of", [])[-1:]:
        if rate := (row.get("ppo_win_rate") or {}).get(deciding_judge(rates) if rates else ""):
            open_ = ", undecided" if significance(rate) == "undecided" else ""
            yield (
                f"Against SFT's best of {row['n']} by the reward model, which needs no training, PPO wins "
                f"{rated(rate)}{open_}."
            )
    yield from _selected(report)


def _beats(rate: Mapping[str, Any]) -> str:
    return {
        "better": "beats SFT",
        "undecided": "cannot be told from SFT: it is better",
        "worse": "loses to SFT: it is better",
    }[significance(rate)]


def _length(report: Mapping[str, Any], rate: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = (at(report, f"models.{name}.response_length_mean") for name in ("ppo", "sft"))
    if is_number(ours) and is_number(theirs):
        equal = rate.get("length_controlled")
        known = bounds(rate.get("length_controlled_ci95"))
        more = f"; at equal length it would win {percent(equal)}{known}" if is_number(equal) else ""
        yield f"Its answers have {number(ours)} tokens on the mean, SFT's {number(theirs)}{more}."


def _selected(report: Mapping[str, Any]) -> Iterator[str]:
    step, chosen = report.get("selected_step"), report.get("selected") or {}
    point = next((each for each in report.get("frontier", []) if each["step"] == step), None)
    if point:
        last = max(each["step"] for each in report["frontier"])
        which = "its last" if step == last else f"not its last, {last}"
        where = f"update {step}, {which}, at {number(point['kl'])} nats"
        same = " The last one cannot be told from it." if last in chosen.get("within_noise", ()) else ""
        yield f"The policy to take is that of {where}, by {chosen['rule']}.{same}"
    elif chosen:
        yield f"No policy was selected: {chosen.get('rule')}."
    elif why := report.get("no_frontier"):
        yield f"There is no frontier: {why}."
