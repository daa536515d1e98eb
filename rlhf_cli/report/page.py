"""The report of one run as an HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rlhf_cli.config.ppo import SIGNAL_MESSAGES
from rlhf_cli.evaluation import report_text, sample_pairs
from rlhf_cli.evaluation.kept_step import describe
from rlhf_cli.evaluation.reward_card import card_rows
from rlhf_cli.evaluation.reward_choices import TITLES, choice_rows
from rlhf_cli.evaluation.reward_model import FIXED_LIMITS, MAX_ECE, MIN_PROBE_LIMIT, ece_limit, mean_confidence
from rlhf_cli.report import diagnosis, figures, tables
from rlhf_cli.report.formats import count, interval_text, percent
from rlhf_cli.report.html import render_template
from rlhf_cli.report.rules import Reading
from rlhf_cli.runs.layout import OPTIONAL_STAGES
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.report import Report, RewardModelCard
from rlhf_cli.runs.settings import from_defaults

SECTIONS = (
    ("glance", "Summary"),
    ("ran", "What ran"),
    ("sft", "SFT"),
    ("reward", "Reward model"),
    ("dpo", "DPO"),
    ("ppo", "PPO"),
    ("frontier", "Reward against KL"),
    ("wins", "Win rates"),
    ("lengths", "Answer lengths"),
    ("samples", "Samples"),
    ("tokens", "Token by token"),
    ("again", "Reproduce"),
)


def of_run(run: Run) -> str:
    """Return the self-contained page of a run; equal files give equal bytes."""
    found = diagnosis.diagnose(run)
    heat_map = tables.last_heat_map(run.samples)
    absent = set(OPTIONAL_STAGES) - run.stages.keys()
    if heat_map is None:
        absent.add("tokens")
    sections = [(anchor, title) for anchor, title in SECTIONS if anchor not in absent]

    return render_template(
        "page.html.jinja",
        title=f"Run {run.name}",
        subtitle=_subtitle(run),
        sections=sections,
        warnings=_warnings(run, found.badges),
        stale=bool(run.stages["eval"].outdated),
        badges=found.badges,
        conclusion=found.conclusion(),
        todo=[badge for badge in found.by_priority() if badge.advice],
        sentences=diagnosis.sentences(run),
        training=[
            (anchor, title, figures.training(run.stages[anchor]))
            for anchor, title in sections
            if anchor in figures.TRAINING
        ],
        heat_map=heat_map,
        **_what_ran(run),
        **_ppo(run, found.readings),
        **_report_card(run),
        **_evaluation(run),
    )


def _subtitle(run: Run) -> str:
    """Return which stages there are, and which are not run yet."""
    present = [name for name, stage in run.stages.items() if stage.there]
    missing = [name for name in run.stages if name not in present]
    text = f"Stages: {', '.join(present)}"
    return f"{text}; {tables.ABSENT}: {', '.join(missing)}" if missing else text


def _warnings(run: Run, badges: Sequence[diagnosis.Badge]) -> list[str]:
    """Return what is damaged, and the warnings of the evaluation that no badge repeats."""
    reasons = list(chain.from_iterable(badge.reasons for badge in badges))
    found = list(run.notes)
    if run.outcome:
        found += run.outcome.warnings or []
    return [warning for warning in found if not any(reason in warning for reason in reasons)]


def _what_ran(run: Run) -> dict[str, Any]:
    """Return the values of the sections What ran and Reproduce."""
    stages = list(run.stages.values())
    ppo = run.stages["ppo"]

    return {
        "stages": [tables.stage_row(stage) for stage in stages],
        "phases": tables.phases(ppo),
        "speed": tables.speed(ppo),
        "differences": [
            [each.stage, each.key, each.value, "required" if each.default is None else each.default]
            for each in chain.from_iterable(map(from_defaults, stages))
        ],
        "data": tables.data_rows(stages),
        "models": tables.model_rows(run),
        "versions": tables.versions(stages),
        "folder": run.folder.name,
        "commands": tables.commands(run),
        "hashes": tables.hashes(run),
    }


def _ppo(run: Run, readings: Sequence[Reading]) -> dict[str, Any]:
    return {
        "ppo": figures.ppo(run, readings),
        "temperature": run.stages["ppo"].setting("ppo.temperature"),
        "alarms": list(_alarms(run.firings)),
    }


def _report_card(run: Run) -> dict[str, Any]:
    """Return the card of the reward stage, or else that of the evaluation."""
    result = run.stages["reward"].manifest.reward_model
    if result is None and run.report:
        result = run.report.reward_model

    values: dict[str, Any] = {
        "card": None,
        "card_accuracy": "",
        "card_limits": {**FIXED_LIMITS, "ece": MAX_ECE, "probe": MIN_PROBE_LIMIT},
        "no_card": (run.report.no_reward_card if run.report else None) or "There is no report card yet.",
    }
    if result:
        interval = interval_text(result.accuracy_ci95)
        accuracy = f"Accuracy {percent(result.accuracy)}{interval} on the held-out pairs; chance is 50 %."
        values |= {"card_accuracy": accuracy, "no_card": accuracy}
    if isinstance(result, RewardModelCard):
        values |= {
            "card": result,
            "card_rows": card_rows(result),
            "card_choices": (TITLES, choice_rows(result)),
            "kept_step": describe(result.kept_step) if result.kept_step else "",
            "card_figures": figures.report_card(result),
            "confidence": mean_confidence(result),
            "ece_limit": ece_limit(result),
        }
    return values


def _alarms(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each watchdog signal's first alarm as a sentence, and the number of later ones."""
    by_signal: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        signal = str(row.get("signal")), str(row.get("source"))
        by_signal.setdefault(signal, []).append(row)

    for first, *later in by_signal.values():
        text = f"Update {first['step']}: {_message(first)} ({first.get('action')})."
        if later:
            text += f" It fired {count(len(later), 'more time')}, up to update {later[-1]['step']}."
        yield text


def _message(alarm: Mapping[str, Any]) -> str:
    """Return the message of a signal, or else its name."""
    try:
        return SIGNAL_MESSAGES[alarm["signal"]].format(**alarm)
    except (KeyError, ValueError, TypeError):  # a line that was edited by hand
        return str(alarm.get("signal"))


def _evaluation(run: Run) -> dict[str, Any]:
    """Return the values of the sections that show the evaluation and its samples."""
    pairs = sample_pairs.response_pairs(run.answers)
    samples = tables.sample_groups(pairs)
    values: dict[str, Any] = {
        "report": run.report,
        "frontiers": [],
        "selection": [],
        "no_frontier": "The evaluation is not finished.",
        "limit": (),
        "wins": None,
        "columns_text": sample_pairs.columns_text,
        "lengths": figures.lengths(pairs),
        "samples": samples,
        "judge": sample_pairs.deciding_judge_of(run.answers),
        "num_pairs": len(pairs),
        "num_shown": sum(len(group) for _, group in samples),
    }
    if run.report:
        values |= _results(run.report)

    return values


def _results(report: Report) -> dict[str, Any]:
    """Return the values of the sections that show a report."""
    frontiers = figures.frontiers(report)
    return {
        "frontiers": frontiers,
        "frontier": report_text.frontier_table(report) if frontiers else (),
        "selection": list(report_text.selection_lines(report)),
        "no_frontier": report.no_frontier or "The evaluation has no frontier.",
        "limit": report_text.limit_table(report) if report.limit else (),
        "limit_score": report_text.limit_score(report),
        "limit_lines": list(report_text.limit_lines(report)),
        "wins": figures.wins(report),
        "win_rates": report_text.win_rate_table(report),
        "pairwise": list(report_text.pairwise_sentences(report)),
        "policies": report_text.policies_table(report),
        "groups": report_text.groups_table(report.by) if report.by else (),
        "groups_title": report_text.groups_title(report.by) if report.by else "",
    }
