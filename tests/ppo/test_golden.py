"""TRL 1.12's PPO, recorded tensor by tensor: fed with its rewards, values and masks, our formulas give its numbers."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.forward_backward import policy_loss_and_metrics, value_loss_and_metrics

ROOT = Path(__file__).parents[2]


def recorded(made: Path, shared: Path) -> list[Path]:
    """The folders with recordings: what `make golden` made here, and what the developers' shared folder holds."""
    folders = [*sorted(made.glob("*")), shared]
    return [folder for folder in folders if (folder / "trl_steps.safetensors").is_file()]


FOLDERS = recorded(ROOT / "runs/golden", ROOT.parent / "shared/golden")
pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="no recordings of TRL 1.12, in runs/golden or ../shared/golden: `make golden` makes them"
)
close = {"rtol": 0, "atol": 1e-5}


def recording(folder: Path, name: str):
    with safe_open(folder / f"trl_{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(params=FOLDERS or [None], ids=lambda folder: folder and folder.name)
def folder(request):
    return request.param


@pytest.fixture(params=["update_k1", "update_k3", "steps"])
def update(folder, request):
    return recording(folder, request.param)


@pytest.fixture
def steps(folder):
    return recording(folder, "steps")


def test_advantages_and_returns(update):
    tensors, settings = update
    mask = ~tensors["padding_mask_p1"].bool()
    advantages, returns = losses.gae(
        tensors["rewards"], tensors["values"], mask, float(settings["gamma"]), float(settings["lam"])
    )
    torch.testing.assert_close(returns[mask], tensors["returns"][mask], **close)
    white = losses.masked_whiten(advantages, ~tensors["padding_mask"].bool())
    torch.testing.assert_close(white, tensors["advantages"], **close)


def test_kl_and_penalty(update):
    tensors, settings = update
    mask = ~tensors["padding_mask"].bool()
    kl = losses.token_kl(tensors["logprobs"], tensors["ref_logprobs"], settings["kl_estimator"])
    torch.testing.assert_close(kl[mask], tensors["kl"][mask], **close)
    assert torch.where(mask, kl, 0).sum(1).mean().item() == pytest.approx(float(settings["objective/kl"]), abs=1e-5)
    shaped = losses.compute_token_rewards(torch.zeros(len(kl)), float(settings["kl_coef"]) * kl, mask)
    assert shaped.sum(1).mean().item() == pytest.approx(float(settings["objective/non_score_reward"]), abs=1e-5)
    assert torch.where(mask, -tensors["logprobs"], 0).sum(1).mean().item() == pytest.approx(
        float(settings["objective/entropy"]), abs=1e-4
    )


def test_rewards_but_for_the_place_of_the_score(update):
    """TRL puts the score one position after the EOS, we on it. Row sums and all other positions agree."""
    tensors, settings = update
    mask = ~tensors["padding_mask"].bool()
    ours = losses.compute_token_rewards(tensors["scores"], float(settings["kl_coef"]) * tensors["kl"], mask)
    theirs = torch.where(~tensors["padding_mask_p1"].bool(), tensors["rewards"], 0)
    torch.testing.assert_close(ours.sum(1), theirs.sum(1), **close)
    for row in range(len(ours)):
        last = int(tensors["sequence_lengths"][row])
        torch.testing.assert_close(ours[row, :last], theirs[row, :last], **close)


def two_token_logits(logprobs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits (N, 2) of a vocabulary of two, whose first token has exactly these log-probs at the temperature."""
    return temperature * torch.stack([logprobs, torch.log1p(-logprobs.exp())], -1)


@pytest.mark.parametrize("epoch", range(3))
@pytest.mark.parametrize("micro", range(2))
def test_the_whole_loss_of_each_micro_batch(steps, epoch, micro):
    """Our losses through our data types; TRL's value loss reads one token more than its policy loss.

    From epoch 1 on over half of the tokens are clipped, so that both branches of both losses are tested.
    """
    tensors, trl = steps
    prefix = f"epoch{epoch}.micro{micro}."
    step = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    rows, temperature = step["rows"], float(trl["temperature"])
    keys = ("cliprange", "cliprange_value", "vf_coef", "temperature")
    settings = PPOSettings(total_episodes=64, **{key: float(trl[key]) for key in keys})
    means: dict[str, float] = {}
    for kind, mask_name in (("policy", "padding_mask"), ("value", "padding_mask_p1")):
        mask = ~tensors[mask_name].bool()[rows]
        prompt = torch.ones(len(mask), 1, dtype=torch.int64)
        ids, real = torch.cat([prompt, torch.zeros_like(mask).long()], 1), torch.cat([prompt.bool(), mask], 1)
        rollout = Rollout(ids, real, mask, torch.ones(len(mask), dtype=torch.bool))
        fields = {name: tensors[name][rows] for name in ("logprobs", "advantages", "values", "returns")}
        experience = tiny.experience(rollout, ref_logprobs=fields["logprobs"], **fields)
        tokens = experience.token_batch(rollout.micro_batch(torch.arange(len(mask))))
        if kind == "policy":
            logits = two_token_logits(step["new_logprobs"][mask], temperature)
            loss, metrics = policy_loss_and_metrics(tokens, logits, None, experience.kl_loss_coef, settings)
            torch.testing.assert_close(metrics["val/ratio"], step["ratio"][mask], rtol=1e-4, atol=1e-5)
        else:
            loss, metrics = value_loss_and_metrics(tokens, step["vpred"][mask], settings)
        means |= {name: metric.mean().item() for name, metric in metrics.items()} | {kind: loss.mean().item()}
    names = {"policy": "pg_loss", "policy/clipfrac_avg": "pg_clipfrac", "value": "vf_loss"}
    names["val/clipfrac_avg"] = "vf_clipfrac"
    assert {name: means[name] for name in names} == pytest.approx(
        {name: step[trl_name].item() for name, trl_name in names.items()}, abs=1e-5
    )
    assert means["policy"] + settings.vf_coef * means["value"] == pytest.approx(step["loss"].item(), abs=1e-5)
    assert not epoch or 0.3 < step["pg_clipfrac"].item() < 1.0
