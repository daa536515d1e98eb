"""A judge behind a real vLLM server on a CPU (`make vllm-test`): a random model whose replies the JSON Schema forms.

In `rlhf eval`, through a kill and a restart of the server; as the labeller of `rlhf label --by`; as a reward of PPO.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny
from label_run import label
from ppo_folder import EVAL, PPO, PROMPTS, lines, must_succeed, ppo, rlhf, untimed, weights, write
from run_cli import ROOT

from rlhf_cli import jsonl
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges.pairwise import Comparison, Pair, PairwiseJudge
from rlhf_cli.judges.question import WINNERS
from rlhf_cli.models import save, tokenizers
from tests.ppo.test_vllm_server import VLLM, free_port, serving

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not VLLM, reason="RLHF_VLLM is not set: make vllm-test sets it")]
# A random model would write blanks for ever where the schema allows them.
OPTIONS = "--served-model-name tiny --dtype float32 --max-model-len 4096 "
OPTIONS += """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
PAIRS = [Pair(prompt, f"It is {n}.", f"No, it is {n + 1}.") for n, prompt in enumerate(PROMPTS[:4])]
SETTINGS = {"model": "tiny", "key_env": None, "parameters": {"max_tokens": 40}}


class Server:
    """A vLLM server that can be started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.command = f"vllm serve {folder / 'model'} {OPTIONS} --host 127.0.0.1 --port {self.port}"
        self.log = folder / "log"
        self.running = ExitStack()

    def start(self) -> None:
        self.running.enter_context(serving(self.command, self.log, self.port))

    def kill(self) -> None:
        self.running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("judge")
    jsonl.write_jsonl(folder / "texts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    tokenizer = tokenizers.train_tokenizer(folder / "texts.jsonl", 280)
    tokenizers.set_chat_template(tokenizer, "chatml")
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 1}
    save.save_model(tiny.causal(**sizes), tokenizer, folder / "model", "")
    server = Server(folder)
    server.start()
    yield server
    server.kill()


def judge_of(server: Server, folder: Path, **settings: Any) -> PairwiseJudge:
    judge = OpenAIJudge(**{"url": server.url, **SETTINGS, "max_wait": 10.0, **settings})
    return PairwiseJudge.of("llm", judge, folder, lambda key: key)


def code_of(judge: PairwiseJudge) -> tuple[str, str]:
    """Return code and text of the one problem of a judge that fails."""
    with pytest.raises(RLHFError) as caught:
        judge.compare(PAIRS)
    (problem,) = caught.value.problems
    return problem.code, problem.text


def test_every_reply_names_a_winner_and_is_kept(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path)
    found = judge.compare(PAIRS)
    assert {each.winner for each in found} | {each.swapped_winner for each in found} <= set(WINNERS)
    assert judge.cost.calls == 8 and judge.cost.prompt_tokens > 8 * 100 and judge.endpoint.sends_schema
    again = judge_of(server, tmp_path)
    assert again.compare(PAIRS) == found and again.cost.asked == 0


def test_without_the_schema_the_same_model_names_no_winner(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path)
    judge.endpoint.sends_schema = False
    assert code_of(judge)[0] == "J01"


def test_a_model_that_it_does_not_serve_and_a_call_that_takes_too_long_are_one_line(
    server: Server, tmp_path: Path
) -> None:
    code, text = code_of(judge_of(server, tmp_path, model="nobody"))
    assert code == "J03" and "answered 404" in text and "nobody" in text
    code, text = code_of(judge_of(server, tmp_path, timeout=0.001, max_wait=1.5))
    assert code == "J03" and "gave no answer within 0.001 s (2 tries" in text


def test_a_random_model_fails_the_probe(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path).pass_probe()
    assert caught.value.problems[0].code == "J02"


def test_texts_beyond_the_context_are_skipped_and_the_others_are_not(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path)
    long = Pair(PROMPTS[0], "word " * 5000, "It is 1.")
    found = judge.compare([long, *PAIRS])
    assert found[0] == Comparison(is_too_long=True) and judge.endpoint.sends_schema
    assert not any(each.is_too_long for each in found[1:]) and judge.cost.asked == 8
    assert "maximum context length is 4096 tokens" in judge.refusal


def judged(run: Path, server: Server, **settings: Any) -> Path:
    llm = {"openai": {"url": server.url, **SETTINGS, "probe": False, **settings}}
    few = {"n": 12, "best_of": [], "frontier": False, "modes": ["sampled"], "per_device_batch_size": 8}
    write(run, "eval", {**EVAL, "judges": {"short": "judges:short", "llm": llm}, "eval": few})
    return run


def test_an_evaluation_waits_for_a_server_that_is_killed_and_asks_nothing_twice(
    server: Server, trained_folder: Path
) -> None:
    judged(trained_folder, server, concurrency=2, max_wait=900.0)
    kept = trained_folder / "judges/llm.jsonl"
    command = [*RLHF_COMMAND, "eval", "-c", trained_folder / "eval.yaml"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while not kept.exists() or kept.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    server.kill()
    before = kept.read_bytes()
    server.start()
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0 and "trying again for 900 s" in output, output

    answers = lines(kept)
    assert kept.read_bytes().startswith(before) and len(answers) > before.count(b"\n")
    cost = json.loads((trained_folder / "eval/report.json").read_text())["judge_costs"]["llm"]
    assert len({row["key"] for row in answers}) == len(answers) == cost["answers"] == cost["calls"]
    assert "llm: 0 calls now" in must_succeed(rlhf("eval", "-c", trained_folder / "eval.yaml", "--fresh")).stderr


def test_it_labels_and_a_second_label_asks_nothing(
    server: Server, label_origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", label_origin, run], check=True)
    monkeypatch.chdir(tmp_path)
    judged(run, server)
    must_succeed(label(run, "--by", "llm", "--n", 6))
    labels = lines(run / "labels/llm/labels.jsonl")
    assert len(labels) == 6 and {row["choice"] for row in labels} <= {"first", "second", "tie"}
    asked = (run / "judges/llm.jsonl").read_bytes()
    output = must_succeed(label(run, "--by", "llm", "--n", 6, "--name", "again")).stderr
    assert "judge llm: 0 calls now" in output and (run / "judges/llm.jsonl").read_bytes() == asked


def test_it_is_a_reward_and_the_same_run_asks_nothing_again(server: Server, run_folder: Path) -> None:
    llm = {"openai": {"url": server.url, **SETTINGS, "probe": False}}
    keys = {**PPO["ppo"], "total_episodes": 16, "num_sample_generations": 1}
    write(run_folder, "ppo", {**PPO, "rewards": {"llm": llm}, "ppo": keys})
    must_succeed(ppo(run_folder))
    files = [run_folder / "ppo" / name for name in ("samples.jsonl", "sft_answers.jsonl")]
    first = [weights(run_folder), untimed(run_folder / "ppo/metrics.jsonl"), *[file.read_bytes() for file in files]]
    assert {row["scores"]["llm"] for row in lines(files[0])} <= {-1.0, 0.0, 1.0}
    assert "judge llm: 0 calls now" in must_succeed(ppo(run_folder, "--fresh")).stderr
    again = [weights(run_folder), untimed(run_folder / "ppo/metrics.jsonl"), *[file.read_bytes() for file in files]]
    assert again == first
