"""The answer in one glance: how each stage fared, which one is bad, and what came out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_cli.report.health import Reading, readings
from rlhf_cli.report.runs import Run, Stage, at, is_number
from rlhf_cli.report.texts import bounds, count, number, percent
from rlhf_cli.verdict.frontier import deciding_judge

Grade = Literal["good", "look", "bad", "open"]  # open: absent, or not finished
ORDER = ("good", "look", "bad")
GUESS = 0.5
TRIVIAL = 0.95  # docs/metrics.md, eval_accuracy
OVERFIT = 1.05  # an evaluation loss so much above its lowest is no noise of one pass


@dataclass(frozen=True)
class Badge:
    """How a stage fared, and why: the gravest of its findings first."""

    stage: str
    grade: Grade
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    grade: Grade
    text: str


def badges(run: Run) -> list[Badge]:
    """A badge for each of the four stages."""
    return [_badge(stage, findings(run, name)) for name, stage in run.stages.items()]


def findings(run: Run, stage: str) -> list[Finding]:
    """What is to be said of one of the four stages, the gravest first."""
    looks = {"sft": _sft, "reward": _reward, "ppo": _ppo, "eval": _eval}
    problem = run.stages[stage].problem
    damaged = [Finding("bad", f"damaged: {problem}")] if problem else []
    return sorted([*damaged, *looks[stage](run)], key=lambda finding: -ORDER.index(finding.grade))


def _badge(stage: Stage, found: list[Finding]) -> Badge:
    if not stage.there:
        return Badge(stage.name, "open", ("not there yet",))
    reasons = tuple(finding.text for finding in found)
    grade = found[0].grade if found else "good"
    if stage.state == "begun":
        return Badge(stage.name, "open" if grade == "good" else grade, (_progress(stage), *reasons))
    return Badge(stage.name, grade, reasons)


def _progress(stage: Stage) -> str:
    steps = [row["step"] for row in stage.metrics]
    return f"begun, not finished: {count(max(steps), 'step')} so far" if steps else "begun, not finished"


def _sft(run: Run) -> Iterator[Finding]:
    stage = run.stages["sft"]
    yield from _losses(stage, "fewer sft.num_train_epochs")
    ended = at(run.report, "models.sft.eos_fraction")
    if is_number(ended) and ended < GUESS:
        yield Finding("look", f"only {percent(ended)} of its answers end by themselves")


def _losses(stage: Stage, cure: str) -> Iterator[Finding]:
    """What the losses of a training say: that it learned nothing, or learned its rows by heart."""
    loss, held_out = stage.series("loss"), stage.series("eval_loss")
    if len(loss) > 1 and loss[-1][1] >= loss[0][1]:
        yield Finding("bad", f"its loss did not fall: {number(loss[0][1])} to {number(loss[-1][1])}")
    lowest = min((value for _, value in held_out), default=0.0)
    if held_out and held_out[-1][1] > OVERFIT * lowest:
        now = number(held_out[-1][1])
        yield Finding("look", f"its loss on held-out rows rose again from {number(lowest)} to {now}: {cure}")


def _reward(run: Run) -> Iterator[Finding]:
    stage = run.stages["reward"]
    yield from _losses(stage, "fewer reward.num_train_epochs")
    metrics = stage.told("metrics")
    accuracy, interval = metrics.get("accuracy"), metrics.get("accuracy_ci95")
    if is_number(accuracy) and interval:
        told = f"right on {percent(accuracy)}{bounds(interval)} of the held-out pairs"
        if interval[0] <= GUESS:
            yield Finding("bad", f"{told}: that may be guessing, and so may all that builds on it")
        elif accuracy > TRIVIAL:
            yield Finding("look", f"{told}: the pairs may differ in something trivial, such as their length")
        else:
            yield Finding("good", told)
    for flag in stage.told("card").get("flags", []):
        yield Finding("look", str(flag["text"]))


def _ppo(run: Run) -> Iterator[Finding]:
    stage = run.stages["ppo"]
    stopped = (stage.manifest or {}).get("stopped")
    if stopped:
        yield Finding("bad", f"it was stopped: {stopped}")
    names = dict.fromkeys(str(row.get("signal")) for row in run.firings)
    if names and not stopped:
        yield Finding("bad", f"the watchdog fired {count(len(run.firings), 'time')} ({', '.join(names)})")
    for reading in readings(stage):
        if reading.verdict in ("look", "bad"):
            yield Finding(reading.verdict, f"{reading.title}: {_short(reading)}")


def _short(reading: Reading) -> str:
    """The last of a reading's sentences: what is seen, without the numbers before."""
    return reading.sentence.rstrip(".").rpartition(". ")[2]


def _eval(run: Run) -> Iterator[Finding]:
    rates = at(run.report, "win_rate.ppo_vs_sft") or {}
    if not rates:
        return
    judge = deciding_judge(rates)
    low, high = rates[judge].get("ci95") or (0.0, 1.0)
    if high < GUESS:
        yield Finding("bad", f"PPO loses to SFT by {judge}")
    elif low <= GUESS:
        yield Finding("look", f"PPO and SFT cannot be told apart by {judge}: more prompts (eval.n) would tell more")
    else:
        yield Finding("good", f"PPO beats SFT by {judge}")


def suspect(run: Run, found: list[Badge]) -> str:
    """Which stage to look at first, in a sentence: the earliest bad one, for what follows builds on it.

    Except that a policy that won by the reward and lost by a better judge tells of the reward model first.
    """
    rates = at(run.report, "win_rate.ppo_vs_sft") or {}
    judge = deciding_judge(rates) if rates else "reward"
    hacked = judge != "reward" and "reward" in rates and rates["reward"]["value"] > GUESS > rates[judge]["value"]
    if hacked:
        text = f"PPO raised the reward and lost by {judge}: it found what the reward model gets wrong."
        return f"{text} The stage to mend first: reward, or stop PPO earlier."
    for grade, lead in (("bad", "The stage to mend first"), ("look", "No stage is bad. Worth a look first")):
        for badge in found:
            if badge.grade == grade and badge.stage != "eval":
                why = next(each for each in badge.reasons if not each.startswith("begun"))
                return f"{lead}: {badge.stage}. {why[:1].upper()}{why[1:]}."
    if any(badge.grade == "bad" for badge in found):
        return "The training stages look healthy, the outcome does not: look at the samples, and at the reward model."
    return "No stage looks bad." if any(badge.grade != "open" for badge in found) else "Nothing can be told yet."


def sentences(run: Run) -> list[str]:
    """What came out, in plain sentences, as far as it is there."""
    report = run.report
    if report is None:
        ppo = run.stages["ppo"]
        end = [f"PPO has made {count(ppo.metrics[-1]['step'], 'update')}."] if ppo.metrics else []
        return [*end, "There is no evaluation yet: whether PPO is better than SFT is not known."]
    return list(_outcome(run, report))


def _outcome(run: Run, report: Mapping[str, Any]) -> Iterator[str]:
    rates = at(report, "win_rate.ppo_vs_sft") or {}
    kl = at(report, "models.ppo.kl")
    if rates:
        judge = deciding_judge(rates)
        rate = rates[judge]
        far = f", at {number(kl)} nats from it" if is_number(kl) else ""
        n = f"{rate.get('n', report['n']):,} held-out prompts"
        yield f"PPO {_beats(rate)} on {percent(rate['value'])}{bounds(rate.get('ci95'))} of {n} by {judge}{far}."
        if judge != "reward" and "reward" in rates:
            own = rates["reward"]
            trained = any(key.startswith("rewards.") for key in run.stages["ppo"].told("parents"))
            won = f"{percent(own['value'])}{bounds(own.get('ci95'))}"
            which = (
                ", which it was trained on, it wins {}: alone that would prove nothing" if trained else " it wins {}"
            )
            yield f"By the reward model{which.format(won)}."
        yield from _length(report, rate)
    for row in report.get("best_of", [])[-1:]:
        if rate := (row.get("ppo_win_rate") or {}).get(deciding_judge(rates) if rates else ""):
            yield (
                f"Against SFT's best of {row['n']} by the reward model, which needs no training, PPO wins "
                f"{percent(rate['value'])}{bounds(rate.get('ci95'))}."
            )
    yield from _selected(report)


def _beats(rate: Mapping[str, Any]) -> str:
    low, high = rate.get("ci95") or (0.0, 1.0)
    if low > GUESS:
        return "beats SFT"
    return "loses to SFT: it is better" if high < GUESS else "cannot be told from SFT: it is better"


def _length(report: Mapping[str, Any], rate: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = (at(report, f"models.{name}.response_length_mean") for name in ("ppo", "sft"))
    if is_number(ours) and is_number(theirs):
        equal = rate.get("length_controlled")
        more = f"; at equal length it would win {percent(equal)}" if is_number(equal) else ""
        yield f"Its answers have {number(ours)} tokens on the mean, SFT's {number(theirs)}{more}."


def _selected(report: Mapping[str, Any]) -> Iterator[str]:
    step, chosen = report.get("selected_step"), report.get("selected") or {}
    point = next((each for each in report.get("frontier", []) if each["step"] == step), None)
    if point:
        last = max(each["step"] for each in report["frontier"])
        which = "its last" if step == last else f"not its last, {last}"
        where = f"update {step}, {which}, at {number(point['kl'])} nats"
        yield f"The policy to take is that of {where}, by {chosen['rule']}."
    elif chosen:
        yield f"No policy was selected: {chosen.get('rule')}."
    elif why := report.get("no_frontier"):
        yield f"There is no frontier: {why}."
