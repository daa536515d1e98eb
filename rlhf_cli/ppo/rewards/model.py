"""`model:` and `models:`: reward models, on the policy's own tokens or on tokens of their own, and ensembles."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import offload, packing, reading
from rlhf_cli.models.batch import EnsembleScores, Rollout

# Prompts and responses -> their token ids, each response with the stop token behind it (data.encode_many).
Asked = str | list[dict[str, Any]] | None
Encode = Callable[[Sequence[Asked], Sequence[str | None]], Sequence[tuple[list[int], list[int]]]]


@dataclass
class ModelReward:
    """A one-label sequence classifier that shares the policy's tokenizer:

    it reads the rollout's own ids, at the last real token. `packed`: its rows end to end, where the model can
    (models/packing.py). `offloaded`: it waits in the CPU's memory, and scores on the rollout's device.
    """

    model: Any
    max_rows: int = 64
    max_tokens: int | None = None
    packed: bool = True
    offloaded: bool = False
    by_row: ClassVar[bool] = True  # several processes may each ask for some of the rows

    def __post_init__(self) -> None:
        self.packed = self.packed and packing.enable([self.model])
        if self.offloaded:
            offload.wait_on_cpu(self.model)

    def __call__(self, rollout: Rollout) -> Tensor:
        with offload.visiting(self.model, rollout.ids.device) if self.offloaded else nullcontext():
            return reading.rollout_scores(self.model, rollout, max_rows=self.max_rows, max_tokens=self.max_tokens)


@dataclass(kw_only=True)
class RetoldReward(ModelReward):
    """A reward model with a tokenizer or a chat template of its own, which `encode` stands for.

    Responses are decoded by the policy's `tokenizer` without special tokens and encoded again, with the stop token
    where they ended with `stop_token_id`. A prompt's tokens are looked up in `prompts`, made of its text or
    conversation as given; one that is not there is decoded and encoded too.
    Raises RLHFError R05 for a row of more than `context` tokens, with no prompt left, or that cannot be encoded.
    """

    name: str
    tokenizer: Any
    encode: Encode
    stop_token_id: int | None
    context: int | None = None
    prompts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __call__(self, rollout: Rollout) -> Tensor:
        rows = range(len(rollout))
        retold = self.retold(
            *([part(row) for row in rows] for part in (rollout.prompt_tokens, rollout.response_tokens)),
            first=rollout.row_offset,
        )
        return super().__call__(Rollout.from_lists(*retold).to(rollout.ids.device))

    def meet(self, ids: Sequence[int], prompt: str | list[dict[str, Any]]) -> None:
        """Take in a further prompt's text or conversation as given, of these ids of the policy's.

        Raises RLHFError D06, D14 for a conversation that the model's template refuses or cannot render.
        """
        self.prompts[tuple(ids)] = self.encode([prompt], [None])[0][0]

    def retold(
        self, prompts: list[list[int]], responses: list[list[int]], *, first: int = 0
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses in the model's own tokens, of those in the policy's; `first` is that row's number."""
        known = [self.prompts.get(tuple(ids)) for ids in prompts]
        try:
            asked = [self._text(ids) if there is None else None for ids, there in zip(prompts, known, strict=True)]
            encoded = self.encode(asked, [self._text(ids) for ids in responses])
        except Exception as error:  # whatever a tokenizer of others may raise
            text = f"reward `{self.name}`: its tokenizer raised {type(error).__name__}: {error}"
            raise RLHFError("R05", text, hint="encode one of the responses with it by itself") from error
        found: tuple[list[list[int]], list[list[int]]] = ([], [])
        for row, (prompt, response) in enumerate(encoded):
            there, ended = known[row], responses[row][-1] == self.stop_token_id
            found[0].append(prompt if there is None else there)
            found[1].append(response if ended or len(response) == 1 else response[:-1])
            self._check_length(first + row, len(found[0][-1]), len(found[1][-1]))
        return found

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _check_length(self, row: int, prompt: int, response: int) -> None:
        if not prompt:
            text = f"reward `{self.name}`: its tokenizer leaves nothing of the prompt of row {row}"
            raise RLHFError("R05", text, hint="take such prompts out of data.prompts")
        if self.context is not None and prompt + response > self.context:
            text = f"row {row} has {prompt + response} tokens, its model reads {self.context} at most"
            raise RLHFError(
                "R05", f"reward `{self.name}`: {text}", hint="take longer prompts out, or lower ppo.response_length"
            )


@dataclass
class EnsembleReward:
    """Several reward models as one source: `combine` is a key of COMBINE (Coste et al. 2023, arXiv 2310.02743)."""

    members: dict[str, ModelReward]
    combine: str = "mean"
    std_coef: float = 1.0
    by_row: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> EnsembleScores:
        scores = {name: member(rollout) for name, member in self.members.items()}
        opinions = EnsembleScores(torch.stack(list(scores.values())).mean(0), scores)
        return replace(opinions, score=COMBINE[self.combine](opinions, self.std_coef))


COMBINE: dict[str, Callable[[EnsembleScores, float], Tensor]] = {
    "mean": lambda opinions, _: opinions.score,
    "min": lambda opinions, _: torch.stack(list(opinions.members.values())).amin(0),
    "mean_minus_std": lambda opinions, std_coef: opinions.score - std_coef * opinions.disagreement,
}
