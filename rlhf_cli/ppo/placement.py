"""Where the weights of a run's models lie: whole on each of the processes, or cut up over them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_cli.models import sharding
from rlhf_cli.ppo.ranks import Ranks

T = TypeVar("T")


class Whole:
    """Each process has all of each model."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This rank's of the items to make passes of, and whether they count."""
        return [(item, True) for item in self.ranks.share(items)]

    def learning(self) -> AbstractContextManager:
        """For the passes of a minibatch, with or without gradients."""
        return nullcontext()

    def writing(self, model: Any) -> AbstractContextManager:
        """For forward passes without gradients that the ranks make each by itself."""
        return nullcontext()

    def add_gradients(self, model: nn.Module) -> None:
        """Each weight's gradient becomes that of all ranks."""
        self.ranks.add_gradients(model.parameters())

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scale a model's gradients down to the norm `most`; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    def fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Give a model the weights of a whole one."""
        model.load_state_dict(state)

    def norm(self, model: nn.Module) -> Tensor:
        """The norm of the weights that learn."""
        return nn.utils.get_total_norm(weight for weight in model.parameters() if weight.requires_grad)


class Cut(Whole):
    """Each process has a part of each model's layers, embeddings and head, and of what is kept for them (FSDP2)."""

    def __init__(self, ranks: Ranks, trained: Sequence[Any], frozen: Sequence[Any]) -> None:
        from rlhf_cli.models import sharding  # it takes over half a second to import

        super().__init__(ranks)
        self.sharding = sharding
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for models, learns in ((trained, True), (frozen, False)):
            for model in models:
                sharding.shard(model, device, trained=learns)
        self.trained = trained

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """As many on each rank: a layer's pass waits for all. What stands in for a missing one does not count."""
        own = super().turns(items)
        return own + [(items[0], False)] * (-(-len(items) // self.ranks.count) - len(own))

    @contextmanager
    def learning(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.trained:
                stack.enter_context(self.sharding.gathered_embeddings(model, self.ranks.add))
            yield

    def writing(self, model: Any) -> AbstractContextManager:
        return self.sharding.gathered(model, self.ranks.add) if self.sharding.is_sharded(model) else nullcontext()

    def add_gradients(self, model: nn.Module) -> None:
        self.ranks.add_gradients(weight for weight in model.parameters() if not sharding.is_sharded_tensor(weight))

    def clip(self, model: nn.Module, most: float) -> Tensor:
        return self.sharding.clip_grad_norm(model.parameters(), most, self.ranks.add)

    def fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        self.sharding.load_full_state_dict(model, state)

    def norm(self, model: nn.Module) -> Tensor:
        return self.sharding.total_norm((w for w in model.parameters() if w.requires_grad), self.ranks.add)
