"""The report of one run as an HTML page."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rlhf_cli import __version__
from rlhf_cli.commands.report import diagnosis, figures, tables
from rlhf_cli.commands.report.tables import bounds, count, number, percent, visible
from rlhf_cli.config.ppo import SIGNAL_MESSAGES
from rlhf_cli.evaluation import render
from rlhf_cli.evaluation.reward_card import card_rows
from rlhf_cli.evaluation.reward_model import FIXED_LIMITS, MAX_ECE, MIN_PROBE_LIMIT, ece_limit, mean_confidence
from rlhf_cli.jsonl import at, is_number
from rlhf_cli.runs.layout import OPTIONAL_STAGES
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.runs.settings import from_defaults

GENERATOR = "rlhf report"  # identifies our own pages: no other file is ever replaced
WORDS = {
    "good": "good", "early": "too early to tell", "stale": "out of date", "look": "worth a look", "bad": "bad",
    "open": "incomplete",
}  # fmt: skip
SECTIONS = (
    ("glance", "Summary"), ("ran", "What ran"), ("sft", "SFT"), ("reward", "Reward model"), ("dpo", "DPO"),
    ("ppo", "PPO"), ("frontier", "Reward against KL"), ("wins", "Win rates"), ("lengths", "Answer lengths"),
    ("samples", "Samples"), ("tokens", "Token by token"), ("again", "Reproduce"),
)  # fmt: skip


def of_run(run: Run) -> str:
    """Return the self-contained page of a run; equal files give equal bytes."""
    heat_map, badges = tables.last_heat_map(run.samples), diagnosis.badges(run)
    stages, ppo = list(run.stages.values()), run.stages["ppo"]
    shown = [each for each in SECTIONS if each[0] not in OPTIONAL_STAGES or each[0] in run.stages]
    missing = [stage.name for stage in stages if not stage.there]
    reasons = [reason for badge in badges for reason in badge.reasons]
    warnings = [*run.notes, *map(str, (run.outcome or {}).get("warnings", []))]
    return render_template(
        "page.html.jinja",
        title=f"Run {run.name}",
        subtitle=f"Stages: {', '.join(stage.name for stage in stages if stage.there)}"
        + (f"; {tables.ABSENT}: {', '.join(missing)}" if missing else ""),
        sections=[section for section in shown if heat_map or section[0] != "tokens"],
        warnings=[text for text in warnings if not any(reason in text for reason in reasons)],
        stale=bool(run.stages["eval"].outdated),
        badges=badges,
        headline=diagnosis.headline(run, badges),
        todo=[badge for badge in diagnosis.by_priority(run, badges) if badge.todo],
        sentences=diagnosis.sentences(run),
        stages=[tables.stage_row(stage) for stage in stages],
        phases=tables.phases(ppo),
        speed=tables.speed(ppo),
        differences=[
            [each.stage, each.key, each.value, "required" if each.default is None else each.default]
            for stage in stages
            for each in from_defaults(stage)
        ],
        data=tables.data_rows(stages),
        models=tables.model_rows(run),
        versions=tables.versions(stages),
        folder=run.folder.name,
        commands=tables.commands(run),
        hashes=tables.hashes(run),
        training=[
            (stage, title, figures.training(run.stages[stage])) for stage, title in shown if stage in figures.TRAINING
        ],
        ppo=figures.ppo(run),
        temperature=ppo.setting("ppo.temperature"),
        firings=list(_alarms(run.firings)),
        heat_map=heat_map,
        **_report_card(run),
        **_evaluation(run),
    )


def render_template(template: str, **values: Any) -> str:
    """Render a page. Every printed value is escaped and made visible, except our own script, style and figures."""
    import jinja2

    loader = jinja2.PackageLoader("rlhf_cli.commands.report", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if value is None or hasattr(value, "__html__") else visible(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(number=number, percent=percent, is_number=is_number, words=WORDS)
    script, style = (loader.get_source(environment, name)[0] for name in ("search.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        generator=GENERATOR,
        version=__version__,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        style=Markup(style),
        **values,
    )


def _report_card(run: Run) -> dict[str, Any]:
    """Return the card of the reward stage, or else that of the evaluation."""
    reward: Stage = run.stages["reward"]
    metrics = reward.manifest.metrics
    card: Mapping[str, Any] = at(run.report, "reward_model") or {}
    if "accuracy" in metrics:
        card = {**metrics, **reward.manifest.card}
    accuracy = ""
    if "accuracy" in card:
        interval = bounds(card.get("accuracy_ci95") or card.get("ci95"))
        accuracy = f"Accuracy {percent(card['accuracy'])}{interval} on the held-out pairs; chance is 50 %."
    complete = "accuracy" in card and "adversarial" in card
    return {
        "card": card if complete else {},
        "card_accuracy": accuracy,
        "card_rows": card_rows(card) if complete else [],
        "card_figures": figures.report_card(card) if complete else [],
        "confidence": mean_confidence(card) if complete else 0.0,
        "ece_limit": ece_limit(card) if complete else MAX_ECE,
        "limits": {**FIXED_LIMITS, "ece": MAX_ECE, "probe": MIN_PROBE_LIMIT},
        "no_card": accuracy or str(at(run.report, "no_reward_card") or "There is no report card yet."),
    }


def _alarms(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each watchdog signal's first alarm as a sentence, and the number of later ones."""
    by_signal: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_signal.setdefault((str(row.get("signal")), str(row.get("source"))), []).append(row)
    for first, *later in by_signal.values():
        try:
            message = SIGNAL_MESSAGES[first["signal"]].format(**first)
        except (KeyError, ValueError, TypeError):  # a line that was edited by hand
            message = str(first.get("signal"))
        more = f" It fired {count(len(later), 'more time')}, up to update {later[-1]['step']}." if later else ""
        yield f"Update {first['step']}: {message} ({first.get('action')}).{more}"


def _evaluation(run: Run) -> dict[str, Any]:
    report, pairs = run.report or {}, render.response_pairs(run.answers)
    missing = "The evaluation has no frontier." if report else "The evaluation is not finished."
    samples, frontiers = tables.sample_groups(pairs), figures.frontiers(report)
    return {
        "report": report,
        "frontiers": frontiers,
        "frontier": render.frontier_table(report) if frontiers else (),
        "selection": list(render.selection_lines(report)),
        "no_frontier": report.get("no_frontier") or missing,
        "limit": render.limit_table(report) if report.get("limit") else (),
        "limit_score": render.limit_score(report) if report.get("limit") else "",
        "limit_lines": list(render.limit_lines(report)),
        "wins": figures.wins(report),
        "win_rates": render.win_rate_table(report),
        "policies": render.policies_table(report) if report else (),
        "groups": render.groups_table(report) if report.get("by") else (),
        "groups_title": render.groups_title(report) if report.get("by") else "",
        "columns_text": render.columns_text,
        "lengths": figures.lengths(run.answers),
        "samples": samples,
        "judge": render.deciding_judge_of(run.answers),
        "num_pairs": len(pairs),
        "num_shown": sum(len(group) for _, group in samples),
    }
