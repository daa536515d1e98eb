"""The share of wrong labels by repeated pairs: worked numbers, simulated raters, and what `rlhf check` says."""

import random
from pathlib import Path

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.data.label_noise import label_noise
from rlhf_cli.stages.reward.card import label_errors


def labels_of(counts: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """Pairs with as many labels in each direction."""
    labels = []
    for number, (first, second) in enumerate(counts):
        labels += [(f"a{number}", f"b{number}")] * first + [(f"b{number}", f"a{number}")] * second
    return labels


def test_two_labels_of_which_18_percent_differ_are_wrong_in_a_tenth() -> None:
    """2 e (1 - e) = .18 at e = .1; a single label tells nothing."""
    noise = label_noise(labels_of([(1, 1)] * 18 + [(2, 0)] * 40 + [(0, 2)] * 42 + [(1, 0)] * 500))
    assert noise and noise.repeats == 100
    assert (noise.differ, noise.wrong) == (pytest.approx(0.18), pytest.approx(0.1))
    low, high = noise.wrong_ci95  # Wilson's interval of 18 in 100 is .117 to .267
    assert (low, high) == (pytest.approx(0.0624, abs=1e-3), pytest.approx(0.1586, abs=1e-3))


def test_three_labels_count_as_two_repeats_of_all_their_comparisons() -> None:
    """Two against one: two of three comparisons differ."""
    noise = label_noise(labels_of([(2, 1)] * 3 + [(3, 0)] * 9))
    assert noise and noise.repeats == 24
    assert noise.differ == pytest.approx(3 * 2 * (2 / 3) / 24)


def test_random_labels_are_wrong_in_half() -> None:
    noise = label_noise(labels_of([(1, 1)] * 55 + [(2, 0)] * 45))
    assert noise and noise.wrong == 0.5 == noise.wrong_ci95[1]


@pytest.mark.parametrize("counts", [[(2, 0)] * 500, [(1, 1)] * 19, [(1, 0)] * 500, [], [(1, 1)] * 24])
def test_copies_merged_labels_and_few_repeats_give_no_estimate(counts: list[tuple[int, int]]) -> None:
    assert label_noise(labels_of(counts)) is None


def test_the_interval_covers_the_error_rate_of_simulated_raters() -> None:
    """2 to 4 labels of a pair, which depend on one another."""
    draw = random.Random(0)
    covered = 0
    for _ in range(200):
        labels = []
        for number in range(100):
            for _ in range(draw.randint(2, 4)):
                label = (f"a{number}", f"b{number}")
                labels.append(label[::-1] if draw.random() < 0.15 else label)
        noise = label_noise(labels)
        assert noise
        low, high = noise.wrong_ci95
        covered += low <= 0.15 <= high
    assert covered >= 180


def write_repeats(path: Path) -> None:
    """40 pairs with two labels, of which every fifth differ: 8 in 40, by Wilson .105 to .348."""
    rows = []
    for number in range(40):
        row = {"prompt": f"Number {number}?", "chosen": " Yes.", "rejected": " No."}
        other = {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if number % 5 == 0 else row
        rows += [row, other]
    jsonl.write_jsonl(path, rows)


def test_check_says_the_noise_of_contradicting_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_repeats(tmp_path / "pairs.jsonl")
    data.preference_rows(tmp_path / "pairs.jsonl", None, max_length=None)
    twice, swapped = [line for line in capsys.readouterr().err.splitlines() if "D15" in line]
    assert "wrong" not in twice
    assert "8 of 80 pairs contradict another pair" in swapped
    said = "; two labels of a pair differ in 20.0% of 40 repeats, so 11.3% [5.6%, 22.4%] of the labels are wrong"
    assert said in swapped


def test_the_card_has_the_same_estimate_from_token_ids() -> None:
    pairs = [{"chosen_ids": [number, 1], "rejected_ids": [number, 2]} for number in range(40)]
    swapped = [{"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]} for row in pairs]
    errors = label_errors(pairs + swapped[:8] + pairs[8:])
    assert errors and errors.repeats == 40 and errors.wrong == pytest.approx(0.1127, abs=1e-4)
    assert label_errors(pairs) is None
