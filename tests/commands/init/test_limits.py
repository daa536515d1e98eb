"""Token limits by the lengths of the pairs, and the pairs that are dropped."""

from typing import Any

import pytest

from rlhf_cli.commands.init.limits import TokenCounts, TokenLimits, fit_pairs
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError
from tests.commands.init.test_parts import pair


def fitted(lengths: list[tuple[int, int, int]], context: int | None) -> tuple[list[Pair], TokenLimits]:
    """Fit pairs with these token counts of prompt, chosen and rejected answer, each with another prompt."""
    pairs = [pair(f"prompt {i}") for i in range(len(lengths))]
    return fit_pairs(pairs, [TokenCounts(*each) for each in lengths], context)


def test_the_answer_length_is_chosen_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 30 to 525 tokens in 512 positions: answers of 10 to 109 keep their 90th percentile."""
    used, limits = fitted([(30 + 5 * i, 10 + i, 20) for i in range(100)], 512)
    assert limits.response_length == 104  # of 10 + i the 90 smallest reach 99
    assert len(used) == 76 and used[-1].prompt == "prompt 75"  # 30 + 5 x 75 + 104 = 509
    assert limits.max_length == 496  # 405 + 85
    assert limits.ended == 1.0 and limits.answer_mean == 10 + 75 / 2
    warning, hint = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning[D10]: --data: 24 of 100 pairs (24 %) dropped: ")
    assert hint.startswith("hint: take a base model with 1024 positions, where 100 % of the pairs fit")


ONE_OUTLIER = "1 of 200 pairs (1 %) dropped: "


@pytest.mark.parametrize(
    ("lengths", "used", "response", "row", "warning"),
    [
        ([(20, 90, 100)] * 50, 50, 96, 120, ""),
        # Answers of 300 fit beside their prompts, but not half of the context: the length is that of the others.
        ([(10, 300, 5)] * 79 + [(10, 5, 5)] * 21, 100, 32, 312, "only 21 % of the chosen answers end within response"),
        ([(20, 40, 50)] * 199 + [(20, 40, 490)], 199, 40, 72, ONE_OUTLIER),  # without a hint
    ],
)
def test_dropped_pairs_are_reported(
    lengths: Any, used: int, response: int, row: int, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, limits = fitted(lengths, 512)
    assert (len(pairs), limits.response_length, limits.max_length) == (used, response, row)
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning[D10]: --data: {warning}") if warning else printed == ""
    assert warning != ONE_OUTLIER or "hint" not in printed


@pytest.mark.parametrize(
    ("answers", "context", "response"),
    [
        ([2] * 40, 512, 8),  # one word and the end token
        ([10] * 39 + [40], 512, 32),  # at least 32 if an answer is longer
        ([10] * 40, 512, 16),
        ([20] * 20 + [30] * 5, 48, 32),  # half of the context would be 24
        ([100] * 30 + [400] * 10, 512, 104),  # answers of 400 do not fit half of the context
        ([250] * 40, 512, 256),
        ([300] * 40, None, 304),
    ],
)
def test_the_length_of_a_response(answers: list[int], context: int | None, response: int) -> None:
    used, limits = fitted([(10, answer, 5) for answer in answers], context)
    assert limits.response_length == response
    kept = [answer for answer in answers if 10 + answer <= (context or 4096)]
    assert len(used) == len(kept) and limits.ended == sum(each <= response for each in kept) / len(kept)


def test_a_fifth_of_the_pairs_and_twenty_prompts_must_fit_and_the_hint_names_positions() -> None:
    lengths = [(200, 4000 + i, 4100) for i in range(60)]
    with pytest.raises(RLHFError) as caught:
        fitted(lengths, 512)
    (problem,) = caught.value.problems
    assert problem.code == "D10" and problem.text.startswith("60 of 60 pairs (100 %) do not fit: ")
    assert problem.hint and "8192 positions, where 100 % of the pairs fit" in problem.hint
    used, limits = fitted(lengths, 8192)
    assert len(used) == 60 and limits.response_length == 4056
    short, long = (20, 40, 40), (500, 40, 40)
    assert len(fitted([short] * 20 + [long] * 79, 512)[0]) == 20
    for lengths in ([short] * 19 + [long] * 10, [short] * 20 + [long] * 81):
        with pytest.raises(RLHFError, match=r"(?s)^error\[D10\].*1024 positions"):
            fitted(lengths, 512)
    assert len(fitted([short] * 18 + [long], 512)[0]) == 18  # too few prompts to begin with: D11 reports it
