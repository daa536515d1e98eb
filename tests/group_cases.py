"""What one process and two of half the batch make of the same, for tests/test_group_ppo.py.

`torchrun group_cases.py OUT` leaves what rank 0 found in OUT, and that of rank 1 in OUT.1; here `found(ProcessGroup())`
is one process.
"""

import sys
from pathlib import Path
from typing import Any

import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward
from rlhf_cli.models.batch import EnsembleScores
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import EnsembleReward, ModelReward

PTX = [([5, 6], [7, 8, 2]), ([4], [9, 9, 9, 2]), ([3, 3, 3], [2])]
# Name -> settings beside the usual ones. Of a batch of 8 rows micro-batches hold 4 in one process, 2 in each of two.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "few tokens, unlike numbers of micro-batches": {"micro_batch_tokens": 11, "num_mini_batches": 2},
    "padded": {"packing": False, "whiten_rewards": True},
    "more minibatches than a rank has rows": {"num_mini_batches": 8},
    "kl in the loss": {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.01},
    "scaled scores, adaptive coefficient": {
        "use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0, "adap_kl_ctrl": True, "horizon": 100,
    },
    "ptx": {"ptx_coef": 0.5},
    "value first": {"value_only_updates": 1},
    "stopped early": {"early_stopping": True, "target_kl": 1e-3, "learning_rate": 0.3},
    "minibatches skipped": {"ratio_threshold": 1.0001, "learning_rate": 0.3},
    "two to a prompt": {"num_samples_per_prompt": 2},
    "checkpointed": {"gradient_checkpointing": True},
}  # fmt: skip
ROUGHLY = ("plain", "few tokens, unlike numbers of micro-batches", "minibatches skipped")  # in float32 too
UPDATES = 2


def trainer(process_group: ProcessGroup, dtype: torch.dtype, head: bool = False, **changes: Any) -> PPOTrainer:
    """As tiny.trainer makes it, with SGD, so that weights tell of gradients."""
    sizes = {
        "per_device_train_batch_size": 4 // process_group.world_size,
        "gradient_accumulation_steps": 2 * process_group.world_size,
    }
    settings = tiny.settings(**sizes, **changes)
    policy, ref = tiny.causal("llama", 3).to(dtype), tiny.causal("llama", 0).to(dtype)
    value = forward.ValueHead(policy) if head else tiny.scorer().to(dtype)
    # Scores are float32: those of a row by itself do not depend on who reads it.
    wide = dtype == torch.float64
    members = {
        f"m{seed}": ModelReward(tiny.scorer("llama", seed), 1 if wide else 4, packed=not wide) for seed in (1, 5)
    }
    rewards = {"model": members["m1"], "both": EnsembleReward(members), "length": length}
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, settings.temperature)
    ptx = PTX if settings.ptx_coef else ()
    made = PPOTrainer(
        policy, ref, value, rewards, engine, settings, ptx=ptx, num_updates=4, process_group=process_group
    )
    learnt = [*policy.parameters(), *value.parameters()]  # as the trainer has cut them up
    made.optimizer = torch.optim.SGD(learnt, lr=settings.learning_rate, foreach=False)
    made.scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer, 1.0)
    return made


def held(made: PPOTrainer) -> float:
    """Numbers of policy and value model that this process holds, as a share of all."""
    parameters = [*made.policy.parameters(), *made.value.parameters()]
    here = sum((w.to_local() if hasattr(w, "to_local") else w).numel() for w in parameters)
    return here / sum(w.numel() for w in parameters)


def weights(model: Any) -> torch.Tensor:
    """All of a model's, also where this process has a part of them."""
    whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()]
    return torch.cat([w.detach().reshape(-1).clone() for w in whole])


def length(rollout: Any) -> Any:
    """A function: asked once, of all rows."""
    assert len(rollout) == 8
    return [0.1 * n for n in rollout.response_lengths.tolist()]


def told(made: PPOTrainer) -> dict[str, Any]:
    """Two updates: their metrics, the rollouts, and the weights after them."""
    prompts = tiny.prompts(8 // made.settings.num_samples_per_prompt)
    stats, rollouts = [], []
    for _ in range(UPDATES):
        stats.append({key: n for key, n in made.step(prompts).items() if not key.endswith("_s")})
        assert made.experience is not None
        rollout = made.experience.rollout
        rollouts.append([(rollout.prompt_tokens(row), rollout.response_tokens(row)) for row in range(len(rollout))])
    learnt = {"policy": weights(made.policy), "value": weights(made.value), "held": held(made)}
    return {"stats": stats, "rollouts": rollouts, **learnt, "kl_coef": made.kl_coef, "moments": made.score_stats}


def found(process_group: ProcessGroup, **more: Any) -> dict[str, Any]:
    made = {}
    for name, changes in CASES.items():
        changes = {**changes, **more}
        made[f"{name}, {torch.float64}"] = told(trainer(process_group, torch.float64, **changes))
        if name in ROUGHLY:
            made[f"{name}, {torch.float32}"] = told(trainer(process_group, torch.float32, **changes))
    made["a head on the policy, torch.float64"] = told(trainer(process_group, torch.float64, head=True, **more))
    made["nobody has a row to spare, torch.float64"] = small(process_group, **more)
    for name, spoilt in (("loss", spoil_loss), ("reward", spoil_reward), ("reward model", spoil_model)):
        made[f"error in the {name}"] = error(spoilt(trainer(process_group, torch.float32, **more)))
    return made


def small(process_group: ProcessGroup, **more: Any) -> dict[str, Any]:
    """A rollout of one row: the second rank has nothing to write, read or learn."""
    made = trainer(process_group, torch.float64, **more)
    made.rewards.pop("length")
    rollout = made.generate(tiny.prompts(1))
    experience = made.make_experience(rollout)
    stats = made.update(experience)
    return {"stats": [stats], "rollouts": [rollout.response_tokens(0)], "policy": weights(made.policy),
            "value": weights(made.value), "kl_coef": made.kl_coef, "moments": made.score_stats}  # fmt: skip


def error(made: PPOTrainer) -> dict[str, Any]:
    before = weights(made.policy)
    try:
        made.step(tiny.prompts(8))
    except RLHFError as problem:
        return {"said": str(problem), "changed": not torch.equal(before, weights(made.policy))}
    return {"said": "nothing"}


def spoil_loss(made: PPOTrainer) -> PPOTrainer:
    """Not finite in one row alone, which one rank alone has."""
    backward = made.model_runner.backward

    def spoilt(told: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        learned = backward(told, micro, *args, **kwargs)
        if 5 in micro.rows.tolist():
            learned.loss[micro.rows[micro.row_index] == 5] = torch.nan
        return learned

    made.model_runner.backward = spoilt  # type: ignore[method-assign]
    return made


def spoil_reward(made: PPOTrainer) -> PPOTrainer:
    """A function, which the first rank alone asks."""

    def fails(rollout: Any) -> EnsembleScores:
        raise RLHFError("R05", "reward `length` raised ValueError", where="ppo.yaml:3", hint="mend it")

    made.rewards["length"] = fails
    return made


def spoil_model(made: PPOTrainer) -> PPOTrainer:
    """A model, which each rank asks for its own rows: here one that finds row 5 too long."""
    model = made.rewards["model"]

    class Fails:
        shardable = True

        def __call__(self, rollout: Any) -> Any:
            if rollout.row_offset <= 5 < rollout.row_offset + len(rollout):
                raise RLHFError(
                    "R05", f"row {rollout.row_offset + (5 - rollout.row_offset)} has 90 tokens", hint="shorten it"
                )
            return model(rollout)

    made.rewards["model"] = Fails()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_process_group() as here:
        torch.save(found(here, fsdp="fsdp" in sys.argv), Path(f"{sys.argv[1]}.{here.rank}"))
