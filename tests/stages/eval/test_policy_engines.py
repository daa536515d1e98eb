"""`models.engine` of eval.yaml: graph and servers draw the answers of hf, and each policy is sent and proven.

Modules: `stages/common/served_policies.py`.
"""

import shutil
from pathlib import Path
from typing import Any

import chat_run
import pytest
import tiny
from ppo_folder import EVAL, evaluate, fails, lines, must_succeed, ppo, rlhf, write
from stand_in_vllm import StandIn
from transformers import AutoModelForCausalLM

from rlhf_cli.stages.eval import policy_evaluator

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
SETTINGS = {"n": 4, "best_of": [2], "per_device_batch_size": 4, "interpolate": [0.5]}


@pytest.fixture(scope="module")
def by_hf(trained_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is evaluated by this process. Read-only."""
    folder = Path(shutil.copytree(trained_once[0], tmp_path_factory.mktemp("hf") / "run"))
    write(folder, "eval", {**EVAL, "eval": SETTINGS})
    evaluate(folder)
    return folder


def copied(by_hf: Path, tmp_path: Path, engine: Any) -> Path:
    folder = Path(shutil.copytree(by_hf, tmp_path / "run"))
    shutil.rmtree(folder / "eval")
    write(folder, "eval", {**EVAL, "models": {**EVAL["models"], "engine": engine}, "eval": SETTINGS})
    return folder


def stand_in(folder: Path) -> StandIn:
    return StandIn(AutoModelForCausalLM.from_pretrained(folder).eval(), 64)


def answers(folder: Path) -> list[tuple[Any, ...]]:
    rows = lines(folder / "eval/samples.jsonl")
    return [(row["model"], row["mode"], row["index"], row["response"]) for row in rows]


def evaluates(folder: Path, *arguments: object) -> Any:
    return rlhf("eval", "-c", folder / "eval.yaml", *arguments)


def test_graph_draws_the_answers_of_hf(by_hf: Path, tmp_path: Path) -> None:
    folder = copied(by_hf, tmp_path, "graph")
    evaluate(folder)
    assert answers(folder) == answers(by_hf)
    fails(evaluates(folder, "-s", "models.engine=auto"), "C15", "models.engine: no longer set (was graph)")
    must_succeed(evaluates(by_hf, "-s", "models.engine=hf"), "finished already")


def test_servers_get_each_policy_in_turn_and_draw_the_answers_of_hf(
    by_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stand_in(by_hf / "sft_model"), stand_in(by_hf / "sft_model")
    folder = copied(by_hf, tmp_path, {"vllm": {"url": [one.url, other.url]}})
    _, result = evaluate(folder)
    assert answers(folder) == answers(by_hf)
    assert f"eval     {one.url} and {other.url} generate the responses; `rlhf serve" in result.stderr

    policies = list(dict.fromkeys(row[0] for row in answers(folder) if not row[0].startswith("best_of")))
    assert policies == ["sft", "ppo", "ppo_step_000000", "ppo_step_000002", "interpolated_0.5"]
    for server in (one, other):
        loads = [body for path, body in server.requests if path == "/collective_rpc"]
        assert len(loads) == 1 + len(policies) + 1  # the reference, each policy, and SFT again for best of n
        drawn = [body for path, body in server.requests if path == "/v1/completions"]
        assert {body["temperature"] for body in drawn} == {0.7, 0.01}
    assert not (folder / "eval/engine").exists()

    monkeypatch.setenv("RLHF_ROLLOUT_URLS", "http://127.0.0.1:1")  # the addresses are no part of the identity
    must_succeed(evaluates(folder), "finished already")
    fails(evaluates(folder, "-s", "models.engine=hf"), "C15", "models.engine: no longer set (was vllm)")


def test_a_server_that_shares_the_gpu_sleeps_before_the_judges_score(
    by_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stand_in(by_hf / "sft_model")
    folder = copied(by_hf, tmp_path, {"vllm": {"url": server.url, "sleep": True}})
    slept: list[bool] = []
    plain = policy_evaluator.model_scores

    def watched(source: Any, rollout: Any) -> Any:
        slept.append(server.asleep)
        return plain(source, rollout)

    monkeypatch.setattr(policy_evaluator, "model_scores", watched)
    evaluate(folder)
    assert answers(folder) == answers(by_hf)
    assert len(slept) > 5 and all(slept) and server.asleep


def test_servers_get_adapters_and_a_restarted_one_gets_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chat_run.make(tmp_path)
    write(folder, "ppo", {**chat_run.PPO, "output": {"snapshots": 1}})
    must_succeed(ppo(folder, "-s", "ppo.total_episodes=8"))
    settings = {"data": {"prompts": "heldout.jsonl"}, "eval": {**SETTINGS, "modes": ["sampled"]}}
    write(folder, "eval", settings)
    evaluate(folder)
    expected = answers(folder)

    server = stand_in(folder / "sft/model")
    write(folder, "eval", {**settings, "models": {"engine": {"vllm": {"url": "http://127.0.0.1:1", "wait": 5}}}})
    monkeypatch.setenv("RLHF_ROLLOUT_URLS", server.url)
    asked: list[str] = []

    def restart(path: str, body: Any) -> None:
        """Lose all adapters, once: between a sync and the draws."""
        asked.append(path)
        if asked.count("/v1/load_lora_adapter") == 1 and asked.count("/v1/completions") == 15:
            server.restart()

    server.faults = [restart] * 1000
    _, result = evaluate(folder, "--fresh")
    assert answers(folder) == expected
    assert "eval waits up to 5 s, and sends the weights again" in result.stderr
    policies = {row[0] for row in expected} - {"sft", "best_of_2"}
    assert asked.count("/v1/load_lora_adapter") == len(policies) + 1  # one of them twice; SFT is what they started with
    assert "/collective_rpc" not in asked


def test_servers_that_are_gone_or_have_another_model(by_hf: Path, tmp_path: Path) -> None:
    server = stand_in(by_hf / "sft_model")
    folder = copied(by_hf, tmp_path, {"vllm": {"url": server.url, "wait": 0.1}})
    at = "models.engine.vllm"
    fails(evaluates(folder, "-s", f"{at}.sync=lora"), "C17", "sync: lora sends adapters", "ppo is not one")
    fails(evaluates(folder, "-s", f"{at}.url=http://127.0.0.1:1"), "R20", "/health gave no answer", exit_code=1)

    other = tiny.causal(seed=5, vocab_size=280, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    server._answers = {**StandIn._answers, "/collective_rpc": lambda stand_in, body: (200, b"{}")}
    server.models["sft"] = other
    result = evaluates(folder)
    fails(result, "R19", "sft: the server at", "models.sft", "none of its draws is used", exit_code=1)
    assert not (folder / "eval/report.json").exists() and not (folder / "eval/engine").exists()
