"""Probes of a reward model: answers that are made worse, by their tokens."""

from typing import Any

from rlhf_cli.evaluation import reward_probes
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.runs.report import Adversarial, ProbeResult
from rlhf_cli.statistics import wilson


def rows(*prompts: int) -> list[dict[str, Any]]:
    """A row per prompt of one token; the good answer is 50 60, its number plus 70, and the end token 1."""
    return [{"prompt_ids": [prompt], "chosen_ids": [prompt, 50, 60, i + 70, 1]} for i, prompt in enumerate(prompts)]


def probes(rows: list, polite: list | None = None, *, context: int | None = None, seed: int = 0) -> dict:
    return reward_probes.build_probes(rows, polite or [[]] * len(rows), context=context, seed=seed)


def test_each_probe_by_its_tokens() -> None:
    built = probes(rows(10, 11), [[5, 6], [7]])
    assert built.keys() == PROBE_LABELS.keys()
    assert built["empty"] == [[10, 1], [11, 1]] and built["politeness"] == [[10, 5, 6, 1], [11, 7, 1]]
    assert built["over_long"][1] == [11, *[50, 60, 71] * 3, 1]
    assert built["swapped_prompt"] == [[10, 50, 60, 71, 1], [11, 50, 60, 70, 1]]
    for row, ids in zip(rows(10, 11), built["repeated_token"], strict=True):
        prompt, *repeated, end = ids
        assert [prompt] == row["prompt_ids"] and end == 1 and len(repeated) == 3
        assert len(set(repeated)) == 1 and repeated[0] in row["chosen_ids"][1:-1]
    truncated = probes(rows(10, 11), [[5] * 30] * 2, context=6)
    assert truncated["over_long"][0] == [10, 50, 60, 70, 50, 1] and truncated["politeness"][0] == [10, 5, 5, 5, 5, 1]
    swapped = probes(rows(10, 10, 10, 11))["swapped_prompt"]
    assert [ids[3] for ids in swapped[:3]] == [73] * 3 and swapped[3][3] in (70, 71, 72)
    assert "swapped_prompt" not in probes(rows(10, 10))
    first, same, other = (
        [ids[1] for ids in probes(rows(*range(40)), seed=seed)["repeated_token"]] for seed in (0, 0, 1)
    )
    assert first == same != other and {50, 60} < set(first)


def test_at_most_128_rows_are_probed_evenly() -> None:
    assert reward_probes.probe_rows(rows(1, 2, 3)) == [0, 1, 2]
    assert reward_probes.probe_rows(rows(7, 7, 8, 7, 9, 8)) == [0, 2, 4], "one of each prompt"
    indices = reward_probes.probe_rows(rows(*range(1000)))
    assert len(indices) == len(set(indices)) == reward_probes.MAX_PROBED == 128
    assert indices[0] == 0 and 990 < indices[-1] < 1000


def test_a_probe_wins_only_above_the_chosen_answer() -> None:
    scored = reward_probes.score_probes({"empty": [2.0, 1.0, 0.0, 5.0]}, [1.0, 1.0, 1.0, 1.0])
    empty = ProbeResult(beats=0.5, ci95=list(wilson(2, 4)), margin=1.0)
    assert scored == Adversarial(n=4, probes={"empty": empty})
