"""What a reward function is given by the names of its parameters."""

from dataclasses import replace
from typing import Any

import pytest

from rlhf_cli.rewards.function import load_function
from rlhf_cli.rewards.signature import Signature, TextRows

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


def test_functions_of_trl_and_of_c() -> None:
    accuracy = load_function("trl.rewards:accuracy_reward")
    assert Signature.of(accuracy).columns == {"solution": True, "log_extra": False}
    assert Signature.of(max).call(max, ROWS) == max(p, r)
