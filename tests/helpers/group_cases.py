"""Cases for tests/distributed/test_ppo.py: one process, and several of a part of the batch, train the same.

`torchrun group_cases.py OUT FSDP` writes the results of each rank to OUT.RANK; `results(SINGLE_PROCESS)` returns those
of one process. FSDP is the value of the key.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward, sharding
from rlhf_cli.models.batch import EnsembleScores
from rlhf_cli.models.parallel import ProcessGroup, open_process_group
from rlhf_cli.ppo.optimizer import ShardedAdamW, build_optimizer
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import EnsembleReward, ModelReward

PTX = [([5, 6], [7, 8, 2]), ([4], [9, 9, 9, 2]), ([3, 3, 3], [2])]
# Name -> additional settings. Micro-batches of the 8 rows have 4 rows in one process, 2 in each of two, 1 of four.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "few tokens, different numbers of micro-batches": {"micro_batch_tokens": 11, "num_mini_batches": 2},
    "padded": {"packing": False, "whiten_rewards": True},
    "more minibatches than a rank has rows": {"num_mini_batches": 8},
    "kl in the loss": {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.01},
    "kl in both": {"kl_in": "both", "kl_estimator": "full"},
    "scaled scores, adaptive coefficient": {
        "use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0, "adap_kl_ctrl": True, "horizon": 100,
    },
    "ptx": {"ptx_coef": 0.5},
    "value first": {"value_only_updates": 1},
    "stopped early": {"early_stopping": True, "target_kl": 1e-3, "learning_rate": 0.3},
    "minibatches skipped": {"ratio_threshold": 1.0001, "learning_rate": 0.3},
    "two to a prompt, no value model": {"num_samples_per_prompt": 2, "advantage": "rloo"},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded": {"offload": True},
    "averaged": {"average": 0.5},  # not with fsdp
}  # fmt: skip
ROUGHLY = ("plain", "few tokens, different numbers of micro-batches", "minibatches skipped")  # in float32 too
UPDATES = 2


def trainer(process_group: ProcessGroup, dtype: torch.dtype, head: bool = False, **changes: Any) -> PPOTrainer:
    """Like tiny.trainer, with SGD, so that the weights show the gradients."""
    settings = tiny.settings(**tiny.batch(4 // process_group.world_size), **changes)
    policy, ref = tiny.causal("llama", 3).to(dtype), tiny.causal("llama", 0).to(dtype)
    value = forward.ValueHead(policy) if head else tiny.scorer().to(dtype)
    value = value if settings.needs_value_model else None
    if settings.fsdp and process_group.rank:  # only the first process loads weights
        policy, ref, value = policy.to("meta"), ref.to("meta"), value and value.to("meta")
    # Scores are float32: those of single rows do not depend on the rank.
    rows = 1 if dtype == torch.float64 else 4
    members = {f"m{seed}": ModelReward(tiny.scorer("llama", seed), rows, packed=rows > 1) for seed in (1, 5)}
    rewards = {"model": members["m1"], "both": EnsembleReward(members), "length": length}
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, settings.temperature)
    ptx = PTX if settings.ptx_coef else ()
    more: dict[str, Any] = {"ptx": ptx, "num_updates": 4, "process_group": process_group}
    ours = PPOTrainer(policy, ref, value, rewards, engine, settings, **more)
    trained = [w for model in ours.trained_models.values() for w in model.parameters()]  # the trainer may shard them
    ours.optimizer = torch.optim.SGD(trained, lr=settings.learning_rate, foreach=False)
    ours.scheduler = torch.optim.lr_scheduler.ConstantLR(ours.optimizer, 1.0)
    return ours


def adamw(process_group: ProcessGroup, **more: Any) -> dict[str, torch.Tensor]:
    """The policy after three steps of AdamW by each kernel; "resumed" goes on after one step of torch's own loop."""
    after = {}
    for name, kernel in (("loop", "foreach"), ("foreach", "foreach"), ("fused", "fused"), ("resumed", "fused")):
        ours = trainer(process_group, torch.float32, **more)
        torch.manual_seed(0)
        gradients = [torch.randn(w.shape) for w in ours.policy.parameters()]
        groups = [
            {key: group[key] for key in ("params", "weight_decay", "name")}
            for group in build_optimizer({"policy": ours.policy}, ours.settings).param_groups
        ]
        options: dict[str, Any] = {"lr": 0.01, kernel: name != "loop"}
        ours.optimizer = optimizer = ShardedAdamW([{**group} for group in groups], **options)
        if name == "resumed":  # from a state of a version that had one kind of optimizer
            optimizer = torch.optim.AdamW([{**group} for group in groups], lr=0.01, foreach=False)
        for step in range(3):
            if name == "resumed" and step == 1:
                ours.optimizer.load_state_dict(optimizer.state_dict())
                optimizer = ours.optimizer
            for weight, gradient in zip(ours.policy.parameters(), gradients, strict=True):
                sharded = sharding.is_sharded_tensor(weight)
                weight.grad = sharding._distribute(gradient, weight.device_mesh) if sharded else gradient.clone()
            optimizer.step()
        assert [(len(group["params"]), group[kernel]) for group in optimizer.param_groups] == [
            (len(group["params"]), name != "loop") for group in groups
        ]
        after[name] = weights(ours.policy)
    return after


def local_share(ours: PPOTrainer) -> float:
    """Share of the parameters of policy and value model in this process."""
    parameters = [w for model in ours.trained_models.values() for w in model.parameters()]
    here = sum((w.to_local() if hasattr(w, "to_local") else w).numel() for w in parameters)
    return here / sum(w.numel() for w in parameters)


def weights(model: Any) -> torch.Tensor:
    """All weights of a model, also if this process has a shard of them."""
    whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()]
    return torch.cat([w.detach().reshape(-1).clone() for w in whole])


def length(rollout: Any) -> Any:
    """A function: called once, with all rows. It reads a column."""
    assert len(rollout) == 8
    lengths = rollout.response_lengths.tolist()
    return [0.1 * n + record["row"] / 50 for n, record in zip(lengths, rollout.records, strict=True)]


def trained(ours: PPOTrainer) -> dict[str, Any]:
    """Two updates: their metrics and rollouts, and the weights after them."""
    prompts = tiny.prompts(8 // ours.settings.num_samples_per_prompt)
    stats, rollouts = [], []
    for _ in range(UPDATES):
        stats.append({key: n for key, n in ours.step(prompts).items() if not key.endswith("_s")})
        assert ours.experience is not None
        rollout = ours.experience.rollout
        rollouts.append([(rollout.prompt_tokens(row), rollout.response_tokens(row)) for row in range(len(rollout))])
    return outcome(ours, stats, rollouts)


def results(process_group: ProcessGroup, **more: Any) -> dict[str, Any]:
    found = {}
    for name, changes in CASES.items():
        changes = {**changes, **more, **({"average": None} if more.get("fsdp") else {})}
        found[f"{name}, {torch.float64}"] = trained(trainer(process_group, torch.float64, **changes))
        if name in ROUGHLY:
            found[f"{name}, {torch.float32}"] = trained(trainer(process_group, torch.float32, **changes))
    found["a head on the policy, torch.float64"] = trained(trainer(process_group, torch.float64, head=True, **more))
    found["adamw"] = adamw(process_group, **more)
    found["one row, torch.float64"] = small(process_group, **more)
    for name, spoilt in (("loss", spoil_loss), ("reward", spoil_reward), ("reward model", spoil_model)):
        found[f"error in the {name}"] = error(spoilt(trainer(process_group, torch.float32, **more)))
    return found


def small(process_group: ProcessGroup, **more: Any) -> dict[str, Any]:
    """A rollout of one row: the second rank has nothing to generate, score or train."""
    ours = trainer(process_group, torch.float64, **more)
    ours.rewards.pop("length")
    rollout = ours.generate(tiny.prompts(1))
    experience = ours.make_experience(rollout)
    stats = ours.update(experience)
    return outcome(ours, [stats], [rollout.response_tokens(0)])


def outcome(ours: PPOTrainer, stats: list[Any], rollouts: list[Any]) -> dict[str, Any]:
    after: dict[str, Any] = {name: weights(model) for name, model in ours.trained_models.items()}
    if ours.weight_average:
        after["average"] = torch.cat([w.reshape(-1) for w in ours.weight_average.state_dict().values()])
    after["share"] = local_share(ours)
    after["gathered"] = len(sharding.full_state_dict(ours.policy) or ())  # tensors of a snapshot in this process
    return {"stats": stats, "rollouts": rollouts, **after, "kl_coef": ours.kl_coef, "moments": ours.score_moments}


def error(ours: PPOTrainer) -> dict[str, Any]:
    before = weights(ours.policy)
    try:
        ours.step(tiny.prompts(8))
    except RLHFError as problem:
        return {"output": str(problem), "changed": not torch.equal(before, weights(ours.policy))}
    return {"output": "nothing"}


def spoil_loss(ours: PPOTrainer) -> PPOTrainer:
    """Not finite in one row, which only one rank has."""
    backward = ours.model_runner.backward

    def spoilt(tokens: Any, micro: Any, *args: Any, **kwargs: Any) -> Any:
        result = backward(tokens, micro, *args, **kwargs)
        result.loss[micro.rows[micro.row_index] == 5] = torch.nan
        return result

    ours.model_runner.backward = spoilt  # type: ignore[method-assign]
    return ours


def spoil_reward(ours: PPOTrainer) -> PPOTrainer:
    """A function, which only the first rank calls."""

    def fails(rollout: Any) -> EnsembleScores:
        raise RLHFError("R05", "reward `length` raised ValueError", where="ppo.yaml:3", hint="fix it")

    ours.rewards["length"] = fails
    return ours


def spoil_model(ours: PPOTrainer) -> PPOTrainer:
    """A model, which each rank calls for its own rows: here row 5 is too long."""
    model = ours.rewards["model"]

    class Fails:
        splits_rows = True

        def __call__(self, rollout: Any) -> Any:
            if rollout.row_offset <= 5 < rollout.row_offset + len(rollout):
                raise RLHFError("R05", "row 5 has 90 tokens", hint="shorten it")
            return model(rollout)

    ours.rewards["model"] = Fails()
    return ours


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_process_group() as here:
        torch.save(results(here, fsdp=json.loads(sys.argv[2])), Path(f"{sys.argv[1]}.{here.rank}"))
