"""What every rollout engine must hold: `models.engine` hf, graph, and vllm by a stand-in for the server.

Modules: `ppo/engine_check.py`.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from stand_in_vllm import served

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.rewards.model import ModelReward
from tests.ppo.test_rollout import responses, seeded

ENGINES = (HFEngine, GraphEngine, served)
LONG = 40  # tokens: two reads of which rows have ended


def engine(kind: Any, family: str = "llama", stop: Any = tiny.EOS, **options: Any) -> Any:
    return kind(tiny.causal(family), stop, tiny.PAD, **options)


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_no_response_is_longer_than_the_limit(kind, length):
    rollout = engine(kind, stop=None).generate(seeded(tiny.prompts(3), length=length))
    assert rollout.response_lengths.tolist() == [length] * 3 and not rollout.ended.any()


@pytest.mark.full
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("size", [None, 1, 5])
def test_a_rows_draws_depend_on_its_seed_alone(kind, size):
    prompts, order = seeded(tiny.prompts(8), length=LONG), [5, 2, 7, 0, 1, 6, 3, 4]
    seeds = tuple(prompts.seeds[row] for row in order)
    turned = replace(prompts, ids=prompts.ids[order], mask=prompts.mask[order], seeds=seeds)
    whole = responses(engine(HFEngine).generate(prompts))
    assert responses(engine(kind, batch_size=size).generate(turned)) == [whole[row] for row in order]


@pytest.mark.full
@pytest.mark.parametrize("kind", ENGINES)
def test_samples_of_one_prompt_differ(kind):
    prompts = Prompts.from_lists([[5, 6, 7]]).repeat(6)
    subject = engine(kind)
    together = responses(subject.generate(seeded(prompts, length=LONG)))
    assert len(set(map(tuple, together))) > 3
    assert responses(subject.generate(seeded(prompts.rows(slice(2)), length=LONG))) == together[:2]
