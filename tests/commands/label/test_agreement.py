"""Agreement of annotators: worked examples."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlhf_cli.commands.label import agreement
from rlhf_cli.data.labels import Choice, Label


def labels_of(annotator: str, choices: Sequence[Choice], order: Sequence[int] = (0, 1)) -> list[Label]:
    return [
        Label(
            pair=f"{n}:0-1",
            prompt="p",
            answers=["short", "much longer"],
            sources=["sft", "sft"],
            order=order,
            choice=choice,
            annotator=annotator,
            seconds=1.0,
            time=0.0,
        )
        for n, choice in enumerate(choices)
    ]


def test_kappa_of_cohens_table() -> None:
    """20 both yes, 15 both no, 5 and 10 differ: p = 0.7, e = 0.5 * 0.6 + 0.5 * 0.4, kappa = 0.4."""
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert agreement.cohens_kappa(first, second) == pytest.approx(0.4)
    low, high = agreement.kappa_interval(first, second) or (0.0, 0.0)
    # Fleiss, Cohen and Everitt 1969 give a standard error of 0.127.
    assert (high - low) / 2 / 1.96 == pytest.approx(0.127, abs=0.005)


def test_kappa_is_one_zero_or_unknown() -> None:
    assert agreement.cohens_kappa(["a", "b"], ["a", "b"]) == 1
    assert agreement.cohens_kappa(["a", "a", "b", "b"], ["a", "b", "a", "b"]) == 0
    assert agreement.cohens_kappa(["a", "a"], ["a", "a"]) is None
    assert agreement.kappa_interval(["a", "b"], ["a", "b"]) is None
    assert agreement.kappa_interval(["a", "b"] * 5, ["a", "b"] * 5) is None  # never different: no error is known


def test_agreement_counts_the_pairs_that_both_judged() -> None:
    labels = labels_of("x", ["first", "second", "tie", "skip", "first"])
    labels += labels_of("y", ["first", "first", "tie", "first"])
    (found,) = agreement.agreements(labels)
    assert found.annotators == ("x", "y") and found.raw.n == 3 and found.raw.value == pytest.approx(2 / 3)
    assert agreement.agreement_text(labels) == "agreement 0.67 of 3"
    assert agreement.agreement_text(labels_of("x", ["first"])) == ""


def test_slots_and_lengths_are_those_that_were_shown() -> None:
    labels = labels_of("x", ["first", "first", "second", "tie"]) + labels_of("y", ["first", "second"], order=(1, 0))
    found = agreement.habits(labels)
    x, y = found["x"], found["y"]
    assert (x.labels, x.ties) == (4, 1)
    assert x.first_slot is not None and x.first_slot.value == pytest.approx(2 / 3)
    assert x.longer is not None and x.longer.value == pytest.approx(1 / 3)
    assert y.first_slot is not None and y.first_slot.value == 0.5


def test_who_always_chooses_a_slot_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    agreement.print_summary(
        labels_of("careless", ["first"] * 12) + labels_of("careful", ["first", "second"] * 6), ["sft"]
    )
    output = capsys.readouterr()
    assert "careless chooses the first slot more often than by chance" in output.err
    assert "careful chooses" not in output.err and "Cohen's kappa" in output.out


def test_a_policy_is_compared_by_all_labels_of_pairs_with_both() -> None:
    labels = labels_of("x", ["first", "second", "second", "tie", "skip"])
    mixed = [replace(label, sources=["sft", "ppo"]) for label in labels]
    found = agreement.compare([*mixed, *labels], "ppo", "sft")  # those of sft alone do not count
    assert found is not None and found.n == 4 and found.value == pytest.approx(2.5 / 4)
    assert "ppo is preferred to sft in 0.62 [" in agreement.comparison_text("ppo", "sft", found)
    assert agreement.compare(labels, "ppo", "sft") is None


def test_pairs_of_one_prompt_are_not_independent() -> None:
    alone = [replace(label, sources=["sft", "ppo"]) for label in labels_of("x", ["first", "second"] * 10)]
    of_few = [replace(label, pair=f"{row % 4}:0-{row}") for row, label in enumerate(alone)]
    narrow, wide = (agreement.compare(labels, "ppo", "sft") for labels in (alone, of_few))
    assert narrow is not None and narrow.ci95 and wide is not None and wide.ci95
    assert narrow.value == wide.value
    assert wide.ci95[1] - wide.ci95[0] > 1.5 * (narrow.ci95[1] - narrow.ci95[0])
