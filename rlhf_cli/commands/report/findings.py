"""What is found in each stage of a run, by the numbers that it and the evaluation left: a finding, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlhf_cli.commands.report.health import ILL, Reading, by_cause, readings
from rlhf_cli.commands.report.rules import FEWEST, NONE, Advice, Move, gained, rose_again, spread
from rlhf_cli.commands.report.runs import Run, Stage, at, is_number
from rlhf_cli.commands.report.tables import bounds, count, number, percent
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.evaluation.render import OWN_REWARD, deciding_judge, significance
from rlhf_cli.evaluation.reward_model import mean_confidence
from rlhf_cli.statistics import wilson

# early: too few updates; stale: out of date; open: absent, or not finished
Grade = Literal["good", "early", "stale", "look", "bad", "open"]
GUESS = 0.5
TRIVIAL = 0.95  # docs/tuning.md, eval_accuracy
OVERFIT = 1.05  # an evaluation loss so much above its lowest is no noise of one pass
# docs/evaluation.md, "Badges", has these three with their sources.
APART = 2.0  # times the loss in training
ENDED = 0.9
REPEATED: float = WatchdogSettings.model_fields["repetition"].default  # above answers that repeat nothing


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it; `name` is what advice on something else calls it by."""

    grade: Grade
    text: str
    advice: Advice = NONE
    name: str = ""


def of_sft(run: Run) -> Iterator[Finding]:
    stage = run.stages["sft"]
    by_heart = [*_losses(stage), *_apart(stage)]
    yield from by_heart
    yield from _ended(run, too_long=any(finding.grade == "look" and finding.advice.moves for finding in by_heart))
    repeated = [value for _, value in run.stages["ppo"].series("objective/repetition")]
    # The first update's is the SFT policy's own: nothing was learned yet.
    if len(repeated) >= FEWEST and repeated[0] - spread(repeated).bound(1) > REPEATED:
        text = f"{percent(repeated[0])} of what its answers say in runs of three tokens they have said before"
        yield Finding(
            "look", f"{text}, {percent(REPEATED)} at most is healthy (PPO's first update)",
            Advice((), "read its answers under Samples, and look for repetition in its rows"),
        )  # fmt: skip


def _losses(stage: Stage) -> Iterator[Finding]:
    """What the losses of a training say: that it learned nothing, or learned its rows by heart."""
    loss, held_out = ([value for _, value in stage.series(key)] for key in ("loss", "eval_loss"))
    if len(loss) >= FEWEST:
        gain, chance = gained(loss)
        told, rate = f"{number(loss[0])} to {number(loss[-1])}", f"{stage.name}.learning_rate"
        if gain > chance:
            name = "its loss rose"
            yield Finding("bad", f"{name}: {told}", Advice((Move("lower", rate),), "in steps of a factor 3"), name)
        elif gain > -chance:
            name = "its loss did not fall by more than its noise"
            yield Finding("look", f"{name}: {told}", Advice((Move("raise", rate),), "in steps of a factor 3"), name)
    if len(held_out) >= FEWEST and held_out[-1] > OVERFIT * min(held_out) and rose_again(held_out):
        name = "its loss on held-out rows rose again"
        told = f"from {number(min(held_out))} to {number(held_out[-1])}"
        yield Finding("look", f"{name} {told}", _by_heart(stage), name)


def _by_heart(stage: Stage) -> Advice:
    return Advice((Move("lower", _how_long(stage)),), "it learns its rows by heart: more rows help as well")


def _how_long(stage: Stage) -> str:
    """The key that says how long a stage trains."""
    steps = f"{stage.name}.max_steps"
    return steps if stage.setting(steps) else f"{stage.name}.num_train_epochs"


def _apart(stage: Stage) -> Iterator[Finding]:
    """SFT's loss on held-out rows, beside that in training."""
    loss, held_out = stage.series("loss"), stage.series("eval_loss")
    if not loss or not held_out:
        return
    # By token, as `rlhf status` has it: the log's is a mean of its batches' means.
    final = stage.told("metrics").get("eval_loss")
    ours, theirs = loss[-1][1], final if is_number(final) else held_out[-1][1]
    told = f"its loss on held-out rows is {number(theirs)}, beside {number(ours)} in training"
    if theirs > APART * ours:
        more = Advice((), "give it more rows: these it knows by heart")
        lowest_last = len(held_out) > 1 and held_out[-1][1] == min(value for _, value in held_out)
        # Where no evaluation was lower, what would stop sooner may be worse.
        advice = more if lowest_last else _by_heart(stage)
        text = f"{told}: up to {number(APART)} times is healthy"
        yield Finding("look", text, advice, "its loss on held-out rows")
    else:
        yield Finding("good", told)


def _ended(run: Run, *, too_long: bool) -> Iterator[Finding]:
    """How many of SFT's answers end by themselves, where they are meant to; `too_long`: it learned rows by heart."""
    report, ended = run.outcome or {}, at(run.outcome, "models.sft.eos_fraction")
    if not is_number(ended) or run.stages["ppo"].setting("ppo.stop_token") == "none":
        return
    n = report["n"]
    interval = wilson(ended * n, n)
    told = f"{percent(ended)}{bounds(interval)} of its {n:,} sampled answers end by themselves"
    if interval[1] >= ENDED:
        yield Finding("good", told)
        return
    length = report.get("response_length")
    cut = f"; the others are cut off at {length} tokens" if is_number(length) else "; the others are cut off"
    text = f"only {told}, {percent(ENDED)} and more is healthy{cut}"
    grade: Grade = "bad" if interval[1] < GUESS else "look"
    greedy = at(report, "greedy.models.sft.eos_fraction")
    if is_number(greedy) and wilson(greedy * n, n)[0] >= ENDED and not too_long:
        text += f" ({percent(greedy)} end near-greedy)"
        more = (Move("raise", _how_long(run.stages["sft"])), Move("raise", "sft.learning_rate"))
        advice = Advice(more, "it knows how to end and is not sure of it: it has learned too little")
    else:
        advice = Advice(
            (Move("raise", "sft.max_length"), Move("raise", "ppo.response_length")),
            "under Samples, whole texts that are cut off ask for the latter, texts without an end for the former, or "
            "for rows that end",
        )
    yield Finding(grade, text, advice, "answers that end")


def found_out(run: Run) -> str:
    """The judge by which PPO surely lost though it surely won by the reward; else empty."""
    rates = run.rates
    judge = deciding_judge(rates) if rates else "reward"
    hacked = "reward" in rates and significance(rates["reward"]) == "better" and significance(rates[judge]) == "worse"
    return judge if hacked else ""


def blamed(run: Run) -> str:
    """The stage to which that is laid: ppo where its own numbers are ill, which costs no pairs to mend, else reward."""
    if not found_out(run):
        return ""
    return "ppo" if any(finding.grade in ILL for finding in _by_its_log(run)) else "reward"


def of_reward(run: Run) -> Iterator[Finding]:
    stage = run.stages["reward"]
    if blamed(run) == "reward":
        beside = "add pairs that reject what paid: it stands under Samples, where PPO lost most"
        yield Finding("bad", f"PPO raised the reward and lost by {found_out(run)}", Advice((), beside))
    yield from _losses(stage)
    metrics = stage.told("metrics")
    accuracy, interval = metrics.get("accuracy"), metrics.get("accuracy_ci95")
    if is_number(accuracy) and interval:
        told = f"right on {percent(accuracy)}{bounds(interval)} of the held-out pairs"
        if interval[0] <= GUESS:
            text = f"{told}: that may be guessing, and so may all that builds on it"
            beside = "read twenty pairs by hand: more pairs, and cleaner ones, are what helps"
            yield Finding("bad", text, Advice((Move("raise", "reward.max_length"),), beside), "pairs told right")
        elif interval[0] > TRIVIAL:
            text = f"{told}: the pairs may differ in something trivial, such as their length"
            yield Finding("look", text, Advice((), "add pairs whose two answers are alike but for their quality"))
        else:
            yield Finding("good", told)
    flags = stage.told("card").get("flags", [])
    probes = [str(flag["text"]).partition(" scores above") for flag in flags if flag.get("code") == "R11"]
    rejected = [f"pairs in which {what if scores else 'such an answer'} is rejected" for what, scores, _ in probes]
    for flag in flags:
        yield Finding("look", str(flag["text"]), _flagged(str(flag.get("code")), rejected, stage), "the report card")


def _flagged(code: str, rejected: list[str], stage: Stage) -> Advice:
    """What to do about a flag of the report card, as docs/evaluation.md has it; `rejected`: the pairs that it asks
    for, of all of its flagged probes."""
    card = stage.told("card")
    if code == "R10":
        return Advice((Move("set", "ppo.overlong_penalty"),), "add pairs in which the shorter answer is the chosen one")
    if code == "R11":
        found = "it" if len(rejected) == 1 else "each of them"
        return Advice((), f"add {', and '.join(rejected)}: PPO will find {found}")
    if code != "R12":
        return NONE
    low, high = wilson(card["accuracy"] * card["n"], card["n"])
    if mean_confidence(card) > high:
        return Advice((Move("lower", _how_long(stage)), Move("lower", "reward.learning_rate")))
    if mean_confidence(card) < low:
        return Advice((Move("raise", _how_long(stage)),), "more pairs help as well")
    return Advice((), "more pairs help")


def of_ppo(run: Run) -> Iterator[Finding]:
    if blamed(run) == "ppo":
        yield Finding("bad", f"it raised the reward and lost by {found_out(run)}")
    yield from _by_its_log(run)


def _by_its_log(run: Run) -> Iterator[Finding]:
    """What is found in PPO by what it left alone, without the evaluation."""
    stage = run.stages["ppo"]
    stopped = (stage.manifest or {}).get("stopped")
    since = f" of update {run.firings[0]['step']} and later ones" if run.firings else ""
    read = Advice((), f"read the responses{since} in ppo/samples.jsonl: what the policy says there is what pays")
    if stopped:
        yield Finding("bad", f"it was stopped: {stopped}", read)
    names = dict.fromkeys(str(row.get("signal")) for row in run.firings)
    if names and not stopped:
        yield Finding("bad", f"the watchdog fired {count(len(run.firings), 'time')} ({', '.join(names)})", read)
    for reading in by_cause(readings(stage)):
        if reading.verdict in ILL:
            yield Finding(reading.verdict, f"{reading.title}: {_short(reading)}", reading.advice, reading.title)
    updates = len(stage.metrics)
    if 0 < updates < FEWEST:
        yield Finding("early", f"{count(updates, 'update')}: a trend can be told from {FEWEST} updates on")


def _short(reading: Reading) -> str:
    """What is seen, without the numbers of the course before it."""
    return reading.sentence.partition(". ")[2].rstrip(".").replace(". ", "; ")


def of_eval(run: Run) -> Iterator[Finding]:
    rates = run.rates
    if not rates:
        return
    judge = deciding_judge(rates)
    stands = significance(rates[judge])
    if stands == "worse":
        beside = "read where PPO lost most, under Samples; an earlier policy may be better (Reward against KL)"
        yield Finding("bad", f"PPO loses to SFT by {judge}", Advice((), beside))
    elif judge == "reward":
        won = "beats SFT" if stands == "better" else "cannot be told from SFT"
        yield Finding("look", f"PPO {won} by {OWN_REWARD}", Advice((), "name another judge in eval.yaml (judges:)"))
    elif stands == "undecided":
        more = Advice((Move("raise", "eval.n"),), "more prompts tell smaller differences")
        yield Finding("look", f"PPO and SFT cannot be told apart by {judge}", more)
    else:
        yield Finding("good", f"PPO beats SFT by {judge}")
