"""TRL 1.12's PPO, recorded tensor by tensor: fed with its rewards, values and masks, our formulas give its numbers."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rlhf_cli.ppo import formulas
from rlhf_cli.ppo.advantages import gae

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="../shared/golden (recordings of TRL 1.12) is not here")
close = {"rtol": 0, "atol": 1e-5}


def recording(name: str):
    with safe_open(GOLDEN / f"trl_{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(params=["update_k1", "update_k3", "steps"])
def update(request):
    return recording(request.param)


def test_advantages_and_returns(update):
    tensors, settings = update
    mask = ~tensors["padding_mask_p1"].bool()
    advantages, returns = gae(
        tensors["rewards"], tensors["values"], mask, float(settings["gamma"]), float(settings["lam"])
    )
    torch.testing.assert_close(returns[mask], tensors["returns"][mask], **close)
    white = formulas.masked_whiten(advantages, ~tensors["padding_mask"].bool())
    torch.testing.assert_close(white, tensors["advantages"], **close)


def test_kl_and_penalty(update):
    tensors, settings = update
    mask = ~tensors["padding_mask"].bool()
    kl = formulas.kl_tokens(tensors["logprobs"], tensors["ref_logprobs"], settings["kl_estimator"])
    torch.testing.assert_close(kl[mask], tensors["kl"][mask], **close)
    assert torch.where(mask, kl, 0).sum(1).mean().item() == pytest.approx(float(settings["objective/kl"]), abs=1e-5)
    shaped = formulas.shape_rewards(torch.zeros(len(kl)), float(settings["kl_coef"]) * kl, mask)
    assert shaped.sum(1).mean().item() == pytest.approx(float(settings["objective/non_score_reward"]), abs=1e-5)
    assert torch.where(mask, -tensors["logprobs"], 0).sum(1).mean().item() == pytest.approx(
        float(settings["objective/entropy"]), abs=1e-4
    )


def test_rewards_but_for_the_place_of_the_score(update):
    """TRL puts the score one position after the EOS; ours lies on it. Row sums and all other places agree."""
    tensors, settings = update
    mask = ~tensors["padding_mask"].bool()
    ours = formulas.shape_rewards(tensors["scores"], float(settings["kl_coef"]) * tensors["kl"], mask)
    theirs = torch.where(~tensors["padding_mask_p1"].bool(), tensors["rewards"], 0)
    torch.testing.assert_close(ours.sum(1), theirs.sum(1), **close)
    for row in range(len(ours)):
        last = int(tensors["sequence_lengths"][row])
        torch.testing.assert_close(ours[row, :last], theirs[row, :last], **close)


@pytest.mark.parametrize("epoch", range(3))
@pytest.mark.parametrize("micro", range(2))
def test_losses_of_each_micro_batch(epoch, micro):
    """From epoch 1 on over half of the tokens are clipped, so both branches of both losses are held."""
    tensors, settings = recording("steps")
    step = {
        name.rpartition(".")[2]: value
        for name, value in tensors.items()
        if name.startswith(f"epoch{epoch}.micro{micro}.")
    }
    rows = step["rows"]
    mask, mask_p1 = (~tensors[name].bool()[rows] for name in ("padding_mask", "padding_mask_p1"))
    loss, ratio, clipped = formulas.policy_loss(
        step["new_logprobs"], tensors["logprobs"][rows], tensors["advantages"][rows], float(settings["cliprange"])
    )
    torch.testing.assert_close(ratio[mask], step["ratio"][mask], rtol=1e-5, atol=1e-5)
    assert formulas.masked_mean(loss, mask).item() == pytest.approx(step["pg_loss"].item(), abs=1e-5)
    assert formulas.masked_mean(clipped.float(), mask).item() == pytest.approx(step["pg_clipfrac"].item(), abs=1e-5)
    error, value_clipped = formulas.value_loss(
        step["vpred"], tensors["values"][rows], tensors["returns"][rows], float(settings["cliprange_value"])
    )
    assert formulas.masked_mean(error, mask_p1).item() == pytest.approx(step["vf_loss"].item(), abs=1e-5)
    assert formulas.masked_mean(value_clipped.float(), mask_p1).item() == pytest.approx(
        step["vf_clipfrac"].item(), abs=1e-5
    )
    total = formulas.masked_mean(loss, mask) + float(settings["vf_coef"]) * formulas.masked_mean(error, mask_p1)
    assert total.item() == pytest.approx(step["loss"].item(), abs=1e-5)
    if epoch:
        assert 0.3 < step["pg_clipfrac"].item() < 1.0
