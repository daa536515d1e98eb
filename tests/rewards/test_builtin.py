"""Built-in rewards by hand, and the parameters that they reject."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppo_folder import PPO, fails, lines, must_succeed, ppo, rlhf, write

from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.function import RewardContext, make_reward_fn

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
