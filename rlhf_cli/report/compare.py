"""Comparison of several runs on one page: results with mean and spread, curves, and the settings that differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rlhf_cli.errors import shown
from rlhf_cli.evaluation.report_text import pair_label, ppo_points
from rlhf_cli.evaluation.sample_pairs import columns_text, deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.report import diagnosis
from rlhf_cli.report.answers import packed, read_answers
from rlhf_cli.report.charts import Figure, curves, figure, tables
from rlhf_cli.report.formats import interval_text, number, percent, rated
from rlhf_cli.report.frontier import draw_runs
from rlhf_cli.report.head_to_head import head_to_head
from rlhf_cli.report.html import WORDS, render_template
from rlhf_cli.report.rules import RULES, Series, end_mean, metrics_of
from rlhf_cli.report.tables import stage_row, total_seconds
from rlhf_cli.runs.layout import SEEDS_FOLDER, STAGES
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.report import PolicyScores, Report, WinRate
from rlhf_cli.runs.resolve import other_member_keys
from rlhf_cli.runs.settings import between
from rlhf_cli.statistics import bonferroni_z, wilson_difference

SECTIONS = (
    ("numbers", "Results"),
    ("answers", "Answers"),
    ("far", "Score over KL"),
    ("curves", "PPO"),
    ("differences", "Settings that differ"),
    ("stages", "Stages"),
)


class Comparison:
    """Runs side by side: their diagnoses, PPO's policies head to head, and the keys that differ."""

    def __init__(self, runs: Sequence[Run], found: Sequence[diagnosis.Diagnosis]) -> None:
        self.runs = runs
        self.found = found
        self.names = short_names([run.folder for run in runs])
        self.differences = between(runs)
        self.direct = head_to_head(self.names, runs, comparable_judges(runs))

    def as_json(self) -> dict[str, Any]:
        """Return the head-to-head win rates and the keys that differ, with the runs by their folders."""
        folders = {name: shown(run.folder) for name, run in zip(self.names, self.runs, strict=True)}
        matches = [
            {
                "first": folders[match.first],
                "second": folders[match.second],
                "judge": match.judge,
                "win_rate": match.rate.model_dump(mode="json", exclude_none=True),
            }
            for match in (self.direct.matches if self.direct else ())
        ]
        settings = [{"stage": stage, "key": key, "values": values} for stage, key, values in self.differences]
        return {"head_to_head": matches, "settings": settings}

    def page(self) -> str:
        """Return the page that compares the runs; equal files give equal bytes."""
        names = self.names
        runs = self.runs
        direct = self.direct
        answered = direct.side_by_side if direct else read_answers([])
        frontiers = list(_frontiers(names, runs))
        drawn = list(_curves(names, runs))

        notes: list[str] = []
        for name, run in zip(names, runs, strict=True):
            notes += [f"{name}: {note}" for note in run.notes]
        return render_template(
            "compare.html.jinja",
            title=f"{len(runs)} runs",
            subtitle=", ".join(names),
            sections=SECTIONS,
            names=names,
            notes=notes,
            conclusions=[(name, each.conclusion()) for name, each in zip(names, self.found, strict=True)],
            win_rates=list(win_rate_differences(names, runs)),
            only_seeds={key for _, key, _ in self.differences} == {"seed"},
            direct=direct.table if direct else (),
            answers=answered,
            columns_text=columns_text,
            agreement="",
            stale=False,
            data=packed(answered.contents() | {"figures": tables([*frontiers, *drawn])}),
            frontiers=frontiers,
            results=[row for row in results(runs) if row[-1]],  # known of some run
            curves=drawn,
            differences=[[stage, key, *values] for stage, key, values in self.differences],
            stages=_state_rows(self.found),
        )


def of_runs(runs: Sequence[Run]) -> Comparison:
    """Return the comparison of runs."""
    return Comparison(runs, [diagnosis.diagnose(run) for run in runs])


def short_names(folders: list[Path]) -> list[str]:
    """Return a unique name for each folder, with as few of its last parts as possible; equal folders are numbered."""
    num_parts = 1
    names = [f"seed {folder.name}" if folder.parent.name == SEEDS_FOLDER else folder.name for folder in folders]
    while len(set(names)) < len(set(folders)):
        num_parts += 1
        names = [Path(*folder.parts[-num_parts:]).as_posix() for folder in folders]
    unique = []
    for position, name in enumerate(names, start=1):
        unique.append(f"{name} ({position})" if names.count(name) > 1 else name)

    return unique


def _state_rows(found: Sequence[diagnosis.Diagnosis]) -> list[list[str]]:
    """Return a row for each stage that a run has: its state in each run."""
    columns = [{badge.stage: _state(each.run, badge) for badge in each.badges} for each in found]
    rows = []
    for stage in STAGES:
        states = [column.get(stage, "") for column in columns]
        if any(states):
            rows.append([stage, *states])
    return rows


def _state(run: Run, badge: diagnosis.Badge) -> str:
    """Return what ran of a badge's stage, with its grade unless that only says that it is open."""
    state = stage_row(run.stages[badge.stage]).state
    return state if badge.grade == "open" else f"{state}: {WORDS[badge.grade]}"


# Results


Row = list[str | int]


class Result(NamedTuple):
    """A result of a run, if it is known, and its 95 % interval."""

    value: float | None = None
    interval: Sequence[float] | None = None


def result_row(title: str, found: Sequence[Result], *, share: bool = False, averaged: bool = True) -> Row:
    """Return the title, each run's result with its 95 % interval, and mean, standard deviation over runs (n - 1) and n.

    A `share` is shown in percent; without `averaged`, the mean is omitted.
    """
    show = percent if share else number
    known: list[float] = []
    cells = []
    for result in found:
        if result.value is None:
            cells.append("-")
        else:
            known.append(result.value)
            cells.append(show(result.value) + interval_text(result.interval))

    mean = spread = ""
    if known and averaged:
        mean = show(fmean(known))
        spread = show(stdev(known)) if len(known) > 1 else "-"
    return [title, *cells, mean, spread, len(known)]


def results(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield a row for each of the main results. Evaluations that are out of date are ignored."""
    reports = [run.outcome for run in runs]
    yield result_row("SFT, held-out loss", [_held_out_loss(run) for run in runs])
    yield result_row("reward model, accuracy", [_accuracy(run) for run in runs], share=True)
    yield from _win_rate_rows(reports)
    yield from _policy_rows(reports)
    chosen = [report.recommended if report else None for report in reports]
    steps = [Result(report.selected_step if report else None) for report in reports]
    yield result_row("recommended update", steps, averaged=False)
    if any(each and each.share is not None for each in chosen):
        yield result_row("recommended share", [Result(each.share if each else None) for each in chosen], averaged=False)
    yield result_row("PPO, final reward score in training", [_final_score(run) for run in runs])
    yield result_row("PPO, seconds", [Result(total_seconds(run.stages["ppo"]) or None) for run in runs])


def _held_out_loss(run: Run) -> Result:
    """Return the loss of SFT over all held-out tokens."""
    loss = run.stages["sft"].manifest.known_metrics.eval_loss
    return Result(loss if is_number(loss) else None)


def _accuracy(run: Run) -> Result:
    result = run.stages["reward"].manifest.reward_model
    return Result(result.accuracy, result.accuracy_ci95) if result else Result()


def _win_rate_rows(reports: Sequence[Report | None]) -> Iterator[Row]:
    """Yield a plain and a length-controlled row for each comparison and judge."""
    sections = [report.win_rate if report else {} for report in reports]
    compared: list[tuple[str, str]] = []
    for section in sections:
        for pair, rates in section.items():
            compared += [(pair, judge) for judge in rates]

    for pair, judge in dict.fromkeys(compared):
        found = [section.get(pair, {}).get(judge) for section in sections]
        title = f"{pair_label(pair)}, {judge}"
        yield result_row(title, [_plain(rate) for rate in found], share=True)
        yield result_row(f"{title}, length-controlled", [_controlled(rate) for rate in found], share=True)


def _plain(rate: WinRate | None) -> Result:
    return Result(rate.value, rate.ci95) if rate else Result()


def _controlled(rate: WinRate | None) -> Result:
    return Result(rate.length_controlled, rate.length_controlled_ci95) if rate else Result()


def _policy_rows(reports: Sequence[Report | None]) -> Iterator[Row]:
    """Yield the means of PPO by each judge, and KL, lengths and ends of the answers."""
    ppo = [report.models.get("ppo") if report else None for report in reports]
    sft = [report.models.get("sft") if report else None for report in reports]

    for judge in dict.fromkeys(chain.from_iterable(scores.judges for scores in ppo if scores)):
        yield result_row(f"PPO, mean of {judge}, held-out prompts", [_mean_by(judge, scores) for scores in ppo])

    yield result_row("PPO, KL from SFT in nats", _of_each(ppo, "kl"))
    yield result_row("PPO, tokens per answer", _of_each(ppo, "response_length_mean"))
    yield result_row("SFT, tokens per answer", _of_each(sft, "response_length_mean"))
    yield result_row("PPO, answers that end", _of_each(ppo, "eos_fraction"), share=True)
    yield result_row("SFT, answers that end", _of_each(sft, "eos_fraction"), share=True)


def _of_each(policies: Sequence[PolicyScores | None], name: str) -> list[Result]:
    """Return an attribute of the scores of each policy; unknown without a policy."""
    return [Result(getattr(scores, name, None)) for scores in policies]


def _mean_by(judge: str, scores: PolicyScores | None) -> Result:
    mean = scores.judges.get(judge) if scores else None
    return Result(mean.mean if mean else None)


def _final_score(run: Run) -> Result:
    """Return the mean score of PPO's last updates."""
    scores = run.stages["ppo"].series("objective/scores")
    return Result(end_mean(scores) if scores else None)


# Win rates against one another


class RatedRun(NamedTuple):
    """A run, its name, and its win rate by a judge over n prompts."""

    name: str
    run: Run
    rate: WinRate
    n: int


def win_rate_differences(names: Sequence[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield for each judge if the highest and lowest win rate over SFT differ by more than chance in the prompts.

    The interval of their difference is corrected for the number of pairs of runs.
    """
    for judge in dict.fromkeys(chain.from_iterable(run.rates for run in runs)):
        rated_runs = list(_rated_runs(judge, names, runs))
        if len(rated_runs) < 2:
            continue
        if len({_judge_model(each.run, judge) for each in rated_runs}) > 1:
            yield f"{judge} is a different judge in these runs: its win rates are not comparable."
        else:
            yield _difference(judge, rated_runs)


def _rated_runs(judge: str, names: Sequence[str], runs: Sequence[Run]) -> Iterator[RatedRun]:
    """Yield the runs that have a win rate with an interval."""
    for name, run in zip(names, runs, strict=True):
        rate = run.rates.get(judge)
        if rate and rate.ci95 and rate.n is not None:
            yield RatedRun(name, run, rate, rate.n)


def _difference(judge: str, rated_runs: Sequence[RatedRun]) -> str:
    """Return the highest and lowest win rate, and whether they differ by more than chance."""
    low, *_, high = sorted(rated_runs, key=lambda each: each.rate.value)
    z = bonferroni_z(math.comb(len(rated_runs), 2))
    gap, _ = wilson_difference((high.rate.value, high.n), (low.rate.value, low.n), z)

    result = "are not distinguishable: the interval of their difference includes 0"
    if gap > 0:
        result = "differ by more than chance in the prompts; another seed may move both"

    return f"By {judge} {high.name} ({rated(high.rate)}) and {low.name} ({rated(low.rate)}) {result}."


def comparable_judges(runs: Sequence[Run]) -> list[str]:
    """Return the judges that are the same in all runs with win rates, the deciding one first."""
    rated_runs = [run for run in runs if run.rates]
    judges = dict.fromkeys(chain.from_iterable(run.rates for run in rated_runs))
    same = []
    for judge in judges:
        models = {_judge_model(run, judge) for run in rated_runs}
        if len(models) == 1:
            same.append(judge)
    return sorted(same, key=lambda judge: judge != deciding_judge(same))


def _judge_model(run: Run, judge: str) -> str:
    """Return the hashes of a judge's models, or the name of a language model, or else its setting."""
    key = "models.reward" if judge == "reward" else f"judges.{judge}"
    stage = run.stages["eval"]
    parents = stage.manifest.parents
    if key in parents:
        keys = [key, *other_member_keys(key, parents).values()]
        return " ".join(parents[name].sha256 for name in keys)
    return str(stage.setting(f"{key}.openai.model") or stage.setting(key))


# Score over KL


def _frontiers(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield a figure with all runs for each judge that is the same in them."""
    for index, judge in enumerate(comparable_judges(runs)):
        shown: dict[str, Report] = {}
        for name, run in zip(names, runs, strict=True):
            if run.outcome and run.rates and _has_means(judge, run.outcome):
                shown[name] = run.outcome

        if len(shown) > 1:
            draw = partial(draw_runs, judge, shown)
            yield figure(f"runs-{index}", f"By {judge}", "A ring marks the recommended policy.", draw, size=(4.2, 3.1))


def _has_means(judge: str, report: Report) -> bool:
    """Return True if a judge scored SFT and PPO's snapshots, which people did not."""
    scores = [report.models["sft"], *(point.scores for point in ppo_points(report))]
    return all(judge in each.judges for each in scores)


# Curves


def _curves(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the curves of each metric that is not constant."""
    stages = [run.stages["ppo"] for run in runs]
    for rule in RULES:
        titles: dict[str, str] = {}
        for stage in stages:
            titles.update(metrics_of(rule, stage))

        for key, title in titles.items():
            lines = {name: stage.series(key) for name, stage in zip(names, stages, strict=True)}
            values = {value for _, value in chain.from_iterable(lines.values())}
            if len(values) > 1:
                yield _curve(key, title, rule.unit, {name: points for name, points in lines.items() if points})


def _curve(key: str, title: str, unit: str, lines: Mapping[str, Series]) -> Figure:
    ends = "; ".join(f"{name} {number(end_mean(points))}" for name, points in lines.items())
    return curves(f"ppo-{key}", title, f"At the end: {ends}.", lines, unit=unit, key=key)
