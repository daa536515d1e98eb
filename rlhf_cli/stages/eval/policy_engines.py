"""The engines that draw the answers of an evaluation's policies: of this process, or servers that get each in turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.vllm_engine import VLLMEngine
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import engines
from rlhf_cli.stages.common.engines import Drawing, Probe
from rlhf_cli.stages.common.served_policies import ServedPolicies, ServedPolicy
from rlhf_cli.stages.eval.evaluated_models import EvaluatedModels, EvaluatedPolicy
from rlhf_cli.stages.eval.evaluation_inputs import EvaluationInputs

Engine = HFEngine | VLLMEngine


@dataclass(frozen=True)
class PolicyEngines:
    """Gives the engine that draws from a policy: a new one of this process, or that of the servers."""

    loaded: EvaluatedModels
    drawing: Drawing
    servers: ServedPolicies | None

    def engine(self, name: str, parent: Parent, model: Any, share: float | None = None) -> Engine:
        """Return the engine that draws from a policy, loaded as `model`, until this is called for another one.

        Raises RLHFError R19, R20 if a server does not have the weights.
        """
        loaded = self.loaded
        servers = self.servers
        if servers is None:
            return engines.best_engine(model, self.drawing, loaded.config.models.engine)
        servers.use(_served(loaded, name, parent, model, share=share))
        return servers.engine


@contextmanager
def open_engines(
    loaded: EvaluatedModels, inputs: EvaluationInputs, policies: Sequence[EvaluatedPolicy]
) -> Iterator[PolicyEngines]:
    """Context manager of the engines that models.engine chooses. Raises RLHFError C17 for `sync` and the addresses."""
    drawing = Drawing(
        "eval",
        inputs.sampling.stop_token_id,
        inputs.tokenizer.pad_token_id or 0,
        temperature=inputs.sampling.temperature,
        bf16=loaded.bf16,
        batch_size=loaded.config.eval.per_device_batch_size,
    )
    servers = _open_servers(loaded, inputs, policies, drawing)
    try:
        yield PolicyEngines(loaded, drawing, servers)
    finally:
        if servers:
            loaded.stage.process_group.run_on_main(servers.close)


def _open_servers(
    loaded: EvaluatedModels, inputs: EvaluationInputs, policies: Sequence[EvaluatedPolicy], drawing: Drawing
) -> ServedPolicies | None:
    """Return the servers of models.engine, None for an engine of this process."""
    config = loaded.config
    if config.models.server is None:
        return None
    return ServedPolicies(
        config,
        drawing,
        {policy.name: policy.parent for policy in policies},
        base=_served(loaded, "sft", loaded.sft_parent, loaded.sft),
        probe=Probe(
            loaded.sft,
            [prompt.ids for prompt in inputs.prompts],
            inputs.sampling.response_length,
            seed=config.seed,
            max_gap=inputs.max_logprob_gap,
        ),
        folder=config.folder,
        keep=1,
        tokenizer=loaded.tokenizer,
        process_group=loaded.stage.process_group,
    )


def _served(
    loaded: EvaluatedModels, name: str, parent: Parent, model: Any, *, share: float | None = None
) -> ServedPolicy:
    return ServedPolicy(name, parent, model, partial(loaded.whole_policy, parent, share), share)
