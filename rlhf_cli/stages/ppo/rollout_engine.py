"""The rollout engine of a PPO run: one of this process, or a server that gets the policy's weights."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli import data, distributed, runs, system, terminal
from rlhf_cli.config.ppo import PPOConfig, PPOSettings, VLLMServerSettings
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import files_sha256, json_sha256
from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models import devices, lora, save
from rlhf_cli.models.batch import Prompts, StopTokenId
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.planning import fits
from rlhf_cli.ppo import graph_engine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.ppo.vllm_engine import VLLMClient, VLLMEngine
from rlhf_cli.ppo.vllm_servers import VLLMServers
from rlhf_cli.runs.parents import Parent

# Prompts and response tokens by which each sync of a rollout server is checked.
PROBE_ROWS = 16
PROBE_TOKENS = 32


def engine_class(config: PPOConfig, policy: Any) -> type[HFEngine]:
    """Return the class of models.engine; hf, with a line that says why, for a model that graph cannot sample from."""
    if config.engine_name(gpu=devices.device().type == "cuda") == "hf":
        return HFEngine
    reason = graph_engine.reason_against(policy)
    if reason:
        terminal.say(f"ppo      models.engine: hf instead of graph for this {policy.config.model_type} model: {reason}")
        return HFEngine
    return graph_engine.GraphEngine


def local_engine(
    kind: type[HFEngine],
    model: Any,
    settings: PPOSettings,
    tokenizer: Any,
    stop_token_id: StopTokenId,
) -> HFEngine:
    """Return an engine of this process that samples from `model` as the run's settings say."""
    return kind(
        model,
        stop_token_id,
        tokenizer.pad_token_id or 0,
        temperature=settings.temperature,
        batch_size=settings.local_rollout_forward_batch_size,
        bf16=settings.bf16,
    )


def set_rollout_rows(
    config: PPOConfig, parents: Mapping[str, Parent], trainer: PPOTrainer, prompts: Sequence[data.Prompt]
) -> None:
    """Choose how many responses are generated at a time on a GPU; no token depends on it. Logs the choice.

    By default they are as many as fit, once all models are loaded. `config` has the batch sizes of all ranks together.
    """
    world_size = trainer.process_group.world_size
    engine = trainer.engine
    if config.ppo.local_rollout_forward_batch_size or not hasattr(engine, "batch_size"):
        return

    longest = max(len(prompt.ids) for prompt in prompts)
    episodes = -(-config.ppo.episodes_per_update // world_size)
    fitting = fits.rollout_rows(config, parents, longest, episodes)
    if fitting is None:
        return

    engine.batch_size = fitting.rows
    size = system.format_bytes(fitting.usable)
    terminal.say(f"ppo      {fitting.rows} of {episodes} responses are generated at a time: what fits in {size}")


# A server


def server_weights_folder(config: PPOConfig, role: str, update: int) -> Path:
    """Return the folder of weights that the rollout server loads: of the "policy" or the "reference"."""
    return config.folder / "engine" / role / runs.step_name(update)


@dataclass(frozen=True)
class ServerWeights:
    """Writes the weights that the rollout server loads to RUN/ppo/engine; keeps those of the last three updates."""

    config: PPOConfig
    policy: Any  # with adapters the peft model
    ref: Any
    tokenizer: Any

    def __call__(self, role: str, update: int) -> tuple[str, Path]:
        """Write the weights of the "policy" or the "reference"; return their version and folder. All ranks call it.

        A version is the name of one content: run, update and hash. Only the main process, which writes, knows it.
        """
        folder = server_weights_folder(self.config, role, update)
        path = runs.commit_state(folder.parent, folder.name, lambda path: self._write(role, path), keep=3).resolve()
        if not distributed.is_main_process():
            return "", path
        content = files_sha256(sorted(path.glob("*.safetensors")))
        run_hash = json_sha256(str(path.parents[1]))
        return f"{run_hash[:8]}-{role}-update-{update}-{content[:8]}", path

    def _write(self, role: str, path: Path) -> None:
        """Write the weights of one role, as the server loads them."""
        if role != "policy":
            save.save_untied(self.ref, self.tokenizer, path)
        elif self.config.models.server_sync == "lora":
            save.save_model(self.policy, self.tokenizer, path, "Adapters for a rollout server.")
        elif lora.is_peft_model(self.policy):
            save.save_untied(lora.merge_and_unload(copy.deepcopy(self.policy)), self.tokenizer, path)
        else:
            save.save_untied(self.policy, self.tokenizer, path)


def server_engine(
    config: PPOConfig,
    weights: ServerWeights,
    prompts: list[list[int]],
    stop_token_id: StopTokenId,
    *,
    bf16: bool,
    process_group: ProcessGroup,
) -> VLLMEngine | VLLMServers:
    """Return the engine of models.engine.vllm. Its probe are some of the run's prompts. Raises RLHFError C17."""
    section = config.models.server
    settings = config.ppo
    assert section
    urls = server_urls(section)
    text = f"{' and '.join(urls)} generate the responses; `rlhf serve {shown(config.run)} --rollouts`"
    terminal.say(f"ppo      {text} prints the command of a server")

    probe_rows = prompts[:PROBE_ROWS]
    probe = replace(
        Prompts.from_lists(probe_rows),
        seeds=tuple(derive_seed(config.seed, "probe", row) for row in range(len(probe_rows))),
        response_length=min(PROBE_TOKENS, settings.max_response_length),
    )
    client = HTTPClient(section.timeout, section.retries)
    engines = []
    for url in urls:
        engine = VLLMEngine(
            server=VLLMClient(url, config.models.server_sync, client, sleeps=section.sleep),
            ref=weights.ref,
            write=weights,
            probe=probe,
            stop_token_id=stop_token_id,
            pad_token_id=weights.tokenizer.pad_token_id or 0,
            temperature=settings.temperature,
            bf16=bf16,
            max_gap=settings.max_logprob_gap,
            max_wait=section.wait,
            longest_row=max(map(len, prompts)) + settings.max_response_length,
            report=lambda text: terminal.say(f"ppo      {text}"),
            process_group=process_group,
        )
        engines.append(engine)
    return engines[0] if len(engines) == 1 else VLLMServers(engines)


def server_urls(section: VLLMServerSettings) -> list[str]:
    """Return the addresses of the servers: those in RLHF_ROLLOUT_URLS, which a scheduler sets, or of the config.

    Raises RLHFError C17 for a variable that is no list of addresses with commas between them.
    """
    text = os.environ.get("RLHF_ROLLOUT_URLS")
    if not text:
        return section.url
    try:
        return VLLMServerSettings(url=text.split(",")).url
    except ValueError:
        message = f"RLHF_ROLLOUT_URLS: {text!r}: addresses must differ, without spaces, paths or a final /"
        raise RLHFError("C17", message, hint="for example http://node1:8000,http://node2:8000") from None
