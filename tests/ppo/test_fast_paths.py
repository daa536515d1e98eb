"""Every fast path of PPO gives the numbers of the plain one, does less work, and can be switched off by its key.

The keys: packing, logits_at_a_time, optim, models.compile, and an engine's `compact_batch`.

Modules: `models/compiled.py`, `models/packing.py`, `ppo/fused_logprobs.py`, `ppo/forward_backward.py`.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models import compiled, forward, lora, packing
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo import fused_logprobs, rollout
from rlhf_cli.ppo.forward_backward import logprobs_and_entropy
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine, gumbel_sample, log_exponential, row_keys, token_counters
from tests.reference.sampling import exponential

PLAIN = {"packing": False, "logits_at_a_time": "all", "optim": "adamw_torch"}
SDPA = [family for family in tiny.FAMILIES if family != "gemma2"]  # gemma2 caps its attention's scores: eager
EXACT = {"dtype": torch.float64, "max_grad_norm": 1e9}
HYBRIDS = {
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "falcon_h1": {
        "num_key_value_heads": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
    },
    "minimax": {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def gradients(**changes) -> torch.Tensor:
    return tiny.gradient(*tiny.trainer_and_experience(**changes))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_all_fast_paths_are_on_by_default_and_agree_with_the_plain_ones():
    trainer, stats = tiny.one_step(learning_rate=1e-4)
    plain, expected = tiny.one_step(learning_rate=1e-4, **PLAIN)
    assert trainer.model_runner.packed and not plain.model_runner.packed
    for name in stats.keys() - {"tokens/padded"}:
        assert stats[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for one, other in ((trainer.policy, plain.policy), (trainer.value, plain.value)):
        assert (tiny.weights(one) - tiny.weights(other)).abs().max() <= 0.1 * 1e-4


# packing


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


# compiled layers


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"gradient_checkpointing": True, "entropy_coef": 0.1}, marks=pytest.mark.slow)]
)
def test_compiled_layers_train_as_plain_ones_and_the_first_ratio_is_1(changes, compiled_without_code):
    plain, trainer = (tiny.trainer(family="qwen2", **changes) for _ in range(2))
    trainer.engine.compiles = True
    for model in (*trainer.model_runner.trained_backbones, trainer.ref, trainer.rewards["reward"].model):
        compiled.enable(model)
    for _ in range(2):
        expected, stats = (each.step(tiny.prompts()) for each in (plain, trainer))
        for name in stats.keys() - {"tokens_per_s", *(name for name in stats if name.startswith("time/"))}:
            assert stats[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
        assert stats["policy/first_ratio_error"] == 0
    assert compiled_without_code == {"_layer_forward", "logprobs_and_entropy", "logits_gradient", "sample"}
    assert "forward" not in vars(trainer.policy.model.layers[0]), "rollouts and checkpoints see the plain layers"


@pytest.mark.full
def test_a_compiled_token_step_draws_the_same_tokens_by_one_function_for_all_layers_and_batches(compiled_without_code):
    policy = tiny.causal("qwen2", num_hidden_layers=4)
    packing.enable([policy])
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()

    for rows in (8, 3, 5):
        prompts = replace(tiny.prompts(rows), seeds=tuple(range(rows)), response_length=20)
        plain = GraphEngine(policy, 5, 0, bf16=False).generate(prompts)
        fast = GraphEngine(policy, 5, 0, bf16=False, compiles=True).generate(prompts)
        assert torch.equal(plain.ids, fast.ids)
        assert torch.allclose(plain.logprobs, fast.logprobs, atol=1e-5)

    assert "_layer_forward" in compiled_without_code
    assert counters["unique_graphs"] <= 2 + 2, "of the layers and of sampling: for the first batch, and for any other"
    assert "forward" not in vars(policy.model.layers[0])


@pytest.mark.full
def test_a_compiled_token_step_keeps_the_cache_in_bfloat16_beside_weights_in_float32(compiled_without_code):
    """As with adapters on a GPU, where the engine samples from the policy itself."""
    policy = tiny.causal("llama")
    packing.enable([policy])
    prompts = replace(tiny.prompts(4), seeds=tuple(range(4)), response_length=6)
    plain = GraphEngine(policy, None, 0, bf16=True).generate(prompts)
    fast = GraphEngine(policy, None, 0, bf16=True, compiles=True).generate(prompts)
    assert torch.equal(plain.ids, fast.ids)
    assert torch.allclose(plain.logprobs, fast.logprobs, atol=0.02)


@pytest.fixture
def compiled_without_code(monkeypatch):
    """Compile by tracing alone, which takes a second and not a minute; return the names of what is compiled."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    made, names = compiled.compiled.__wrapped__, set()
    cached = cache(made)

    def recorded(function):
        names.add(function.__name__)
        return cached(function)

    for module in (compiled, fused_logprobs, rollout):
        monkeypatch.setattr(module, "compiled", recorded)
    return names


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_log_probs_have_the_values_and_gradients_of_the_plain_ones(temperature, monkeypatch):
    """Also for a word that is masked out, whose logit is minus infinity."""
    monkeypatch.setattr(fused_logprobs, "compiled", lambda function: function)
    torch.manual_seed(0)
    logits, ids = 5 * torch.randn(6, 11, dtype=torch.float64), torch.tensor([0, 3, 10, 7, 7, 2])
    logits[2, 5] = -torch.inf
    weights, results = 0.1 * torch.randn(2, 6, dtype=torch.float64), []
    settings = tiny.settings(temperature=temperature, entropy_coef=0.1)
    for each in (logprobs_and_entropy, fused_logprobs.fused_logprobs_and_entropy):
        leaf = logits.clone().requires_grad_()
        values = each(leaf, ids, settings if each is logprobs_and_entropy else temperature)
        (weights[0] * values[0] + weights[1] * values[1]).sum().backward()
        results.append([*values, leaf.grad])
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-12) and fused.isfinite().all()


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


# logits_at_a_time


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3, 7, "auto"])
@pytest.mark.parametrize(
    "changes", [{}, {"head": True}, {"entropy_coef": 0.3}, {"kl_in": "loss", "kl_estimator": "k3"}]
)
def test_the_gradient_does_not_depend_on_logits_at_a_time(size, changes):
    found = gradients(logits_at_a_time=size, **changes, **EXACT)
    assert difference(found, gradients(logits_at_a_time="all", **changes, **EXACT)) <= 1e-12


def test_logits_at_a_time_bounds_them(monkeypatch):
    sizes, plain = [], forward.lm_head_logits
    monkeypatch.setattr(
        forward, "lm_head_logits", lambda model, hidden: (sizes.append(len(hidden)), plain(model, hidden))[1]
    )
    for size, most in ((3, 3), ("all", 11)):
        sizes.clear()
        trainer, experience = tiny.trainer_and_experience(
            logits_at_a_time=size, ptx_coef=1.0, ptx=[([5, 6], [7, 8, 2]), ([9], [10, 2])]
        )
        trainer.update(experience)
        assert max(sizes) == most
    trainer = tiny.trainer()
    assert trainer.model_runner.logit_chunks(10**6)[0].stop == 2**20 // tiny.VOCABULARY
    monkeypatch.setattr(trainer.policy.config, "vocab_size", 2**19)
    assert trainer.model_runner.logit_chunks(1000)[0].stop == 64, "smaller would be slow"


class Operations(TorchDispatchMode):
    """Records which operators run, with the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.__name__.split(".")[0], tuple(getattr(result, "shape", ()))))
        return result


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])  # gpt2's embedding and head are tied
def test_gradients_of_embedding_and_head_are_added_in_place(family):
    """With logits_at_a_time, autograd creates no matrix of the vocabulary's size; the numbers are its own."""
    gradient, large = {}, {}
    for size in ("all", 3):
        trainer, experience = tiny.trainer_and_experience(logits_at_a_time=size, family=family, **EXACT)
        with Operations() as operations:
            gradient[size] = tiny.gradient(trainer, experience)
        shape = tuple(trainer.policy.get_input_embeddings().weight.shape)
        large[size] = {name for name, of in operations.calls if of == shape}
        large[size] &= {"embedding_dense_backward", "mm", "add_"}
    assert large["all"] >= {"embedding_dense_backward", "mm"} and not large[3]
    assert difference(gradient[3], gradient["all"]) <= 1e-12


@pytest.mark.full
def test_gradients_in_place_are_those_of_autograd():
    """With a pad token, a bias of the head, repeated tokens, two calls that add up; and none without grad mode."""
    torch.manual_seed(0)
    ids = torch.tensor([[3, 1, 3], [0, 2, 3]])

    def run(*, in_place: bool) -> list[torch.Tensor]:
        model = tiny.causal(seed=5).double()
        embedding, head = torch.nn.Embedding(7, 4, padding_idx=1), torch.nn.Linear(4, 7)
        with torch.no_grad():
            for number, weight in enumerate([embedding.weight, head.weight, head.bias]):
                weight.copy_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape) * (number + 1))
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(head)
        with forward.in_place_embedding_gradients(model) if in_place else nullcontext():
            for _ in range(2):
                model.get_output_embeddings()(model.get_input_embeddings()(ids)).square().sum().backward()
            with torch.no_grad():
                assert not model.get_input_embeddings()(ids).requires_grad
        assert "forward" not in vars(embedding) and "forward" not in vars(head)
        return [embedding.weight.grad, head.weight.grad, head.bias.grad]

    for one, other in zip(run(in_place=True), run(in_place=False), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    in_place, plain = (gradients(bf16=True, logits_at_a_time=size) for size in ("auto", "all"))
    assert difference(in_place, plain) <= 2e-2 < difference(in_place, gradients())


def test_an_embedding_that_the_model_changes_in_place_has_the_gradient_of_autograd():
    """As CTRL, which multiplies it by the root of its width."""
    gradients_of = []
    for in_place in (True, False):
        embedding = tiny.causal().get_input_embeddings()
        model = tiny.causal()
        model.set_input_embeddings(embedding)
        with forward.in_place_embedding_gradients(model) if in_place else nullcontext():
            embedded = model.get_input_embeddings()(torch.tensor([[3, 4, 3]]))
            embedded *= 3.0
            embedded.square().sum().backward()
        gradients_of.append(embedding.weight.grad)
    torch.testing.assert_close(*gradients_of)


def test_a_gradient_with_a_hook_is_autograds():
    model, calls = tiny.causal(), []
    model.get_input_embeddings().weight.register_hook(calls.append)
    with forward.in_place_embedding_gradients(model):
        assert "forward" not in vars(model.get_input_embeddings())
        model(torch.tensor([[3, 4]])).logits.sum().backward()
    assert len(calls) == 1


# optim


def test_both_optimizers_make_the_same_steps():
    trainer = {name: tiny.one_step(optim=name, learning_rate=1e-3)[0] for name in ("adamw_torch_fused", "adamw_torch")}
    assert [trainer.optimizer.defaults["fused"] for trainer in trainer.values()] == [True, False]
    one, other = (torch.cat([tiny.weights(t.policy), tiny.weights(t.value)]) for t in trainer.values())
    assert (one - other).abs().max() <= 1e-6 and (one - tiny.weights(trainer["adamw_torch"].ref).new_zeros(1)).any()


# compact_batch


def engine(family: str = "llama", *, compact_batch: bool) -> HFEngine:
    model = tiny.causal(family, **HYBRIDS.get(family, {}))
    return HFEngine(model, tiny.EOS, tiny.PAD, compact_batch=compact_batch)


def prompts(queries: list[list[int]], length: int = 12) -> Prompts:
    return replace(Prompts.from_lists(queries), seeds=tuple(seeds_of(len(queries))), response_length=length)


@pytest.mark.full
@pytest.mark.parametrize("family", [*tiny.FAMILIES, "lfm2", "falcon_h1"])
def test_a_compact_batch_engine_samples_what_the_plain_one_samples(family):
    queries = [[5, 6]] * 3 + [[7]] * 2 + [[8, 9, 4]] + [[5, 6]] * 2 + [[7, 7, 7, 7]] * 4
    one, other = (engine(family, compact_batch=compact).generate(prompts(queries)) for compact in (True, False))
    assert torch.equal(one.ids, other.ids) and torch.equal(one.ended, other.ended)


@pytest.mark.parametrize("compact", [True, False])
def test_a_compact_batch_engine_reads_a_prompt_once_and_drops_finished_rows(compact, monkeypatch):
    body, sizes = type(tiny.causal().model), []
    plain = body.forward

    def spy(model, input_ids, **others):
        sizes.append(len(input_ids))
        return plain(model, input_ids=input_ids, **others)

    subject = engine(compact_batch=compact)
    subject.generate(prompts([[5, 6]], length=1))  # tries its cache
    monkeypatch.setattr(body, "forward", spy)
    subject.generate(prompts([[5, 6]] * 16 + [[7, 8]] * 16, length=20))
    assert sizes[0] == (2 if compact else 32) and sizes[1] == 32 and (sizes[-1] < 32) is compact


# Noise


CPU = torch.device("cpu")


def seeds_of(rows: int, seed: int = 0, step: int = 0) -> list[int]:
    return [derive_seed(seed, "sample", step, row) for row in range(rows)]


def test_noise_is_the_plain_arithmetic_of_seed_step_and_token():
    seeds = [*seeds_of(4, step=3), 0, 2**63 - 1, 2**31, 2**32]
    keys, counters = row_keys(seeds, CPU), token_counters(50, CPU)
    for step in (0, 1, 52):
        noise = log_exponential(keys, step, counters).double()
        expected = torch.stack([exponential(seed, step, 50).log().double() for seed in seeds])
        torch.testing.assert_close(noise, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.full
def test_rare_tokens_are_drawn_as_often_as_they_should_be():
    """Beyond the resolution of 24 bits: a token of probability 1e-6 besides a likely one, in 2 x 10^7 draws."""
    keys, counters = row_keys(seeds_of(20000, seed=1), CPU), token_counters(2, CPU)
    logits = torch.tensor([[0.0, -13.815511]]).expand(20000, 2)
    hits = sum(int(gumbel_sample(logits, keys, step, counters).sum()) for step in range(1000))
    assert 4 <= hits <= 40  # 20 expected


@pytest.mark.parametrize("kind", ["consecutive", "derived"])
def test_rows_and_steps_draw_independently(kind):
    """A token of probability 1/5 among 512, 1500 rows, 20 steps: hits vary over steps, and over rows, like coin tosses.

    With consecutive seeds, too: a weaker hash had 3 times and more the variance over steps.
    """
    rows, steps, chance = 1500, 20, 0.2
    keys = row_keys(list(range(rows)) if kind == "consecutive" else seeds_of(rows, seed=7), CPU)
    logits = torch.zeros(rows, 512).index_fill(1, torch.tensor([1]), math.log(511 * chance / (1 - chance)))
    counters = token_counters(512, CPU)
    hits = torch.stack([gumbel_sample(logits, keys, step, counters) == 1 for step in range(steps)]).double()
    variance = chance * (1 - chance)
    assert abs(hits.mean() - chance) < 4 * math.sqrt(variance / hits.numel())
    assert 0.3 < hits.mean(1).var() / (variance / rows) < 2.2
    assert 0.85 < hits.sum(0).var() / (variance * steps) < 1.15


def test_chunks_change_no_draw(monkeypatch):
    keys, counters = row_keys(list(range(9)), CPU), token_counters(100, CPU)
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(0))
    whole = gumbel_sample(logits, keys, 5, counters)
    monkeypatch.setattr(rollout, "NOISE_CHUNK_ELEMENTS_CPU", 250)
    assert torch.equal(gumbel_sample(logits, keys, 5, counters), whole)
