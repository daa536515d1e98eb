"""Packed rows: the gradients of padded ones, without padding; and the models that are padded."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch.nn import functional as F

from rlhf_cli.models import forward, lora, packing
from rlhf_cli.models.batch import Rollout
from tests.ppo.test_fast_paths import CPU, EXACT, HYBRIDS, difference, gradients

SDPA = [family for family in tiny.FAMILIES if family != "gemma2"]  # gemma2 caps its attention's scores: eager


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        *({"family": family} for family in SDPA),
        {"head": True},
        {"gradient_checkpointing": True},
        {"kl_in": "loss", "kl_estimator": "full"},
    ],
)
def test_packed_rows_give_the_gradient_of_padded_ones(changes):
    packed, padded = (gradients(packing=packing, **changes, **EXACT) for packing in (True, False))
    assert difference(packed, padded) <= 1e-12
    packed, padded = (gradients(packing=packing, **changes) for packing in (True, False))
    assert difference(packed, padded) <= 1e-5


in_one_batch = packing.PackedRows.on_accelerator


def varlen_attn(query, key, value, ends, key_ends, width, key_width, *, scale, window_size, enable_gqa=False):
    """What torch's kernel for CUDA computes, row by row."""
    assert ends is key_ends and width == key_width == packing.WIDTH_MULTIPLE and window_size == (-1, 0) and enable_gqa
    assert query.dtype == key.dtype == value.dtype and ends.dtype == torch.int32
    rows = []
    for start, end in pairwise(ends.tolist()):
        q, k, v = (each[None, start:end].transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows.append(attended[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_by_the_variable_length_kernel_give_the_gradient_of_rows_by_length(family, monkeypatch):
    by_length, calls = gradients(family=family, **EXACT), []
    monkeypatch.setattr(packing.PackedRows, "from_lengths", in_one_batch)
    monkeypatch.setattr(packing, "_takes_varlen_kernel", lambda rows, *_: rows.mask is None)
    monkeypatch.setattr(packing, "varlen_attn", lambda *args, **kwargs: calls.append(1) or varlen_attn(*args, **kwargs))
    assert difference(gradients(family=family, **EXACT), by_length) <= 1e-12 and calls


def test_the_variable_length_kernel_takes_causal_rows_in_half_precision_on_cuda():
    rows = in_one_batch([3, 2], CPU)
    query = SimpleNamespace(is_cuda=True, shape=(1, 4, 5, 64), dtype=torch.bfloat16, device=CPU)
    taken = partial(packing._takes_varlen_kernel, options={})
    assert taken(rows, query, query, query)
    for changes in ({"is_cuda": False}, {"shape": (1, 4, 5, 60)}, {"shape": (1, 4, 5, 264)}, {"dtype": torch.float32}):
        other = SimpleNamespace(**{**vars(query), **changes})
        assert not taken(rows, other, other, other), changes
    assert not taken(replace(rows, mask=torch.ones(1, 1, 3, 3, dtype=torch.bool)), query, query, query)
    assert not taken(rows, query, query, query, options={"softcap": 30.0})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert taken(rows, SimpleNamespace(**{**vars(query), "dtype": torch.float32}), query, query)


def test_a_token_step_on_cuda_attends_as_sdpa_without_copies_of_keys():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)
    mask = torch.rand(3, 1, 1, 6) < 0.7
    mask[..., 0] = True
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    expected, _ = packing.sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert torch.allclose(packing._attend_to_cache(query, key, value, mask, {"scaling": 0.3}), expected, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_in_one_batch_give_the_gradient_of_rows_by_length(family, monkeypatch):
    """How rows are attended to on an accelerator, and on a CPU."""
    by_length = gradients(family=family, **EXACT)
    monkeypatch.setattr(packing.PackedRows, "from_lengths", in_one_batch)
    assert difference(gradients(family=family, **EXACT), by_length) <= 1e-12


def test_a_cpu_attends_to_no_padding_which_repeats_the_tokens_of_its_row():
    """No token is read by many cells: on a GPU their gradients would be added at one address, one after the other."""
    lengths = [7, 7, 5, 7, 3]
    rows = packing.PackedRows.from_lengths(lengths, CPU)
    assert [(list(one.lengths), one.width) for one in rows.batches] == [([7, 7], 7), ([5], 5), ([7], 7), ([3], 3)]
    assert rows.width == 7 and all(one.source_index is None for one in rows.batches)
    assert in_one_batch([4, 4], CPU).batches[0].source_index is None, "no padding, no copy"
    batch = in_one_batch([5, 2, 4], CPU).batches[0]
    assert batch.source_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 7, 8, 9, 10, 7]
    assert batch.source_index[batch.cell_index].tolist() == list(range(11))


@pytest.mark.parametrize("packed", [True, False])
def test_no_padding_goes_through_the_models(packed, monkeypatch):
    trainer = tiny.trainer(packing=packed)
    shapes = tiny.spy_on_shapes(monkeypatch)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    passed = sum(rows * width for rows, width in shapes)
    needed = int(tiny.rollout().mask.sum()) - 4  # the last token of each of the four rows predicts nothing
    assert (passed == 3 * needed) is packed, "policy, value and reference"
    assert passed == 3 * (experience.forward_tokens - 4)
    assert trainer.update(experience)["tokens/padded"] == experience.forward_tokens


def test_a_window_narrower_than_a_row_is_kept():
    """Mistral here attends to 4 tokens; a packed row of 9 must not attend to more."""
    model, rows = tiny.causal("mistral"), Rollout.from_lists([[5, 6, 7, 3], [8]], [[3, 4, 9, 7, 2], [9, 2]])
    micro = rows.micro_batch(torch.arange(2))
    expected = forward.response_logits(model, micro)
    wide = forward.response_logits(tiny.causal("mistral", sliding_window=64), micro)
    assert packing.enable([model])
    torch.testing.assert_close(forward.response_logits(model, micro), expected, atol=1e-5, rtol=1e-5)
    assert (wide - expected).abs().max() > 1e-2


def test_a_model_without_sdpa_attention_is_padded():
    trainer = tiny.trainer(family="gemma2", policy_seed=3)
    assert not trainer.model_runner.packed and trainer.policy.config._attn_implementation == "eager"
    assert trainer.step(tiny.prompts())["policy/first_ratio_error"] == 0.0


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_with_convolutions_or_recurrences_is_padded(family, monkeypatch):
    """With initial weights so small that a trial at 2% of the norm finds no leak from row to row."""
    model = tiny.causal(family, initializer_range=0.02, **HYBRIDS[family])
    assert not packing.enable([model]) and model.config._attn_implementation == "sdpa"
    assert not packing._attends_only(model)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_attends_only", lambda model: True)
        assert not packing.enable([model]) or family == "lfm2", "its leak is below the tolerance of the trial, too"
    monkeypatch.setattr(packing, "ATTENTION_LAYERS", {"full_attention", "linear_attention", "conv", "hybrid"})
    assert packing._attends_only(model) is (family == "minimax"), "the others have convolutions"


def test_a_causal_lm_that_is_its_own_base_model_is_packed():
    """Llama 4's text model has no attribute of the name of its base model prefix."""
    model = tiny.causal("llama4_text", num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=4)
    micro = tiny.rollout().micro_batch(torch.arange(4))
    assert model.base_model is model
    rows = zip(tiny.QUERIES, tiny.RESPONSES, strict=True)
    whole = [model(torch.tensor([query + answer])).logits[0, len(query) - 1 : -1] for query, answer in rows]
    for _ in range(2):
        torch.testing.assert_close(forward.response_logits(model, micro), torch.cat(whole), atol=1e-5, rtol=1e-5)
        assert packing.enable([model])
    names = {name for _, name, _ in lora.linear_layers(model)}
    assert "q_proj" in names and "lm_head" not in names


def test_a_model_that_mixes_rows_is_detected_and_padded(monkeypatch):
    """A family that would drop our mask: tokens of all rows attend to one another."""

    def careless(module, query, key, value, attention_mask, **options):
        return packing.sdpa_attention_forward(module, query, key, value, None, **options)

    with monkeypatch.context() as patch:
        patch.setitem(packing.AttentionInterface._global_mapping, packing.ATTN_IMPLEMENTATION, careless)
        trainer = tiny.trainer()
    assert not trainer.model_runner.packed
    assert {m.config._attn_implementation for m in (trainer.policy, trainer.ref, trainer.value)} == {"sdpa"}


def test_packing_is_not_saved(tmp_path):
    trainer = tiny.trainer()
    trainer.policy.save_pretrained(tmp_path)
    assert packing.ATTN_IMPLEMENTATION not in (tmp_path / "config.json").read_text()
