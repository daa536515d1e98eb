"""The faster loss on a CPU gives TRL's numbers."""

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.stages.common.cpu_loss import use_own_lm_head
from tests.conftest import World

pytestmark = pytest.mark.full


def test_the_models_own_head_gives_the_numbers_of_trls(world: World) -> None:
    model = load_causal_lm(world.base)
    ids = torch.randint(2, 300, (6, 20), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(20) < torch.tensor([[4], [9], [2], [19], [20], [7]]), -100, ids)  # one has none
    results = []
    for attach in (
        lambda: add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1")),
        lambda: use_own_lm_head(model),
    ):
        model.__dict__.pop("forward", None)
        attach()
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, use_cache=False, fused_lm_head=True)
        out.log_probs.sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        values = out.log_probs, out.entropy, out.mean_logits, out.is_top1.float(), out.label_mask.float()
        results.append([*values, gradient])
    assert all(torch.allclose(ours, theirs, atol=2e-5) for theirs, ours in zip(*results, strict=True))
    assert torch.equal(model(input_ids=ids).logits, load_causal_lm(model.config.name_or_path)(input_ids=ids).logits)
