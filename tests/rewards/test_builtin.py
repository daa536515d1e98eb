"""Built-in rewards by hand, the parameters that they reject, and async functions.

Modules: `rewards/function.py`, `rewards/results.py`, `rewards/signature.py`.
"""

import asyncio
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from ppo_folder import PPO, fails, lines, must_succeed, ppo, rlhf, write

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.function import (
    FunctionReward,
    RewardContext,
    call_reward_fn,
    load_function,
    make_reward_fn,
    score_texts,
)
from rlhf_cli.rewards.results import RewardFormError
from rlhf_cli.rewards.signature import Signature, TextRows

HERE = RewardContext(Path(), lambda key: f"ppo.yaml:{key}")


def scores(name: str, responses: list[str], **parameters: Any) -> list[float]:
    reward = make_reward_fn("builtin", SimpleNamespace(builtin=name, parameters=parameters), HERE)
    return list(reward([""] * len(responses), responses))


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("length", {"most": 2}, {"": 0, "a b": 0, "a b c d e": -3}),
        ("length", {"least": 2, "most": 3, "scale": 2}, {"": -1, "a": -0.5, "a b": 0, "a b c": 0, "a b c d": -0.5}),
        ("length", {"least": 3, "unit": "characters"}, {"ab": -1, "abc": 0, "a" * 99: 0}),
        ("regex", {"pattern": r"\d+"}, {"": 0, "in 1984": 1, "never": 0}),
        ("regex", {"pattern": r"yes.*", "whole": True, "ignore_case": True}, {" Yes\nno ": 1, "oh yes": 0}),
        ("regex", {"pattern": "yes"}, {"Yes": 0}),
        ("keyword", {"words": ["sea"]}, {"The Sea.": 1, "season": 0, "sea sea": 1, "undersea": 0, "": 0}),
        ("keyword", {"words": ["sea", "deep sea"], "most": 4}, {"deep sea, sea": 0.5, "sea " * 9: 1}),
        ("keyword", {"words": ["C++"], "ignore_case": False}, {"I use C++.": 1, "c++": 0}),
        ("repetition", {}, {"": 0, "a b": 0, "a b c d": 0, "a a a a a": -2 / 3}),
        ("repetition", {"words": 1}, {"a b a b": -0.5, "a": 0}),
    ],
)
def test_a_builtin_by_hand(name: str, parameters: dict[str, Any], expected: dict[str, float]) -> None:
    assert scores(name, list(expected), **parameters) == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(
    ("name", "parameters", "code", "says"),
    [
        ("lenght", {}, "C07", "did you mean length?"),
        ("length", {}, "C17", "give least, most or both"),
        ("length", {"least": 5, "most": 4}, "C17", "most 4 is below least 5"),
        ("length", {"most": -1}, "C17", "parameters.most: builtin length: most: Input should be greater"),
        ("length", {"most": "9"}, "C17", "valid integer"),
        ("length", {"most": True}, "C17", "valid integer"),
        ("length", {"most": 9, "unit": "tokens"}, "C17", "'words' or 'characters'"),
        ("length", {"most": 9, "scale": 0}, "C17", "greater than 0"),
        ("length", {"most": 9, "scale": float("inf")}, "C17", "finite"),
        ("length", {"max": 9}, "C17", "max: is not a parameter"),
        ("regex", {}, "C17", "give pattern or column"),
        ("regex", {"pattern": ""}, "C17", "matches everything"),
        ("regex", {"pattern": "(a"}, "C17", "not a regular expression"),
        ("keyword", {"words": []}, "C17", "at least 1 item"),
        ("keyword", {"words": ["a", " "]}, "C17", "contains an empty word"),
        ("keyword", {"words": ["a"], "most": 0}, "C17", "greater than 0"),
        ("repetition", {"words": 0}, "C17", "greater than 0"),
    ],
)
def test_c07_c17_wrong_parameters(name: str, parameters: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(RLHFError) as caught:
        scores(name, [], **parameters)
    assert caught.value.problems[0].code == code and says in str(caught.value)


def test_the_hint_names_all_parameters() -> None:
    with pytest.raises(RLHFError, match="keyword takes words, most, ignore_case"):
        scores("keyword", [], wrods=["a"])


def test_check_and_the_stage_report_the_errors_of_all_sources_together(run_folder: Path) -> None:
    wrong = {
        "a": {"builtin": "lenght"},
        "b": {"builtin": "regex", "parameters": {"pattern": "(a"}},
        "c": {"function": "no_such:module"},
    }
    write(run_folder, "ppo", {**PPO, "rewards": wrong})
    for result in (rlhf("check", run_folder / "ppo.yaml"), ppo(run_folder)):
        fails(result, "C07", "error[C17]: ", "did you mean length?", "not a regular expression", "cannot import")
        assert not (run_folder / "ppo/metrics.jsonl").exists()
    assert "rewards.b" not in result.stderr.partition("error[C07]")[0]


@pytest.mark.full
def test_builtins_through_the_stage_each_named_weighted_clipped_and_logged(run_folder: Path) -> None:
    sources = {
        "brief": {"builtin": "length", "parameters": {"most": 1, "unit": "characters"}, "clip": 2.0},
        "fresh": {"builtin": "repetition", "weight": 3.0},
    }
    write(run_folder, "ppo", {**PPO, "rewards": sources})
    must_succeed(ppo(run_folder, "ppo.missing_eos_penalty=null"))
    for row in lines(run_folder / "ppo/samples.jsonl"):
        brief = -float(max(0, len(row["response"]) - 1))
        assert row["scores"]["brief"] == brief
        assert row["score"] == pytest.approx(max(brief, -2.0) + 3 * row["scores"]["fresh"])
    logged = lines(run_folder / "ppo/metrics.jsonl")[0]
    assert {"objective/score/brief", "objective/score/fresh"} <= logged.keys()


# Async functions


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


# What functions are given


# A text and a conversation. `p` and `r` are texts, `P` and `C` TRL's prompts and completions, `a` and `t` columns.
p, r, ids = ["one", "user: two"], ["1", "2"], [[5, 2], [6]]
P: list[Any] = ["One", [{"role": "user", "content": "two"}]]
C = ["1", [{"role": "assistant", "content": "2"}]]
a, t = [4, None], [["x"], None]
RECORDS = ({"prompt": P[0], "answer": 4, "tags": ["x"]}, {"prompt": P[1], "answer": None})
# With the special tokens of a chat template; without one, OpenRLHF's form has the texts without special tokens.
mp, mr = ["<u>one", "<u>two<a>"], ["1<end>", "2"]
q, s = ["<u>one1<end>", "<u>two<a>2"], ["one1", "user: two2"]
ROWS = TextRows(p, r, ids, RECORDS, list(zip(mp, mr, strict=True)))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("prompts, responses", {"prompts": p, "responses": r}),
        ("prompts, responses, /", {"prompts": p, "responses": r}),
        ("x, answer", {"x": p, "answer": r}),  # by position: the same for all data
        ("x, answer, tags, k=2, **rest", {"x": p, "answer": r, "tags": t, "k": 2, "rest": {}}),
        ("x, y, answer", {"x": p, "y": r, "answer": a}),
        ("responses, answer, tags=0, k=2", {"responses": r, "answer": a, "tags": t, "k": 2}),
        ("responses, answer, **rest", {"responses": r, "answer": a, "rest": {"tags": t}}),
        ("*both, **rest", {"both": (p, r), "rest": {}}),
        ("completions, answer, log_extra=0", {"completions": C, "answer": a, "log_extra": 0}),
        ("prompts, completions", {"prompts": P, "completions": C}),
        ("completion_ids, *, tags", {"completion_ids": ids, "tags": t}),
        ("prompts, **rest", {"prompts": P, "rest": {"completions": C, "completion_ids": ids, "answer": a, "tags": t}}),
        ("x, prompts", {"x": r, "prompts": p}),  # a parameter called prompts gets prompts, at any place
        ("response, prompt, answer", {"response": r, "prompt": p, "answer": a}),
        ("x, prompts, /", {"x": r, "prompts": p}),
        ("query, prompt", {"query": q, "prompt": mp}),
        ("query, response", {"query": p, "response": r}),
        ("responses, prompts, /", {"responses": r, "prompts": p}),
        ("queries, prompts", {"queries": q, "prompts": mp}),
        ("prompts, queries, /", {"queries": q, "prompts": mp}),
        ("queries, prompts, responses, answer", {"queries": q, "prompts": mp, "responses": mr, "answer": a}),
        ("queries, **rest", {"queries": q, "rest": {"answer": a, "tags": t}}),
        ("queries, responses", {"queries": p, "responses": r}),  # as TRL's PPOTrainer calls the prompts
        ("samples", {"samples": s}),
        ("samples, **rest", {"samples": s, "rest": {"prompts": p, "outputs": r, "answer": a, "tags": t}}),
        ("samples, prompts, outputs", {"samples": s, "prompts": p, "outputs": r}),
        ("prompts, outputs", {"prompts": p, "outputs": r}),
        ("completions, samples=0", {"completions": C, "samples": 0}),  # in TRL's form a column
    ],
)
def test_what_a_function_is_given(parameters: str, expected: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(f"def received({parameters}):\n    return locals()", scope)
    assert Signature.of(scope["received"]).call(scope["received"], ROWS) == expected


def test_queries_of_a_model_without_a_chat_template() -> None:
    rows = replace(ROWS, marked=())
    assert Signature.of(lambda queries, prompts: 0).arguments(rows)[1] == {"queries": s, "prompts": p}


@pytest.mark.parametrize(
    ("result", "scores"),
    [
        ([True, False], [1.0, 0.0]),
        ([np.True_, np.float32(0.5)], [1.0, 0.5]),
        (np.array([1, 2]), [1.0, 2.0]),
        ([torch.tensor(1.5), torch.tensor([2])], [1.5, 2.0]),
        (torch.tensor([1.0, -2.0], dtype=torch.bfloat16, requires_grad=True), [1.0, -2.0]),
        (torch.tensor([True, False]), [1.0, 0.0]),
        (torch.tensor([[1.0], [2.0]]), [1.0, 2.0]),
        ({"rewards": torch.ones(2), "scores": torch.zeros(2)}, [1.0, 1.0]),
        ({"rewards": [torch.tensor(1), None]}, [1.0, None]),
        ((each for each in (1, None)), [1.0, None]),
    ],
)
def test_scores_in_all_forms_that_grpo_and_openrlhf_take(result: Any, scores: list[float | None]) -> None:
    found = score_texts("mine", lambda x, y: result, TextRows(["p", "p"], ["a", "b"]), every_row=False)
    assert found == scores and all(score is None or type(score) is float for score in found)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({0: 1.0, 1: 2.0}, "returned a dict without `rewards`; its keys: 0, 1\nhint: .* OpenRLHF's dict"),
        (1, "returned 1, one number for all rows"),
        (torch.tensor(2.0), "returned 2.0, one number for all rows"),
        ({"rewards": np.float64(3)}, "returned 3.0, one number for all rows"),
        (torch.ones(2, 2), r"returned \[1.0, 1.0\] for row 0"),
        (torch.ones(1, 2), "returned 1 scores for 2 responses"),
        ("ab", "returned 'ab'"),
        (torch.ones(3), "returned 3 scores for 2 responses"),
        (torch.tensor([1.0, math.nan]), "returned nan for row 1"),
        ([1.0, torch.tensor(math.inf)], "returned inf for row 1"),
        ([1.0, "2"], "returned '2' for row 1"),
        ([1.0, np.array([1, 2])], r"returned \[1, 2\] for row 1"),
    ],
)
def test_r05_scores_in_no_form(result: Any, says: str) -> None:
    with pytest.raises(RLHFError, match=f"R05.*reward `mine` {says}"):
        score_texts("mine", lambda x, y: result, TextRows(["p", "p"], ["a", "b"]))


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


def test_functions_of_trl_and_of_c() -> None:
    accuracy = load_function("trl.rewards:accuracy_reward")
    assert Signature.of(accuracy).columns == {"solution": True, "log_extra": False}
    assert Signature.of(max).call(max, ROWS) == max(p, r)


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


def skipping(**scores: list[float | None]) -> dict[str, FunctionReward]:
    return {name: FunctionReward(name, lambda x, y, s=s: s, tiny.Words()) for name, s in scores.items()}


def test_none_takes_a_source_out_of_the_sum_of_that_row() -> None:
    sources = skipping(a=[1.0, None, 3.0, None], b=[10.0, 20.0, None, 40.0], judge=[None] * 4)
    trainer = tiny.trainer(rewards=sources, missing_eos_penalty=None)
    trainer.reward_weights, trainer.reward_clips = {"a": 2.0, "b": 1.0, "judge": 0.0}, {"b": 15.0}
    experience = trainer.make_experience(tiny.rollout())
    assert experience.scores.tolist() == [2 + 10, 15, 6, 15]
    metrics = experience.metrics(kl_in_reward=True)
    found = {name.removeprefix("objective/"): each for name, each in metrics.items() if name[10:14] in ("scor", "unsc")}
    shares = {"unscored/a": 0.5, "unscored/b": 0.25, "unscored/judge": 1.0}
    assert found == pytest.approx({"scores": 48 / 4, "score/a": 2.0, "score/b": 70 / 3, **shares})
    assert experience.histograms()["rollout/score/a"] == [1.0, 3.0]


def test_r05_a_row_without_any_score() -> None:
    """A judge of weight 0 is none that counts."""
    trainer = tiny.trainer(rewards=skipping(a=[1.0, None, 3.0, 4.0], judge=[1.0] * 4))
    trainer.reward_weights = {"a": 1.0, "judge": 0.0}
    rollout = replace(tiny.rollout(), records=(RECORDS[1], RECORDS[0]) * 2)
    with pytest.raises(RLHFError, match=r"R05.* no reward has a score for row 1: .*\(prompt: 'One'\)"):
        trainer.make_experience(rollout)
    with pytest.raises(RLHFError, match=r"R05.* returned nan for row 1"):
        skipping(a=[1.0, math.nan, 3.0, 4.0])["a"](rollout)
    trainer.rewards["model"], trainer.reward_weights["model"] = (lambda rollout: torch.full((4,), torch.nan)), 1.0
    with pytest.raises(RLHFError, match=r"R01.*score `model`"):
        trainer.make_experience(rollout)
