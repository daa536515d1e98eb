"""The engine samples from the softmax, keyed by row; batching, order and padding have no effect."""

from dataclasses import replace

import pytest
import tiny
import torch

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from tests.reference.sampling import exponential


def seeded(prompts: Prompts, length: int = 8, step: int = 0) -> Prompts:
    seeds = tuple(derive_seed(0, "sample", step, row) for row in range(len(prompts)))
    return replace(prompts, seeds=seeds, response_length=length)


def engine(family="llama", stop=tiny.EOS, pad=tiny.PAD, **kwargs) -> HFEngine:
    return HFEngine(tiny.causal(family), stop, pad, **kwargs)


def responses(rollout) -> list[list[int]]:
    return [rollout.response_tokens(row) for row in range(len(rollout))]


@pytest.mark.full
@pytest.mark.parametrize(("family", "temperature"), [*((family, 0.8) for family in tiny.FAMILIES), ("llama", 0.0)])
def test_agrees_with_a_plain_loop(family, temperature):
    """No cache, no batching, no padding: one row at a time, the full prefix through the model at each token."""
    prompts, subject = seeded(tiny.prompts(6)), engine(family, temperature=temperature)
    rollout = subject.generate(prompts)
    for row, response in enumerate(responses(rollout)):
        ids, plain = rollout.prompt_tokens(row), []
        while len(plain) < 8 and tiny.EOS not in plain:
            logits = subject.model(input_ids=torch.tensor([ids + plain])).logits[0, -1]
            noise = -exponential(prompts.seeds[row], len(plain), tiny.VOCABULARY).log()
            plain.append(int((logits + temperature * noise).argmax()))
        assert response == plain and bool(rollout.ended[row]) is (tiny.EOS in plain)


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_a_stream_is_the_row_that_generate_gives(temperature):
    prompts, subject = seeded(tiny.prompts(6), length=20), engine(temperature=temperature)
    whole = subject.generate(prompts)
    for row, response in enumerate(responses(whole)):
        alone = seeded(Prompts.from_lists([whole.prompt_tokens(row)]), length=20)
        stream = subject.stream(replace(alone, seeds=prompts.seeds[row : row + 1]))
        assert next(stream) == response[0]
        assert torch.is_grad_enabled()  # also between two tokens
        assert list(stream) == response[1:]
    assert whole.ended.any() or not temperature


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    subject, rows = engine(stop=None, temperature=temperature), 4000
    rollout = subject.generate(seeded(Prompts.from_lists([[5, 6]] * rows), length=1))
    counts = torch.bincount(rollout.ids[:, -1], minlength=tiny.VOCABULARY) / rows
    expected = torch.softmax(subject.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / temperature, -1)
    # 5 standard errors of each share: a false alarm once in about 10^5 runs, and the draws are seeded
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / rows).sqrt() + 1e-4).all()


def test_several_stop_tokens_cut_what_none_leaves():
    prompts, stops = seeded(tiny.prompts(32), length=20), [tiny.EOS, 5, 9]
    rollout, endless = (engine(stop=stop).generate(prompts) for stop in (stops, None))
    assert endless.response_mask.all() and endless.response_mask.shape == (32, 20) and not endless.ended.any()
    assert {5, 9, tiny.EOS} == {response[-1] for response in responses(rollout)} & set(stops)
    for row, (response, whole) in enumerate(zip(responses(rollout), responses(endless), strict=True)):
        cut = next((step for step, token in enumerate(whole) if token in stops), None)
        assert response == (whole if cut is None else whole[: cut + 1]) and bool(rollout.ended[row]) == (
            cut is not None
        )


def test_pad_equal_to_eos_changes_nothing():
    prompts = seeded(tiny.prompts(8))
    one, other = (engine(pad=pad).generate(prompts) for pad in (tiny.PAD, tiny.EOS))
    assert torch.equal(one.response_mask, other.response_mask) and responses(one) == responses(other)
