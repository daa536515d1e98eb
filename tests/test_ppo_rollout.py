"""The engine samples from the softmax, keyed by row, whatever shares the batch."""

from dataclasses import replace

import pytest
import tiny
import torch

from rlhf_cli.commands.verify.reference_state import exponential
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine


def ask(prompts: Prompts, length: int = 8, step: int = 0) -> Prompts:
    return replace(
        prompts, seeds=tuple(derive_seed(0, "sample", step, row) for row in range(len(prompts))), response_length=length
    )


def engine(family="llama", stop=tiny.EOS, **kwargs) -> HFEngine:
    return HFEngine(tiny.causal(family), stop, tiny.PAD, **kwargs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_agrees_with_a_plain_loop(family):
    """No cache, no batching, no padding: one row at a time, the whole prefix through the model at each token."""
    prompts, how = ask(tiny.prompts(6)), engine(family, temperature=0.8)
    rollout = how.generate(prompts)
    for row in range(6):
        ids = rollout.prompt_tokens(row)
        written: list[int] = []
        while len(written) < 8 and tiny.EOS not in written:
            logits = how.model(input_ids=torch.tensor([ids + written])).logits[0, -1] / 0.8
            noise = -exponential(prompts.seeds[row], len(written), tiny.VOCABULARY).log()
            written.append(int((logits + noise).argmax()))
        assert rollout.response_tokens(row) == written
        assert bool(rollout.ended[row]) is (tiny.EOS in written)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_batching_leaves_the_draws_alone(size):
    whole, parts = (engine(batch_size=batch).generate(ask(tiny.prompts(8))) for batch in (None, size))
    assert torch.equal(whole.ids, parts.ids) and torch.equal(whole.response_mask, parts.response_mask)


def test_rows_and_steps_draw_apart():
    same = Prompts.from_lists([[5, 6]] * 32)
    first, second = (engine().generate(ask(same, step=step)) for step in (0, 1))
    responses = {tuple(first.response_tokens(row)) for row in range(32)}
    assert len(responses) > 16
    assert [first.response_tokens(row) for row in range(32)] != [second.response_tokens(row) for row in range(32)]


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_a_stream_is_the_row_that_generate_gives(temperature):
    prompts, how = ask(tiny.prompts(6), length=20), engine(temperature=temperature)
    whole = how.generate(prompts)
    for row in range(6):
        alone = ask(Prompts.from_lists([whole.prompt_tokens(row)]), length=20)
        stream = how.stream(replace(alone, seeds=prompts.seeds[row : row + 1]))
        assert next(stream) == whole.response_tokens(row)[0]
        assert torch.is_grad_enabled()  # between two tokens all is as it was
        assert list(stream) == whole.response_tokens(row)[1:]
    assert whole.ended.any() or not temperature


def test_temperature_0_takes_the_most_likely_token():
    prompts, how = ask(tiny.prompts(4)), engine(temperature=0.0)
    rollout = how.generate(prompts)
    for row in range(4):
        ids = rollout.prompt_tokens(row)
        for token in rollout.response_tokens(row):
            assert token == int(how.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids = [*ids, token]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    how, rows = engine(stop=None, temperature=temperature), 4000
    rollout = how.generate(ask(Prompts.from_lists([[5, 6]] * rows), length=1))
    counts = torch.bincount(rollout.ids[:, -1], minlength=tiny.VOCABULARY) / rows
    wanted = torch.softmax(how.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / temperature, -1)
    # 5 standard errors of each share: a false alarm once in about 10^5 runs, and the draws are seeded
    assert ((counts - wanted).abs() < 5 * (wanted * (1 - wanted) / rows).sqrt() + 1e-4).all()


def test_nothing_follows_the_stop_token():
    rollout = engine().generate(ask(tiny.prompts(32), length=20))
    assert rollout.ended.any() and not rollout.ended.all()
    for row in range(32):
        response = rollout.response_tokens(row)
        assert tiny.EOS not in response[:-1]
        assert (response[-1] == tiny.EOS) == bool(rollout.ended[row])
        assert bool(rollout.ended[row]) or len(response) == 20


def test_without_a_stop_token_every_response_is_full():
    rollout = engine(stop=None).generate(ask(tiny.prompts(8), length=12))
    assert rollout.response_mask.all() and rollout.response_mask.shape == (8, 12) and not rollout.ended.any()


def test_pad_equal_to_eos_changes_nothing():
    prompts, model = tiny.prompts(8), tiny.causal()
    one, other = (HFEngine(model, tiny.EOS, pad).generate(ask(prompts)) for pad in (tiny.PAD, tiny.EOS))
    assert torch.equal(one.response_mask, other.response_mask)
    assert [one.response_tokens(row) for row in range(8)] == [other.response_tokens(row) for row in range(8)]
