"""Several vLLM servers as one rollout engine: each draws a block of the rows, and is proven after each sync."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar, TypeVar

from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.models.parallel import part_of
from rlhf_cli.ppo.vllm_engine import VLLMEngine

T = TypeVar("T")


@dataclass
class VLLMServers:
    """Samples from several servers at the same time. They load the same files, which are written once.

    A server that is lost is waited for by its own engine, and draws its block again with the same seeds.
    """

    engines: list[VLLMEngine]
    name: ClassVar[str] = "vllm"
    deterministic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Let the engines check their servers one after the other: they compute with the same models."""
        computing = Lock()
        for engine in self.engines:
            engine.computing = computing

    @property
    def temperature(self) -> float:
        """The temperature of the responses."""
        return self.engines[0].temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        for engine in self.engines:
            engine.temperature = value

    def generate(self, prompts: Prompts) -> Rollout:
        """Draw a response to each prompt: the first block of rows from the first server, and so on."""

        def draw(number: int) -> list[Rollout]:
            rows = part_of(len(prompts), number, len(self.engines))
            return [self.engines[number].generate(prompts.rows(rows))] if rows.start < rows.stop else []

        return Rollout.concat([part for parts in self._at_once(draw) for part in parts])

    def update_weights(self, update: int, policy: Any) -> None:
        """Write the policy's weights, make all servers load them, and check that each has them. All ranks call it."""
        first, *_ = self.engines
        reference = first.reference_weights()
        weights = first.write("policy", update)
        for engine in self.engines:
            engine.policy = policy
        first.make_room()

        def sync(number: int) -> None:
            self.engines[number].sync(update, reference, weights)

        first.process_group.run_on_main(lambda: self._at_once(sync), self.join)

    def join(self, asked: Any) -> object:
        """Take part in the check of a server, as `VLLMEngine.join`."""
        return self.engines[0].join(asked)

    @property
    def sleeps(self) -> bool:
        """True if the servers sleep after a rollout, as `VLLMEngine.sleeps`."""
        return self.engines[0].sleeps

    def release_memory(self) -> None:
        """Let servers sleep that share the GPUs, as `VLLMEngine.release_memory`."""
        if self.sleeps:
            group = self.engines[0].process_group
            group.run_on_main(lambda: self._at_once(lambda number: self.engines[number].sleep()))

    def _at_once(self, action: Callable[[int], T]) -> list[T]:
        """Return what an action returns for the number of each server. Raises the first error when all have ended."""
        with ThreadPoolExecutor(len(self.engines)) as threads:
            return list(threads.map(action, range(len(self.engines))))
