"""Logits, scores and values agree with the plain full forward, for every family."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_cli import terminal
from rlhf_cli.models import build, forward, save
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.common.scoring import warn_pad_is_end_token
from rlhf_cli.stages.reward import scores as reward_scores
from tests.reference.scores import model_scores

QUERIES, RESPONSES = [[5, 6, 7], [8], [9, 4, 5, 6]], [[3, 4, 2], [7, 8, 9, 10, 2], [2]]
ROLLOUT = Rollout.from_lists(QUERIES, RESPONSES)
ENDED = [[3, 4, tiny.EOS], [9, tiny.EOS], [tiny.EOS]]


def full_logits(model) -> list[torch.Tensor]:
    """The logits of each row, without any padding."""
    rows = zip(QUERIES, RESPONSES, strict=True)
    return [model(input_ids=torch.tensor([query + response])).logits[0].detach() for query, response in rows]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_response_logits_are_the_full_forwards(family):
    model, micro = tiny.causal(family), ROLLOUT.micro_batch(torch.tensor([2, 0, 1]))
    logits = forward.response_logits(model, micro)
    for row, full in enumerate(full_logits(model)):
        close(logits[micro.rows[micro.row_index] == row], full[len(QUERIES[row]) - 1 : -1])
    assert micro.response_ids.tolist() == [2, 3, 4, 2, 7, 8, 9, 10, 2]
    assert family != "gemma2" or logits.abs().max() <= 3.0, "soft-capping applies"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scores_are_the_pooled_ones(family):
    model = tiny.scorer(family)
    close(forward.rollout_scores(model, ROLLOUT, max_rows=2), torch.cat(full_logits(model)))


def test_a_foreign_scorer_whose_pad_is_its_eos_is_read_as_transformers_pools_it():
    """transformers reads the last token that is not padding: with pad == eos, the one before the EOS."""
    model = tiny.scorer(pad_token_id=tiny.EOS)
    pooled = torch.cat(full_logits(model))
    close(forward.rollout_scores(model, ROLLOUT, max_rows=3), pooled)
    assert (forward.rollout_scores(tiny.scorer(), ROLLOUT, max_rows=3) - pooled).abs().min() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_end_token_gets_the_score_of_the_pairs_own(family, packed):
    """Also if it is the pad token. A row that was cut off is read at its last token, whatever that is."""
    model, ends = tiny.scorer(family), (tiny.EOS, tiny.PAD)
    rows = [[3, 4, tiny.PAD], [7, 8, 9, tiny.EOS], [tiny.PAD], [5, 6]]
    ended_alike = [[3, 4, tiny.EOS], [7, 8, 9, tiny.EOS], [tiny.EOS], [5, 6]]
    queries = [*QUERIES, [8, 9]]
    expected = last_scores(model, queries, ended_alike)
    rollout = Rollout.from_lists(queries, rows)
    close(ModelReward(model, 2, packed=packed, end_token_ids=ends)(rollout), expected)
    assert [rollout.response_tokens(row) for row in range(4)] == rows, "the policy trains on its own tokens"
    cut_off = ModelReward(model, 2, packed=packed, end_token_ids=(tiny.EOS,))
    close(cut_off(rollout), last_scores(model, queries, rows))
    close(torch.tensor(model_scores(model, ends, (), queries, rows)), expected)
    close(torch.tensor(model_scores(model, ends[:1], (), queries, rows)), last_scores(model, queries, rows))


def last_scores(model, queries, responses) -> torch.Tensor:
    """The score of the last token of each row, without any padding or pooling."""
    rows = [torch.tensor([query + response]) for query, response in zip(queries, responses, strict=True)]
    states = [model.base_model(input_ids=row, use_cache=False).last_hidden_state[0, -1] for row in rows]
    return torch.cat([model.score(state) for state in states]).detach()


@pytest.mark.parametrize("packed", [True, False])
def test_a_foreign_scorer_whose_pad_is_its_eos_gives_every_end_token_its_own_score(packed):
    model, other = tiny.scorer(pad_token_id=tiny.EOS), 7
    rows = [[other if token == tiny.EOS else token for token in row] for row in ENDED]
    pooled = torch.cat([model(input_ids=torch.tensor([q + r])).logits[0] for q, r in zip(QUERIES, ENDED, strict=True)])
    source = ModelReward(model, 2, packed=packed, end_token_ids=(tiny.EOS, other))
    close(source(Rollout.from_lists(QUERIES, rows)), pooled.detach())
    close(torch.tensor(model_scores(model, (tiny.EOS, other), (), QUERIES, rows)), pooled.detach())


def test_a_composite_model_has_its_pad_token_in_its_text_config(tmp_path):
    """Gemma 3 of 4B parameters and more: a vision tower, and no pad_token_id in the outer config."""
    text = tiny.config("gemma3_text", num_key_value_heads=2, head_dim=8).to_dict()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(build.one_label(config)).eval()
    assert not hasattr(model.config, "pad_token_id")
    padded = Rollout.from_lists(QUERIES, [[*row, 7] for row in RESPONSES])
    save.set_special_token_ids(model, SimpleNamespace(pad_token_id=7), 2)
    save.save_config(model, tmp_path)
    model.config = AutoConfig.from_pretrained(tmp_path)
    assert build.pad_token_id(model.config) == 7
    pooled, rows = torch.cat(full_logits(model)), [q + r for q, r in zip(QUERIES, RESPONSES, strict=True)]
    for rollout in (ROLLOUT, padded):
        close(forward.rollout_scores(model, rollout, max_rows=2), pooled)
    close(torch.tensor(reward_scores.raw_scores(model, rows, 2)), pooled)
    warn_pad_is_end_token(model.config, (7,), "reward")
    assert "T01" in terminal.emitted_warnings()[0]


def test_values_end_where_the_score_begins():
    """The value before token t reads the state that predicts it; the score reads the state at the last token."""
    model, longer = tiny.scorer(), Rollout.from_lists(QUERIES, [[*row, 3] for row in RESPONSES])
    model.config.reward_length_slope, model.config.reward_length_mean = 0.25, 3.0
    micro = longer.micro_batch(torch.arange(3))
    last = torch.cat([micro.row_index[1:] != micro.row_index[:-1], torch.tensor([True])])
    close(forward.response_values(model, micro)[last], forward.rollout_scores(model, ROLLOUT, max_rows=3))


@pytest.mark.parametrize("read", [forward.pooled_scores, forward.response_values])
def test_every_reader_shifts_and_scales(read):
    model, micro = tiny.scorer(), ROLLOUT.micro_batch(torch.arange(3))
    raw = read(model, micro)
    model.config.reward_mean, model.config.reward_std = 2.0, 0.5
    close(read(model, micro), (raw - 2.0) / 0.5)


LENGTHS = {forward.pooled_scores: [3, 5, 1], forward.response_values: [0, 1, 2, 0, 1, 2, 3, 4, 0]}


@pytest.mark.parametrize("read", LENGTHS)
def test_every_reader_subtracts_the_slope_of_the_length(read):
    """Of the answer, not of the row; a value is that of the answer so far."""
    model, micro = tiny.scorer(), ROLLOUT.micro_batch(torch.arange(3))
    raw = read(model, micro)
    model.config.reward_mean, model.config.reward_std = 2.0, 0.5
    model.config.reward_length_slope, model.config.reward_length_mean = 0.25, 3.0
    longer = torch.tensor([length - 3.0 for length in LENGTHS[read]])
    close(read(model, micro), (raw - 0.25 * longer - 2.0) / 0.5)


@pytest.mark.parametrize("options", [{"packed": False}, {"max_tokens": 8}, {"offloaded": True}])
def test_every_way_to_score_subtracts_the_slope(options):
    """Padded, packed, in small micro-batches or from CPU memory, of a rollout whose prompts are padded on the left."""
    model = tiny.scorer()
    raw = ModelReward(model, 64)(ROLLOUT)
    model.config.reward_length_slope, model.config.reward_length_mean = 0.25, 3.0
    close(ModelReward(model, 2, **options)(ROLLOUT), raw - 0.25 * torch.tensor([0.0, 2.0, -2.0]))


@pytest.mark.parametrize("family,key", [("llama", "attention_dropout"), ("gpt2", "resid_pdrop"), ("opt", "dropout")])
def test_dropout_is_off_even_in_training_mode(family, key):
    model, ids = tiny.causal(family, **{key: 0.5}), torch.tensor([[5, 6, 7, 8]])
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    forward.disable_dropout(model)
    model.train()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert model.config.to_dict()[key] == 0.5, "the saved config keeps the dropout"


def test_gradient_checkpointing_is_on_only_inside_its_context():
    model = tiny.causal()
    forward.enable_gradient_checkpointing(model)
    with forward.gradient_checkpointing(model):
        layers = model.model.layers
        assert [layer.training for layer in layers] == [True, True] and not layers[0].mlp.training
    assert not any(module.training for module in model.modules())


# Logits in float32


@pytest.mark.parametrize("in_place", [False, True])
def test_logits_and_gradients_of_a_bfloat16_head(in_place):
    model, hidden = tiny.causal().bfloat16(), 8 * torch.randn(3, tiny.causal().config.hidden_size).bfloat16()
    weight = model.get_output_embeddings().weight
    inputs = [hidden.double().requires_grad_(), weight.detach().double().requires_grad_()]
    exact = inputs[0] @ inputs[1].t()
    exact.square().sum().backward()
    hidden.requires_grad_()
    with forward.in_place_embedding_gradients(model) if in_place else nullcontext():
        logits = forward.lm_head_logits(model, hidden)
        logits.square().sum().backward()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    for half, wide in zip((hidden, weight), inputs, strict=True):
        assert (half.grad.double() - wide.grad).norm() <= 2e-2 * wide.grad.norm()


def test_autocast_leaves_the_head_of_float32_weights_in_float32():
    model, hidden = tiny.causal(), 8 * torch.randn(3, tiny.causal().config.hidden_size)
    plain = hidden @ model.get_output_embeddings().weight.t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(forward.lm_head_logits(model, hidden), plain)
    assert "forward" not in vars(model.get_output_embeddings())
