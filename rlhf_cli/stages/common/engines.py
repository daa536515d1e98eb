"""The engines that draw answers, for every stage and command: of this process, or vLLM servers that get the weights."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from rlhf_cli import distributed, runs, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import EngineChoice, PPOConfig, VLLMServerSettings, engine_name
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import files_sha256, json_sha256
from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models import devices
from rlhf_cli.models.batch import Prompts, StopTokenId
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo import graph_engine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.vllm_client import VLLMClient
from rlhf_cli.ppo.vllm_engine import VLLMEngine
from rlhf_cli.ppo.vllm_server import SentPolicy, VLLMServer, Weights

# Prompts and response tokens by which each sync of a server is checked.
PROBE_ROWS = 16
PROBE_TOKENS = 32
WEIGHTS = "engine"  # folder in a stage's with the weights that servers load


@dataclass(frozen=True)
class Drawing:
    """How a stage or command draws answers."""

    stage: str  # for messages
    stop_token_id: StopTokenId
    pad_token_id: int
    temperature: float
    bf16: bool | None  # None: on a GPU that can
    batch_size: int | None = None  # of an engine of this process; None: all rows at a time


def engine_class(choice: EngineChoice, model: Any, stage: str, *, sharded: bool = False) -> type[HFEngine]:
    """Return the class of the engine of this process that samples from a model as a config chooses.

    A model that graph cannot sample from gets hf. PPO prints why, and so does a stage whose config asks for graph.
    """
    if engine_name(choice, gpu=devices.device().type == "cuda", sharded=sharded) == "hf":
        return HFEngine
    reason = graph_engine.reason_against(model)
    if reason is None:
        return graph_engine.GraphEngine
    if stage == "ppo" or choice == "graph":
        model_type = model.config.model_type
        terminal.say(f"{stage:<8} models.engine: hf instead of graph for this {model_type} model: {reason}")
    return HFEngine


def local_engine(kind: type[HFEngine], model: Any, drawing: Drawing) -> HFEngine:
    """Return an engine of this process that samples from `model`."""
    return kind(
        model,
        drawing.stop_token_id,
        drawing.pad_token_id,
        temperature=drawing.temperature,
        batch_size=drawing.batch_size,
        bf16=drawing.bf16,
    )


def best_engine(model: Any, drawing: Drawing, choice: EngineChoice = "auto") -> HFEngine:
    """Return the engine of this process that samples from `model` as PPO would: graph on a GPU, if it can."""
    return local_engine(engine_class(choice, model, drawing.stage), model, drawing)


# Servers


def weights_folder(config: Config, role: str, update: int) -> Path:
    """Return the folder of weights that a stage's servers load: of the "policy" or the "reference"."""
    return config.folder / WEIGHTS / role / runs.step_name(update)


@dataclass(frozen=True)
class ServerWeights:
    """Writes the weights that servers load to folder/ROLE/step_N, and keeps the newest `keep` of a role."""

    folder: Path
    save: Callable[[str, Path], None]  # writes those of the "policy" or the "reference"
    keep: int = 3

    def __call__(self, role: str, update: int) -> Weights:
        """Write the weights of the "policy" or the "reference"; return their version and folder. All ranks call it.

        A version is the name of one content: run, update and hash. Only the main process, which writes, knows it.
        """
        folder = self.folder / role
        name = runs.step_name(update)
        path = runs.commit_state(folder, name, lambda path: self.save(role, path), keep=self.keep).resolve()
        if not distributed.is_main_process():
            return "", path
        content = files_sha256(sorted(path.glob("*.safetensors")))
        run_hash = json_sha256(str(path.parents[1]))
        return f"{run_hash[:8]}-{role}-update-{update}-{content[:8]}", path


@dataclass(frozen=True)
class Probe:
    """What proves that a server has the weights: the reference, and the rows that are drawn from it and the policy."""

    ref: Any
    prompts: Sequence[list[int]]  # of all answers
    response_length: int
    seed: int
    max_gap: float  # nats per token

    @classmethod
    def of(cls, config: PPOConfig, ref: Any, prompts: Sequence[list[int]]) -> Self:
        """Return the probe of a PPO run."""
        settings = config.ppo
        return cls(ref, prompts, settings.max_response_length, seed=config.seed, max_gap=settings.max_logprob_gap)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt and response."""
        return max(map(len, self.prompts)) + self.response_length

    def rows(self) -> Prompts:
        """Return the first prompts, with seeds for this purpose."""
        first = self.prompts[:PROBE_ROWS]
        return replace(
            Prompts.from_lists(first),
            seeds=tuple(derive_seed(self.seed, "probe", row) for row in range(len(first))),
            response_length=min(PROBE_TOKENS, self.response_length),
        )


def server_engine(
    config: EvalConfig | PPOConfig,
    sync: Literal["lora", "disk"],
    drawing: Drawing,
    *,
    weights: Callable[[str, int], Weights | None],
    probe: Probe,
    process_group: ProcessGroup = SINGLE_PROCESS,
    names: Sequence[str] = (),
) -> VLLMEngine:
    """Return the engine of the servers of a config, or of RLHF_ROLLOUT_URLS, and say so. Raises RLHFError C17.

    All ranks of `process_group` sync weights together; by default one process alone has the engine. `names` of the
    policies that get drawn from in turn, by the number of their sync; without them it is PPO's.
    """
    section = config.models.server
    assert section
    stage = drawing.stage
    urls = server_urls(section)
    text = f"{' and '.join(urls)} generate the responses; `rlhf serve {shown(config.run)} --rollouts`"
    terminal.say(f"{stage:<8} {text} prints the command of a server")

    http = HTTPClient(section.timeout, section.retries)
    policy = SentPolicy(
        probe.ref,
        probe.rows(),
        drawing.stop_token_id,
        pad_token_id=drawing.pad_token_id,
        temperature=drawing.temperature,
        bf16=bool(drawing.bf16),
        max_gap=probe.max_gap,
        process_group=process_group,
        names=names,
    )

    servers = []
    for url in urls:
        server = VLLMServer(
            VLLMClient(url, sync, http, sleeps=section.sleep),
            policy,
            max_wait=section.wait,
            longest_row=probe.longest_row,
            report=lambda text: terminal.say(f"{stage:<8} {text}"),
            stage=stage,
        )
        servers.append(server)
    return VLLMEngine(servers, policy, weights, drawing.temperature)


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
