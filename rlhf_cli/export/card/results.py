"""What was measured: by an evaluation of this very policy, and of the reward model on pairs that it never saw."""

from collections.abc import Iterator

from rlhf_cli.config.paths import FUNCTION
from rlhf_cli.evaluation import render, reward_model_table
from rlhf_cli.evaluation.render import deciding_judge
from rlhf_cli.export.card.making import parent
from rlhf_cli.export.card.markdown import bullets, code, table, text
from rlhf_cli.export.card.subject import Subject, data_name, report_card
from rlhf_cli.report import glance, tables
from rlhf_cli.report.runs import Stage
from rlhf_cli.report.texts import bounds, percent
from rlhf_cli.statistics import with_interval

# What a judge may be, if no Python function.
MODEL = "a reward model"
OWN = "the reward model that PPO was trained on: a win by it alone proves nothing"


def blocks(about: Subject) -> Iterator[str]:
    """The sections, part by part."""
    if about.stage.name != "reward":
        yield "## Evaluation"
        yield from _evaluation(about)
    for stage in about.reward_models:
        yield "## Evaluation" if stage is about.stage else "## The reward model"
        yield from _report_card(stage)


def judges(about: Subject) -> dict[str, str]:
    """What each judge of the evaluation is, in words."""
    evaluation, found = about.run.stages["eval"], {}
    for name in tables.judges(about.report):
        judge = str(evaluation.setting(f"judges.{name}"))
        if FUNCTION.fullmatch(judge):
            found[name] = f"the Python function {code(judge)}: a higher score is better, and its code says by what"
            continue
        key = "models.reward" if name == "reward" else f"judges.{name}"
        own = evaluation.told("parents").get(key, {}).get("sha256") in about.rewarded_by
        found[name] = OWN if own else MODEL
    return found


def _evaluation(about: Subject) -> Iterator[str]:
    if not about.is_evaluated:
        yield "No evaluation of this very model was found beside it."
    else:
        yield from _told(about)
    metrics = about.stage.told("metrics") if about.chosen.last else {}
    rows = [
        [code(name), str(value) if isinstance(value, int) else with_interval(value, metrics.get(f"{name}_ci95"))]
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
    if rows:
        yield "Measured at the end of its training:"
        yield table(("", "value"), rows)


def _told(about: Subject) -> Iterator[str]:
    report, who = about.report, render.model_label(about.stage.name)
    data = code(data_name(about.run.stages["eval"], "data.prompts"))
    yield (
        f"{report['n']:,} held-out prompts of {data}, an answer each, sampled as above; near-greedy where it says so. "
        "A tie counts half. In brackets: 95 % intervals."
    )
    if about.stage.name == "ppo":
        first, *others = glance.sentences(about.run)
        yield bullets(map(text, [first + _caveat(about), *others]))
    if rows := [row for row in tables.won(report) if row[0].startswith(f"{who} over ")]:
        yield table(tables.WON, rows)
    columns, policies = tables.policies(report)
    theirs = policies if about.stage.name == "ppo" else [row for row in policies if not row[0].startswith("PPO")]
    yield table(columns, theirs)
    yield "The policies:"
    yield bullets(_compared(about))
    yield "The judges:"
    yield bullets(f"{code(name)}: {what}" for name, what in judges(about).items())


def _caveat(about: Subject) -> str:
    """What the headline is worth where none but PPO's own reward decides."""
    rates = about.report.get("win_rate", {}).get("ppo_vs_sft")
    own = rates and judges(about).get(deciding_judge(rates)) == OWN
    return " That judge is what it was trained to please: alone this proves nothing." if own else ""


def _compared(about: Subject) -> Iterator[str]:
    """What the evaluation's policies are."""
    parents = about.run.stages["eval"].told("parents")
    for name in about.report["models"]:
        told = parents.get(f"models.{name}")
        if name == about.stage.name:
            yield f"{text(render.model_label(name))}: this model"
        elif told and (name != "ppo" or about.stage.name == "ppo"):
            yield f"{text(render.model_label(name))}: {parent(about, told)}"


def _report_card(stage: Stage) -> Iterator[str]:
    card = report_card(stage)
    if "accuracy" not in card:
        yield "It was measured on no held-out pairs: how often it is right is not known."
        return
    name = code(data_name(stage, "data.eval"))
    right = f"{percent(card['accuracy'])}{bounds(card.get('accuracy_ci95'))}"
    yield f"Right on {right} of {card['n']:,} held-out pairs of {name}; a coin is on 50 %."
    if "adversarial" in card:
        rows = [
            [row.name, row.value, row.limit, "flagged" if row.flagged else ""]
            for row in reward_model_table.card_rows(card)
        ]
        yield table(("report card", f"{card['n']} pairs, {card['adversarial']['n']} probed", "limit", ""), rows)
