"""Rollout engines of a run draw the same tokens, through stops and restarts."""

import json
import re

import pytest
from ppo_folder import ONE, fails, lines, manifest, must_succeed, ppo, settings, stop_in_update, untimed, weights
from stand_in_vllm import StandIn
from transformers import AutoModelForCausalLM

from rlhf_cli.ppo.rollout import HFEngine

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]


def test_graph_draws_the_tokens_of_hf_and_resumes_to_the_same_bytes(run_folder, ppo_run):
    engine = ("-s", "models.engine=graph")
    stop_in_update(run_folder, 3, *engine)
    assert "resumes at step" in ppo(run_folder, *engine).stderr
    resumed = weights(run_folder), weights(run_folder, "value"), untimed(run_folder / "ppo/metrics.jsonl")
    assert ppo(run_folder, *engine, "--fresh").exit_code == 0
    assert resumed == (weights(run_folder), weights(run_folder, "value"), untimed(run_folder / "ppo/metrics.jsonl"))
    ours, plain = (lines(folder / "ppo/samples.jsonl") for folder in (run_folder, ppo_run))
    assert [row["response"] for row in ours] == [row["response"] for row in plain]
    assert (manifest(run_folder)["engine"], manifest(ppo_run)["engine"]) == ("graph", "hf")
    refused = ppo(run_folder, "-s", "models.engine=hf")
    assert refused.exit_code == 2 and "models.engine" in refused.stderr


def test_a_server_draws_the_tokens_of_hf_through_a_stop_and_a_restart(run_folder, ppo_run):
    """Whole weights over a stand-in; the run goes on with the server at another address."""
    first, second = (
        StandIn(AutoModelForCausalLM.from_pretrained(run_folder / "sft_model").eval(), 64) for _ in range(2)
    )
    engine = [("-s", f"models.engine={{vllm: {{url: '{each.url}', wait: 0.1}}}}") for each in (first, second)]
    stop_in_update(run_folder, 3, *engine[0])
    first.faults = [unavailable] * 1000
    fails(ppo(run_folder, *engine[0]), "R20", "/health answered 503", exit_code=1)
    result = must_succeed(ppo(run_folder, *engine[1]), "resumes at step", f"{second.url} generate the responses")
    ours, plain = (lines(folder / "ppo/samples.jsonl") for folder in (run_folder, ppo_run))
    assert [row["response"] for row in ours] == [row["response"] for row in plain]
    pairs = zip(lines(run_folder / "ppo/metrics.jsonl"), lines(ppo_run / "ppo/metrics.jsonl"), strict=True)
    assert all(one["objective/scores"] == pytest.approx(other["objective/scores"], abs=1e-4) for one, other in pairs)
    assert manifest(run_folder)["engine"] == "vllm" and "sends the weights again" not in result.stderr
    assert sorted(path.name for path in (run_folder / "ppo/engine/policy").iterdir()) == [
        f"step_00000{step}" for step in (2, 3, 4)
    ]
    refused = ppo(run_folder, *engine[1], "-s", "models.engine.vllm.sync=lora", "-s", "models.adapters={kind: lora}")
    assert refused.exit_code == 2 and "models.engine.vllm.sync" in refused.stderr


@pytest.mark.parametrize("sync", ["disk", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_server_with_the_sft_model_gets_the_policy_that_a_round_starts_from(run_folder, sync):
    adapters = () if sync == "disk" else ("-s", "models.adapters={kind: lora, r: 3}")
    must_succeed(ppo(run_folder, "-s", ONE, "-s", "ppo.learning_rate=0.05", *adapters))
    (run_folder / "ppo").rename(run_folder / "before")
    options = ("-s", f"models.policy={run_folder / 'before'}", "-s", ONE, *adapters)
    must_succeed(ppo(run_folder, *options, "-s", f"run={run_folder}/plain"))

    server = StandIn(AutoModelForCausalLM.from_pretrained(run_folder / "sft_model").eval(), 64)
    engine = f"models.engine={{vllm: {{url: '{server.url}', sync: {sync}, wait: 0.1}}}}"
    must_succeed(ppo(run_folder, *options, "-s", engine))
    ours, plain = (lines(folder / "ppo/samples.jsonl") for folder in (run_folder, run_folder / "plain"))
    assert [row["response"] for row in ours] == [row["response"] for row in plain]


@pytest.mark.slow  # tests/ppo/test_vllm_servers.py has several servers without a run
def test_two_servers_draw_the_tokens_of_hf_and_a_scheduler_may_move_them(run_folder, ppo_run, monkeypatch):
    """The addresses are no part of the run's identity."""
    first, second = (
        StandIn(AutoModelForCausalLM.from_pretrained(run_folder / "sft_model").eval(), 64) for _ in range(2)
    )
    engine = ("-s", f"models.engine={{vllm: {{url: ['{first.url}', 'http://127.0.0.1:1'], wait: 0.1}}}}")
    fails(ppo(run_folder, *engine), "R20", "http://127.0.0.1:1 /health gave no answer", exit_code=1)

    monkeypatch.setenv("RLHF_ROLLOUT_URLS", f"{first.url},{second.url}")
    must_succeed(ppo(run_folder, *engine), f"{first.url} and {second.url} generate the responses")
    ours, plain = (lines(folder / "ppo/samples.jsonl") for folder in (run_folder, ppo_run))
    assert [row["response"] for row in ours] == [row["response"] for row in plain]
    drawn = [[path for path, _ in server.requests].count("/v1/completions") for server in (first, second)]
    assert min(drawn) > 20

    for wrong in ("localhost:8000", f"{first.url},{first.url}", f"{first.url},"):
        monkeypatch.setenv("RLHF_ROLLOUT_URLS", wrong)
        fails(ppo(run_folder, *engine, "--fresh"), "C17", "addresses must differ, without spaces")


def test_a_server_that_shares_the_gpu_sleeps_except_in_rollouts(run_folder, ppo_run):
    """The stand-in refuses every request for weights or tokens while it sleeps; `sleep` is no part of the identity."""
    server = StandIn(AutoModelForCausalLM.from_pretrained(run_folder / "sft_model").eval(), 64)
    engine = f"models.engine={{vllm: {{url: '{server.url}', wait: 0.1}}}}"
    sleep = ("-s", "models.engine.vllm.sleep=true")
    stop_in_update(run_folder, 3, "-s", engine, *sleep)
    assert server.asleep
    must_succeed(ppo(run_folder, "-s", engine, *sleep), "resumes at step")
    ours, plain = (lines(folder / "ppo/samples.jsonl") for folder in (run_folder, ppo_run))
    assert [row["response"] for row in ours] == [row["response"] for row in plain]

    turns = "".join(TURNS.get(path, "") for path, _ in server.requests)
    assert re.fullmatch(r"(ld+)+s(w(ld+)+s)+", turns) and turns.count("s") == 5, turns  # 4 updates, and at the end
    must_succeed(ppo(run_folder, "-s", engine), "finished already")


TURNS = {"/wake_up": "w", "/collective_rpc": "l", "/v1/completions": "d", "/sleep?level=1": "s"}


def test_r20_a_server_that_cannot_sleep_is_refused_before_the_first_update(run_folder, monkeypatch):
    server = StandIn(AutoModelForCausalLM.from_pretrained(run_folder / "sft_model").eval(), 64)
    without = {path: answer for path, answer in StandIn._answers.items() if "sleep" not in path}
    monkeypatch.setattr(StandIn, "_answers", without)
    engine = f"models.engine={{vllm: {{url: '{server.url}', wait: 0.1, sleep: true}}}}"
    text = f"{server.url} /is_sleeping answered 404 Not Found: 'no such path': it cannot sleep"
    fails(ppo(run_folder, "-s", engine), "R20", text, "remove models.engine.vllm.sleep", exit_code=1)
    assert not [path for path, _ in server.requests if path == "/v1/completions"]


def unavailable(path: str, body: object) -> tuple[int, bytes]:
    return 503, b""


def test_rollout_options_reach_the_engine(run_folder, monkeypatch):
    batches, plain = [], HFEngine._generate_ids

    def spy(engine, prompts):
        batches.append((len(prompts), engine.temperature, engine.stop_token_id))
        return plain(engine, prompts)

    monkeypatch.setattr(HFEngine, "_generate_ids", spy)
    options = settings("stop_token=none", "local_rollout_forward_batch_size=3", "temperature=0.9")
    assert ppo(run_folder, *options).exit_code == 0
    assert set(batches) == {(3, 0.9, None), (2, 0.9, None)}
    assert all(row["length"] == 8 and not row["ended"] for row in lines(run_folder / "ppo/samples.jsonl"))
    batches.clear()
    assert ppo(run_folder, *settings(ONE, "stop_token_id=40", "num_shared_layers=1"), "--fresh").exit_code == 0
    assert {stop for _, _, stop in batches} == {40}
    assert ppo(run_folder, *settings(ONE, "stop_token_id=[40, 3]"), "--fresh").exit_code == 0
    manifest = json.loads((run_folder / "ppo/manifest.json").read_text())
    assert batches[-1][2] == [40, 3] == manifest["special_tokens"]["stop"]
