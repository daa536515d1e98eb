"""Examples of an evaluation: which pairs of answers are shown."""

import pytest

from rlhf_cli.evaluation.sample_pairs import ResponsePair, deciding_judge, quartile_examples


@pytest.mark.parametrize(
    ("gains", "examples"),
    [
        ({0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, [1, 2, 3]),
        ({7: 4.0, 5: 0.0, 3: 2.0, 9: 1.0, 1: 3.0}, [9, 3, 1]),
        ({4: 1.0, 2: 1.0, 0: 1.0, 6: 1.0}, [0, 2, 4]),
        ({8: -1.0, 3: 1.0}, [8, 3]),
        ({8: 0.5}, [8]),
    ],
)
def test_examples_are_deterministic(gains: dict[int, float], examples: list[int]) -> None:
    pairs = [ResponsePair(index, "", {}, {}, gain) for index, gain in gains.items()]
    assert [pair.index for pair in quartile_examples(pairs)] == examples


def test_a_judge_other_than_the_reward_model_decides() -> None:
    for judges, judge in ((["reward", "helpful", "gold"], "gold"), (["reward", "helpful"], "helpful")):
        assert deciding_judge(judges) == judge
    assert deciding_judge(["reward"]) == "reward"
