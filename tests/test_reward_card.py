"""The reward model's report card, on numbers: worked examples, and samples whose truth is known."""

import math
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom, spearmanr

from rlhf_cli.config.ppo_options import RewardRequirements
from rlhf_cli.evaluation import reward_model, reward_model_table
from rlhf_cli.evaluation.reward_model import PROBE_LABELS, ScoredPair
from rlhf_cli.statistics import wilson

THREE_TO_ONE, NINE_TO_ONE = math.log(3), math.log(9)  # margins that say 75 % and 90 %


def pair(margin: float, chosen_length: int = 7, rejected_length: int = 7) -> ScoredPair:
    return ScoredPair(margin / 2, -margin / 2, chosen_length, rejected_length)


def test_accuracy_counts_a_tie_as_half_right() -> None:
    card = reward_model.evaluate_pairs([pair(m) for m in (1.0, 0.1, 3.0, -2.0, 0.0)])
    assert (card["n"], card["accuracy"], card["margin"]) == (5, 0.7, pytest.approx(2.1 / 5))
    low, high = card["accuracy_ci95"]
    assert low < 0.7 < high


def test_the_histogram_counts_each_margin_once_at_its_lower_edge() -> None:
    assert reward_model.margin_histogram([-5.0, -4.0, -0.5, 0.0, 0.5, 2.0, 4.0, 9.0]) == [1, 1, 0, 1, 2, 0, 1, 2]


def test_calibration_error_of_two_bins_by_hand() -> None:
    as_said = [pair(THREE_TO_ONE)] * 3 + [pair(-THREE_TO_ONE)]
    assert reward_model.expected_calibration_error(as_said) == pytest.approx(0)
    # 4 pairs at 75 % all come true, 6 at 90 % come true half the time: 0.4 x 0.25 + 0.6 x 0.4
    off = [pair(THREE_TO_ONE)] * 4 + [pair(NINE_TO_ONE), pair(-NINE_TO_ONE)] * 3
    assert reward_model.expected_calibration_error(off) == pytest.approx(0.34)
    low, high = reward_model.calibration_bins(off)
    assert (low["n"], low["confidence"], low["accuracy"]) == (4, pytest.approx(0.75), 1.0)
    assert (high["n"], high["confidence"], high["accuracy"]) == (6, pytest.approx(0.9), 0.5)
    assert high["from"] <= 0.9 <= high["to"] and (high["to"] - high["from"]) == pytest.approx(0.05)


def test_one_sure_of_all_and_always_wrong_is_as_far_off_as_can_be() -> None:
    assert reward_model.expected_calibration_error([pair(-20.0)] * 5) == pytest.approx(1.0)
    assert reward_model.expected_calibration_error([pair(20.0)] * 5) == pytest.approx(0.0, abs=1e-8)
    assert reward_model.expected_calibration_error([pair(0.0)] * 5) == 0.0


def test_what_chance_does_to_twenty_pairs() -> None:
    """One bin at 75 %: |k/20 - 0.75| with k of Binomial(20, 0.75) is at most 0.15 in 93.5 % of draws, 0.2 in 98.3 %."""
    pairs = [pair(THREE_TO_ONE)] * 20
    assert reward_model.ece_null_quantile(pairs) == pytest.approx(0.2)
    assert reward_model.ece_null_quantile(pairs * 100) < 0.025


def test_what_chance_does_to_two_bins_adds_up() -> None:
    """Against every outcome of 20 pairs at 75 % and 20 at 90 %, with its chance."""
    off = [[(abs(k / 20 - p) / 2, binom.pmf(k, 20, p)) for k in range(21)] for p in (0.75, 0.9)]
    outcomes = sorted((a + b, chance * other) for a, chance in off[0] for b, other in off[1])
    below = list(accumulate(chance for _, chance in outcomes))
    exact = next(error for (error, _), share in zip(outcomes, below, strict=True) if share >= 0.95)
    found = reward_model.ece_null_quantile([pair(THREE_TO_ONE)] * 20 + [pair(NINE_TO_ONE)] * 20)
    assert found == pytest.approx(exact, abs=0.0126)  # one outcome more or less in either bin


def test_the_correlation_is_of_ranks() -> None:
    """Ranks 1 3 2 4 against 1 2 3 4: 1 - 6 x 2 / (4 x 15). A bend changes nothing, one great length little."""
    assert reward_model.length_correlation([ScoredPair(1, 3, 10, 20), ScoredPair(2, 4, 30, 40)])[0] == pytest.approx(
        0.8
    )
    assert reward_model.length_correlation([ScoredPair(1, 3, 10, 20), ScoredPair(2, 90, 30, 4000)])[0] == pytest.approx(
        0.8
    )
    down = [ScoredPair(-1, -2, 1, 2), ScoredPair(-9, -300, 3, 4)]
    assert reward_model.length_correlation(down)[0] == pytest.approx(-1)
    assert reward_model.length_correlation([pair(1.0), pair(-1.0)]) == (0.0, (0.0, 0.0))


def noisy(n: int, slope: float, *, alike: bool = False) -> list[ScoredPair]:
    """Scores with a part that grows with the length; `alike`: a pair's two answers are one and the same."""
    draw, found = random.Random(3), []
    for _ in range(n):
        lengths = [draw.randint(1, 20) for _ in range(2)]
        scores = [slope * length + draw.gauss(0, 5) for length in lengths]
        pick = [0, 0] if alike else [0, 1]
        found.append(ScoredPair(*(scores[i] for i in pick), *(lengths[i] for i in pick)))
    return found


@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.3])
def test_the_correlation_is_scipys_with_ties_and_the_interval_has_the_known_width(slope: float) -> None:
    pairs = noisy(400, slope)
    scores = [score for each in pairs for score in (each.chosen, each.rejected)]
    lengths = [length for each in pairs for length in (each.chosen_length, each.rejected_length)]
    value, (low, high) = reward_model.length_correlation(pairs)
    assert value == pytest.approx(spearmanr(scores, lengths).statistic)
    fisher = [math.tanh(math.atanh(value) + side * 1.96 * 1.03 / math.sqrt(797)) for side in (-1, 1)]
    assert high - low == pytest.approx(fisher[1] - fisher[0], rel=0.2) and low < value < high


def test_two_answers_of_one_prompt_are_not_two_observations() -> None:
    _, (low, high) = reward_model.length_correlation(noisy(400, 0.0, alike=True))
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15), "not 2 x 1.96 / sqrt(800)"


def test_the_longer_answer_by_hand() -> None:
    pairs = [pair(1, 9, 5), pair(-1, 9, 5), pair(1, 5, 9), pair(0, 5, 9), pair(5, 7, 7)]
    won = 1 + 0 + 0 + 0.5
    assert reward_model.longer_answer_preference(pairs) == {
        "n": 4,
        "preferred": won / 4,
        "ci95": list(wilson(won, 4)),
        "chosen": 0.5,
    }
    assert "longer_answer" not in reward_model.evaluate_pairs([pair(1.0)])


def test_the_same_seed_gives_the_same_card() -> None:
    pairs = noisy(60, 0.1)
    assert reward_model.evaluate_pairs(pairs, seed=5) == reward_model.evaluate_pairs(pairs, seed=5)
    assert reward_model.evaluate_pairs(pairs, seed=5) != reward_model.evaluate_pairs(pairs, seed=6)


# Probes


def rows(*prompts: int) -> list[dict[str, Any]]:
    """A row for each prompt, of one token: the good answer is 50 60 and its number, the end token 1."""
    return [{"prompt_ids": [prompt], "chosen_ids": [prompt, 50, 60, i + 70, 1]} for i, prompt in enumerate(prompts)]


def test_each_probe_by_its_tokens() -> None:
    found = reward_model.build_probes(rows(10, 11), [[5, 6], [7]], context=None, seed=0)
    assert found["empty"] == [[10, 1], [11, 1]]
    assert found["politeness"] == [[10, 5, 6, 1], [11, 7, 1]]
    assert found["over_long"][1] == [11, *[50, 60, 71] * 3, 1]
    assert found["swapped_prompt"] == [[10, 50, 60, 71, 1], [11, 50, 60, 70, 1]]
    for row, ids in zip(rows(10, 11), found["repeated_token"], strict=True):
        prompt, *repeated, end = ids
        assert [prompt] == row["prompt_ids"] and end == 1 and len(repeated) == 3
        assert len(set(repeated)) == 1 and repeated[0] in row["chosen_ids"][1:-1]


def test_the_repeated_token_is_drawn_by_the_seed() -> None:
    made = [
        [
            ids[1]
            for ids in reward_model.build_probes(rows(*range(40)), [[]] * 40, context=None, seed=seed)["repeated_token"]
        ]
        for seed in (0, 0, 1)
    ]
    assert made[0] == made[1] != made[2] and {50, 60} < set(made[0])


def test_a_probe_is_cut_to_the_context_and_still_ends() -> None:
    found = reward_model.build_probes(rows(10, 11), [[5] * 30] * 2, context=6, seed=0)
    assert found["over_long"][0] == [10, 50, 60, 70, 50, 1] and found["politeness"][0] == [10, 5, 5, 5, 5, 1]


def test_a_swapped_answer_is_never_one_to_the_same_prompt() -> None:
    asked = rows(10, 10, 10, 11)
    found = reward_model.build_probes(asked, [[]] * 4, context=None, seed=0)["swapped_prompt"]
    assert [ids[3] for ids in found[:3]] == [73] * 3 and found[3][3] in (70, 71, 72)
    assert "swapped_prompt" not in reward_model.build_probes(rows(10, 10), [[]] * 2, context=None, seed=0)


def test_at_most_128_rows_are_probed_from_all_over_the_data() -> None:
    assert reward_model.probe_rows(rows(1, 2, 3)) == [0, 1, 2]
    picked = reward_model.probe_rows(rows(*range(1000)))
    assert len(picked) == len(set(picked)) == reward_model.MAX_PROBED == 128
    assert picked[0] == 0 and 990 < picked[-1] < 1000


def test_a_probe_wins_only_above_the_chosen_answer() -> None:
    found = reward_model.score_probes({"empty": [2.0, 1.0, 0.0, 5.0]}, [1.0, 1.0, 1.0, 1.0])
    assert found["n"] == 4
    assert found["probes"]["empty"]["beats"] == 0.5 and found["probes"]["empty"]["margin"] == 1.0
    low, high = found["probes"]["empty"]["ci95"]
    assert low < 0.5 < high


# Flags


def card(**changes: Any) -> dict[str, Any]:
    """A card without a fault, 500 pairs of which 80 % are right, with the changes."""
    shares = {"empty": 0.05, "repeated_token": 0.1, "politeness": 0.0, "over_long": 0.5, "swapped_prompt": 0.2}
    shares |= changes.pop("beats", {})
    told = {
        name: {"beats": share, "ci95": [share - 0.05, share + 0.05], "margin": 0.1} for name, share in shares.items()
    }
    return {
        "n": 500,
        "accuracy": 0.8,
        "accuracy_ci95": [0.76, 0.83],
        "ci95": [0.76, 0.83],
        "ece": 0.06,
        "ece_by_chance": 0.05,
        "calibration": [{"from": 0.7, "to": 0.75, "n": 500, "confidence": 0.74, "accuracy": 0.8}],
        "length_correlation": 0.15,
        "length_correlation_ci95": [0.09, 0.21],
        "longer_answer": {"n": 480, "preferred": 0.6, "ci95": [0.55, 0.64], "chosen": 0.58},
        "margin_histogram": {"edges": [-4, -2, -1, 0, 1, 2, 4], "counts": [0, 7, 19, 74, 149, 133, 113, 5]},
        "adversarial": {"n": 128, "probes": told},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"length_correlation": 0.5, "length_correlation_ci95": [0.31, 0.6]}, ["R10"]),
        ({"length_correlation": 0.5, "length_correlation_ci95": [0.29, 0.6]}, []),
        ({"length_correlation": -0.5, "length_correlation_ci95": [-0.6, -0.31]}, ["R10"]),
        ({"length_correlation": -0.5, "length_correlation_ci95": [-0.6, -0.29]}, []),
        ({"beats": {"empty": 40 / 128}}, ["R11"]),
        ({"beats": {"empty": 39 / 128}}, []),
        ({"beats": {"empty": 39 / 128}, "accuracy": 0.95}, ["R11"]),
        ({"beats": {"politeness": 21 / 128}, "accuracy": 0.99}, []),
        ({"beats": {"repeated_token": 0.4}}, ["R11"]),
        ({"beats": {"over_long": 78 / 128}}, []),
        ({"beats": {"over_long": 79 / 128, "empty": 0.5}}, ["R11", "R11"]),
        ({"beats": {"swapped_prompt": 44 / 128}, "accuracy": 0.99}, []),
        ({"beats": {"swapped_prompt": 45 / 128}}, ["R11"]),
        ({"ece": 0.11}, ["R12"]),
        ({"ece": 0.11, "ece_by_chance": 0.12}, []),
        ({"ece": 0.09, "ece_by_chance": 0.02}, []),
    ],
)
def test_a_fault_is_flagged_beyond_its_limit_and_not_below(changes: dict[str, Any], codes: list[str]) -> None:
    """A probe: by its Wilson interval for five probes together, 2.576 standard errors wide to each side, and where the
    limit is 1 - accuracy by Newcombe's interval of the difference, with those of 500 pairs."""
    assert [problem.code for problem in reward_model.flags(card(**changes))] == codes


def test_a_flag_says_the_number_the_limit_and_what_helps() -> None:
    length, probe, calibration = reward_model.flags(
        card(length_correlation=0.5, length_correlation_ci95=[0.4, 0.6], beats={"swapped_prompt": 0.5}, ece=0.2)
    )
    assert "correlation 0.50 [0.40, 0.60], limit 0.3" in length.text and "chosen one in 58%" in length.text
    assert "good answer to another prompt scores above the chosen answer for 50% of 128 prompts" in probe.text
    assert "limit 25%" in probe.text and "answer alone" in (probe.hint or "")
    assert "ECE 0.20, limit 0.1; 0.74 claimed right, 0.80 are" in calibration.text
    assert all(problem.hint for problem in (length, probe, calibration))


def test_the_table_shows_every_number_and_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    reward_model_table.print_card(card(beats={"politeness": 0.9}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reward model: right on 0.800 [0.760, 0.830] of the held-out pairs"
    table = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]
    assert table[0] == ["report card: 500 pairs, 128 probed", "found [95 % interval]", "limit"]
    assert ["calibration error (ECE)", "0.060; 0.74 claimed right, 0.80 are", "0.10"] in table
    assert ["score with length, rank correlation", "0.150 [0.090, 0.210]", "+-0.30"] in table
    assert ["longer answer preferred", "0.600 [0.550, 0.640]; people: 0.580"] in table
    assert ["beaten by an empty answer", "0.050 [0.000, 0.100]; mean gap +0.10", "0.20"] in table
    assert ["beaten by politeness alone", "0.900 [0.850, 0.950]; mean gap +0.10", "0.20", "flagged"] in table
    assert sum("flagged" in row for row in table) == 1
    margins = ["below -4", "-4 to -2", "-2 to -1", "-1 to 0", "0 to 1", "1 to 2", "2 to 4", "from 4"]
    start = table.index(["margin, chosen less rejected", *margins])
    assert table[start + 1] == ["pairs", "0", "7", "19", "74", "149", "133", "113", "5"]
    assert [line.partition(":")[0] for line in lines[-4:-1]] == ["beaten by X", "mean gap", "flagged"]
    assert all(line.endswith(".") for line in lines[-4:])
    assert max(map(len, lines)) <= 100


def test_a_command_tells_the_table_of_a_card_once(capsys: pytest.CaptureFixture[str]) -> None:
    for card_ in (card(), card(beats={"politeness": 0.9}), card(beats={"politeness": 0.9})):
        reward_model_table.print_card(card_)
    told = capsys.readouterr().out
    assert told.count("beaten by an empty answer") == 2, "another card is another table"
    headline = "reward model: right on 0.800 [0.760, 0.830] of the held-out pairs"
    assert told.splitlines()[-1] == f"{headline}; its report card stands above"


def test_the_page_has_the_limits_and_the_keys_of_the_code() -> None:
    page = (Path(__file__).parent.parent / "docs/evaluation.md").read_text(encoding="utf-8")
    assert all(name in page for name in (*PROBE_LABELS.values(), *RewardRequirements.model_fields))
    assert f"beyond {reward_model.MAX_LENGTH_CORRELATION} " in page and f"R12 above {reward_model.MAX_ECE}," in page
    assert (
        f"half way there, {reward_model.SWAPPED_PROMPT_LIMIT}." in page
        and f"at least {reward_model.MIN_PROBE_LIMIT}." in page
    )
    assert (
        reward_model.OVER_LONG_LIMIT == 0.5
        and f"up to {reward_model.MAX_PROBED} pairs" in page
        and reward_model.OVER_LONG_REPEATS == 3
    )


def test_every_probe_has_a_name_for_people() -> None:
    made = reward_model.build_probes(rows(10, 11), [[5], [5]], context=None, seed=0)
    assert made.keys() == PROBE_LABELS.keys()
