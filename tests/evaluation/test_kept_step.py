"""The step that is kept: worked tables, and simulated steps that are equal or not.

Modules: `evaluation/reward_choices.py`.
"""

import random

import pytest
from reward_card import card

from rlhf_cli.evaluation.kept_step import describe, keep_step
from rlhf_cli.evaluation.reward_card import card_rows
from rlhf_cli.evaluation.reward_choices import choice_rows
from rlhf_cli.runs.report import KeptStep, RewardModelCard


def rights(n: int, **accuracies: int) -> dict[int, list[float]]:
    """Of n pairs each step ranks the first ones right: nested, so that steps differ where they must."""
    return {int(step.removeprefix("s")): [float(row < right) for row in range(n)] for step, right in accuracies.items()}


@pytest.mark.parametrize(
    ("steps", "prompts", "kept"),
    [
        (rights(200, s1=120, s2=150, s3=120), 200, 2),  # 30 pairs apart, all in one direction
        (rights(200, s1=120, s2=123, s3=120), 200, 3),  # 3 pairs: sign test p = .25
        (rights(200, s1=120, s2=150, s3=150), 200, 3),  # none is better than the last
        (rights(200, s1=120, s2=150, s3=120), 2, 3),  # the pairs of two prompts
        (rights(200, s1=150, s2=150, s3=120), 200, 1),  # the first of equal ones
    ],
)
def test_the_last_step_is_kept_unless_it_is_worse_by_more_than_chance(
    steps: dict[int, list[float]], prompts: int, kept: int
) -> None:
    choice = keep_step(steps, [row * prompts // 200 for row in range(200)])
    assert choice.step == kept
    assert (choice.optimism is None) == (kept == 3)


def test_equal_steps_seldom_lose_their_last_one() -> None:
    """20 steps of the same accuracy, each right on other pairs: one in twenty runs may keep an earlier step."""
    draw = random.Random(0)
    earlier = 0
    for _ in range(40):
        steps = {step: [float(draw.random() < 0.7) for _ in range(150)] for step in range(20)}
        earlier += keep_step(steps, range(150)).step != 19
    assert earlier <= 7  # binomial(40, .05) exceeds it in one of a thousand


def test_the_optimism_is_the_bias_of_the_choice() -> None:
    """Steps that are equally good but for one bad last one: on other pairs the best has their common accuracy."""
    draw = random.Random(1)
    biases = []
    optimisms = []
    for _ in range(25):
        steps = {step: [float(draw.random() < 0.7) for _ in range(200)] for step in range(6)}
        steps[6] = [float(draw.random() < 0.3) for _ in range(200)]
        kept = keep_step(steps, range(200))
        assert kept.step != 6 and kept.optimism is not None
        biases.append(max(each.accuracy for each in kept.evaluated) - 0.7)
        optimisms.append(kept.optimism)
    assert sum(optimisms) / 25 == pytest.approx(sum(biases) / 25, abs=0.015)
    assert sum(biases) / 25 > 0.03


def kept_card(kept: KeptStep | None) -> RewardModelCard:
    return RewardModelCard.model_validate({**card(), "kept_step": kept})


def test_the_card_and_the_choices_say_what_happened() -> None:
    prompts = range(200)
    steps = rights(200, s10=120, s20=160, s30=120)
    best = keep_step(steps, prompts)
    assert describe(best) == (
        "step 20 of 30: held-out accuracy 0.800; that of the last step, 0.600, is lower by more than chance"
    )
    last = keep_step(steps, prompts, keeps_best=False)
    assert describe(last) == (
        "the last step, 30: held-out accuracy 0.600; that of step 20, 0.800, is higher, by more than chance"
    )
    equal = keep_step(rights(200, s10=123, s30=120), prompts)
    assert describe(equal).endswith("that of step 10, 0.615, is higher, not by more than chance")
    said = [choice_rows(kept_card(kept))[0] for kept in (best, last, equal, None)]
    assert said == [
        ["best checkpoint", "yes: step 20 of 30", "had: 0.200 of accuracy over the last step"],
        ["best checkpoint", "the last of 3 evaluated steps", "0.200 of accuracy: set reward.keep: best"],
        ["best checkpoint", "the last of 2 evaluated steps", "nothing beyond chance"],
        [
            "best checkpoint",
            "no: one step was evaluated",
            "unknown; reward.eval_steps evaluates more",
        ],
    ]


def test_the_corrected_accuracy_is_on_the_card_of_a_chosen_step() -> None:
    kept = keep_step(rights(200, s10=120, s20=160, s30=120), range(200))
    chosen = kept_card(kept.with_changes(optimism=0.02))
    (row,) = [row for row in card_rows(chosen) if "did not choose" in row[0]]
    assert row[1].startswith("0.780 [0.73")  # the card's 0.8 [0.76, 0.83] without 0.02, wider by the same
    assert not any("did not choose" in row[0] for row in card_rows(kept_card(None)))
    assert choice_rows(chosen)[0][2] == "had: 0.180 of accuracy over the last step"


def test_the_choices_say_the_errors_of_the_labels() -> None:
    """An accuracy of .8 on labels of which a tenth are wrong is one of .875 on right ones: .875 * .9 + .125 * .1."""
    errors = {"repeats": 100, "wrong": 0.1, "wrong_ci95": [0.06, 0.16]}
    known = RewardModelCard.model_validate({**card(), "label_errors": errors})
    *_, row = choice_rows(known)
    said = ["10.0% [6.0%, 16.0%] are wrong", "accuracy 0.875, if held-out labels err alike"]
    assert row == ["labels without errors", *said]
    often = RewardModelCard.model_validate({**card(), "label_errors": {**errors, "wrong": 0.2}})
    assert choice_rows(often)[-1][2] == "cannot be told: the labels err as often"
    *_, unknown = choice_rows(kept_card(None))
    assert unknown[1:] == ["unknown: no pair has two labels", "unknown; label some pairs twice"]
