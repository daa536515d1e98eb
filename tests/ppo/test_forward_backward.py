"""Passes of a micro-batch: logits_at_a_time bounds the logits, and changes no number."""

import pytest
import tiny

from rlhf_cli.models import forward
from tests.ppo.test_fast_paths import EXACT, difference, gradients


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
