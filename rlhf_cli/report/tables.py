"""An evaluation's numbers as rows of tables, for a page and for a model card."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.evaluation import render
from rlhf_cli.report.runs import at
from rlhf_cli.report.texts import percent, rated
from rlhf_cli.statistics import with_interval

WON = ("comparison", "won", "at equal length", "ties", "of")


def judges(report: Mapping[str, Any]) -> list[str]:
    """The names of those that scored the answers."""
    return list(at(report, "models.sft.judges") or [])


def won(report: Mapping[str, Any]) -> list[list[str]]:
    """A row of `WON` for each win rate."""
    rows = []
    for pair, how, judge, rate in render.win_rate_rows(report):
        value, equal = rated(rate), rate.get("length_controlled")
        told = "-" if equal is None else percent(equal)
        rows.append([f"{pair}, {judge}{how}", value, told, str(rate.get("ties", "-")), str(rate.get("n", "-"))])
    return rows


def policies(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, a row for each policy): its distance from SFT, its answers' length, and its mean by each judge."""
    names, rows = judges(report), []
    for how, section in (("", report), (", near-greedy", report.get("greedy") or {})):
        for name, told in (section.get("models") or {}).items():
            kl = with_interval(told["kl"], told.get("kl_ci95")) if "kl" in told else "-"
            means = [mean(told["judges"][judge]) for judge in names]
            length, ended = f"{told['response_length_mean']:.1f}", percent(told["eos_fraction"])
            rows.append([render.model_label(name) + how, kl, length, ended, *means])
    return ["policy", "KL, nats", "length", "ended", *names], rows


def mean(told: Mapping[str, Any]) -> str:
    """A judge's mean with its interval."""
    return with_interval(told["mean"], told.get("ci95"))
