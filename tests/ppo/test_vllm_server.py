"""A real vLLM server on a CPU: `make vllm-test`. The program `vllm` of another environment is in RLHF_VLLM.

What every engine must hold, faults planted into a sync, and PPO of the demo through kills of the run and of the server.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
from ppo_folder import lines, manifest
from run_cli import child, must_succeed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_cli.models import load, save
from tests.ppo import test_engines as contract
from tests.ppo.test_rollout import responses, seeded
from tests.ppo.test_vllm_engine import CASES, Pair, change, notices_fault, refused

VLLM = os.environ.get("RLHF_VLLM")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not VLLM, reason="RLHF_VLLM is not set: make vllm-test sets it")]
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
OPTIONS = "--served-model-name sft --dtype float32 --max-model-len 64 --generation-config vllm "
OPTIONS += "--no-enable-chunked-prefill --max-num-batched-tokens 8192 --logprobs-mode processed_logprobs"
ADAPTERS = " --enable-lora --max-lora-rank 8 --max-loras 3"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(command: str, log: Path, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start `vllm serve ...` on a free port, or on `port`; yield its URL and process once it answers."""
    if port is None:
        port = free_port()
        command += f" --host 127.0.0.1 --port {port}"
    url, program = f"http://127.0.0.1:{port}", [str(VLLM), *shlex.split(command)[1:], "--enforce-eager"]
    environment = {**os.environ, **CPU, **SWITCHES, "PYTHONPATH": ""}
    with log.open("ab") as output:
        server = subprocess.Popen(program, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url, server
    finally:
        kill(server)


def kill(server: subprocess.Popen[bytes]) -> None:
    """Kill a server and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture(scope="module", autouse=True)
def wide_heads() -> Iterator[None]:
    """Attention heads of 32: vLLM's attention on a CPU takes no smaller ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "llama", {**tiny.FAMILIES["llama"], "head_dim": 32})
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def urls(wide_heads: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server for whole weights, and one that takes adapters."""
    folder = tmp_path_factory.mktemp("served")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(tiny.VOCABULARY)}, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0", unk_token="w3")
    save.save_untied(tiny.causal(tie_word_embeddings=True), tokenizer, folder / "disk")
    save.save_model(tiny.causal(), tokenizer, folder / "lora", "")
    commands = {name: f"vllm serve {folder / name} {OPTIONS}" for name in ("disk", "lora")}
    commands["lora"] += ADAPTERS
    with (
        serving(commands["disk"], folder / "disk.log") as (disk, _),
        serving(commands["lora"], folder / "lora.log") as (adapters, _),
    ):
        yield {"disk": disk, "lora": adapters}


@pytest.fixture
def make(urls: dict[str, str], tmp_path: Path) -> Any:
    return lambda sync: Pair(tmp_path, sync, url=urls[sync], probe=(12, 16))


@pytest.fixture
def real(urls: dict[str, str], tmp_path: Path) -> Any:
    """A constructor of engines, as the classes are in the contract suite."""

    def engine(model: Any, stop: Any, pad: int, temperature: float = 1.0, **_: Any) -> Any:
        pair = Pair(tmp_path, "disk", url=urls["disk"], probe=(12, 16), temperature=temperature)
        pair.policy = model
        pair.sent.stop_token_id = stop
        pair.sent.ref = model
        pair.ref = model
        pair.sync(0)
        return pair.engine

    return engine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(real: Any, temperature: float) -> None:
    contract.test_log_probs_are_those_of_a_pass_over_the_whole_row(real, temperature)


def test_trained_weights_arrive(real: Any) -> None:
    contract.test_the_trainer_measures_no_gap_and_new_weights_change_the_draws(real)
    contract.test_r19_an_engine_that_keeps_old_weights_is_noticed_before_anything_is_trained(real)


@pytest.mark.parametrize("stop", [tiny.EOS, tiny.PAD, (tiny.EOS, 7), None])
def test_ends(real: Any, stop: Any) -> None:
    contract.test_a_response_ends_with_its_first_stop_token(real, stop)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_lengths(real: Any, length: int) -> None:
    contract.test_no_response_is_longer_than_the_limit(real, length)


def test_samples(real: Any) -> None:
    contract.test_samples_of_one_prompt_differ(real)


@pytest.mark.parametrize("sync", ["lora", "disk"])
def test_the_same_seeds_draw_the_same_tokens_after_each_sync(make: Any, sync: str) -> None:
    pair, prompts, drawn = make(sync), seeded(tiny.prompts(8), length=16), []
    for update in range(3):
        pair.sync(update)
        drawn.append(responses(pair.engine.generate(prompts)))
        assert responses(pair.engine.generate(prompts)) == drawn[-1]
        pair.train()
    assert drawn[0] != drawn[1] != drawn[2] and not pair.reports
    assert pair.server.noise < 1e-4


@pytest.mark.parametrize(("fault", "sync"), CASES)
def test_a_planted_fault_is_noticed(make: Any, fault: str, sync: str) -> None:
    notices_fault(make(sync), fault)


def test_a_penalty_is_noticed(make: Any) -> None:
    pair = make("disk")
    pair.sync(0)
    pair.client.plant = change("repetition_penalty", lambda _: 1.5)
    refused(lambda: pair.sync(1), "R19 does not draw from the weights of the policy")


# PPO of the demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose SFT and reward stages are finished."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    must_succeed(child("init", "demo", folder))
    for stage in ("sft", "reward"):
        must_succeed(child(stage, "-c", folder / f"{stage}.yaml"))
    return folder


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [os.sys.executable, "-m", "rlhf_cli", "ppo", "-c", str(folder / "ppo.yaml"), *options]
    with (folder / "ppo.log").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": str(Path(contract.__file__).parents[2])}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def wait_for_step(folder: Path, step: int) -> None:
    metrics = folder / "ppo/metrics.jsonl"
    for _ in range(3000):
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.1)
    pytest.fail((folder / "ppo.log").read_text()[-3000:])


def test_a_tied_head_that_stays_behind_is_noticed(demo: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """From a folder with tied weights the server loads the new body, keeps the old head, and answers 200."""
    model, tokenizer = load.load_causal_lm(demo / "sft/model").eval(), AutoTokenizer.from_pretrained(demo / "sft/model")
    monkeypatch.setattr(save, "save_untied", lambda model, _, folder: save.save_model(model, tokenizer, folder, ""))
    with serving(f"vllm serve {demo / 'sft/model'} {OPTIONS}", tmp_path / "server.log") as (url, _):
        pair = Pair(tmp_path, "disk", url=url, ref=model, probe=(12, 16))
        pair.sync(0)
        pair.train()
        refused(lambda: pair.sync(1), "R19 or only a part of them")
        monkeypatch.undo()
        pair.sync(1)


@pytest.mark.parametrize(("sync", "servers"), [("lora", 2), ("disk", 1), ("disk", 2)])
def test_ppo_of_the_demo_goes_on_after_kills_of_the_run_and_of_a_server(
    demo: Path, tmp_path: Path, sync: str, servers: int
) -> None:
    """SIGKILL of `rlhf ppo` in update 8, of a server in update 20. Prints what docs/results/engines.md records."""
    folder = tmp_path / "run"
    must_succeed(subprocess.run(["cp", "-r", demo, folder], capture_output=True, text=True, check=False))
    ports, options = [free_port() for _ in range(servers)], ["-s", "output.save_steps=5"]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    engine = f"models:\n  engine: {{vllm: {{url: {json.dumps(urls)}, sync: {sync}}}}}\n"
    if sync == "lora":
        engine, options = engine + "  adapters: {kind: lora}\n", [*options, "-s", "ppo.learning_rate=3e-3"]
    with (folder / "ppo.yaml").open("a") as config:
        config.write(engine)
    run = start(folder, *options)  # first: it writes the weights that the servers start from
    printed = must_succeed(child("serve", folder, "--rollouts")).stdout
    commands = [line[line.index("vllm serve") :] for line in printed.splitlines() if "vllm serve" in line]
    assert len(commands) == servers
    while sync == "disk" and not (folder / "ppo/engine/reference/step_000000").exists():
        time.sleep(0.1)
    logs = [tmp_path / f"server-{number}.log" for number in range(servers)]
    with ExitStack() as others:
        for command, log, port in list(zip(commands, logs, ports, strict=True))[1:]:
            others.enter_context(serving(command, log, port))
        with serving(commands[0], logs[0], ports[0]) as (_, server):
            wait_for_step(folder, 8)
            run.kill()
            run.wait()
            run = start(folder, *options)
            wait_for_step(folder, 20)
            kill(server)
        with serving(commands[0], logs[0], ports[0]):
            assert run.wait(1200) == 0, (folder / "ppo.log").read_text()[-3000:]
    metrics, said = lines(folder / "ppo/metrics.jsonl"), (folder / "ppo.log").read_text()
    assert "resumes at step 5" in said and "sends the weights again" in said
    assert [row["step"] for row in metrics] == list(range(1, 51)) and manifest(folder)["engine"] == "vllm"
    assert all("POST /v1/completions" in log.read_text() for log in logs)  # each drew a part of the responses
    gap = max(row["rollout/logprob_gap"] for row in metrics)
    assert gap < 1e-4
    must_succeed(child("eval", "-c", folder / "eval.yaml"))
    report = json.loads((folder / "eval/report.json").read_text())
    gold = report["win_rate"]["ppo_vs_sft"]["gold"]
    assert gold["ci95"][0] > 0.65  # what each of hf's five seeds must reach: docs/results/demo.md
    print(f"\n{sync}, {servers} servers: largest mean gap {gap:.2g}; gold win rate {gold['value']:.3f} {gold['ci95']}")
