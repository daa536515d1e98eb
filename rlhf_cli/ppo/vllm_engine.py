"""The engine of vLLM servers: each draws a block of the rows, and gets the policy's weights after each update."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.models.parallel import part_of
from rlhf_cli.ppo.vllm_server import SentPolicy, VLLMServer, Weights

T = TypeVar("T")


@dataclass
class VLLMEngine:
    """Samples from one or several servers at the same time. They load the same files, which are written once."""

    servers: Sequence[VLLMServer]
    policy: SentPolicy  # of all servers
    write: Callable[[str, int], Weights | None]  # those of the "policy" or the "reference" after an update
    temperature: float
    name: ClassVar[str] = "vllm"
    deterministic: ClassVar[bool] = False  # by the servers' seeds: batches of another size round differently

    def generate(self, prompts: Prompts) -> Rollout:
        """Draw a response to each prompt: the first block of rows from the first server, and so on."""
        draws = []
        for number, server in enumerate(self.servers):
            rows = part_of(len(prompts), number, len(self.servers))
            if rows.start < rows.stop:
                draws.append(partial(server.generate, prompts.rows(rows), self.temperature))
        return Rollout.concat(_at_once(draws))

    @property
    def sleeps(self) -> bool:
        """True if the servers sleep after a rollout: they are sent the weights, and checked, before each."""
        return self.servers[0].client.sleeps

    def update_weights(self, update: int, policy: Any) -> None:
        """Write the policy's weights, make all servers load them, and check that each has them. All ranks call it.

        Before the first time, write the reference's whole weights, too, which servers may start from.
        """
        sent = self.policy
        reference = None
        if sent.model is None and self.servers[0].client.sync == "disk":
            reference = self.write("reference", 0)
        sent.weights = self.write("policy", update)
        sent.update = update
        sent.model = policy

        if self.sleeps:  # give them the cached GPU memory of all ranks
            torch.cuda.empty_cache()
            sent.process_group.barrier()
        syncs = [partial(server.sync, reference) for server in self.servers]
        sent.process_group.run_on_main(lambda: _at_once(syncs), self.join)

    def join(self, asked: tuple[Rollout, bool]) -> object:
        """Take part in the check of a server, which runs on rank 0."""
        return self.policy.join(asked)

    def release_memory(self) -> None:
        """Let servers sleep that share the GPUs. All ranks call it; it returns when they have freed it."""
        if self.sleeps:
            actions = [server.sleep for server in self.servers]
            self.policy.process_group.run_on_main(lambda: _at_once(actions))


def _at_once(actions: Sequence[Callable[[], T]]) -> list[T]:
    """Return what each action returns. Raises the first error when all have ended.

    A single one runs in this thread, where Ctrl-C ends it.
    """
    if len(actions) == 1:
        return [actions[0]()]
    with ThreadPoolExecutor(len(actions)) as threads:
        return list(threads.map(lambda action: action(), actions))
