"""Trial of a model's batches: the rows of a batch must get the outputs that each row gets alone.

Some families break this. A recurrent state or a sparse indexer reads the padding beside a row, a model that was built
as an encoder reads what follows a token, a cache is of another kind than the one passed to it. The trial computes a
short row alone, and again beside a longer one: as training does, and as generation does.

The difference of the outputs is a share of the row's own, which does not depend on the scale of untrained weights. Over
the families of transformers 5.23 with float32 weights, those that agree differ by 5e-4 at most, and the others by 0.027
or more. In bfloat16 and 4 bits, rounding sends tokens to other experts, and families that agree differ by up to 0.6.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import system
from rlhf_cli.errors import RLHFError, short_reason
from rlhf_cli.models import build, devices, forward, load, packing
from rlhf_cli.models.batch import left_pad, right_pad
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup

LONG_ROW = 12  # tokens of the longer row
PADDING = 6  # beside the short row
ANSWER = 3
TOLERANCE = 0.01  # with float32 weights
TOLERANCE_ROUNDED = 0.75  # with rounded ones
FLOAT32_ATTENTION = ("eager", "sdpa", "flex_attention", packing.ATTN_IMPLEMENTATION)

OpenDecoder = Callable[[Tensor, Tensor], Any]  # prompt ids (B, P) and mask -> `.logits` (B, V), `.append(tokens (B,))`


def require_rows_alone(model: Any, where: str | None = None, loading: ProcessGroup = SINGLE_PROCESS) -> None:
    """Raise RLHFError M16 if a model's outputs for a right-padded row are not those for the row alone.

    `model`: a causal LM, or a classifier with a linear `score`. Of the processes `loading` only the main one tries: the
    others' models may be empty.
    """
    problem = loading.run_on_main(lambda: padding_problem(model))
    if problem:
        raise refusal(model, problem, where)


def refusal(model: Any, problem: str, where: str | None = None) -> RLHFError:
    """Return the error M16 for a model whose rows are not right in any form."""
    text = f"{model.config.model_type} models cannot be used in batches: {problem}"
    hint = "take a model of another family, or try a newer transformers"
    return RLHFError("M16", text, where=where, hint=hint)


@torch.no_grad()
def padding_problem(model: Any) -> str | None:
    """Return how a right-padded row fails or differs from the row alone, None if they agree."""
    rows, pad = probe_rows(model)
    ids, mask = (tensor.to(model.device) for tensor in right_pad(rows, pad))
    column = torch.arange(len(rows[0]), device=model.device)
    first_row = torch.zeros_like(column)
    body = model.base_model if _is_scorer(model) else build.decoder(model)

    def masked() -> Tensor:  # as TRL's trainers
        return body(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state[0, column]

    def unmasked() -> Tensor:  # as the other passes
        return packing.hidden_states_at(body, ids, mask.sum(1), row=first_row, column=column)

    for form, states in (("with a mask", masked), ("without a mask", unmasked)):
        problem = _problem(model, rows[0], 0, partial(_outputs, model, states))
        if problem:
            return f"padded on the right {form}, {problem}"
    return None


@torch.no_grad()
def generation_problem(model: Any, open_decoder: OpenDecoder) -> str | None:
    """Return how generation after a left-padded prompt fails or differs from the row alone, None if they agree."""
    rows, pad = probe_rows(model)
    prompts = [row[:-ANSWER] for row in rows]
    answers = torch.tensor([row[-ANSWER:] for row in rows], device=model.device)

    def logits() -> Tensor:
        ids, mask = left_pad(prompts, pad)
        decoder = open_decoder(ids.to(model.device), mask.to(model.device))
        steps = [decoder.logits[0]]
        for tokens in answers[:, :-1].unbind(1):
            decoder.append(tokens)
            steps.append(decoder.logits[0])
        return torch.stack(steps)

    return _problem(model, rows[0], len(prompts[0]) - 1, logits)


def probe_rows(model: Any) -> tuple[list[list[int]], int]:
    """Return a short and a long row of ids, and one for the padding; none of them special.

    Rows have twice as many tokens as a sparse indexer selects: it reads all of a short one.
    """
    config = model.config.get_text_config()
    indexed = getattr(config, "index_topk", None) or 0
    length = LONG_ROW + 2 * indexed
    context = load.context_length(model.config)
    if context is not None:
        length = min(length, context)

    settings = {**model.config.to_dict(), **config.to_dict()}
    special = {str(value) for name, value in settings.items() if name.endswith(("token_id", "token_index"))}
    all_ids = list(range(config.vocab_size))
    ids = [token for token in all_ids if str(token) not in special] or all_ids
    chosen = [ids[7 * number % len(ids)] for number in range(2 * length + 1)]

    short_row = chosen[: max(length - PADDING, ANSWER + 1)]
    long_row = chosen[length:-1]
    return [short_row, long_row], chosen[-1]


def _problem(model: Any, row: Sequence[int], start: int, compute: Callable[[], Tensor]) -> str | None:
    """Return how `compute()`, the outputs (N, D) from a row's token `start` on, fails or differs from the row alone."""
    exact = _computes_in_float32(model)
    try:
        with _evaluation(model), devices.autocast(bf16=not exact, on=model.device):
            outputs = compute().float()
            alone = _alone(model, row)
    except Exception as error:  # each family fails in its own way
        if system.is_out_of_memory(error):
            raise
        return f"a row raises {type(error).__name__}: {short_reason(error)}"

    end = start + len(outputs)
    expected = alone[start:end].float()
    own = _centred(expected)
    difference = _centred(outputs) - own
    tolerance = TOLERANCE if exact else TOLERANCE_ROUNDED
    if difference.norm() <= tolerance * own.norm():
        return None

    if _is_scorer(model):
        compared = "scores"
        unit = ""
        errors = model.score(outputs) - model.score(expected)
    else:
        compared = "log-probs"
        unit = " nats"
        targets = torch.tensor(row[start + 1 : end + 1], device=model.device)
        errors = _logprobs_of(targets, outputs) - _logprobs_of(targets, expected)
    return f"a row's {compared} differ by {float(errors.abs().max()):.2g}{unit} from the row's alone"


def _computes_in_float32(model: Any) -> bool:
    """Return True if neither weights nor attention round to half precision."""
    dtypes = {weight.dtype for weight in model.parameters()}
    return dtypes <= {torch.float32, torch.float64} and model.config._attn_implementation in FLOAT32_ATTENTION


def _centred(outputs: Tensor) -> Tensor:
    """Return outputs (N, D) less the mean of each row: a softmax reads differences only."""
    return outputs - outputs.mean(-1, keepdim=True)


def _logprobs_of(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the log-probs (n, 1) of targets (n,) by the first of the logits (N, V)."""
    return logits[: len(targets)].log_softmax(-1).gather(1, targets[:, None])


def _alone(model: Any, row: Sequence[int]) -> Tensor:
    """Return the outputs of a row alone: a scorer's hidden states (L, H), a language model's logits (L, V)."""
    ids = torch.tensor([row], device=model.device)
    if _is_scorer(model):
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return model(input_ids=ids, use_cache=False).logits[0]


def _outputs(model: Any, hidden_states: Callable[[], Tensor]) -> Tensor:
    """Return the outputs of hidden states (L, H): themselves, or a language model's logits (L, V)."""
    hidden = hidden_states()
    return hidden if _is_scorer(model) else forward.lm_head_logits(model, hidden)


def _is_scorer(model: Any) -> bool:
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


@contextmanager
def _evaluation(model: Any) -> Iterator[None]:
    """Context manager without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
