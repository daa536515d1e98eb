"""A model's embeddings beside the ids of a tokenizer."""

from typing import Any

from rlhf_cli.errors import RLHFError


def check_vocabulary(model: Any, tokenizer: Any, where: str | None = None) -> None:
    """Raises RLHFError M06 where the tokenizer knows ids that the model has no embedding for."""
    check_ids(model.get_input_embeddings().weight.shape[0], tokenizer, where)


def check_ids(rows: int, tokenizer: Any, where: str | None) -> None:
    """`check_vocabulary` for a model of so many embeddings."""
    if (largest := max(tokenizer.get_vocab().values())) >= rows:
        raise RLHFError(
            "M06",
            f"the tokenizer has ids up to {largest}, the model {rows} embeddings",
            where=where,
            hint="use the tokenizer that belongs to the model",
        )


def fit_embeddings(model: Any, tokenizer: Any) -> None:
    """Grow the embeddings to tokens that were added; a new row starts near the average one: no logit stands out."""
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
