"""Forward passes: logits of response tokens, values before them, scores of whole rows. Scoring and update share them.

Rows are padded on the right (MicroBatch), so a causal model needs no attention mask: no token attends to its right.

`in_place_embedding_gradients` adds the gradients of embedding and head to `.grad` in place. Autograd would create each
as a separate matrix, for the embedding per micro-batch and for the head per chunk of logits: 933 MB for a vocabulary of
152,000 and width 1536. In place, only the embedding rows of the batch are touched.

`float32_logits` keeps the logits of a bfloat16 head in float32: rounded to bfloat16, a logit of 16 makes an error of
0.02 in a log-prob. MiniMax-M1 (arXiv 2506.13585, section 3.2) computes its head in float32 for the same reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, packing
from rlhf_cli.models.batch import MicroBatch, Rollout, slices, split_into_micro_batches
from rlhf_cli.progress import track_progress

MAX_LOGITS = 2**27  # (tokens x vocabulary) in a chunk of `logit_chunks`
MIN_CHUNK_TOKENS = 64  # fewer make the matrix product slow


class ValueHead(nn.Module):
    """Value head: a linear layer on the policy's last hidden state, (..., H) -> (...).

    Its weights start at zero, so all values do. As TRL 0.11's AutoModelForCausalLMWithValueHead.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        width = model.get_output_embeddings().weight.shape[1]
        self.score = nn.Linear(width, 1, bias=False, device=model.device, dtype=model.dtype)
        nn.init.zeros_(self.score.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # rounding a value to bfloat16 would lose two digits
            values = self.score(hidden.to(self.score.weight.dtype))[..., 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))


def response_hidden_states(model: Any, micro: MicroBatch) -> Tensor:
    """Return the hidden states (N, H) from which a causal LM's head computes the logits of each response token."""
    return _states_before_responses(build.decoder(model), micro)


def _states_before_responses(backbone: Any, micro: MicroBatch) -> Tensor:
    lengths = micro.lengths - 1  # a row's last token is not passed to the model
    return packing.hidden_states_at(backbone, micro.ids, lengths, row=micro.row_index, column=micro.logit_position)


def lm_head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits (N, V) of hidden states (N, H).

    Calls the model's forward() with the decoder stubbed to return `hidden`, so that model-specific logit scaling and
    soft-capping still apply. The product with the head is in float32 or wider (`float32_logits`).
    """
    decoder = build.decoder(model)
    decoder.forward = lambda *_, **__: _StubOutput(hidden[None])  # overrides the class's method
    try:
        unread = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)  # some families look at the last id
        with float32_logits(model):
            return model(input_ids=unread, use_cache=False).logits[0]
    finally:
        del decoder.forward


@dataclass(frozen=True)
class _StubOutput:
    """A decoder output with hidden states only; the additional outputs of a model family are None."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def response_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Return the logits (N, V) that predict each response token of the micro-batch."""
    return lm_head_logits(model, response_hidden_states(model, micro))


def logit_chunk_size(vocabulary: int, max_logits: int | None = None) -> int:
    """Return the number of tokens whose logits are computed together: at most `max_logits`, by default MAX_LOGITS."""
    limit = max_logits or MAX_LOGITS
    return max(MIN_CHUNK_TOKENS, limit // vocabulary)


def logit_chunks(model: Any, num_tokens: int) -> list[slice]:
    """Return slices of tokens whose logits (tokens, V) are computed together: all, unless they are very many."""
    size = logit_chunk_size(model.config.get_text_config().vocab_size)
    return slices(num_tokens, size)


def _head_scores(model: Any, hidden: Tensor, lengths: Tensor) -> Tensor:
    """Return scores (N,) of hidden states (N, H) behind answers of `lengths` (N,), float32 or wider and normalised."""
    with torch.autocast(hidden.device.type, enabled=False):  # rounding a score to bfloat16 would lose two digits
        raw = model.score(hidden.to(model.score.weight.dtype))[:, 0]
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    return scale_scores(model.config, raw, lengths)


def scale_scores(config: Any, raw: Any, lengths: Any) -> Any:
    """Return raw scores of answers of these lengths on the scale that the reward stage stored in a model's config.

    Of numbers or tensors (N,). `reward.normalize` stores mean and deviation, `reward.length_debias` the slope.
    """
    slope = getattr(config, "reward_length_slope", 0.0)  # of the raw score, per token
    mean_length = getattr(config, "reward_length_mean", 0.0)
    mean = getattr(config, "reward_mean", 0.0)
    std = getattr(config, "reward_std", 1.0)
    return (raw - slope * (lengths - mean_length) - mean) / std


def response_values(model: nn.Module, micro: MicroBatch, hidden: Tensor | None = None) -> Tensor:
    """Return the values (N,) before each response token; a `ValueHead` reads the policy's `hidden` states (N, H).

    The value of a scalar model is the score that it gives to the answer so far.
    """
    if isinstance(model, ValueHead):
        return model(hidden)
    hidden = _states_before_responses(model.base_model, micro)
    return _head_scores(model, hidden, micro.token_index)


def pooled_scores(model: Any, micro: MicroBatch, end_token_id: int | None = None) -> Tensor:
    """Return the score (n,) of each row, read at its last token.

    `end_token_id` ends the pairs that the model was trained on. If it is the model's pad token, too, or is not known,
    the score is read where transformers pools it, and trained this model: at the last token that is not the pad token.
    """
    ids = micro.ids
    columns = torch.arange(ids.shape[1], device=ids.device)
    counts = columns < micro.lengths[:, None]  # (n, L)
    pad_id = build.pad_token_id(model.config)
    if pad_id is not None and end_token_id in (pad_id, None):
        counts &= ids != pad_id
    last = torch.where(counts, columns, 0).amax(1)
    rows = torch.arange(len(ids), device=ids.device)
    hidden = packing.hidden_states_at(model.base_model, ids, micro.lengths, row=rows, column=last)
    return _head_scores(model, hidden, micro.response_lengths)


@torch.no_grad()
def rollout_scores(
    model: Any,
    rollout: Rollout,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    end_token_ids: Sequence[int] = (),
    closing_ids: Sequence[int] = (),
) -> Tensor:
    """Return the score (B,) float32 of each row of a rollout, in micro-batches of rows with similar lengths.

    `end_token_ids`: the token that ends the pairs of the model's training, and others with which a row may end. These
    get the score of the first: no pair ended with them, so what the model gives them was never trained.
    `closing_ids`: tokens behind the end token in the rows that the model was trained on, where it reads the score.
    Raises RLHFError M06 for an id without embedding, which a policy with more embeddings may generate.
    """
    rollout = rollout.with_one_end(end_token_ids)
    end_token_id = end_token_ids[0] if end_token_ids else None
    if closing_ids and end_token_id is not None:
        rollout = rollout.with_closed_turns(end_token_id, closing_ids)
    _require_embeddings(model, rollout)

    device = rollout.ids.device
    micro_batches = split_into_micro_batches(
        rollout.lengths,
        torch.arange(len(rollout), device=device),
        max_rows=max_rows,
        max_tokens=max_tokens,
        packed=packing.is_enabled(model),
    )
    scores = torch.empty(len(rollout), device=device)
    for rows in track_progress("score: micro-batch", micro_batches):
        scores[rows] = pooled_scores(model, rollout.micro_batch(rows), end_token_id)
    return scores


def _require_embeddings(model: Any, rollout: Rollout) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    largest = int((rollout.ids * rollout.mask).max()) if len(rollout) else 0
    if largest >= size:
        text = f"a row to score contains the token {largest}, and the reward model has {size} embeddings"
        raise RLHFError("M06", text, hint="train the reward model from the SFT model")


def disable_dropout(model: nn.Module) -> None:
    """Set dropout to 0, so that the trained policy equals the generating one; the saved config keeps its values."""
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (is_dropout and name == "p")
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    model.eval()


def enable_gradient_checkpointing(model: Any) -> None:
    """Prepare a model for `gradient_checkpointing`. Raises ValueError if the model does not support it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def gradient_checkpointing(*models: nn.Module) -> Iterator[None]:
    """Context manager in which prepared layers recompute their activations in the backward pass.

    transformers does so only for layers in training mode, and then drops their key-value cache. So training mode is
    set only here, and only on those layers.
    """
    modules = chain.from_iterable(model.modules() for model in models)
    layers = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def in_place_embedding_gradients(*models: Any) -> Iterator[None]:
    """Context manager in which backward passes add the gradients of embeddings and heads to `.grad` in place.

    Layers of other classes than nn.Embedding and nn.Linear, and weights with gradient hooks, are left to autograd.
    """
    with ExitStack() as undo:
        for model in models:
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                weight = getattr(layer, "weight", None)
                if weight is not None and weight.requires_grad and not weight._backward_hooks:
                    _replace_forward(layer, IN_PLACE_FORWARD, undo)
        yield


def _embed(layer: nn.Embedding, ids: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or layer.max_norm is not None or layer.scale_grad_by_freq:
        return nn.Embedding.forward(layer, ids)
    embedded: Tensor = _InPlaceEmbedding.apply(layer.weight, ids, layer)
    return embedded


class _InPlaceEmbedding(torch.autograd.Function):
    """An embedding whose backward pass adds to the weight's gradient. Its output may be changed, as CTRL does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, layer: nn.Embedding) -> Tensor:
        ctx.ids = ids
        ctx.layer = layer
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layer = ctx.layer
        token_ids = ctx.ids.flatten()
        rows = gradients[0].flatten(0, -2)
        if layer.padding_idx is not None:  # not trained
            is_padding = token_ids == layer.padding_idx
            rows = rows.masked_fill(is_padding[:, None], 0)
        _accumulate(layer.weight, lambda total: _add_rows(total, token_ids, rows))
        return None, None, None


def _add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Add rows at indices, with the operator that sums duplicates in a fixed order: deterministic on each device."""
    if total.device.type == "cpu":
        total.index_add_(0, indices, rows)
    else:
        total.index_put_((indices,), rows, accumulate=True)


def _accumulate(weight: Any, add: Callable[[Tensor], Any]) -> None:
    """Add to a weight's gradient, and call its post-accumulate hooks as autograd does."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    add(weight.grad)
    hooks = weight._post_accumulate_grad_hooks or {}
    for hook in hooks.values():
        hook(weight)


@contextmanager
def float32_logits(*models: Any) -> Iterator[None]:
    """Context manager in which the models' heads give logits in float32 or wider, also for bfloat16 hidden states.

    Under autocast on a GPU each frozen head is cast once. A context within another one changes nothing.
    """
    with ExitStack() as undo:
        for model in models:
            _replace_forward(model.get_output_embeddings(), {nn.Linear: _Head}, undo)
        yield


def _replace_forward(
    layer: Any,
    forwards: Mapping[type, Callable[[Any], Callable[..., Tensor]]],
    undo: ExitStack,
) -> None:
    """Override the class's method by the one for this class of layers, unless it has been overridden."""
    new_forward = forwards.get(type(layer))
    if new_forward and "forward" not in vars(layer):
        layer.forward = new_forward(layer)
        undo.callback(delattr, layer, "forward")


class _Head:
    """Forward of an output head (V, H) with logits in float32 or wider; `in_place`: adds its gradient in place."""

    def __init__(self, layer: nn.Linear, *, in_place: bool = False):
        self.layer = layer
        self.in_place = in_place
        self.cast: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        has_gradient = torch.is_grad_enabled()
        in_place = self.in_place and hidden.requires_grad and has_gradient
        weight = self._operand(detach=in_place or not has_gradient)
        bias = self.layer.bias
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(weight.dtype)
            if weight.dtype not in (torch.bfloat16, torch.float16):
                logits = F.linear(hidden, weight, bias)
            else:
                logits = _Float32Product.apply(hidden, weight)
                if bias is not None:
                    logits = logits + bias.float()
        if in_place:
            logits.register_hook(partial(self._accumulate, hidden.detach()))
        return logits

    def _operand(self, *, detach: bool) -> Tensor:
        """Return the weight for the product: in autocast's dtype on a GPU; on a CPU float32 is as fast."""
        weight = self.layer.weight
        kind = weight.device.type
        if kind == "cpu" or not torch.is_autocast_enabled(kind):
            return weight.detach() if detach else weight
        dtype = torch.get_autocast_dtype(kind)
        if not detach:
            return weight.to(dtype)
        if self.cast is None:
            self.cast = weight.detach().to(dtype)
        return self.cast

    def _accumulate(self, hidden: Tensor, gradient: Tensor) -> None:
        left = gradient.flatten(0, -2).t().to(hidden.dtype)
        right = hidden.flatten(0, -2)
        weight = self.layer.weight
        if hidden.dtype == weight.dtype:
            _accumulate(weight, lambda total: total.addmm_(left, right))
        else:
            _accumulate(weight, lambda total: total.add_(left @ right))


class _Float32Product(torch.autograd.Function):
    """Hidden states (..., H) times the transposed weight (V, H), both in half precision: (..., V) float32.

    The gradients are products in half precision, as under autocast.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cpu":
            return hidden.float() @ weight.float().t()
        product = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return product.unflatten(0, hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        to_hidden = None
        to_weight = None
        if ctx.needs_input_grad[0]:
            to_hidden = gradient @ weight
        if ctx.needs_input_grad[1]:
            to_weight = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
        return to_hidden, to_weight


IN_PLACE_FORWARD: dict[type, Callable[[Any], Callable[..., Tensor]]] = {
    nn.Embedding: lambda layer: partial(_embed, layer),
    nn.Linear: partial(_Head, in_place=True),
}
