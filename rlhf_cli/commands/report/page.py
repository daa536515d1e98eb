"""One run as a page."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from rlhf_cli import __version__
from rlhf_cli.commands.report import charts, run_tables, summary, tables
from rlhf_cli.commands.report.runs import Run, Stage, at, from_defaults, is_number
from rlhf_cli.commands.report.tables import GENERATOR, bounds, count, finalize, last_heat_map, number, percent
from rlhf_cli.config.ppo_algorithm import SIGNAL_MESSAGES
from rlhf_cli.evaluation.render import deciding_judge_of, response_pairs, selection_lines
from rlhf_cli.evaluation.reward_model_table import card_rows

WORDS = {
    "good": "good", "early": "too early to tell", "stale": "out of date", "look": "worth a look", "bad": "bad",
    "open": "not there yet",
}  # fmt: skip
SECTIONS = (
    ("glance", "In one glance"), ("ran", "What ran"), ("sft", "SFT"), ("reward", "Reward model"), ("ppo", "PPO"),
    ("frontier", "Reward against KL"), ("wins", "Win rates"), ("lengths", "Lengths"), ("samples", "Samples"),
    ("tokens", "Token by token"), ("again", "Make it again"),
)  # fmt: skip


def of_run(run: Run) -> str:
    """The page of a run, complete in itself; the same bytes for the same files."""
    heat_map, badges = last_heat_map(run.samples), summary.badges(run)
    return render(
        "page.html.jinja",
        title=f"Run {run.name}",
        subtitle=_subtitle(run),
        sections=[each for each in SECTIONS if heat_map or each[0] != "tokens"],
        warnings=_untold(run, badges),
        stale=bool(run.stages["eval"].outdated),
        badges=badges,
        suspect=summary.suspect(run, badges),
        todo=summary.todo(run, badges),
        sentences=summary.sentences(run),
        heat_map=heat_map,
        **_what_ran(run),
        **_training(run),
        **_evaluation(run.report),
        **_samples(run),
    )


def render(template: str, **about: Any) -> str:
    """A page from its template. Everything printed into it is escaped and made visible, our own figures aside."""
    import jinja2

    # A script, a style and a figure are ours; all else goes through `finalize` and is escaped.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlhf_cli.commands.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(number=number, words=WORDS)
    script = _text("search.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        generator=GENERATOR,
        version=__version__,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        style=Markup(_text("style.css")),
        **about,
    )


@cache
def _text(name: str) -> str:
    return (files("rlhf_cli.commands.report") / "templates" / name).read_text(encoding="utf-8")


def _untold(run: Run, badges: Sequence[summary.Badge]) -> list[str]:
    """What is damaged, and what the evaluation warned of, where no badge tells it in the same words."""
    told = [reason for badge in badges for reason in badge.reasons]
    noted = [*run.notes, *map(str, (run.outcome or {}).get("warnings", []))]
    return [note for note in noted if not any(reason in note for reason in told)]


def _subtitle(run: Run) -> str:
    there = [name for name, stage in run.stages.items() if stage.there]
    missing = [name for name, stage in run.stages.items() if not stage.there]
    return f"Stages: {', '.join(there)}" + (f"; not there yet: {', '.join(missing)}" if missing else "")


def _what_ran(run: Run) -> dict[str, Any]:
    stages = list(run.stages.values())
    return {
        "stages": [run_tables.stage_row(stage) for stage in stages],
        "phases": run_tables.phases(run.stages["ppo"]),
        "speed": run_tables.speed(run.stages["ppo"]),
        "differences": [each for stage in stages for each in from_defaults(stage)],
        "data": run_tables.data_rows(stages),
        "models": run_tables.model_rows(run),
        "versions": run_tables.versions(stages),
        "folder": run.folder.name,
        "commands": run_tables.commands(run),
        "hashes": run_tables.hashes(run),
    }


def _training(run: Run) -> dict[str, Any]:
    sft, reward = run.stages["sft"], run.stages["reward"]
    found = _card(run, reward)
    told = "adversarial" in found
    return {
        "training": [("sft", "SFT", charts.training(sft)), ("reward", "Reward model", charts.training(reward))],
        "card_rows": card_rows(found) if told else [],
        "card_notes": list(tables.notes(found)) if told else [],
        "card_accuracy": _right(found) if told else "",
        "card_figures": charts.card(found) if told else [],
        "no_card": _right(found) if found else str(at(run.report, "no_reward_card") or "There is no report card yet."),
        "ppo": charts.ppo(run),
        "trained_on": _trained_on(run.stages["ppo"]),
        "firings": list(_fired(run.firings)),
    }


def _card(run: Run, reward: Stage) -> Mapping[str, Any]:
    """The reward stage's report card, or that of the evaluation where the stage is not there; empty without one."""
    metrics, card = reward.told("metrics"), reward.told("card")
    told = {**metrics, **card} if "accuracy" in metrics else at(run.report, "reward_model") or {}
    return told if "accuracy" in told else {}


def _right(card: Mapping[str, Any]) -> str:
    interval = bounds(card.get("accuracy_ci95") or card.get("ci95"))
    return f"Right on {percent(card['accuracy'])}{interval} of the held-out pairs; a coin is on 50 %."


def _trained_on(ppo: Stage) -> str:
    """What the responses are that PPO's figures are of."""
    temperature = ppo.setting("ppo.temperature")
    return "sampled from prompts of the training" + (
        f" at temperature {number(temperature)}" if is_number(temperature) else ""
    )


def _fired(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each signal's first line of watchdog.jsonl in a sentence, and how often it fired after that."""
    by_signal: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_signal.setdefault((str(row.get("signal")), str(row.get("source"))), []).append(row)
    for first, *later in by_signal.values():
        more = f" After that {count(len(later), 'time')} more, up to update {later[-1]['step']}." if later else ""
        yield _firing(first) + more


def _firing(row: Mapping[str, Any]) -> str:
    try:
        told = SIGNAL_MESSAGES[row["signal"]].format(**row)
    except (KeyError, ValueError, TypeError):  # a line that somebody wrote by hand
        told = str(row.get("signal"))
    return f"Update {row['step']}: {told} ({row.get('action')})."


def _evaluation(report: Mapping[str, Any] | None) -> dict[str, Any]:
    told = report or {}
    points, judges = told.get("frontier") or [], tables.judge_table(told)
    columns, rows = tables.policies(told)
    why = told.get("no_frontier")
    return {
        "judged_on": _judged_on(told),
        "frontiers": charts.frontiers(told),
        "frontier_judges": judges,
        "frontier_rows": [
            [point["step"], number(point["kl"]), *(tables.mean(point["judges"][judge]) for judge in judges),
             "selected" if point["step"] == told.get("selected_step") else ""]
            for point in points
        ],
        "selected": "selected_step" in told,
        "choice": [line.strip() for line in selection_lines(told)],
        "no_frontier": f"There is none: {why}." if why else _no_frontier(report),
        "wins": charts.wins(told),
        "win_columns": list(tables.WON),
        "win_rows": tables.won(told),
        "model_columns": columns,
        "model_rows": rows,
    }  # fmt: skip


def _judged_on(report: Mapping[str, Any]) -> str:
    """What the answers are that the evaluation's numbers are of."""
    if not report:
        return ""
    told = f"{count(report['n'], 'held-out prompt')}, an answer each"
    if is_number(temperature := report.get("temperature")):
        told += f", sampled at temperature {number(temperature)}"
    return told + (f", cut off at {length} tokens" if is_number(length := report.get("response_length")) else "")


def _no_frontier(report: Mapping[str, Any] | None) -> str:
    return "Not there yet: the evaluation is not finished." if report is None else "The evaluation has none."


def _samples(run: Run) -> dict[str, Any]:
    found = response_pairs(run.answers)
    shown = tables.chosen(found)
    return {
        "lengths": charts.length_figure(run),
        "shown": shown,
        "judge": deciding_judge_of(run.answers),
        "pair_count": count(len(found), "prompt"),
        "shown_count": sum(len(each.pairs) for each in shown),
    }
