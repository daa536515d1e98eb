"""Every fast path of PPO gives the numbers of the plain one, does less work, and can be switched off by its key.

The keys: logits_at_a_time, optim, and an engine's `compact_batch`; tests/models/ has packing and compiled layers.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models import forward
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo import rollout
from rlhf_cli.ppo.rollout import HFEngine, gumbel_sample, log_exponential, row_keys, token_counters
from tests.reference.sampling import exponential

PLAIN = {"packing": False, "logits_at_a_time": "all", "optim": "adamw_torch"}
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


# logits_at_a_time


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
