"""Servers that draw from several policies: one after the other gets its weights, and each sync is checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import distributed, runs
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import remove
from rlhf_cli.models import lora, save
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.vllm_server import Weights
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import engines
from rlhf_cli.stages.common.engines import Drawing, Probe, ServerWeights


@dataclass(frozen=True)
class ServedPolicy:
    """A policy that servers can get."""

    name: str
    parent: Parent
    model: Any  # in this process
    read_whole: Callable[[], Any]  # returns it with its own weights, adapters merged
    share: float | None = None  # of the way from SFT to the policy


class ServedPolicies:
    """The engine of the servers of models.engine, and the policy that they have.

    `base` is what the servers were started with, where they get adapters. A folder `engine` in `folder` holds the
    weights of the last `keep` policies until `close`.
    """

    def __init__(
        self,
        config: EvalConfig | PPOConfig,
        drawing: Drawing,
        parents: Mapping[str, Parent],
        *,
        base: ServedPolicy,
        probe: Probe,
        folder: Path,
        keep: int,
        tokenizer: Any,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Say which servers draw from the policies, whose `parents` have their names. Connect to nothing yet.

        Raises RLHFError C17 for `sync`, and as `engines.server_engine`.
        """
        sync = _choose_sync(config, base.parent, parents)
        self.base = base
        self.folder = folder / engines.WEIGHTS
        self.keep = keep
        self.tokenizer = tokenizer
        self.sends_adapters = sync == "lora"
        self.names: list[str] = []  # of the policies so far, for messages
        self.whole: dict[tuple[str, str], Weights] = {}  # that were written, by role and name
        self.policy = base
        self.engine = engines.server_engine(
            config,
            sync,
            drawing,
            weights=self._write,
            probe=probe,
            process_group=process_group,
            names=self.names,
        )

    def use(self, policy: ServedPolicy) -> None:
        """Send a policy's weights, and check that the servers have them. All ranks call it.

        Raises RLHFError R19, R20.
        """
        if self.names[-1:] == [policy.name] and not self.engine.sleeps:
            return
        self.policy = policy
        self.names.append(policy.name)
        self.engine.update_weights(len(self.names) - 1, policy.model)

    def close(self) -> None:
        """Delete the weights that the servers have read."""
        remove(self.folder)

    def _write(self, role: str, number: int) -> Weights | None:
        """Write the weights of the "policy" or the "reference"; None for a base that has never been replaced.

        Whole ones are written once while they are kept. Adapters, which are small, get a new name each time.
        """
        policy = self.policy if role == "policy" else self.base
        if self.sends_adapters and policy.name == self.base.name:
            return None

        weights = self.whole.get((role, policy.name))
        if weights is None or not weights[1].exists():
            weights = ServerWeights(self.folder, partial(self._save, policy), self.keep)(role, number)
        if not self.sends_adapters:
            self.whole[role, policy.name] = weights
        return weights

    def _save(self, policy: ServedPolicy, role: str, path: Path) -> None:
        if not distributed.is_main_process():
            return
        if self.sends_adapters:
            lora.copy_scaled(policy.parent.model, path, 1.0 if policy.share is None else policy.share)
        else:
            save.save_untied(policy.read_whole(), self.tokenizer, path)


def _choose_sync(config: EvalConfig | PPOConfig, sft: Parent, parents: Mapping[str, Parent]) -> Literal["lora", "disk"]:
    """Return how servers get policies: by default as adapters if they are adapters of `sft`.

    Raises RLHFError C17 for `sync: lora` and a policy that is no adapter.
    """
    section = config.models.server
    assert section
    others = [name for name in parents if name != "sft"]
    whole = [name for name in others if not runs.is_adapter_of(parents[name], sft)]
    if section.sync == "lora" and whole:
        text = f"sync: lora sends adapters of models.sft, and {whole[0]} is not one"
        where = config.where("models.engine.vllm.sync")
        raise RLHFError("C17", text, where=where, hint="set disk, and start the servers without --enable-lora")
    return section.sync or ("lora" if others and not whole else "disk")
