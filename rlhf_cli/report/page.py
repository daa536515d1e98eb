"""The report of one run as an HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rlhf_cli.config.ppo import SIGNAL_MESSAGES
from rlhf_cli.evaluation import report_text, sample_pairs
from rlhf_cli.evaluation.kept_step import describe
from rlhf_cli.evaluation.requirements import Requirement, requirements
from rlhf_cli.evaluation.reward_card import card_rows
from rlhf_cli.evaluation.reward_choices import TITLES, choice_rows
from rlhf_cli.evaluation.reward_model import FIXED_LIMITS, MAX_ECE, MIN_PROBE_LIMIT, ece_limit, mean_confidence
from rlhf_cli.report import answers, charts, diagnosis, figures, headline, tables, terms, tokens
from rlhf_cli.report.formats import count, interval_text, percent
from rlhf_cli.report.html import render_template
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.report import Report, RewardModelCard
from rlhf_cli.runs.settings import from_defaults

SECTIONS = (
    ("verdict", "Is it better?"),
    ("answers", "Answers"),
    ("far", "How far could it go?"),
    ("health", "Was training healthy?"),
    ("reward", "Reward model"),
    ("ran", "What ran"),
)


def of_run(run: Run) -> str:
    """Return the self-contained page of a run; equal files of the same time give equal bytes."""
    found = diagnosis.diagnose(run)
    ran = _what_ran(run)
    answered = answers.read_answers(run.answers)
    sections = _head(run, found) | _far(run, answered) | _health(run, found) | _report_card(run)

    return render_template(
        "page.html.jinja",
        title=f"Run {run.name}",
        subtitle=_subtitle(run),
        facts=tables.facts(run, ran["data_rows"]),
        sections=SECTIONS,
        stale=bool(run.stages["eval"].outdated),
        report=run.report,
        answers=answered,
        agreement=_agreement(run, answered.judge),
        columns_text=sample_pairs.columns_text,
        data=answers.packed(answered.contents() | {"figures": charts.tables(_figures(sections))}),
        **sections,
        **ran,
    )


def _head(run: Run, found: diagnosis.Diagnosis) -> dict[str, Any]:
    """Return the values of the first section."""
    return {
        "verdict": headline.verdict(run, found),
        "judges": list(terms.judges(run, run.answers)),
        "key_figures": headline.key_figures(run),
        "required": _required(run),
        "warnings": _warnings(run, found.badges),
        "conclusion": found.conclusion(),
        "recommendation": headline.recommendation(run),
        "todo": [badge for badge in found.by_priority() if badge.advice],
        "sentences": list(diagnosis.sentences(run)),
    }


def _required(run: Run) -> list[Requirement]:
    """Return each requirement of eval.yaml, and whether it is met."""
    require = run.stages["eval"].setting("eval.require")
    return list(requirements(run.outcome, require)) if run.outcome and require else []


def _agreement(run: Run, judge: str | None) -> str:
    """Return on how many prompts a judge and the reward prefer the same answer, as text; empty if it is not known."""
    rate = run.rates.get(judge) if judge else None
    if rate is None or rate.agrees_with_reward is None:
        return ""
    return f"{percent(rate.agrees_with_reward)}{interval_text(rate.agrees_with_reward_ci95)}"


def _figures(sections: Mapping[str, Any]) -> Iterator[charts.Figure]:
    """Return the figures of all sections."""
    health = sections["health"]
    return chain(health.open, health.folded, sections["card_figures"], sections["evaluation_figures"])


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
    """Return the values of the section What ran."""
    stages = list(run.stages.values())
    ppo = run.stages["ppo"]
    versions = tables.versions(stages)

    return {
        "stages": [tables.stage_row(stage) for stage in stages],
        "phases": tables.phases(ppo),
        "speed": tables.speed(ppo),
        "differences": [
            [each.stage, each.key, each.value, "required" if each.default is None else each.default]
            for each in chain.from_iterable(map(from_defaults, stages))
        ],
        "data_rows": tables.data_rows(stages),
        "models": tables.model_rows(run),
        "versions": versions,
        "install": tables.install_command(versions),
        "folder": run.folder.name,
        "commands": tables.commands(run),
        "hashes": tables.hashes(run),
    }


def _health(run: Run, found: diagnosis.Diagnosis) -> dict[str, Any]:
    return {
        "badges": found.badges,
        "health": figures.health(run, found),
        "has_updates": bool(run.stages["ppo"].metrics),
        "temperature": run.stages["ppo"].setting("ppo.temperature"),
        "alarms": list(_alarms(run.firings)),
        "heat_map": tokens.last_heat_map(run.samples),
    }


def _report_card(run: Run) -> dict[str, Any]:
    """Return the card of the reward stage, or else that of the evaluation."""
    result = run.stages["reward"].manifest.reward_model
    if result is None and run.report:
        result = run.report.reward_model

    values: dict[str, Any] = {
        "card": None,
        "card_figures": [],
        "kept_step": "",
        "card_limits": {**FIXED_LIMITS, "ece": MAX_ECE, "probe": MIN_PROBE_LIMIT},
        "accuracy": (run.report.no_reward_card if run.report else None) or "There is no report card yet.",
    }
    if result:
        interval = interval_text(result.accuracy_ci95)
        values["accuracy"] = f"Accuracy {percent(result.accuracy)}{interval} on the held-out pairs; chance is 50 %."
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


def _far(run: Run, answered: answers.Answers) -> dict[str, Any]:
    """Return the values of the section that shows the policies of the evaluation."""
    report = run.report
    if report is None:
        no_frontier = "The evaluation is not finished."
        return {"evaluation_figures": [], "frontiers": [], "no_frontier": no_frontier, "limit": (), "wins": None}

    frontiers = figures.frontiers(report)
    wins = figures.wins(report)
    lengths = figures.lengths(answered.pairs)
    return {
        "evaluation_figures": [*frontiers, *filter(None, [wins, lengths])],
        "frontiers": frontiers,
        "frontier": report_text.frontier_table(report) if frontiers else (),
        "recommended": list(report_text.recommendation_lines(report)),
        "no_frontier": report.no_frontier or "The evaluation has no frontier.",
        "limit": report_text.limit_table(report) if report.limit else (),
        "limit_score": report_text.limit_score(report),
        "limit_lines": list(report_text.limit_lines(report)),
        "wins": wins,
        "win_rates": report_text.win_rate_table(report),
        "uncontrolled": list(_uncontrolled(report)),
        "pairwise": list(report_text.pairwise_sentences(report)),
        "lengths": lengths,
        "policies": report_text.policies_table(report),
        "groups": report_text.groups_table(report.by) if report.by else (),
        "groups_title": report_text.groups_title(report.by) if report.by else "",
    }


def _uncontrolled(report: Report) -> Iterator[str]:
    """Yield why comparisons have no length-controlled rate."""
    reasons: dict[str, dict[str, None]] = {}  # comparisons, each once
    for each in report_text.win_rate_rows(report):
        if each.rate.no_length_controlled:
            reasons.setdefault(each.rate.no_length_controlled, {})[each.pair] = None
    for reason, pairs in reasons.items():
        yield f"No length-controlled rate of {'; '.join(pairs)}: {reason}"
