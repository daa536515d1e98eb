"""`rlhf serve RUN`: print or start the `vllm serve` command of a run's model, or of the server that PPO samples from.

vLLM has its own environment and is never imported. The options are those of vLLM 0.28 to 0.33.
"""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_cli import config, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, shell_path, shell_word
from rlhf_cli.models import devices, load
from rlhf_cli.runs.integrity import verify_parents
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.model_files import read_adapter
from rlhf_cli.runs.parents import FOREIGN, Parent
from rlhf_cli.stages.common import engines, model_loading, reading

NAMES = {"ppo": "policy", "sft": "sft", "dpo": "dpo", "reward": "reward"}  # of the models in requests
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
PLAIN = "--generation-config vllm"  # sample from the full softmax by default, as in training
# By default a score is the sigmoid of the logit. A key as an option needs no quotes, so $(rlhf serve RUN) works.
LOGITS = "--runner pooling --no-enable-prefix-caching --pooler-config.use_activation false"
REQUEST = 'POST /pooling {"model": "reward", "input": [IDS of prompt, response and stop token]}; score: data[0].data'
DEBIASED = "reward.length_debias is not part of a served score: its formula is in the README.md of the model"
ROLLOUTS = f"--logprobs-mode processed_logprobs {PLAIN} --no-enable-chunked-prefill --max-num-batched-tokens"
VARIABLES = "env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


def run(folder: Path, options: Options, *, stage: str | None, step: str | None, rollouts: bool, execute: bool) -> None:
    """Print the command alone on stdout, or a line for each server; with `execute` replace this process by it.

    Raises RLHFError as the functions below; with `execute` M01 for a model that is not written yet, E09 without vLLM,
    C11 for several servers.
    """
    if rollouts:
        lines, missing = rollout_server(folder, options)
    else:
        lines, missing = model_server(folder, stage, step, options=options)
    if options.trust_remote_code:
        lines = [f"{line} --trust-remote-code" for line in lines]
    line, *others = lines
    if execute and others:
        text = f"--exec starts one server, and models.engine.vllm.url names {len(lines)}"
        raise RLHFError("C11", text, hint="omit --exec, and start each line where its server is")
    if execute and missing:
        raise RLHFError("M01", "--exec: the model to serve is not written yet", hint=missing)
    if execute and not shutil.which("vllm"):
        raise RLHFError("E09", "--exec: there is no program vllm on PATH", hint="install it in its own environment")

    if missing:
        terminal.say(f"serve    {missing}")
    if LOGITS in line:
        terminal.say(f"serve    {REQUEST}")
    if execute:
        os.execvp(shlex.split(line)[0], shlex.split(line))
    terminal.answer("\n".join(lines))


def model_server(folder: Path, stage: str | None, step: str | None, options: Options) -> tuple[list[str], str]:
    """Return the command, alone in a list, for a model as `runs.resolve_model` finds it, and what must run before."""
    chosen = runs.resolve_model(folder, stage, step)
    model = chosen.model
    name = NAMES[model.stage]
    settings = LOGITS if name == "reward" else PLAIN
    missing = ""
    if chosen.share is not None:
        place, missing = _export(model, f"-share-{chosen.share:g}", " --step recommended")
        served = f"{place} --served-model-name {name}"
    elif model.base is not None and _can_load_adapter(model, model.base):
        own = shell_path(model.model)
        base, _ = _whole_model(model.base)
        adapter = read_adapter(model.model) or {}
        served = f"{base} {_lora(adapter['r'])} --lora-modules {name}={own}"
        if model.base.stage == FOREIGN:  # its tokenizer and stop tokens may be others
            settings = f"--tokenizer {own} --generation-config {shell_path(load.config_folder(model.model))}"
    else:
        place, missing = _whole_model(model, None if chosen.last else chosen.step)
        served = f"{place} --served-model-name {name}"

    line = f"vllm serve {served} {settings}"
    body = load.read_config(model.model, options.trust_remote_code)
    if hasattr(body, "reward_length_slope"):
        terminal.say(f"serve    {DEBIASED}")
    context = load.context_length(body)
    if context:
        line += f" --max-model-len {context}"
    return [line], missing


def _can_load_adapter(model: Parent, base: Parent) -> bool:
    """Return True if vLLM can load a model's adapters beside their base, so that no whole model need be exported."""
    adapter = read_adapter(model.model) or {}
    is_unsupported = adapter.get("use_dora") or adapter.get("modules_to_save")
    return not base.base and not is_unsupported and adapter["r"] <= LORA_RANKS[-1]


def rollout_server(folder: Path, options: Options) -> tuple[list[str], str]:
    """Return the command of each server of models.engine in RUN/ppo.yaml, and what must run before.

    Once PPO has finished they are those of RUN/eval.yaml, if it names some. Raises RLHFError C11 for another engine,
    and as `config.load`, `runs.open_reference` and `reading.read_prompts`.
    """
    run = folder.resolve().parent if (folder / "identity.json").is_file() else folder
    ppo = config.load("ppo", run / "ppo.yaml")
    served = _sampling_from_servers(run, ppo)
    if not served:
        raise RLHFError("C11", "the engine needs no server", where=ppo.where("models.engine"), hint="omit --rollouts")
    is_trained = (ppo.folder / MANIFEST).is_file()
    stage = served[-1 if is_trained else 0]
    server = stage.models.server
    assert server

    sft = runs.open_reference(stage, runs.references(stage)[0])
    verify_parents({sft.key: sft})
    body = load.read_config(sft.model, options.trust_remote_code)
    place, missing = _whole_model(sft)
    sync = server.sync or ("lora" if ppo.models.adapters else "disk")
    if sync == "disk" and body.get_text_config().tie_word_embeddings:  # vLLM would keep the old head
        untied = engines.weights_folder(stage, "reference", 0)
        written = f"rlhf {stage.stage} --config {shell_path(stage.file)} writes it, and waits for the server"
        place = shell_path(untied)
        missing = "" if untied.is_dir() else written

    tokenizer = model_loading.load_tokenizer(stage, options, sft)
    length = max(_longest_row(each, ppo, tokenizer, body) for each in served)
    dtype = "bfloat16" if devices.use_bf16(getattr(stage, stage.stage).bf16) else "float32"
    line = f"{VARIABLES} vllm serve {place} --served-model-name sft --dtype {dtype} --max-model-len {length}"
    line += f" {ROLLOUTS} {max(length, 8192)}"  # at least a whole sequence
    if server.sleep:
        line += " --enable-sleep-mode"
    if sync == "lora" and ppo.models.adapters:
        line += f" {_lora(ppo.models.adapters.r)} --max-loras 3"
    return [line + _address(url) for url in server.url], missing


def _sampling_from_servers(run: Path, ppo: PPOConfig) -> list[PPOConfig | EvalConfig]:
    """Return the configs of a run that name servers: of PPO, and of the evaluation."""
    stages: list[PPOConfig | EvalConfig] = [ppo]
    if (run / "eval.yaml").is_file():
        evaluation = config.load("eval", run / "eval.yaml")
        assert isinstance(evaluation, EvalConfig)
        stages.append(evaluation)
    return [stage for stage in stages if stage.models.server]


def _longest_row(stage: PPOConfig | EvalConfig, ppo: PPOConfig, tokenizer: Any, body: Any) -> int:
    """Return the tokens of a stage's longest prompt and of its longest response."""
    if isinstance(stage, EvalConfig):
        keys = ["data.prompts"]
        response = stage.eval.response_length or ppo.ppo.max_response_length
    else:
        keys = sorted(stage.sources().keys() - {"data.ptx_data"})
        response = ppo.ppo.max_response_length

    prompts = [reading.read_prompts(stage, key, tokenizer, body, response) for key in keys]
    return response + max(rows.longest for rows in prompts)


def _address(url: str) -> str:
    """Return the options that make a server listen at an address."""
    parts = urlsplit(url)
    return f" --host {parts.hostname}" + (f" --port {parts.port}" if parts.port else "")


def _whole_model(model: Parent, step: int | None = None) -> tuple[str, str]:
    """Return a model's hub id or folder, for adapters that of an export, and what must run before.

    `step` is that of a snapshot of PPO.
    """
    if model.base is not None:
        if step is not None:
            return _export(model, f"-step-{step}", f" --step {step}")
        return _export(model, "", " --step last" if model.stage == "ppo" else "")
    if not model.hub:
        return shell_path(model.model), ""
    revision = f" --revision {shell_word(model.revision)}" if model.revision else ""
    return f"{model.hub}{revision}", ""


def _export(model: Parent, suffix: str, options: str) -> tuple[str, str]:
    """Return the folder of an export of a model, and the command that writes it if it is missing."""
    folder = model.path.resolve().parent / "exported" / f"{model.stage}-{model.sha256[:8]}{suffix}"
    command = f"first: rlhf export {shell_path(model.path)} --out {shell_path(folder)}{options}"
    return shell_path(folder), "" if folder.is_dir() else command


def _lora(rank: int) -> str:
    limit = next((known for known in LORA_RANKS if known >= rank), LORA_RANKS[-1])
    return f"--enable-lora --max-lora-rank {limit}"
