"""New models from the fields of a config."""

from typing import Any

import pytest
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build
from tests.conftest import SIZES


def test_new_weights_get_vocabulary_and_special_tokens_from_the_tokenizer(tokenizer: Any) -> None:
    model = build.new_causal_lm({**SIZES, "model_type": "qwen2"}, tokenizer)
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.pad_token_id, model.config.eos_token_id) == (len(tokenizer), 0, 1)


@pytest.mark.parametrize(
    ("fields", "code", "hint"),
    [
        ({"model_type": "lama"}, "C07", "did you mean llama?"),
        ({"hiden_size": 32}, "C01", "did you mean hidden_size?"),
        ({"vocab_size": 99}, "C17", "remove the line"),
    ],
)
def test_invalid_fields_of_a_new_model(tokenizer: Any, fields: dict[str, Any], code: str, hint: str) -> None:
    with pytest.raises(RLHFError) as error:
        build.new_causal_lm(fields, tokenizer)
    assert error.value.problems[0].code == code and hint in str(error.value)
