"""`rlhf serve`: the exact command of vLLM for each kind of model and for PPO's rollouts; --exec with a fake vllm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from adapter_folder import run as run_stage
from bad_inputs import replace
from chat_run import PROMPTS
from ppo_folder import EVAL, lines, write
from run_cli import forked, is_one_error, must_succeed, rlhf
from transformers import AutoTokenizer

from rlhf_cli.commands import serve

pytestmark = pytest.mark.full
SCORING = "--runner pooling --no-enable-prefix-caching --pooler-config.use_activation false"
ROLLOUTS = "--logprobs-mode processed_logprobs --generation-config vllm --no-enable-chunked-prefill"
ADDRESS = "--max-num-batched-tokens 8192{} --host 127.0.0.1 --port 8101\n"
VARIABLES = "env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve "


def served(*arguments: object, says: str = "") -> str:
    """Return what the command prints; with `says`, this one line is on stderr, beside that of the chosen policy."""
    result = must_succeed(rlhf("serve", *arguments))
    chosen = [line for line in result.stderr.splitlines() if not line.startswith("the last policy, after update ")]
    assert "\n".join(chosen) == (f"serve    {says}" if says else ""), result.stderr
    return str(result.stdout)


def set_sync(folder: str, kind: str) -> None:
    """Set models.engine: {vllm: {url, sync}}."""
    file = Path(folder, "ppo.yaml")
    config = yaml.safe_load(file.read_text())
    models = config.setdefault("models", {})
    models["engine"] = {"vllm": {"url": "http://127.0.0.1:8101", "sync": kind}}
    if kind == "lora":
        models.setdefault("adapters", {"kind": "lora", "r": 8})
    file.write_text(yaml.safe_dump(config))


def one_at(line: str, host: str, port: str) -> str:
    """Return a command with another address."""
    return line.replace("--host 127.0.0.1", f"--host {host}").replace("--port 8101", f"--port {port}")


def test_whole_policies_and_refusals(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder)
    whole = "vllm serve ppo/model --served-model-name policy --generation-config vllm --max-model-len 64"
    assert served(".") == served("ppo") == f"{whole}\n"
    assert served(".", "--trust-remote-code") == f"{whole} --trust-remote-code\n"
    assert is_one_error(rlhf("serve", ".", "--rollouts"), "C11", "the engine needs no server")
    assert is_one_error(rlhf("serve", ".", "--rollouts", "--stage", "sft"), "C11", "omit --stage")
    set_sync(".", "disk")
    prompt = max(len(AutoTokenizer.from_pretrained("sft_model")(text)["input_ids"]) for text in PROMPTS)
    line = f"--served-model-name sft --dtype float32 --max-model-len {prompt + 8} {ROLLOUTS} {ADDRESS.format('')}"
    assert served("ppo", "--rollouts") == f"{VARIABLES}sft_model {line}"
    replace("sft_model/config.json", '"tie_word_embeddings": false', '"tie_word_embeddings": true')
    replace("ppo.yaml", "ppo:\n", "ppo:\n  bf16: true\n")
    line, writes = line.replace("float32", "bfloat16"), "rlhf ppo --config ppo.yaml writes it, and waits for the server"
    assert served(".", "--rollouts", says=writes) == f"{VARIABLES}ppo/engine/reference/step_000000 {line}"
    Path("ppo/engine/reference/step_000000").mkdir(parents=True)
    assert served(".", "--rollouts") == f"{VARIABLES}ppo/engine/reference/step_000000 {line}"
    replace("ppo.yaml", "url: http://127.0.0.1:8101", "url: [http://127.0.0.1:8101, http://node2:8102]")
    one, other = served(".", "--rollouts").splitlines()
    assert (one, other) == (f"{VARIABLES}ppo/engine/reference/step_000000 {line}".strip(), one_at(one, "node2", "8102"))
    assert is_one_error(rlhf("serve", ".", "--rollouts", "--exec"), "C11", "--exec starts one server")
    replace("ppo.yaml", "    vllm:\n", "    vllm:\n      sleep: true\n")
    assert [line.count(" --enable-sleep-mode ") for line in served(".", "--rollouts").splitlines()] == [1, 1]
    Path("ppo/manifest.json").unlink()
    assert is_one_error(rlhf("serve", "ppo"), "M10", "ppo is not finished")
    assert is_one_error(rlhf("serve", "sft_model"), "M01", "sft_model holds neither ppo/ nor sft/ of a run")


def test_the_servers_of_an_evaluation(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve PPO's longest rows, too; once PPO has finished they are those of eval.yaml."""
    monkeypatch.chdir(trained_folder)
    set_sync(".", "disk")
    settings = {"n": 4, "best_of": [], "response_length": 50}
    models = {**EVAL["models"], "engine": {"vllm": {"url": "http://127.0.0.1:8102"}}}
    write(Path(), "eval", {**EVAL, "models": models, "eval": settings})
    line = served(".", "--rollouts")
    assert line.endswith("--port 8102\n") and "vllm serve sft_model " in line
    tokenizer = AutoTokenizer.from_pretrained("sft_model")
    prompt = max(len(tokenizer(row["prompt"])["input_ids"]) for row in lines(Path("heldout.jsonl")))
    assert f"--max-model-len {prompt + 50} " in line

    replace("sft_model/config.json", '"tie_word_embeddings": false', '"tie_word_embeddings": true')
    writes = "rlhf eval --config eval.yaml writes it, and waits for the server"
    assert "vllm serve eval/engine/reference/step_000000 " in served(".", "--rollouts", says=writes)

    Path("ppo/manifest.json").unlink()
    writes = "rlhf ppo --config ppo.yaml writes it, and waits for the server"
    assert served(".", "--rollouts", says=writes).endswith("--port 8101\n")


def test_adapters_of_a_policy_and_a_whole_reward_model(chat_origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chat_origin.parent)
    name, long = chat_origin.name, "--max-model-len 4096"
    adapters = f"--enable-lora --max-lora-rank 8 --lora-modules policy={name}/ppo/model --generation-config vllm {long}"
    assert served(name) == f"vllm serve {name}/sft/model {adapters}\n"
    sft = f"vllm serve {name}/sft/model --served-model-name sft --generation-config vllm {long}\n"
    assert served(name, "--stage", "sft") == sft
    reward = f"vllm serve {name}/reward/model --served-model-name reward {SCORING} {long}\n"
    assert served(name, "--stage", "reward", says=serve.REQUEST) == reward
    config = serve.load.read_config(f"{name}/reward/model")
    config.reward_length_slope = 0.5
    with monkeypatch.context() as patch:
        patch.setattr(serve.load, "read_config", lambda *_: config)
        both = f"{serve.DEBIASED}\nserve    {serve.REQUEST}"
        assert served(name, "--stage", "reward", says=both) == reward
    for adapter, part in (({"r": 1}, "rank 1 "), ({"r": 33}, "rank 64 "), ({"r": 513}, "exported/ppo-")):
        monkeypatch.setattr(serve, "read_adapter", lambda _, adapter=adapter: adapter)
        assert part in rlhf("serve", name).stdout
    monkeypatch.setattr(serve, "read_adapter", lambda _: {"r": 1, "use_dora": True})
    assert "exported/ppo-" in rlhf("serve", name).stdout


def test_what_vllm_cannot_load_is_exported_first(adapters_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "--tokenizer sft/model --generation-config sft/model/merged --max-model-len 128"
    assert served(".") == f"vllm serve model --enable-lora --max-lora-rank 8 --lora-modules sft=sft/model {own}\n"
    before = Path("ppo.yaml").read_text()
    set_sync(".", "lora")
    result = must_succeed(rlhf("serve", ".", "--rollouts"), "serve    first: rlhf export sft --out exported/sft-")
    export = result.stderr.split()[2:]
    assert result.stdout.startswith(f"{VARIABLES}{export[-1]} --served-model-name sft --dtype float32 ")
    must_succeed(rlhf(*export[1:]))
    assert served(".", "--rollouts") == result.stdout
    Path("ppo.yaml").write_text(before)
    run_stage(adapters_copy, "ppo", "-s", "models.adapters={kind: lora, r: 9}")
    for stage, name in (("ppo", "policy"), ("reward", "reward")):  # adapters on adapters; a trained head
        result = must_succeed(rlhf("serve", stage), f"serve    first: rlhf export {stage} --out exported/{stage}-")
        assert result.stdout.startswith(f"vllm serve exported/{stage}-") and f"-name {name} " in result.stdout
    result = rlhf("serve", ".", "--exec", "--step", "last")
    assert is_one_error(result, "M01", "hint: first: rlhf export ppo --out exported/ppo-")


def test_exec_starts_what_is_printed(
    chat_origin: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(chat_origin, "my run")
    monkeypatch.setenv("PATH", f"{here}/no bin:{os.defpath}")
    assert is_one_error(rlhf("serve", "my run", "--exec", "--step", "last"), "E09", "there is no program vllm on PATH")
    Path("no bin").mkdir()
    script = '#!/bin/sh\nprintf "%s\\n" "$@" $VLLM_SERVER_DEV_MODE$VLLM_ALLOW_RUNTIME_LORA_UPDATING\n'
    Path("no bin/vllm").write_text(script)
    Path("no bin/vllm").chmod(0o755)
    set_sync("my run", "lora")
    must_succeed(forked("serve", "my run", "--rollouts", "--exec"))
    started = capfd.readouterr().out
    lora = "--enable-lora\n--max-lora-rank\n8\n--max-loras\n3\n--host\n127.0.0.1\n--port\n8101\n11\n"
    assert started.startswith("serve\nmy run/sft/model\n--served-model-name\nsft\n") and started.endswith(lora)
    printed = served("my run", "--rollouts")
    assert subprocess.run(printed, shell=True, capture_output=True, text=True, check=True).stdout == started
