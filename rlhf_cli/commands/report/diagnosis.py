"""Diagnosis of a run: findings and advice for each stage, the stage to fix first, and the result in sentences."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.commands.report.rules import ILL, SEVERITY, by_cause, key_changes, readings, reconcile, with_values
from rlhf_cli.commands.report.tables import ABSENT, bounds, count, number, percent
from rlhf_cli.config.ppo import WatchdogSettings
from rlhf_cli.evaluation.render import (
    OWN_REWARD,
    deciding_judge,
    is_own_reward,
    limit_lines,
    reward_name,
    significance,
    summary_sentence,
    worth_sentences,
)
from rlhf_cli.evaluation.reward_model import mean_confidence
from rlhf_cli.jsonl import at, is_number
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.statistics import FEWEST, gained, noise, rose_again, wilson, with_interval

# early: too few updates; stale: out of date; open: absent, or not finished
Grade = Literal["good", "early", "stale", "look", "bad", "open"]
# Limits of docs/evaluation.md, "Badges", and docs/tuning.md (TRIVIAL).
CHANCE = 0.5
TRIVIAL = 0.95  # accuracy above which the pairs may differ in something trivial
OVERFIT = 1.05  # times the lowest held-out loss
MEMORIZED = 2.0  # times the training loss
ENDED = 0.9
REPEATED: float = WatchdogSettings.model_fields["repetition"].default


@dataclass(frozen=True)
class Finding:
    """A problem, or a check that passed, with advice; `name` refers to it in the advice for other findings."""

    grade: Grade
    text: str
    advice: str = ""
    name: str = ""


_TABLE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def _finding(key: str, **values: Any) -> Finding:
    return Finding(**{name: text.format(**values) for name, text in _TABLE[key].items()})


def findings(run: Run, stage: str) -> list[Finding]:
    """Return the findings on a stage, the most severe first."""
    rules = {"sft": _sft, "reward": _reward, "dpo": _dpo, "ppo": _ppo, "eval": _evaluation}
    problem, unreadable = run.stages[stage].problem, run.stages[stage].state == "unreadable"
    damaged = [Finding("bad", problem if unreadable else f"damaged: {problem}")] if problem else []
    stale = [Finding("stale", f"made from {change}") for change in run.stages[stage].outdated]
    return sorted([*damaged, *stale, *rules[stage](run)], key=lambda finding: -SEVERITY.index(finding.grade))


# SFT and the losses of the reward model and DPO


def _sft(run: Run) -> Iterator[Finding]:
    losses = list(_losses(run.stages["sft"]))
    yield from losses
    yield from _ended(run, overfit=any(finding.grade == "look" and key_changes(finding.advice) for finding in losses))
    repetition = [value for _, value in run.stages["ppo"].series("objective/repetition")]
    # PPO's first update is written by the SFT policy.
    if len(repetition) >= FEWEST and repetition[0] - noise(repetition) > REPEATED:
        yield _finding("repetition", share=percent(repetition[0]), limit=percent(REPEATED))


def _dpo(run: Run) -> Iterator[Finding]:
    yield from _losses(run.stages["dpo"])


def _losses(stage: Stage) -> Iterator[Finding]:
    loss, held_out = ([value for _, value in stage.series(key)] for key in ("loss", "eval_loss"))
    if len(loss) >= FEWEST:
        gain, chance = gained(loss)
        if gain > -chance:
            key = "loss_rose" if gain > chance else "loss_flat"
            yield _finding(key, first=number(loss[0]), last=number(loss[-1]), stage=stage.name)
    if len(held_out) >= FEWEST and held_out[-1] > OVERFIT * min(held_out) and rose_again(held_out):
        lowest, last = number(min(held_out)), number(held_out[-1])
        yield _finding("held_out_loss_rose", lowest=lowest, last=last, duration=_duration_key(stage))
    if stage.name == "sft" and loss and held_out:
        final = stage.manifest.metrics.get("eval_loss")  # over tokens; the log's is a mean of batch means
        ours, theirs = loss[-1], final if is_number(final) else held_out[-1]
        falling = len(held_out) > 1 and held_out[-1] == min(held_out)
        key = "losses_close" if theirs <= MEMORIZED * ours else "memorized_while_falling" if falling else "memorized"
        values = {"held_out": number(theirs), "training": number(ours), "limit": number(MEMORIZED)}
        yield _finding(key, **values, duration=_duration_key(stage))


def _duration_key(stage: Stage) -> str:
    steps = f"{stage.name}.max_steps"
    return steps if stage.setting(steps) else f"{stage.name}.num_train_epochs"


def _ended(run: Run, *, overfit: bool) -> Iterator[Finding]:
    """Judge how many of SFT's answers end, unless PPO trains without a stop token."""
    report, ended = run.outcome or {}, at(run.outcome, "models.sft.eos_fraction")
    if not is_number(ended) or run.stages["ppo"].setting("ppo.stop_token") == "none":
        return
    n, length, greedy = report["n"], report.get("response_length"), at(report, "greedy.models.sft.eos_fraction")
    interval = wilson(ended * n, n)
    values = {"n": n, "share": percent(ended) + bounds(interval), "limit": percent(ENDED)}
    values |= {"at": f" at {length} tokens" if is_number(length) else "", "duration": _duration_key(run.stages["sft"])}
    if interval[1] >= ENDED:
        yield _finding("answers_end", **values)
        return
    if is_number(greedy) and wilson(greedy * n, n)[0] >= ENDED and not overfit:
        found = _finding("undertrained", **values, greedy=percent(greedy))
    else:
        found = _finding("answers_cut_off", **values)
    yield replace(found, grade="bad") if interval[1] < CHANCE else found


# Reward model


def reward_hacking(run: Run) -> tuple[str, str]:
    """Return the judge by which PPO loses although it wins by the reward model, and the stage that caused it.

    It is ppo if its metrics are unhealthy or there is no reward stage, else reward. Both texts are empty unless loss
    and win exceed chance.
    """
    rates = run.rates
    judge = deciding_judge(rates) if rates else "reward"
    if "reward" not in rates or significance(rates["reward"]) != "better" or significance(rates[judge]) != "worse":
        return "", ""
    unhealthy = any(finding.grade in ILL for finding in _ppo_log(run))
    return judge, "ppo" if unhealthy or not run.stages["reward"].there else "reward"


def _reward(run: Run) -> Iterator[Finding]:
    stage, (judge, cause) = run.stages["reward"], reward_hacking(run)
    if cause == "reward":
        yield _finding("exploited", judge=judge)
    yield from _losses(stage)
    metrics, card = stage.manifest.metrics, stage.manifest.card
    accuracy, interval = metrics.get("accuracy"), metrics.get("accuracy_ci95")
    if is_number(accuracy) and interval:
        key = "chance" if interval[0] <= CHANCE else "trivial" if interval[0] > TRIVIAL else "accurate"
        yield _finding(key, accuracy=percent(accuracy) + bounds(interval))
    flags = card.get("flags", [])
    probes = [str(flag["text"]).partition(" scores above") for flag in flags if flag.get("code") == "R11"]
    rejected = [f"pairs in which {probe if found else 'such an answer'} is rejected" for probe, found, _ in probes]
    exploit = "it" if len(rejected) == 1 else "each of them"
    advices = {
        "R10": "set ppo.overlong_penalty; add pairs in which the shorter answer is the chosen one",
        "R11": f"add {', and '.join(rejected)}: PPO will exploit {exploit}",
    }
    for flag in flags:
        code = str(flag.get("code"))
        advice = _recalibrate(stage, card) if code == "R12" else advices.get(code, "")
        yield Finding("look", str(flag["text"]), advice, "the report card")


def _recalibrate(stage: Stage, card: Mapping[str, Any]) -> str:
    low, high = card["accuracy_ci95"]
    if mean_confidence(card) > high:
        return f"lower {_duration_key(stage)} or reward.learning_rate"
    if mean_confidence(card) < low:
        return f"raise {_duration_key(stage)}; more pairs help as well"
    return "add more pairs"


# PPO and the evaluation


def _ppo(run: Run) -> Iterator[Finding]:
    judge, cause = reward_hacking(run)
    if cause == "ppo":
        yield _finding("over_optimized", judge=judge)
    yield from _ppo_log(run)


def _ppo_log(run: Run) -> Iterator[Finding]:
    """Yield the findings on PPO without the evaluation."""
    stage = run.stages["ppo"]
    stopped, updates = stage.manifest.stopped, len(stage.metrics)
    since = f" of update {run.firings[0]['step']} and later" if run.firings else ""
    signals = dict.fromkeys(str(row.get("signal")) for row in run.firings)
    if stopped:
        yield _finding("stopped", reason=stopped, since=since)
    elif signals:
        yield _finding("alarms", times=count(len(run.firings), "time"), signals=", ".join(signals), since=since)
    for reading in by_cause(readings(stage)):
        if reading.verdict == "look" or reading.verdict == "bad":
            judged = reading.sentence.partition(". ")[2].rstrip(".").replace(". ", "; ")  # without its course
            yield Finding(reading.verdict, f"{reading.title}: {judged}", reading.advice, reading.title)
    if 0 < updates < FEWEST:
        yield _finding("few_updates", updates=count(updates, "update"), fewest=FEWEST)


def _evaluation(run: Run) -> Iterator[Finding]:
    if rates := run.rates:
        judge = deciding_judge(rates)
        result: str = significance(rates[judge])
        if is_own_reward(run.report or {}, judge) and result != "worse":
            yield _finding(f"{result}_by_own_reward", judge=OWN_REWARD)
        else:
            yield _finding(result, judge=judge)


# Badges: the findings on each stage, and which stage to fix first


@dataclass(frozen=True)
class Badge:
    """A stage's grade, its findings as text, the most severe first, and one advice (empty if healthy)."""

    stage: str
    grade: Grade
    reasons: tuple[str, ...]
    todo: str = ""


def badges(run: Run) -> list[Badge]:
    """Return a badge for each stage."""
    return [_badge(stage, findings(run, name)) for name, stage in run.stages.items()]


def _badge(stage: Stage, found: list[Finding]) -> Badge:
    if not stage.there:
        return Badge(stage.name, "open", (ABSENT,))
    grade, reasons = found[0].grade if found else "good", tuple(finding.text for finding in found)
    # One advice, as it may remove the cause of the others: config keys before files to read.
    advices = filter(None, reconcile([(finding.name, finding.advice) for finding in found if finding.grade in ILL]))
    todo = with_values(next(iter(sorted(advices, key=lambda advice: not key_changes(advice))), ""), stage.config)
    if stage.state == "begun":
        steps = [row["step"] for row in stage.metrics]
        progress = "not finished" + (f": {count(max(steps), 'step')} so far" if steps else "")
        return Badge(stage.name, grade if grade in ILL else "open", (progress, *reasons), todo)
    return Badge(stage.name, grade, reasons, todo)


def headline(run: Run, found: list[Badge]) -> str:
    """Return the stage to fix first, and a sentence for each stage that is out of date."""
    stale = [stage for stage in run.stages.values() if stage.outdated]
    outdated = [f"Out of date: {stage.name}, made from {', and from '.join(stage.outdated)}." for stage in stale]
    return " ".join([_fix_first(run, found), *outdated])


def _fix_first(run: Run, found: list[Badge]) -> str:
    judge, stage = reward_hacking(run)
    if judge:
        why = "over-optimized its reward" if stage == "ppo" else "exploited errors of the reward model"
        return f"PPO raised the reward and lost by {judge}: it {why}. Stage to fix first: {stage}."
    first = by_priority(run, found)[0]
    if first.grade == "bad" and first.stage == "eval":
        return "The training stages look healthy, but the outcome is bad: check the samples and the reward model."
    if first.grade in ILL:
        lead = "Stage to fix first" if first.grade == "bad" else "No stage is bad. Worth a look first"
        if first.grade == "look" and found[-1].grade == "bad":
            lead = "The outcome is bad, but no training stage is. Worth a look first"
        why = next(reason for reason in first.reasons if not reason.startswith("not finished"))
        return f"{lead}: {first.stage}. {why[:1].upper()}{why[1:]}."
    if early := [badge.stage for badge in found if badge.grade == "early"]:
        return f"No stage is bad so far; too early to tell for {early[0]}."
    return "No stage is bad." if any(badge.grade != "open" for badge in found) else "No results yet."


def by_priority(run: Run, found: list[Badge]) -> list[Badge]:
    """Return the badges in the order in which to fix their stages.

    The cause of reward hacking is first. Then bad stages come before those worth a look, earlier ones first, since the
    later ones depend on them, and the evaluation after the training stages.
    """
    _, cause = reward_hacking(run)
    return sorted(
        found,
        key=lambda badge: (badge.stage != cause, badge.grade not in ILL, badge.stage == "eval", badge.grade != "bad"),
    )


# The result


def sentences(run: Run) -> Iterator[str]:
    """Yield the result in plain sentences, as far as it exists."""
    report, rates, ppo = run.outcome, run.rates, run.stages["ppo"]
    if run.stages["eval"].outdated:
        yield "The evaluation is out of date: it used models that have changed. Run `rlhf eval` again."
        return
    if report is None:
        if ppo.metrics:
            yield f"PPO has made {count(ppo.metrics[-1]['step'], 'update')}."
        yield "There is no evaluation yet, so PPO and SFT are not compared."
        return
    if rates:
        yield f"{summary_sentence(report)}."
        ours, theirs = (at(report, f"models.{name}.response_length_mean") for name in ("ppo", "sft"))
        if is_number(ours) and is_number(theirs):
            rate = rates[deciding_judge(rates)]
            equal, interval = rate.get("length_controlled"), rate.get("length_controlled_ci95")
            controlled = f"; length-controlled win rate {with_interval(equal, interval)}" if is_number(equal) else ""
            yield f"PPO's answers have {number(ours)} tokens on average, SFT's {number(theirs)}{controlled}."
    yield from (f"{sentence}." for sentence in worth_sentences(report))
    for row in report.get("best_of", [])[-1:]:
        if rate := (row.get("ppo_win_rate") or {}).get(deciding_judge(rates) if rates else ""):
            undecided = ", undecided" if significance(rate) == "undecided" else ""
            baseline = f"SFT's best of {row['n']} by {reward_name(report)}, which needs no training"
            yield f"PPO's win rate over {baseline}: {with_interval(rate['value'], rate.get('ci95'))}{undecided}."
    yield from (f"{line}." for line in limit_lines(report))
    step, chosen, points = report.get("selected_step"), report.get("selected") or {}, report.get("frontier") or []
    if point := next((each for each in points if each["step"] == step), None):
        last, kl = max((each["step"], each["kl"]) for each in points)
        compared = "within noise of it" if last in chosen.get("within_noise", ()) else "worse by more than noise"
        if kl > (run.stages["eval"].setting("eval.select.kl_max") or math.inf):
            compared = f"beyond the bound on the KL with {number(kl)} nats"
        end = "the last one" if step == last else f"the last one, {last}, is {compared}"
        yield f"Selected policy: update {step} at {number(point['kl'])} nats, by {chosen['rule']}; {end}."
    elif chosen:
        yield f"No policy was selected: {chosen.get('rule')}."
    elif reason := report.get("no_frontier"):
        yield f"There is no frontier: {reason}."
