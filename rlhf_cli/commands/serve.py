"""`rlhf serve RUN`: print or start the `vllm serve` command of a run's model, or of the server that PPO samples from.

vLLM has its own environment and is never imported. The options are those of vLLM 0.28 to 0.33.
"""

import os
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_cli import config, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, shell_path, shell_word
from rlhf_cli.models import load
from rlhf_cli.runs.parents import FOREIGN, Parent, read_adapter, verify_parents
from rlhf_cli.stages.common import machine, model_loading, reading
from rlhf_cli.stages.ppo import setup

NAMES = {"ppo": "policy", "sft": "sft", "dpo": "dpo", "reward": "reward"}  # of the models in requests
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
PLAIN = "--generation-config vllm"  # sample from the full softmax by default, as in training
# By default a score is the sigmoid of the logit. A key as an option needs no quotes, so $(rlhf serve RUN) works.
LOGITS = "--runner pooling --no-enable-prefix-caching --pooler-config.use_activation false"
REQUEST = 'POST /pooling {"model": "reward", "input": [IDS of prompt, response and stop token]}; score: data[0].data'
ROLLOUTS = f"--logprobs-mode processed_logprobs {PLAIN} --no-enable-chunked-prefill --max-num-batched-tokens"
VARIABLES = "env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


def run(folder: Path, options: Options, *, stage: str | None, rollouts: bool, execute: bool) -> None:
    """Print the command alone on stdout; with `execute` replace this process by it.

    Raises RLHFError as the functions below; with `execute` M01 for a model that is not written yet, E09 without vLLM.
    """
    line, missing = rollout_server(folder, options) if rollouts else model_server(folder, stage, options)
    line += " --trust-remote-code" if options.trust_remote_code else ""
    if execute and missing:
        raise RLHFError("M01", "--exec: the model to serve is not written yet", hint=missing)
    if execute and not shutil.which("vllm"):
        raise RLHFError("E09", "--exec: there is no program vllm on PATH", hint="install it in its own environment")
    for text in filter(None, (missing, REQUEST if LOGITS in line else "")):
        terminal.say(f"serve    {text}")
    if execute:
        os.execvp(shlex.split(line)[0], shlex.split(line))
    terminal.out(line)


def model_server(folder: Path, stage: str | None, options: Options) -> tuple[str, str]:
    """Return the command for a model as `runs.resolve_model` finds it, and what must run before."""
    model, missing = runs.resolve_model(folder, stage, runs.LAST).model, ""
    name, adapter, own = NAMES[model.stage], read_adapter(model.model) or {}, shell_path(model.model)
    settings = LOGITS if name == "reward" else PLAIN
    trained = adapter.get("use_dora") or adapter.get("modules_to_save")  # vLLM supports neither
    if model.base is None or model.base.base or trained or adapter["r"] > LORA_RANKS[-1]:
        place, missing = _whole_model(model)
        served = f"{place} --served-model-name {name}"
    else:
        served = f"{_whole_model(model.base)[0]} {_lora(adapter['r'])} --lora-modules {name}={own}"
        if model.base.stage == FOREIGN:  # its tokenizer and stop tokens may be others
            settings = f"--tokenizer {own} --generation-config {shell_path(load.config_folder(model.model))}"
    context = load.context_length(load.read_config(model.model, options.trust_remote_code))
    return f"vllm serve {served} {settings}" + (f" --max-model-len {context}" if context else ""), missing


def rollout_server(folder: Path, options: Options) -> tuple[str, str]:
    """Return the command for models.engine of RUN/ppo.yaml, and what must run before. Raises RLHFError C11 for others.

    Raises RLHFError as `config.load`, `runs.open_reference` and `setup.read_prompts`, too.
    """
    ppo = config.load("ppo", (folder.resolve().parent if (folder / "identity.json").is_file() else folder) / "ppo.yaml")
    if (engine := ppo.models.server) is None:
        raise RLHFError("C11", "the engine needs no server", where=ppo.where("models.engine"), hint="omit --rollouts")
    sft = runs.open_reference(ppo, runs.references(ppo)[0])
    verify_parents({sft.key: sft})
    body, (place, missing) = load.read_config(sft.model, options.trust_remote_code), _whole_model(sft)
    if ppo.models.server_sync == "disk" and body.get_text_config().tie_word_embeddings:  # vLLM would keep the old head
        untied = setup.server_weights_folder(ppo, "reference", 0)
        written = f"rlhf ppo --config {shell_path(ppo.file)} writes it, and waits for the server"
        place, missing = shell_path(untied), "" if untied.is_dir() else written
    tokenizer, response = model_loading.load_tokenizer(ppo, options, sft), ppo.ppo.max_response_length
    keys = sorted(ppo.sources().keys() - {"data.ptx_data"})
    length = response + max(reading.read_prompts(ppo, key, tokenizer, body, response).longest for key in keys)
    dtype = "bfloat16" if machine.settings_for_this_machine(ppo.ppo).bf16 else "float32"
    line = f"{VARIABLES} vllm serve {place} --served-model-name sft --dtype {dtype} --max-model-len {length}"
    line += f" {ROLLOUTS} {max(length, 8192)}"  # at least a whole sequence
    if ppo.models.server_sync == "lora" and ppo.models.adapters:
        line += f" {_lora(ppo.models.adapters.r)} --max-loras 3"
    url = urlsplit(engine.url)
    return f"{line} --host {url.hostname}" + (f" --port {url.port}" if url.port else ""), missing


def _whole_model(model: Parent) -> tuple[str, str]:
    """Return a model's hub id or folder, for adapters that of an export, and what must run before."""
    if model.base is None:
        revision = f" --revision {shell_word(model.revision)}" if model.revision else ""
        return f"{model.hub}{revision}" if model.hub else shell_path(model.model), ""
    folder = model.path.resolve().parent / "exported" / f"{model.stage}-{model.sha256[:8]}"
    export = f"first: rlhf export {shell_path(model.path)} --out {shell_path(folder)}"
    return shell_path(folder), "" if folder.is_dir() else export


def _lora(rank: int) -> str:
    return f"--enable-lora --max-lora-rank {next((known for known in LORA_RANKS if known >= rank), LORA_RANKS[-1])}"
