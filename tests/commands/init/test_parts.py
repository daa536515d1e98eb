"""The parts of pairs for each stage: they share no prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands.init.parts import balance_lengths, longer_share, most_chosen, split_pairs
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.texts import Pair, split_key
from rlhf_cli.errors import RLHFError
from tests.commands.init.test_sizes import PROMPTS, chat


def pair(prompt: Any, number: int = 1, chosen: str = "Good") -> Pair:
    return Pair(RowLocation(Path("pairs.jsonl"), number), prompt, f"{chosen} {number}.", f"Bad {number}.", None)


def test_parts_share_no_prompt_keep_every_pair_and_hold_out_at_most_1000_prompts() -> None:
    pairs = [pair(prompt, number) for number, prompt in enumerate(PROMPTS * 3)]
    parts = split_pairs(pairs, seed=0)
    prompts = [{each.prompt for each in part} for part in parts.values()]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == len(PROMPTS)
    assert sorted(each.chosen for part in parts.values() for each in part) == sorted(each.chosen for each in pairs)
    assert list(map(len, prompts)) == [30, 45, 15, 10]
    for part in parts.values():  # in random order: evaluations take the first rows
        numbers = [each.location.number for each in part]
        assert numbers != sorted(numbers)
    assert split_pairs(pairs, 1) == split_pairs(pairs, 1) != split_pairs(pairs, 2)
    parts = split_pairs([pair(f"prompt {number}") for number in range(20_000)], 0)
    assert len(parts["held-out"]) == 1000 and len(parts["pairs"]) == 10_000
    with pytest.raises(RLHFError, match=r"^error\[D11\].*19 different prompts"):
        split_pairs([pair(prompt) for prompt in PROMPTS[:19] * 9], 0)


@pytest.mark.parametrize("swaps", [False, True], ids=["the longer is chosen", "the shorter is chosen"])
def test_balanced_pairs_do_not_tell_by_length_which_answer_was_chosen(swaps: bool) -> None:
    lengths = [(30, 10), (20, 20), (10, 21), (80, 10), (40, 20), (10, 80), (12, 9), (9, 9), (60, 10), (50, 50)]
    lengths = [(two, one) if swaps else (one, two) for one, two in lengths]
    assert balance_lengths(lengths) == [1, 2, 3, 4, 5, 7, 9]  # 10:21 keeps 40:20, 10:80 keeps 80:10
    assert balance_lengths(lengths[1:2]) == [0] and balance_lengths(lengths[:1]) == []
    pairs = [replace(pair("x", 0), chosen="a" * one, rejected="b" * two) for one, two in lengths]
    assert longer_share(pairs) == pytest.approx(2 / 7 if swaps else 5 / 7)
    assert longer_share(pairs[1:2]) == 0.5


def test_conversations_with_the_same_first_message_share_a_part() -> None:
    longer = [[*chat(text), {"role": "assistant", "content": "Yes?"}, *chat("More.")] for text in PROMPTS]
    both = [pair(prompt) for text, two in zip(PROMPTS, longer, strict=True) for prompt in (chat(text), two)]
    parts = split_pairs(both, 0)
    openings = [{split_key(each.prompt) for each in part} for part in parts.values()]
    assert sum(map(len, openings)) == len(set().union(*openings)) == len(PROMPTS)
    assert all(len(part) == 2 * len(keys) for part, keys in zip(parts.values(), openings, strict=True))


def test_sft_learns_the_answers_that_were_chosen_most_often() -> None:
    chosen = ["a", "b", "c", "d", "e", "e", "d"]
    pairs = [pair("one", 1, answer) for answer in chosen] + [pair("another", 1, "z")]
    learned = [(each.prompt, each.chosen[0]) for each in most_chosen(pairs)]
    assert learned == [("one", "a"), ("one", "b"), ("one", "d"), ("one", "e"), ("another", "z")]
