"""`model:` and `models:`: reward models on the policy's tokens or their own tokenizer's, and ensembles."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_cli.data.tokens import Answer, PromptText
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward, lora, packing, sharding
from rlhf_cli.models.batch import EnsembleScores, Rollout, StopTokenId, stop_ids
from rlhf_cli.models.compiled import compiled_layers

# (prompts, responses) -> token ids of both per row, each response with the stop token appended (data.encode_many).
Encode = Callable[[Sequence[PromptText | None], Sequence[Answer | None]], Sequence[tuple[list[int], list[int]]]]


@dataclass
class ModelReward:
    """A one-label sequence classifier that shares the policy's tokenizer.

    It reads the rollout's ids and scores the last real token. `end_token_ids` and `closing_ids` are those of
    `forward.rollout_scores`.
    `packed`: rows are packed if the model supports it (models/packing.py). `offloaded`: the model stays in CPU memory
    and is moved to the rollout's device to score. `bf16`: the layers compute in bfloat16; the head is float32.
    """

    model: Any
    max_rows: int = 64
    max_tokens: int | None = None
    packed: bool = True
    offloaded: bool = False
    bf16: bool = False
    end_token_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    splits_rows: ClassVar[bool] = True  # each rank may score a part of the rows

    def __post_init__(self) -> None:
        self.packed = self.packed and packing.enable([self.model])
        if self.bf16:
            lora.autocast_matrices(self.model.requires_grad_(False))
        if self.offloaded:
            sharding.offload_to_cpu(self.model)

    def __call__(self, rollout: Rollout) -> Tensor:
        device = rollout.ids.device
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16)
        placed = sharding.on_device(self.model, device) if self.offloaded else nullcontext()
        with placed, autocast, compiled_layers(self.model):
            return forward.rollout_scores(
                self.model,
                rollout,
                max_rows=self.max_rows,
                max_tokens=self.max_tokens,
                end_token_ids=self.end_token_ids,
                closing_ids=self.closing_ids,
            )


@dataclass(kw_only=True)
class RetokenizingReward(ModelReward):
    """A reward model with its own tokenizer or chat template, applied by `encode`.

    Responses are decoded by the policy's `tokenizer` without special tokens and encoded again, with its stop token if
    they ended with one of `stop_token_id`. `prompts` maps a prompt's ids to the model's tokens of its original text or
    conversation; a prompt that is missing there is decoded and encoded too. Responses to `conversations`, by their ids,
    are rendered by the model's chat template.
    Raises RLHFError R05 for a row that exceeds `context` tokens, has an empty prompt, or cannot be encoded.
    """

    name: str
    tokenizer: Any
    encode: Encode
    stop_token_id: StopTokenId
    context: int | None = None
    prompts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    conversations: set[tuple[int, ...]] = field(default_factory=set)

    def __call__(self, rollout: Rollout) -> Tensor:
        rows = range(len(rollout))
        prompts = [rollout.prompt_tokens(row) for row in rows]
        responses = [rollout.response_tokens(row) for row in rows]
        prompts, responses = self.retokenize(prompts, responses, row_offset=rollout.row_offset)
        return super().__call__(Rollout.from_lists(prompts, responses).to(rollout.ids.device))

    def add_prompt(self, ids: Sequence[int], prompt: PromptText) -> None:
        """Add a prompt's original text or conversation under its ids in the policy's tokens.

        Raises RLHFError D06, D14 for a conversation that the model's template rejects or cannot render.
        """
        self.prompts[tuple(ids)] = self.encode([prompt], [None])[0][0]
        if not isinstance(prompt, str):
            self.conversations.add(tuple(ids))

    def retokenize(
        self, prompts: list[list[int]], responses: list[list[int]], *, row_offset: int = 0
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Convert prompts and responses from the policy's tokens to the model's; `row_offset` is for errors only."""
        known = [self.prompts.get(tuple(ids)) for ids in prompts]
        try:
            texts = [None if tuple(ids) in self.prompts else self._decode(ids) for ids in prompts]
            answers = list(map(self._answer, prompts, responses))
            encoded = self.encode(texts, answers)
        except Exception as error:  # a third-party tokenizer may raise anything
            text = f"reward `{self.name}`: its tokenizer raised {type(error).__name__}: {error}"
            raise RLHFError("R05", text, hint="encode one of the responses with it by itself") from error

        new_prompts: list[list[int]] = []
        new_responses: list[list[int]] = []
        for row, (prompt, response) in enumerate(encoded):
            tokens = known[row]
            if tokens is not None:
                prompt = tokens
            has_ended = responses[row][-1] in stop_ids(self.stop_token_id)
            if not has_ended and len(response) > 1:
                response = response[:-1]
            self._check_length(f"row {row_offset + row}", prompt, response)
            new_prompts.append(prompt)
            new_responses.append(response)
        return new_prompts, new_responses

    def _check_length(self, row: str, prompt: list[int], response: list[int]) -> None:
        if not prompt:
            text = f"reward `{self.name}`: its tokenizer encodes the prompt of {row} to nothing"
            raise RLHFError("R05", text, hint="remove such prompts from data.prompts")
        length = len(prompt) + len(response) + len(self.closing_ids)
        if self.context is not None and length > self.context:
            text = f"reward `{self.name}`: {row} has {length} tokens, its model reads {self.context} at most"
            raise RLHFError("R05", text, hint="remove longer prompts, or lower ppo.response_length")

    def _answer(self, prompt: list[int], response: list[int]) -> Answer:
        text = self._decode(response)
        return {"role": "assistant", "content": text} if tuple(prompt) in self.conversations else text

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass
class EnsembleReward:
    """Several reward models as one source; `combine` is a key of COMBINE (Coste et al. 2023, arXiv 2310.02743)."""

    members: dict[str, ModelReward]
    combine: str = "mean"
    std_coef: float = 1.0
    splits_rows: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> EnsembleScores:
        scores = {name: member(rollout) for name, member in self.members.items()}
        ensemble = EnsembleScores(torch.stack(list(scores.values())).mean(0), scores)
        return replace(ensemble, score=COMBINE[self.combine](ensemble, self.std_coef))


RewardModels = ModelReward | EnsembleReward


def model_scores(source: RewardModels, rollout: Rollout) -> Tensor:
    """Return the scores (B,) of one reward model, or the combined ones of an ensemble."""
    scores = source(rollout)
    return scores.score if isinstance(scores, EnsembleScores) else scores


# Name -> the combined score (B,), of an ensemble whose `score` is the mean of its members.
COMBINE: dict[str, Callable[[EnsembleScores, float], Tensor]] = {
    "mean": lambda ensemble, _: ensemble.score,
    "min": lambda ensemble, _: torch.stack(list(ensemble.members.values())).amin(0),
    "mean_minus_std": lambda ensemble, std_coef: ensemble.score - std_coef * ensemble.disagreement,
}
