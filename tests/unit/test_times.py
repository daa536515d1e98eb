"""Spans of time in words."""

import pytest

from rlhf_cli import terminal


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.0123, "0.012 s"),
        (4.68, "4.7 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (723, "12 min 3 s"),
        (3599.7, "1 h"),
        (12_000, "3 h 20 min"),
        (7_210, "2 h"),
        (190_000, "2 d 4 h"),
    ],
)
def test_a_span_has_two_units_at_most_and_none_that_is_nothing(seconds: float, expected: str) -> None:
    assert terminal.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-5, "just now"), (59, "just now"), (60, "1 min ago"), (7_199, "1 h ago"), (86_400 * 40, "40 d ago")],
)
def test_ages_have_one_unit(seconds: float, expected: str) -> None:
    assert terminal.ago(seconds) == expected
