"""Every fast path of PPO gives the numbers of the plain one, does the less work that it promises, and can be switched
off by its key: packing, logits_at_a_time, optim, and an engine's `compact_batch`.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.commands.verify.reference_state import exponential
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models import forward, packing
from rlhf_cli.models.batch import Prompts, Rollout, micro_batches
from rlhf_cli.ppo import rollout
from rlhf_cli.ppo.rollout import HFEngine, gumbel_sample, log_exponential, row_keys, token_counters

PLAIN = {"packing": False, "logits_at_a_time": "all", "optim": "adamw_torch"}
SDPA = [family for family in tiny.FAMILIES if family != "gemma2"]  # gemma2 caps its attention's scores: eager
EXACT = {"dtype": torch.float64, "max_grad_norm": 1e9}


def gradients(**changes) -> torch.Tensor:
    return tiny.gradient(*tiny.judged(**changes))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_all_fast_paths_are_on_by_default_and_agree_with_the_plain_ones():
    made, stats = tiny.one_step(learning_rate=1e-4)
    plain, wanted = tiny.one_step(learning_rate=1e-4, **PLAIN)
    assert made.model_runner.packed and not plain.model_runner.packed
    for name in stats.keys() - {"tokens/padded"}:
        assert stats[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    for one, other in ((made.policy, plain.policy), (made.value, plain.value)):
        assert (tiny.weights(one) - tiny.weights(other)).abs().max() <= 0.1 * 1e-4


# packing


@pytest.mark.parametrize("family", SDPA)
def test_packed_rows_give_the_gradient_of_padded_ones(family):
    assert apart(gradients(family=family, **EXACT), gradients(family=family, packing=False, **EXACT)) <= 1e-12
    assert apart(gradients(family=family), gradients(family=family, packing=False)) <= 1e-5


def in_one_batch(lengths: list[int], device: torch.device) -> packing.PackedRows:
    return packing.PackedRows([packing.PaddedBatch.from_lengths(lengths, device)])


def test_rows_in_one_batch_give_the_gradient_of_rows_by_length(monkeypatch):
    """How rows are attended to on an accelerator, and on a CPU."""
    for family in ("llama", "mistral"):
        found = gradients(family=family, **EXACT)
        with monkeypatch.context() as patch:
            patch.setattr(packing.PackedRows, "from_lengths", in_one_batch)
            assert apart(gradients(family=family, **EXACT), found) <= 1e-12


def test_a_cpu_attends_to_no_padding():
    lengths, cpu = [7, 7, 5, 7, 3], torch.device("cpu")
    rows = packing.PackedRows.from_lengths(lengths, cpu)
    assert [(list(one.lengths), one.width) for one in rows.batches] == [([7, 7], 7), ([5], 5), ([7], 7), ([3], 3)]
    assert rows.width == 7 and all(one.source_index is None for one in rows.batches)
    tokens = torch.arange(29.0).reshape(1, 1, 29, 1).expand(1, 2, 29, 3)
    together = in_one_batch(lengths, cpu)
    (batch,), (padded,) = together.batches, together.split(tokens)
    assert padded.shape == (5, 2, 7, 3) and padded[2, 1, :5, 0].tolist() == [14, 15, 16, 17, 18]
    assert torch.equal(batch.unpad(padded.transpose(1, 2)), tokens.transpose(1, 2))
    assert in_one_batch([4, 4], cpu).batches[0].source_index is None, "no padding, no copy"


def test_short_packed_rows_share_a_micro_batch_as_large_as_the_longest_would_make():
    lengths, rows = torch.tensor([10, 4, 2, 3, 9, 2]), torch.arange(6)
    packed = [part.tolist() for part in micro_batches(lengths, rows, max_rows=2, packed=True)]
    assert packed == [[0, 4], [1, 3, 2, 5]]
    assert [part.tolist() for part in micro_batches(lengths, rows, max_rows=2)] == [[0, 4], [1, 3], [2, 5]]
    tight = [part.tolist() for part in micro_batches(lengths, rows, max_rows=2, max_tokens=9, packed=True)]
    assert tight == [[0], [4], [1, 3, 2], [5]]


def test_packed_rows_stay_apart_for_a_head_on_the_policy_and_with_recomputed_activations():
    for changes in ({"head": True}, {"gradient_checkpointing": True}, {"kl_in": "loss", "kl_estimator": "full"}):
        assert apart(gradients(**changes, **EXACT), gradients(packing=False, **changes, **EXACT)) <= 1e-12


@pytest.mark.parametrize("changes", [{}, {"num_mini_batches": 2}, {"logits_at_a_time": 2}, {"head": True}])
def test_the_first_ratio_is_exactly_one(changes):
    made = tiny.trainer(per_device_train_batch_size=2, gradient_accumulation_steps=4, **changes)
    assert made.model_runner.packed and made.step(tiny.prompts())["policy/first_ratio_error"] == 0.0


def test_no_padding_goes_through_the_models(monkeypatch):
    body, seen = type(tiny.causal().model), []
    plain = body.forward

    @wraps(plain)
    def spy(model, input_ids, use_cache=False, **others):
        seen.append(input_ids.numel())
        return plain(model, input_ids=input_ids, use_cache=use_cache, **others)

    monkeypatch.setattr(body, "forward", spy)
    for packed in (True, False):
        made = tiny.trainer(packing=packed)
        seen.clear()
        judged = made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
        asked = int(tiny.rollout().mask.sum()) - 4  # nothing is asked behind the last token of the four rows
        assert (sum(seen) == 3 * asked) is packed, "policy, value and reference"
        assert sum(seen) == 3 * (judged.forward_tokens - 4)
        assert made.update(judged)["tokens/padded"] == judged.forward_tokens


def test_a_window_narrower_than_a_row_is_kept():
    """Mistral here sees 4 tokens back; a row of 9 beside others must not see more."""
    model, rows = tiny.causal("mistral"), Rollout.from_lists([[5, 6, 7, 3], [8]], [[3, 4, 9, 7, 2], [9, 2]])
    micro = rows.micro_batch(torch.arange(2))
    wanted = forward.response_logits(model, micro)
    wide = forward.response_logits(tiny.causal("mistral", sliding_window=64), micro)
    assert packing.enable([model])
    torch.testing.assert_close(forward.response_logits(model, micro), wanted, atol=1e-5, rtol=1e-5)
    assert (wide - wanted).abs().max() > 1e-2


def test_a_model_without_sdpa_attention_is_padded():
    made = tiny.trainer(family="gemma2", policy_seed=3)
    assert not made.model_runner.packed and made.policy.config._attn_implementation == "eager"
    assert made.step(tiny.prompts())["policy/first_ratio_error"] == 0.0


def test_a_model_that_mixes_rows_up_is_found_out_and_padded(monkeypatch):
    """A family that would not hand our mask on: tokens of all rows see one another."""

    def careless(module, query, key, value, attention_mask, **how):
        return packing.sdpa_attention_forward(module, query, key, value, None, **how)

    with monkeypatch.context() as patch:
        patch.setitem(packing.AttentionInterface._global_mapping, packing.ATTN_IMPLEMENTATION, careless)
        made = tiny.trainer()
    assert not made.model_runner.packed
    assert {m.config._attn_implementation for m in (made.policy, made.ref, made.value)} == {"sdpa"}


def test_packing_is_not_saved(tmp_path):
    made = tiny.trainer()
    made.policy.save_pretrained(tmp_path)
    assert packing.ATTN_IMPLEMENTATION not in (tmp_path / "config.json").read_text()


# logits_at_a_time


@pytest.mark.parametrize("size", [1, 2, 3, 7, "auto"])
@pytest.mark.parametrize(
    "changes", [{}, {"head": True}, {"entropy_coef": 0.3}, {"kl_in": "loss", "kl_estimator": "k3"}]
)
def test_the_gradient_does_not_depend_on_how_many_logits_are_held(size, changes):
    found = gradients(logits_at_a_time=size, **changes, **EXACT)
    assert apart(found, gradients(logits_at_a_time="all", **changes, **EXACT)) <= 1e-12


def test_logits_at_a_time_bounds_them(monkeypatch):
    seen, plain = [], forward.lm_head_logits

    def spy(model, hidden):
        seen.append(len(hidden))
        return plain(model, hidden)

    monkeypatch.setattr(forward, "lm_head_logits", spy)
    rows = [([5, 6], [7, 8, 2]), ([9], [10, 2])]
    for size, most in ((3, 3), ("all", 11)):
        seen.clear()
        made, judged = tiny.judged(logits_at_a_time=size, ptx_coef=1.0, ptx=rows)
        made.update(judged)
        assert max(seen) == most
    made = tiny.trainer()
    assert made.model_runner.logit_chunks(10**6)[0].stop == 2**20 // tiny.VOCABULARY
    monkeypatch.setattr(made.policy.config, "vocab_size", 2**19)
    assert made.model_runner.logit_chunks(1000)[0].stop == 64, "smaller would be slow"


class Operations(TorchDispatchMode):
    """Which operators run, with the shape of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.seen.append((func.__name__.split(".")[0], tuple(getattr(found, "shape", ()))))
        return found


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])  # the second one's two matrices are one
def test_gradients_of_the_words_matrices_are_added_in_place(family):
    """With logits_at_a_time, autograd makes no matrix of the vocabulary's size; the numbers are its own."""
    found, made = {}, {}
    for size in ("all", 3):
        trainer, judged = tiny.judged(logits_at_a_time=size, family=family, **EXACT)
        with Operations() as run:
            found[size] = tiny.gradient(trainer, judged)
        shape = tuple(trainer.policy.get_input_embeddings().weight.shape)
        made[size] = {name for name, of in run.seen if of == shape} & {"embedding_dense_backward", "mm", "add_"}
    assert made["all"] >= {"embedding_dense_backward", "mm"} and not made[3]
    assert apart(found[3], found["all"]) <= 1e-12


def test_gradients_in_place_are_those_of_autograd():
    """A pad token that learns nothing, a bias of the head, words that come twice, calls that add up; and none without
    grad mode.
    """
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


def test_gradients_in_place_are_those_of_autograd_in_bfloat16():
    found, wanted = (gradients(bf16=True, logits_at_a_time=size) for size in ("auto", "all"))
    assert apart(found, wanted) <= 2e-2 < apart(found, gradients())


def test_a_gradient_that_somebody_watches_is_autograds():
    model, seen = tiny.causal(), []
    model.get_input_embeddings().weight.register_hook(seen.append)
    with forward.in_place_embedding_gradients(model):
        assert "forward" not in vars(model.get_input_embeddings())
        model(torch.tensor([[3, 4]])).logits.sum().backward()
    assert len(seen) == 1


# optim


def test_both_optimizers_make_the_same_steps():
    made = {name: tiny.one_step(optim=name, learning_rate=1e-3)[0] for name in ("adamw_torch_fused", "adamw_torch")}
    assert [trainer.optimizer.defaults["fused"] for trainer in made.values()] == [True, False]
    one, other = (torch.cat([tiny.weights(t.policy), tiny.weights(t.value)]) for t in made.values())
    assert (one - other).abs().max() <= 1e-6 and (one - tiny.weights(made["adamw_torch"].ref).new_zeros(1)).any()


# compact_batch


def asked(queries: list[list[int]], length: int = 12) -> Prompts:
    seeds = tuple(derive_seed(0, "sample", 0, row) for row in range(len(queries)))
    return replace(Prompts.from_lists(queries), seeds=seeds, response_length=length)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_compact_batch_engine_writes_what_the_plain_one_writes(family):
    queries = [[5, 6]] * 3 + [[7]] * 2 + [[8, 9, 4]] + [[5, 6]] * 2 + [[7, 7, 7, 7]] * 4
    model = tiny.causal(family)
    one, other = (
        HFEngine(model, tiny.EOS, tiny.PAD, compact_batch=compact_batch).generate(asked(queries))
        for compact_batch in (True, False)
    )
    assert torch.equal(one.ids, other.ids) and torch.equal(one.ended, other.ended)


def test_a_compact_batch_engine_reads_a_prompt_once_and_drops_what_has_ended(monkeypatch):
    body, seen = type(tiny.causal().model), []
    plain = body.forward

    def spy(model, input_ids, **others):
        seen.append(len(input_ids))
        return plain(model, input_ids=input_ids, **others)

    monkeypatch.setattr(body, "forward", spy)
    for compact_batch in (True, False):
        seen.clear()
        engine = HFEngine(tiny.causal(), tiny.EOS, tiny.PAD, compact_batch=compact_batch)
        engine.generate(asked([[5, 6]] * 16 + [[7, 8]] * 16, length=20))
        assert seen[0] == (2 if compact_batch else 32) and seen[1] == 32
        assert (seen[-1] < 32) is compact_batch


# Noise


def test_noise_is_what_plain_arithmetic_makes_of_seed_step_and_token():
    seeds = [derive_seed(0, "sample", 3, row) for row in range(4)] + [0, 2**63 - 1, 2**31, 2**32]
    keys, counters = row_keys(seeds, torch.device("cpu")), token_counters(50, torch.device("cpu"))
    for step in (0, 1, 52):
        found = log_exponential(keys, step, counters)
        for row, seed in enumerate(seeds):
            wanted = exponential(seed, step, 50).log()
            torch.testing.assert_close(found[row].double(), wanted.double(), atol=2e-6, rtol=2e-6)


def test_noise_is_that_of_an_exponential():
    """10^6 numbers: 64 bins of equal chance, and no likeness of neighbours in row, step or token."""
    keys = row_keys([derive_seed(0, "sample", 0, row) for row in range(50)], torch.device("cpu"))
    counters = token_counters(2000, torch.device("cpu"))
    drawn = torch.stack([log_exponential(keys, step, counters) for step in range(10)]).double()
    assert torch.isfinite(drawn).all()
    uniform = 1 - (-drawn.exp()).exp()
    counts = torch.histc(uniform, 64, 0.0, 1.0)
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert 25 < chi2 < 115  # 63 degrees of freedom: 6 in a million outside, and the draws are seeded
    for dim in range(3):
        one, other = drawn.narrow(dim, 1, drawn.shape[dim] - 1), drawn.narrow(dim, 0, drawn.shape[dim] - 1)
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 5e-3


def test_rare_tokens_are_drawn_as_often_as_they_should_be():
    """Beyond what 24 bits could tell apart: a token of chance 1e-6 beside a likely one, in 2 x 10^7 draws."""
    keys = row_keys([derive_seed(1, "sample", 0, row) for row in range(20000)], torch.device("cpu"))
    counters, logits = token_counters(2, torch.device("cpu")), torch.tensor([[0.0, -13.815511]]).expand(20000, 2)
    hits = sum(int(gumbel_sample(logits, keys, step, counters).sum()) for step in range(1000))
    assert 4 <= hits <= 40  # 20 expected


@pytest.mark.parametrize("kind", ["consecutive", "derived"])
def test_rows_and_steps_draw_independently(kind):
    """A token of chance 1/5 against 511 others, 1500 rows, 20 steps: hits vary over steps, and over rows, as tosses of
    a coin do. With consecutive seeds, too: a weaker hash had 3 times and more the variance over steps.
    """
    rows, steps, chance = 1500, 20, 0.2
    seeds = [row if kind == "consecutive" else derive_seed(7, "sample", 0, row) for row in range(rows)]
    keys, counters = row_keys(seeds, torch.device("cpu")), token_counters(512, torch.device("cpu"))
    logits = torch.zeros(rows, 512).index_fill(1, torch.tensor([1]), math.log(511 * chance / (1 - chance)))
    hits = torch.stack([gumbel_sample(logits, keys, step, counters) == 1 for step in range(steps)]).double()
    of_one = chance * (1 - chance)
    assert abs(hits.mean() - chance) < 4 * math.sqrt(of_one / hits.numel())
    assert 0.3 < hits.mean(1).var() / (of_one / rows) < 2.2
    assert 0.85 < hits.sum(0).var() / (of_one * steps) < 1.15


def test_blocks_change_no_draw(monkeypatch):
    keys, counters = row_keys(list(range(9)), torch.device("cpu")), token_counters(100, torch.device("cpu"))
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(0))
    whole = gumbel_sample(logits, keys, 5, counters)
    monkeypatch.setattr(rollout, "NOISE_CHUNK_ELEMENTS_CPU", 250)
    assert torch.equal(gumbel_sample(logits, keys, 5, counters), whole)
