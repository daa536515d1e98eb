"""Reward functions: how they are called, also async ones, and what ends the call."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
import tiny

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.function import FunctionReward, call_reward_fn, score_texts
from rlhf_cli.rewards.results import RewardFormError
from rlhf_cli.rewards.signature import TextRows
from tests.rewards.test_signature import RECORDS, ROWS


async def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(response)) for response in responses]


class Client:
    """Like real clients, it belongs to the loop that it was first used on."""

    loop: Any = None

    async def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return [1.0] * len(responses)


def test_a_coroutine_is_awaited_on_one_loop_for_all_calls() -> None:
    assert call_reward_fn(lengths, TextRows(["", ""], ["a", "bcd"])) == [1.0, 3.0]
    client = Client()
    assert [call_reward_fn(client, TextRows([""], [""])) for _ in range(2)] == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ("raise SystemExit(3)", "raised SystemExit"),
        ("raise asyncio.CancelledError('gone')", "raised CancelledError"),
        ("await asyncio.wait_for(asyncio.sleep(9), 0.01)", "raised TimeoutError"),
        ("return [1.0]", "returned 1 scores for 2"),
        ("return [1.0, float('inf')]", "inf for row 1"),
        ("return None", "returned None"),
    ],
)
def test_r05_an_async_function_that_misbehaves(body: str, says: str) -> None:
    scope: dict[str, Any] = {"asyncio": asyncio}
    exec(f"async def score(prompts, responses):\n    {body}\n", scope)
    with pytest.raises(RLHFError, match=f"R05.*reward `mine` .*{says}"):
        score_texts("mine", scope["score"], TextRows(["p", "p"], ["a", "b"]))


def messages(completions: list[Any], answer: list[str], **rest: Any) -> list[float]:
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


def texts(completions: list[Any]) -> list[float]:
    return [float(completion.upper().count("A")) for completion in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(solution_str.strip() == ground_truth)}


async def one_completion(completion_ids: list[int]) -> float:
    return 1 / (completion_ids[0] + 1)


def without_match(completions: list[str]) -> list[int]:
    return [len(re.search("x", completion).group()) for completion in completions]


TEXT, CONVERSATION = ({"prompt": "q", "answer": "a", "ground_truth": "a"},), ({"prompt": [{"role": "user"}]},)


@pytest.mark.parametrize(
    ("function", "records", "says"),
    [
        (messages, TEXT, "raised TypeError.*; it reads prompts or completions as messages, but .* are texts"),
        (texts, CONVERSATION, ".*Attribute.*; it reads prompts or completions as texts, but .* conversations"),
        (compute_score, TEXT, "raised AttributeError.*; it is a function of one sample"),
        (one_completion, TEXT, "raised TypeError.*; it is a function of one sample"),
        (without_match, TEXT, "raised AttributeError: .*\nhint: call it by itself"),
    ],
)  # fmt: skip
def test_r05_names_the_cause_of_a_call_in_another_form(function: Any, records: Any, says: str) -> None:
    rows = TextRows(["q", "q"], ["a", "b"], [[5], [6]], records * 2)
    with pytest.raises(RLHFError, match=f"R05.*reward `mine` {says}") as caught:
        score_texts("mine", function, rows)
    assert isinstance(caught.value, RewardFormError) == (function is not without_match)


def test_a_function_may_change_what_it_is_given() -> None:
    def change(prompts: list[Any], completions: list[Any], tags: list[Any]) -> list[float]:
        return [len(prompts[1].pop()), len(tags[0].pop())]

    def empty(prompts: list[str], responses: list[str], completion_ids: list[list[int]]) -> list[float]:
        return [len(prompts.pop()), len(responses.pop()) + completion_ids[1].pop()]

    def by_place(x: list[str], y: list[str]) -> list[float]:
        return [len(x.pop()), len(y.pop())]

    for function, found in ((change, [2.0, 1.0]), (empty, [9.0, 7.0]), (by_place, [9.0, 1.0])):
        assert [score_texts("change", function, ROWS) for _ in range(2)] == [found] * 2


def test_records_stay_with_their_rows() -> None:
    """Repeated, sliced, generated and concatenated; another number of records than rows is an error."""
    prompts = tiny.prompts(8)
    assert [record["row"] for record in prompts.repeat(2).rows(slice(3, 6)).records] == [1, 2, 2]
    source = FunctionReward("row", lambda x, y, row: row, tiny.Words())
    rollout = tiny.trainer(rewards={"row": source}, num_samples_per_prompt=2).generate(prompts)
    parts = [rollout.rows(slice(0, 5)), rollout.rows(slice(5, 16))]
    assert [source(part).tolist() for part in parts] == [[0, 0, 1, 1, 2], [2, *[n for n in range(3, 8) for _ in "ab"]]]
    assert source(Rollout.concat(parts)).tolist() == source(rollout).tolist()
    for rows in (prompts, rollout):
        with pytest.raises(ValueError, match=r"2 records for (8|16) rows"):
            replace(rows, records=RECORDS)
