"""Diagnosis of a run: findings and advice for each stage, the stage to fix first, and the result in sentences."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.config.ppo import WatchdogSettings
from rlhf_cli.errors import shown
from rlhf_cli.evaluation.report_text import (
    OWN_REWARD,
    is_own_reward,
    limit_lines,
    rate_text,
    reward_name,
    significance,
    summary_sentence,
    worth_sentences,
)
from rlhf_cli.evaluation.reward_model import describe_debiasing, mean_confidence
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import count, interval_text, number, percent
from rlhf_cli.report.rules import ILL, SEVERITY, Reading, by_cause, key_changes, readings, reconcile, with_values
from rlhf_cli.report.tables import ABSENT
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.runs.report import Report, RewardModelCard, WinRates
from rlhf_cli.statistics import FEWEST, gained, noise, rose_again, wilson, with_interval

# early: too few updates; stale: out of date; open: absent, or not finished
Grade = Literal["good", "early", "stale", "look", "bad", "open"]
# Limits of docs/report-page.md, "Badges", and docs/metrics.md (TRIVIAL).
CHANCE = 0.5  # accuracy of guessing
TRIVIAL = 0.95  # accuracy above which the pairs may differ in something trivial
OVERFIT = 1.05  # times the lowest held-out loss
MEMORIZED = 2.0  # times the training loss
ENDED = 0.9
MOSTLY_ENDED = 0.5
REPEATED: float = WatchdogSettings.model_fields["repetition"].default


@dataclass(frozen=True)
class Finding:
    """A problem, or a check that passed, with advice; `name` refers to it in the advice for other findings."""

    grade: Grade
    text: str
    advice: str = ""
    name: str = ""
    key: str = ""  # its table in findings.toml


_TABLE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def _finding(key: str, **values: Any) -> Finding:
    """Return the finding of a table of findings.toml."""
    return Finding(key=key, **{name: text.format(**values) for name, text in _TABLE[key].items()})


def diagnose(run: Run) -> "Diagnosis":
    """Return what is found in a run."""
    found = readings(run.stages["ppo"])
    log = list(_ppo_log(run, found))
    hacking = _reward_hacking(run, is_unhealthy=any(finding.grade in ILL for finding in log))
    checks = {
        "sft": _sft(run),
        "reward": _reward(run, hacking),
        "dpo": _dpo(run),
        "ppo": _ppo(run, log, hacking),
        "eval": _evaluation(run),
    }
    findings = {}
    for name, stage in run.stages.items():
        of_stage = [*_of_the_folder(stage), *checks[name]]
        findings[name] = sorted(of_stage, key=lambda finding: -SEVERITY.index(finding.grade))
    return Diagnosis(run, found, findings, hacking)


def _of_the_folder(stage: Stage) -> Iterator[Finding]:
    """Yield what is damaged or out of date."""
    if stage.problem:
        yield Finding("bad", stage.problem if stage.state == "unreadable" else f"damaged: {stage.problem}")
    for change in stage.outdated:
        yield Finding("stale", f"made from {change}")


# SFT and the losses of the reward model and DPO


def _sft(run: Run) -> Iterator[Finding]:
    """Yield the findings on the losses, on answers that end, and on repetition."""
    losses = list(_losses(run.stages["sft"]))
    yield from losses
    is_overfit = any(finding.key in ("held_out_loss_rose", "memorized") for finding in losses)
    yield from _ended(run, overfit=is_overfit)

    repetition = [value for _, value in run.stages["ppo"].series("objective/repetition")]
    # PPO's first update is written by the SFT policy, in a further round by models.policy.
    is_by_sft = run.stages["ppo"].setting("models.policy") is None
    if is_by_sft and len(repetition) >= FEWEST and repetition[0] - noise(repetition) > REPEATED:
        yield _finding("repetition", share=percent(repetition[0]), limit=percent(REPEATED))


def _dpo(run: Run) -> Iterator[Finding]:
    yield from _losses(run.stages["dpo"])


def _losses(stage: Stage) -> Iterator[Finding]:
    """Yield whether the training loss falls, and whether the held-out loss follows it."""
    loss = [value for _, value in stage.series("loss")]
    held_out = [value for _, value in stage.series("eval_loss")]
    if len(loss) >= FEWEST:
        rise, chance = gained(loss)
        if rise > -chance:
            key = "loss_rose" if rise > chance else "loss_flat"
            yield _finding(key, first=number(loss[0]), last=number(loss[-1]), stage=stage.name)

    if len(held_out) >= FEWEST and held_out[-1] > OVERFIT * min(held_out) and rose_again(held_out):
        yield _finding(
            "held_out_loss_rose",
            lowest=number(min(held_out)),
            last=number(held_out[-1]),
            duration=_duration_key(stage),
        )

    if stage.name == "sft" and loss and held_out:
        yield _memorized(stage, loss[-1], held_out)


def _memorized(stage: Stage, training: float, held_out: Sequence[float]) -> Finding:
    """Judge the distance of SFT's losses at the end."""
    final = stage.manifest.known_metrics.eval_loss  # over tokens; the log's is a mean of batch means
    theirs = final if is_number(final) else held_out[-1]
    is_falling = len(held_out) > 1 and held_out[-1] == min(held_out)
    key = "memorized_while_falling" if is_falling else "memorized"
    if theirs <= MEMORIZED * training:
        key = "losses_close"

    return _finding(
        key,
        held_out=number(theirs),
        training=number(training),
        limit=number(MEMORIZED),
        duration=_duration_key(stage),
    )


def _duration_key(stage: Stage) -> str:
    """Return the key that decides how long a stage trains."""
    steps = "ppo.total_episodes" if stage.name == "ppo" else f"{stage.name}.max_steps"
    return steps if stage.setting(steps) else f"{stage.name}.num_train_epochs"


def _ended(run: Run, *, overfit: bool) -> Iterator[Finding]:
    """Judge how many of SFT's answers end, unless PPO trains without a stop token."""
    report = run.outcome
    sft = report.models.get("sft") if report else None
    if report is None or sft is None or run.stages["ppo"].setting("ppo.stop_token") == "none":
        return

    low, high = wilson(sft.eos_fraction * report.n, report.n)
    values: dict[str, Any] = {
        "n": report.n,
        "share": percent(sft.eos_fraction) + interval_text((low, high)),
        "limit": percent(ENDED),
        "at": "" if report.response_length is None else f" at {report.response_length} tokens",
        "duration": _duration_key(run.stages["sft"]),
    }
    if high >= ENDED:
        yield _finding("answers_end", **values)
        return

    key = "answers_cut_off"
    greedy = report.greedy.models.get("sft") if report.greedy else None
    if greedy and not overfit and wilson(greedy.eos_fraction * report.n, report.n)[0] >= ENDED:
        key = "undertrained"
        values["greedy"] = percent(greedy.eos_fraction)
    finding = _finding(key, **values)
    yield replace(finding, grade="bad") if high < MOSTLY_ENDED else finding


# Reward model


@dataclass(frozen=True)
class RewardHacking:
    """PPO wins by the reward model and loses by another judge; `cause` is the stage to fix."""

    judge: str
    cause: Literal["reward", "ppo"]


def _reward_hacking(run: Run, *, is_unhealthy: bool) -> RewardHacking | None:
    """Return the reward hacking of a run; None unless win and loss exceed chance.

    Its cause is ppo if PPO's metrics are unhealthy or there is no reward stage, else reward.
    """
    rates = run.rates
    if "reward" not in rates:
        return None
    judge = deciding_judge(rates)
    if significance(rates["reward"]) != "better" or significance(rates[judge]) != "worse":
        return None
    return RewardHacking(judge, "ppo" if is_unhealthy or not run.stages["reward"].there else "reward")


def _reward(run: Run, hacking: RewardHacking | None) -> Iterator[Finding]:
    """Yield reward hacking that it caused, and the findings on the losses, the accuracy and the report card."""
    stage = run.stages["reward"]
    if hacking and hacking.cause == "reward":
        yield _finding("exploited", judge=hacking.judge)
    yield from _losses(stage)

    result = stage.manifest.reward_model
    if result and result.accuracy_ci95:
        low, _ = result.accuracy_ci95
        key = "accurate"
        if low <= CHANCE:
            key = "chance"
        elif low > TRIVIAL:
            key = "trivial"
        yield _finding(key, accuracy=percent(result.accuracy) + interval_text(result.accuracy_ci95))
    if isinstance(result, RewardModelCard):
        yield from _flags(stage, result)


def _flags(stage: Stage, card: RewardModelCard) -> Iterator[Finding]:
    """Yield the flags of a report card with advice."""
    flags = card.flags or []
    rejected = []
    for flag in flags:
        if flag.code == "R11":
            probe, found, _ = flag.text.partition(" scores above")
            rejected.append(f"pairs in which {probe if found else 'such an answer'} is rejected")

    exploit = "it" if len(rejected) == 1 else "each of them"
    debiasing = describe_debiasing(card)
    advice = {
        "R10": debiasing or "set ppo.overlong_penalty; add pairs in which the shorter answer is the chosen one",
        "R11": f"add {', and '.join(rejected)}: PPO will exploit {exploit}",
        "R12": _recalibrate(stage, card),
    }
    for flag in flags:
        yield Finding("look", flag.text, advice.get(flag.code, ""), "the report card")


def _recalibrate(stage: Stage, card: RewardModelCard) -> str:
    """Return the advice on scores that imply a higher or lower accuracy than there is."""
    confidence = mean_confidence(card)
    low, high = card.accuracy_ci95 or (0.0, 1.0)
    if confidence > high:
        return f"lower {_duration_key(stage)} or reward.learning_rate"
    if confidence < low:
        return f"raise {_duration_key(stage)}; more pairs help as well"

    return "add more pairs"


# PPO and the evaluation


def _ppo(run: Run, log: Sequence[Finding], hacking: RewardHacking | None) -> Iterator[Finding]:
    """Yield reward hacking that it caused, a last policy worse than an earlier one, and the findings on its log."""
    if hacking and hacking.cause == "ppo":
        yield _finding("over_optimized", judge=hacking.judge)
    yield from _past_its_best(run)
    yield from log


def _past_its_best(run: Run) -> Iterator[Finding]:
    """Yield if the judge that decides prefers an earlier snapshot by more than chance, and the reward the last one."""
    end = run.stages["ppo"].manifest.step  # of a run that was stopped later snapshots may exist
    frontier = (run.outcome.frontier if run.outcome else None) or []
    snapshots = [point for point in frontier if end is None or point.step <= end]
    if not snapshots or "reward" not in snapshots[-1].judges:
        return
    last = snapshots[-1].judges
    judge = deciding_judge(last)
    best = max(snapshots, key=lambda point: point.judges[judge].mean)
    rose = last["reward"].mean - best.judges["reward"].mean

    if last[judge].within_noise is False and rose > 0:
        yield _finding(
            "past_its_best",
            step=best.step,
            judge=judge,
            highest=number(best.judges[judge].mean),
            last=number(last[judge].mean),
            reward=number(best.judges["reward"].mean),
            last_reward=number(last["reward"].mean),
            duration=_duration_key(run.stages["ppo"]),
        )


def _ppo_log(run: Run, found: Sequence[Reading]) -> Iterator[Finding]:
    """Yield the findings on PPO without the evaluation."""
    stage = run.stages["ppo"]
    stopped = stage.manifest.stopped
    since = f" of update {run.firings[0]['step']} and later" if run.firings else ""
    if stopped:
        yield _finding("stopped", reason=stopped, since=since)
    elif run.firings:
        signals = dict.fromkeys(str(row.get("signal")) for row in run.firings)
        yield _finding("alarms", times=count(len(run.firings), "time"), signals=", ".join(signals), since=since)

    for reading in by_cause(found):
        if reading.verdict == "look" or reading.verdict == "bad":  # ILL, for mypy
            judged = reading.judged.rstrip(".").replace(". ", "; ")
            yield Finding(reading.verdict, f"{reading.title}: {judged}", reading.advice, reading.title)

    if 0 < len(stage.metrics) < FEWEST:
        yield _finding("few_updates", updates=count(len(stage.metrics), "update"), fewest=FEWEST)


def _evaluation(run: Run) -> Iterator[Finding]:
    """Yield who wins; a win by the reward that PPO was trained on alone is not good."""
    if run.outcome and run.rates:
        judge = deciding_judge(run.rates)
        result: str = significance(run.rates[judge])
        if is_own_reward(run.outcome, judge) and result != "worse":
            yield _finding(f"{result}_by_own_reward", judge=OWN_REWARD)
        else:
            yield _finding(result, judge=judge)


# Badges: the findings on each stage, and which stage to fix first


@dataclass(frozen=True)
class Badge:
    """A stage's grade, its findings as text, the most severe first, and one advice (empty if healthy)."""

    stage: str
    grade: Grade
    findings: tuple[str, ...] = ()
    advice: str = ""
    progress: str = ""  # of a stage that is not finished

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return what the page shows: the progress and the findings."""
        return (self.progress, *self.findings) if self.progress else self.findings


@dataclass(frozen=True)
class Diagnosis:
    """The readings of PPO's log, the findings on each stage, the most severe first, and reward hacking, if any."""

    run: Run
    readings: Sequence[Reading]
    findings: Mapping[str, Sequence[Finding]]
    hacking: RewardHacking | None

    @cached_property
    def badges(self) -> list[Badge]:
        return [_badge(stage, self.findings[name]) for name, stage in self.run.stages.items()]

    def conclusion(self) -> str:
        """Return the stage to fix first, and a sentence for each stage that is out of date."""
        sentences = [self._fix_first()]
        for stage in self.run.stages.values():
            if stage.outdated:
                sentences.append(f"Out of date: {stage.name}, made from {', and from '.join(stage.outdated)}.")
        return " ".join(sentences)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis for scripts: the conclusion, and each stage's grade with its reasons."""
        stages = [{"stage": each.stage, "grade": each.grade, "findings": list(each.findings)} for each in self.badges]
        rates = {judge: rate.model_dump(mode="json", exclude_none=True) for judge, rate in self.run.rates.items()}
        return {
            "run": shown(self.run.folder),
            "conclusion": self.conclusion(),
            "stages": stages,
            "win_rate": rates,
        }

    def _fix_first(self) -> str:
        if self.hacking:
            cause = self.hacking.cause
            how = "over-optimized its reward" if cause == "ppo" else "exploited errors of the reward model"
            return f"PPO raised the reward and lost by {self.hacking.judge}: it {how}. Stage to fix first: {cause}."

        first = self.by_priority()[0]
        outcome = self.badges[-1].grade  # of the evaluation
        if first.grade == "bad" and first.stage == "eval":
            return "The training stages look healthy, but the outcome is bad: check the samples and the reward model."
        if first.grade in ILL:
            lead = "No stage is bad. Worth a look first"
            if first.grade == "bad":
                lead = "Stage to fix first"
            elif outcome == "bad":
                lead = "The outcome is bad, but no training stage is. Worth a look first"
            why = first.findings[0]
            return f"{lead}: {first.stage}. {why[:1].upper()}{why[1:]}."

        early = [badge.stage for badge in self.badges if badge.grade == "early"]
        if early:
            return f"No stage is bad so far; too early to tell for {early[0]}."
        is_new = all(badge.grade == "open" for badge in self.badges)
        return "No results yet." if is_new else "No stage is bad."

    def by_priority(self) -> list[Badge]:
        """Return the badges in the order in which to fix their stages.

        The cause of reward hacking is first. Then bad stages come before those worth a look, earlier ones first, since
        the later ones depend on them, and the evaluation after the training stages.
        """
        cause = self.hacking.cause if self.hacking else None

        def priority(badge: Badge) -> tuple[bool, bool, bool, bool]:
            return badge.stage != cause, badge.grade not in ILL, badge.stage == "eval", badge.grade != "bad"

        return sorted(self.badges, key=priority)


def _badge(stage: Stage, found: Sequence[Finding]) -> Badge:
    """Return the badge of a stage; its grade is that of its most severe finding, but open while it runs well."""
    if not stage.there:
        return Badge(stage.name, "open", progress=ABSENT)

    grade: Grade = found[0].grade if found else "good"
    progress = ""
    if stage.state == "begun":
        progress = "not finished"
        if stage.metrics:
            last = max(row["step"] for row in stage.metrics)
            progress += f": {count(last, 'step')} so far"
        if grade not in ILL:
            grade = "open"
    texts = tuple(finding.text for finding in found)
    return Badge(stage.name, grade, texts, with_values(_first_advice(found), stage.config), progress)


def _first_advice(found: Sequence[Finding]) -> str:
    """Return one advice, as it may remove the cause of the others: on config keys before files to read."""
    ill = [(finding.name, finding.advice) for finding in found if finding.grade in ILL]
    advices = [advice for advice in reconcile(ill) if advice]
    with_keys = [advice for advice in advices if key_changes(advice)]
    return next(iter(with_keys + advices), "")


# The result


def sentences(run: Run) -> Iterator[str]:
    """Yield the result in plain sentences, as far as it exists."""
    report = run.outcome
    ppo = run.stages["ppo"]
    if run.stages["eval"].outdated:
        yield "The evaluation is out of date: it used models that have changed. Run `rlhf eval` again."
        return
    if report is None:
        if ppo.metrics:
            yield f"PPO has made {count(ppo.metrics[-1]['step'], 'update')}."
        yield "There is no evaluation yet, so PPO and SFT are not compared."
        return

    if run.rates:
        yield f"{summary_sentence(report)}."
        yield from _length_sentence(report)
    yield from (f"{sentence}." for sentence in worth_sentences(report))
    yield from _best_of_sentence(report, run.rates)
    yield from (f"{line}." for line in limit_lines(report))
    yield from _recommended_sentence(report)


def _length_sentence(report: Report) -> Iterator[str]:
    """Yield the lengths of both policies' answers, and the win rate at equal lengths."""
    ppo = report.models.get("ppo")
    sft = report.models.get("sft")
    if ppo is None or sft is None:
        return

    rate = report.ppo_over_sft[deciding_judge(report.ppo_over_sft)]
    controlled = ""
    if rate.length_controlled is not None:
        equal = with_interval(rate.length_controlled, rate.length_controlled_ci95)
        controlled = f"; length-controlled win rate {equal}"
    ours = number(ppo.response_length_mean)
    theirs = number(sft.response_length_mean)
    yield f"PPO's answers have {ours} tokens on average, SFT's {theirs}{controlled}."


def _best_of_sentence(report: Report, rates: WinRates) -> Iterator[str]:
    """Yield PPO's win rate over the largest best of n."""
    if not report.best_of or not rates:
        return

    largest = report.best_of[-1]
    rate = (largest.ppo_win_rate or {}).get(deciding_judge(rates))
    if rate:
        baseline = f"SFT's best of {largest.n} (chosen by {reward_name(report)})"
        yield f"PPO against {baseline}, judged by {deciding_judge(rates)}: win rate {rate_text(rate)}."


def _recommended_sentence(report: Report) -> Iterator[str]:
    """Yield the recommended policy, or else why there is no frontier."""
    chosen = report.recommended
    if chosen:
        kl = "" if chosen.kl is None or chosen.is_sft else f", at {number(chosen.kl)} nats"
        yield f"Recommended policy: {report.recommendation}{kl}{_beside_last(report)}."
    elif report.no_frontier:
        yield f"There is no frontier: {report.no_frontier}."


def _beside_last(report: Report) -> str:
    """Return the win rate of the recommended policy over the last one as text."""
    chosen = report.recommended
    if chosen is None or not chosen.over_last:
        return ", the last one" if report.recommends_last else ""
    rate = chosen.over_last[chosen.judge]
    return f"; its win rate over the last one is {rate_text(rate)}"
