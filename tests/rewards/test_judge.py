"""A language model as a reward of `rlhf ppo`, which a stand-in plays: what it is asked, faults, kills, processes.

Modules: `judges/costs.py`, `stages/ppo/reward_judges.py`, `stages/ppo/sft_answers.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_judge
from ppo_folder import PPO, PROMPTS, lines, must_succeed, ppo, write
from stand_in_judge import MODEL, StandIn

pytestmark = pytest.mark.training
# Two updates of eight responses, and eight of the finished policy, in both orders.
CALLS = 2 * (16 + 8)


def longer(prompt: str, first: str, second: str) -> str:
    """Prefer the longer answer; of the probe's texts the sensible one."""
    if not prompt.startswith("tell me about"):
        return stand_in_judge.sensible(prompt, first, second)
    return "tie" if len(first) == len(second) else "1" if len(first) > len(second) else "2"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stand_in_judge.stand_in(longer) as server:
        yield server


def judged(folder: Path, server: StandIn, *, weight: float = 1.0, **openai: Any) -> Path:
    """Return the folder, whose ppo.yaml has the judge as its only reward."""
    judge = {"openai": {"url": server.url, "model": MODEL, **openai}, "weight": weight}
    keys = {**PPO["ppo"], "total_episodes": 16, "num_sample_generations": 1}
    write(folder, "ppo", {**PPO, "rewards": {"llm": judge}, "ppo": keys})
    return folder


def texts_of(bodies: list[Any]) -> set[tuple[str, str, str]]:
    """Return prompt, first and second answer of each request about the run's prompts."""
    found = set()
    for body in bodies:
        match = stand_in_judge.TEXTS.search(body["messages"][0]["content"])
        assert match
        if match[1].startswith("tell me about"):
            found.add((match[1], match[2], match[3]))
    return found


def test_each_response_is_compared_with_the_sft_models_answer_in_both_orders(run_folder: Path, server: StandIn) -> None:
    judged(run_folder, server)
    result = must_succeed(ppo(run_folder))
    answers = {row["prompt"]: row["answer"].strip() for row in lines(run_folder / "ppo/sft_answers.jsonl")}
    assert set(answers) <= set(PROMPTS) and len(answers) == len(lines(run_folder / "ppo/sft_answers.jsonl"))

    shown = texts_of(server.requests)
    assert {(prompt, second, first) for prompt, first, second in shown} == shown
    assert all(answers[prompt] in (first, second) for prompt, first, second in shown)
    for row in lines(run_folder / "ppo/samples.jsonl"):
        ours, theirs = len(row["response"].strip()), len(answers[row["prompt"]])
        assert row["scores"]["llm"] == (ours > theirs) - (ours < theirs), row
    assert len(server.requests) <= 28 + CALLS and f"judge llm: {len(server.requests)} calls now" in result.stderr
