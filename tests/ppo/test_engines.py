"""What every rollout engine must hold: `models.engine` hf, graph, and vllm by a stand-in for the server.

Modules: `ppo/graph_engine.py`, `ppo/engine_check.py`.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from stand_in_vllm import served
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.graph_engine import GraphEngine, reason_against, row_bucket
from rlhf_cli.ppo.rollout import HFEngine, row_keys
from rlhf_cli.rewards.model import ModelReward
from tests.ppo.test_rollout import responses, seeded

ENGINES = (HFEngine, GraphEngine, served)
STATIC = [family for family in tiny.FAMILIES if reason_against(tiny.causal(family)) is None]
LONG = 40  # tokens: two reads of which rows have ended


def engine(kind: Any, family: str = "llama", stop: Any = tiny.EOS, **options: Any) -> Any:
    return kind(tiny.causal(family), stop, tiny.PAD, **options)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_pass_over_the_whole_row(kind, temperature):
    subject = engine(kind, temperature=temperature)
    rollout = subject.generate(seeded(tiny.prompts(7), length=LONG))
    assert rollout.logprobs.dtype == torch.float32 and not rollout.logprobs[~rollout.response_mask].any()
    for row in range(7):
        prompt, response = rollout.prompt_tokens(row), rollout.response_tokens(row)
        with torch.no_grad():
            logits = tiny.causal()(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = losses.token_logprobs(logits, torch.tensor(response), temperature)
        assert torch.allclose(rollout.logprobs[row, : len(response)], expected, atol=1e-4)
    assert rollout.ended.any()


@pytest.mark.parametrize("kind", ENGINES)
def test_the_trainer_measures_no_gap_and_new_weights_change_the_draws(kind):
    trainer = tiny.trainer(learning_rate=0.01)
    trainer.engine = kind(trainer.policy, tiny.EOS, tiny.PAD, trainer.settings.temperature)
    before = trainer.generate(tiny.prompts(), "show")
    for seed in range(3):
        stats = trainer.step(tiny.prompts(seed=seed))
        assert stats["rollout/logprob_gap"] <= stats["rollout/logprob_gap_p99"] < 1e-4
    trainer.updates = 0  # the same seeds
    assert responses(trainer.generate(tiny.prompts(), "show")) != responses(before)


@pytest.mark.parametrize("kind", ENGINES)
def test_r19_an_engine_that_keeps_old_weights_is_noticed_before_anything_is_trained(kind):
    trainer = tiny.trainer(learning_rate=0.05, max_logprob_gap=0.05)
    trainer.engine = kind(copy.deepcopy(trainer.policy), tiny.EOS, tiny.PAD, trainer.settings.temperature)
    trainer.step(tiny.prompts())
    weights, updates = tiny.weights(trainer.policy), trainer.updates
    with pytest.raises(RLHFError) as error:
        trainer.step(tiny.prompts())
    (problem,) = error.value.problems
    assert problem.code == "R19" and "weights" in problem.text and problem.text.startswith("step 2:")
    assert torch.equal(tiny.weights(trainer.policy), weights) and trainer.updates == updates


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("stop", [tiny.EOS, tiny.PAD, (tiny.EOS, 7), None])
def test_a_response_ends_with_its_first_stop_token(kind, stop):
    rollout = engine(kind, stop=stop).generate(seeded(tiny.prompts(9), length=LONG))
    stops = set() if stop is None else {stop} if isinstance(stop, int) else set(stop)
    for row, response in enumerate(responses(rollout)):
        assert bool(rollout.ended[row]) is (response[-1] in stops) and not stops & set(response[:-1])
        assert len(response) == LONG or rollout.ended[row]
    beyond = ~rollout.response_mask
    assert (rollout.ids[:, rollout.prompt_width :][beyond] == tiny.PAD).all() and rollout.mask[:, -1].any()


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("packed", [True, False])
def test_the_score_is_that_of_the_pairs_stop_token_whichever_ends_the_response(kind, packed):
    """The second stop token is also the pad token, as of Qwen2.5 and Qwen3."""
    ends, scorer = (tiny.EOS, tiny.PAD), tiny.scorer()
    rollout = engine(kind, stop=ends).generate(seeded(tiny.prompts(24), length=8))
    scores = ModelReward(scorer, 5, packed=packed, end_token_ids=ends)(rollout)
    for row, response in enumerate(responses(rollout)):
        read = [*response[:-1], tiny.EOS] if rollout.ended[row] else response
        ids = torch.tensor([rollout.prompt_tokens(row) + read])
        with torch.no_grad():
            states = scorer.base_model(input_ids=ids, use_cache=False).last_hidden_state
            assert float(scores[row]) == pytest.approx(float(scorer.score(states[0, -1])), abs=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_no_response_is_longer_than_the_limit(kind, length):
    rollout = engine(kind, stop=None).generate(seeded(tiny.prompts(3), length=length))
    assert rollout.response_lengths.tolist() == [length] * 3 and not rollout.ended.any()


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("size", [None, 1, 5])
def test_a_rows_draws_depend_on_its_seed_alone(kind, size):
    prompts, order = seeded(tiny.prompts(8), length=LONG), [5, 2, 7, 0, 1, 6, 3, 4]
    seeds = tuple(prompts.seeds[row] for row in order)
    turned = replace(prompts, ids=prompts.ids[order], mask=prompts.mask[order], seeds=seeds)
    whole = responses(engine(HFEngine).generate(prompts))
    assert responses(engine(kind, batch_size=size).generate(turned)) == [whole[row] for row in order]


@pytest.mark.parametrize("kind", ENGINES)
def test_samples_of_one_prompt_differ(kind):
    prompts = Prompts.from_lists([[5, 6, 7]]).repeat(6)
    subject = engine(kind)
    together = responses(subject.generate(seeded(prompts, length=LONG)))
    assert len(set(map(tuple, together))) > 3
    assert responses(subject.generate(seeded(prompts.rows(slice(2)), length=LONG))) == together[:2]


# graph


@pytest.mark.parametrize("family", STATIC)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_tokens_of_fixed_shapes_are_those_of_hf(family, temperature):
    """Twice: the second rollout uses the caches of the first."""
    plain, subject = (engine(kind, family, temperature=temperature) for kind in (HFEngine, GraphEngine))
    for seed, rows in ((0, 12), (1, 11)):
        prompts = seeded(tiny.prompts(rows, seed=seed), length=LONG, step=seed)
        one, other = plain.generate(prompts), subject.generate(prompts)
        assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)
        assert torch.equal(one.response_mask, other.response_mask) and torch.equal(one.ended, other.ended)
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_rows_that_have_ended_leave_the_batch():
    subject = engine(GraphEngine, stop=tuple(range(3, tiny.VOCABULARY, 4)))
    plain = engine(HFEngine, stop=subject.stop_token_id)
    for step in range(30):  # until some rows of a draw end before the first read, and not all
        prompts = seeded(tiny.prompts(16), length=LONG, step=step)
        assert responses(subject.generate(prompts)) == responses(plain.generate(prompts))
        batches = {rows for rows, _ in subject.steps}
        subject.release_memory()
        assert not subject.steps and max(batches) == 16
        if len(batches) > 1:
            break
    assert len(batches) > 1


class Watch(TorchDispatchMode):
    """Records operations that wait for the device, and the shapes of all results."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []
        self.shapes: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = str(operation), operation(*args, **(kwargs or {}))
        by_mask = "index" in name and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if by_mask or any(word in name for word in self.WAITING):
            self.waiting.append(name)
        if isinstance(result, torch.Tensor):
            self.shapes.append((name, tuple(result.shape), result.dtype))
        return result


@pytest.mark.parametrize("family", STATIC)
def test_a_step_neither_waits_for_the_device_nor_changes_a_shape(family):
    subject, prompts = engine(GraphEngine, family), seeded(tiny.prompts(6), length=LONG)
    with torch.no_grad():
        step = subject._step(6, 60)
        step.start(subject._prefill(prompts), row_keys(prompts.seeds, subject.model.device))
        watched = []
        for _ in range(3):
            with Watch() as watch:
                step()
            watched.append(watch)
        with Watch() as plain:
            subject.generate(prompts)
    assert plain.waiting  # the watch sees what it looks for
    assert [watch.waiting for watch in watched] == [[], [], []]
    assert watched[0].shapes == watched[1].shapes == watched[2].shapes


def test_models_without_fixed_shapes_are_named():
    assert set(STATIC) >= {"llama", "qwen2", "gpt2"} and "mistral" not in STATIC
    assert "sliding windows" in str(reason_against(tiny.causal("mistral")))
    eager = tiny.causal("llama")
    eager.config._attn_implementation = "eager"
    assert "not by sdpa" in str(reason_against(eager))


def test_row_buckets():
    assert [row_bucket(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 9, 64, 65, 97)] == [1, 2, 3, 4, 6, 6, 8, 12, 64, 96, 128]
