"""Tiny random models of real families, and a PPO run on them, for tests that need no files."""

from dataclasses import replace
from functools import wraps

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.scores import RunningMeanStd, ScoreResult
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

VOCABULARY, EOS, PAD = 16, 2, 0
FAMILIES = {
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "llama": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neox": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 3.0},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
}


def config(family: str = "llama", **extra):
    special = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 64}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    # A larger spread than the usual 0.02: distributions that differ from token to token.
    changes = {"vocab_size": VOCABULARY, "initializer_range": 0.3, **FAMILIES.get(family, {}), **extra}
    return AutoConfig.for_model(family, **{**sizes, **special, **changes})


def causal(family: str = "llama", seed: int = 0, **extra):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(family, **extra)).eval()


def scorer(family: str = "llama", seed: int = 1, **extra):
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config(family, num_labels=1, **extra)).eval()


def prompts(rows: int = 8, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (rows,), generator=generator).tolist()
    queries = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return replace(Prompts.from_lists(queries), records=tuple({"prompt": "", "row": row} for row in range(rows)))


def settings(**changes) -> PPOSettings:
    base = {
        "total_episodes": 32, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "response_length": 8,
        "temperature": 0.7, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return PPOSettings(**(base | changes))


def trainer(
    *, dtype=torch.float32, rewards=None, seed=0, policy_seed=0, family="llama", head=False, ptx=(), **changes
) -> PPOTrainer:
    """A trainer of 8 episodes an update; `policy_seed` other than 0 gives a policy that differs from the reference.

    `head`: the value model is a head on the policy. `changes` are settings.
    """
    chosen = settings(**changes)
    policy, ref = causal(family, policy_seed).to(dtype), causal(family, 0).to(dtype)
    value, reward = forward.ValueHead(policy) if head else scorer(family).to(dtype), scorer(family).to(dtype)
    value = value if chosen.needs_value_model else None
    stop = None if chosen.stop_token == "none" else EOS
    engine = HFEngine(policy, stop, PAD, chosen.temperature, bf16=chosen.bf16)
    sources = rewards or {"reward": ModelReward(reward, 4)}
    return PPOTrainer(policy, ref, value, sources, engine, chosen, seed=seed, ptx=ptx)


def trainer_of(policy, chosen: PPOSettings, *, ref=None, value=None, **engine_options) -> PPOTrainer:
    """A trainer of this policy, which is rewarded for long responses."""
    engine = HFEngine(policy, EOS, PAD, **{"temperature": chosen.temperature, **engine_options})
    rewards = {"length": lambda rollout: rollout.response_lengths.float()}
    return PPOTrainer(policy, ref or causal(), value or scorer(), rewards, engine, chosen)


class Words:
    """A tokenizer of numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in ids if token not in (EOS, PAD))


def batch(rows: int, episodes: int = 8) -> dict[str, int]:
    """Sizes of an update of `episodes` rows in micro-batches of `rows`."""
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": episodes // rows}


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def description(model) -> list:
    """All that two processes must have in common to exchange a model's weights, and its mode."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [type(model), model.training, model.config._attn_implementation] + [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors
    ]


# An update without the engine: four rows of different length, three of them ended.

QUERIES, RESPONSES = [[5, 6], [7], [8, 9, 4], [6]], [[3, 2], [4, 8, 9, 5, 2], [6, 5], [9, 2]]
SCORES = [1.0, -1.0, 0.5, 2.0]


def rollout() -> Rollout:
    return Rollout.from_lists(QUERIES, RESPONSES, stop_token_id=EOS)


def trainer_and_experience(**changes):
    """A trainer whose policy differs from its reference, and its experience of the four rows."""
    ours = trainer(**{"policy_seed": 3, **changes})
    return ours, ours.make_experience(rollout(), scores=torch.tensor(SCORES))


def one_step(**changes):
    """A trainer after its update on the four rows, and the update's metrics."""
    ours, experience = trainer_and_experience(**changes)
    return ours, ours.update(experience)


def experience(rows: Rollout, kl_coef: float = 0.05, **fields: torch.Tensor) -> Experience:
    """An Experience with these (B, R) tensors; the others are 0, in float64. `kl_coef` is that in the loss, too."""
    zeros = torch.zeros(rows.response_mask.shape, dtype=torch.float64)
    names = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
    tensors = {name: fields.get(name, zeros) for name in names}
    scores = torch.zeros(len(rows))
    scored = ScoreResult({}, {}, scores, RunningMeanStd(), scores)
    return Experience(rows, ((torch.arange(len(rows)),),), False, scored, kl_coef, kl_coef, **tensors)


def gradient(ours: PPOTrainer, experience: Experience) -> torch.Tensor:
    """The gradient of one optimizer step over the whole experience, policy and value; takes no step."""
    (minibatch,) = experience.minibatches
    ours.optimizer.step = lambda: None
    ours._train_minibatch(experience, minibatch, epoch=0)
    weights = [p for model in (ours.policy, ours.value) for p in model.parameters() if p.grad is not None]
    return torch.cat([p.grad.reshape(-1).clone() for p in weights])


def spy_on_shapes(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the ids of all forward passes of tiny models from now on, but those that generate."""
    body, shapes = type(causal().model), []
    plain = body.forward

    @wraps(plain)
    def forward(model, input_ids, use_cache=False, **others):
        shapes.extend([] if use_cache else [tuple(input_ids.shape)])
        return plain(model, input_ids=input_ids, use_cache=use_cache, **others)

    monkeypatch.setattr(body, "forward", forward)
    return shapes
