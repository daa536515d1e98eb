"""How reward functions are called: each form by hand, columns by row, None in place of a score, and bad input."""

import math
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.function import FunctionReward, load_function, score_texts
from rlhf_cli.rewards.signature import Signature, TextRows

# A text and a conversation. `p` and `r` are texts, `P` and `C` TRL's prompts and completions, `a` and `t` columns.
p, r, ids = ["one", "user: two"], ["1", "2"], [[5, 2], [6]]
P: list[Any] = ["One", [{"role": "user", "content": "two"}]]
C = ["1", [{"role": "assistant", "content": "2"}]]
a, t = [4, None], [["x"], None]
RECORDS = ({"prompt": P[0], "answer": 4, "tags": ["x"]}, {"prompt": P[1], "answer": None})
ROWS = TextRows(p, r, ids, RECORDS)


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
    ],
)
def test_what_a_function_is_given(parameters: str, expected: dict[str, Any]) -> None:
    scope: dict[str, Any] = {}
    exec(f"def received({parameters}):\n    return locals()", scope)
    assert Signature.of(scope["received"]).call(scope["received"], ROWS) == expected


def test_functions_of_trl_and_of_c() -> None:
    accuracy = load_function("trl.rewards:accuracy_reward")
    assert Signature.of(accuracy).columns == {"solution": True, "log_extra": False}
    assert Signature.of(max).call(max, ROWS) == max(p, r)


def test_a_function_may_change_what_it_is_given() -> None:
    def change(prompts: list[Any], completions: list[Any], tags: list[Any]) -> list[float]:
        return [len(prompts[1].pop()), len(tags[0].pop())]

    assert [score_texts("change", change, ROWS) for _ in range(2)] == [[2.0, 1.0]] * 2


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
