"""Answers to label are the same by graph and by servers, which get one policy after the other."""

import json
from pathlib import Path
from typing import Any

import chat_run
import pytest
import tiny
import yaml
from label_run import label
from ppo_folder import fails, lines, must_succeed, ppo, write
from stand_in_vllm import StandIn
from transformers import AutoModelForCausalLM

from rlhf_cli.commands.label import candidates
from rlhf_cli.models import save
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.stages.common import engines

pytestmark = pytest.mark.full
URL = "http://127.0.0.1:8000"


def answers(run: Path, name: str) -> list[Any]:
    return [(row["row"], row["answers"], row["sources"]) for row in lines(run / f"labels/{name}/candidates.jsonl")]


def with_engine(run: Path, url: str = URL, **keys: Any) -> None:
    engine = {"vllm": {"url": url, "wait": 0.1, **keys}}
    write(run, "ppo", {**chat_run.PPO, "models": {**chat_run.PPO["models"], "engine": engine}})


def test_graph_draws_the_answers_of_hf(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    must_succeed(label(run, "--terminal", "--n", 6))
    monkeypatch.setattr(engines, "engine_class", lambda *_: GraphEngine)  # as on a GPU
    must_succeed(label(run, "--terminal", "--n", 6, "--name", "graph"))
    assert answers(run, "people") == answers(run, "graph")


def serve(run: Path, **keys: Any) -> None:
    """Name servers in the config of a finished PPO stage, as if it had sampled from them."""
    resolved = yaml.safe_load((run / "ppo/config.yaml").read_text())
    resolved["models"]["engine"] = {"vllm": {"url": URL, "wait": 0.1, **keys}}
    write(run / "ppo", "config", resolved)


def test_servers_draw_the_answers_of_hf_from_two_policies(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StandIn(AutoModelForCausalLM.from_pretrained(run / "sft/model").eval(), 64)
    must_succeed(ppo(run, "-s", "ppo.total_episodes=8"))
    two = ("--terminal", "--n", 6, "--from", "sft,ppo")
    monkeypatch.setattr(candidates, "BATCH_PROMPTS", 4)
    must_succeed(label(run, *two))

    serve(run)
    monkeypatch.setenv("RLHF_ROLLOUT_URLS", server.url)
    result = must_succeed(label(run, *two, "--servers", "--name", "served"))
    assert f"label    {server.url} generate the responses" in result.stderr
    assert answers(run, "served") == answers(run, "people")
    loads = [body["lora_name"] for path, body in server.requests if path == "/v1/load_lora_adapter"]
    assert len(loads) == 2 and "-policy-update-" in loads[0]  # PPO's, once in each batch of prompts
    assert not (run / "labels/served/engine").exists()

    fails(label(run, *two, "--name", "served"), "C15", "drawn with engine vllm, not None")
    settings = [json.loads((run / f"labels/{name}/settings.json").read_text()) for name in ("people", "served")]
    assert "engine" not in settings[0] and settings[1] == {**settings[0], "engine": "vllm"}

    serve(run, sync="disk", sleep=True)
    written = []
    save_untied = save.save_untied
    monkeypatch.setattr(save, "save_untied", lambda *of: (written.append(of[2]), save_untied(*of)))
    must_succeed(label(run, *two, "--servers", "--name", "whole"))
    assert answers(run, "whole") == answers(run, "people")
    reloads = [path for path, _ in server.requests].count("/collective_rpc")
    assert (len(written), reloads) == (3, 5)  # the reference and two policies, which are loaded for each batch
    assert not (run / "labels/whole/engine").exists()


def test_servers_that_are_not_named_or_gone_or_have_another_model(run: Path) -> None:
    fails(label(run, "--terminal", "--servers"), "C11", "--servers: the run's ppo.yaml names none")
    with_engine(run, "http://127.0.0.1:1")
    fails(label(run, "--terminal", "--servers"), "R20", "/health gave no answer", exit_code=1)
    other = tiny.causal(seed=5, vocab_size=280, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    with_engine(run, StandIn(other, 64).url, sync="lora")
    fails(label(run, "--terminal", "--servers"), "R19", "sft: the server at", "none of its draws is used", exit_code=1)
    assert not (run / "labels/people/candidates.jsonl").exists()
