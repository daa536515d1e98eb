"""PPO's loop: generate -> judge -> update. Knows models and numbers; no disk, no YAML."""

import time
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import reading
from rlhf_cli.ppo import formulas, metrics
from rlhf_cli.ppo import optimizer as default
from rlhf_cli.ppo.advantages import gae
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.ppo.records import Experience, MicroBatch, Prompts, Rollout, micro_batches
from rlhf_cli.ppo.rewards import RewardSource
from rlhf_cli.ppo.rollout import RolloutEngine
from rlhf_cli.ppo.seeds import derive
from rlhf_cli.ppo.settings import LengthRange, PPOSettings


class PPOTrainer:
    """Four models and a schedule of updates.

    `policy` and `ref` are causal models, `value` a one-label sequence classifier with the policy's tokenizer; `rewards`
    are named sources whose scores are added with `weights` (1 each by default). Dropout is switched off in all, and
    `ref` is frozen. `num_updates` is the length of the learning-rate schedule; by default what total_episodes makes.
    """

    def __init__(
        self,
        policy: Any,
        ref: Any,
        value: Any,
        rewards: dict[str, RewardSource],
        engine: RolloutEngine,
        settings: PPOSettings,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        weights: dict[str, float] | None = None,
        num_updates: int | None = None,
        seed: int = 0,
    ):
        assert policy is not ref, "the reference must be a copy of its own"
        drawn = getattr(engine, "temperature", settings.temperature)
        assert drawn == settings.temperature, (
            f"the engine samples at {drawn}, log-probs are read at {settings.temperature}"
        )
        self.policy, self.ref, self.value = policy, ref.requires_grad_(False), value.requires_grad_(True)
        self.rewards, self.engine, self.settings, self.seed = rewards, engine, settings, seed
        self.weights = weights or dict.fromkeys(rewards, 1.0)
        for model in (policy, ref, value):
            reading.disable_dropout(model)
        if settings.gradient_checkpointing:
            reading.checkpoint_activations(policy)
            reading.checkpoint_activations(value)
        self.optimizer = optimizer or default.adamw({"policy": policy, "value": value}, settings)
        self.scheduler = scheduler or default.schedule(self.optimizer, settings, num_updates or settings.num_updates())
        self.updates = 0
        self.experience: Experience | None = None  # of the last step, for sample tables

    def step(self, prompts: Prompts) -> Stats:
        """One PPO update on num_samples_per_prompt responses to each of `prompts`; returns its metrics."""
        clock = [time.perf_counter()]
        rollout = self.generate(prompts)
        clock.append(time.perf_counter())
        self.experience = self.judge(rollout)
        clock.append(time.perf_counter())
        stats = self.update(self.experience)
        clock.append(time.perf_counter())
        phases = dict(zip(("rollout", "judge", "update"), (b - a for a, b in pairwise(clock)), strict=True))
        stats |= {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
        return stats | {"tokens_per_s": stats["tokens/real"] / (clock[-1] - clock[0])}

    # Generate

    def generate(self, prompts: Prompts, purpose: str = "sample") -> Rollout:
        """Responses, their draws keyed by (seed, purpose, update, row).

        For training ("sample") num_samples_per_prompt to each prompt, for another purpose one.
        """
        if purpose == "sample":
            prompts = prompts.repeat(self.settings.num_samples_per_prompt)
        seeds = tuple(derive(self.seed, purpose, self.updates, row) for row in range(len(prompts)))
        return self.engine.generate(replace(prompts, seeds=seeds, response_length=self._response_length()))

    def _response_length(self) -> int:
        length = self.settings.response_length
        if not isinstance(length, LengthRange):
            return length
        return length.min + derive(self.seed, "length", self.updates) % (length.max - length.min + 1)

    # Judge

    @torch.no_grad()
    def judge(self, rollout: Rollout, scores: Tensor | None = None) -> Experience:
        """Log-probs, values, scores, rewards and advantages of a rollout.

        `scores` (B,), where given, are placed as they are, in the stead of sources and missing_eos_penalty.
        Raises RLHFError R01 where a number is not finite.
        """
        rollout = rollout.to(self.policy.device)
        settings, mask = self.settings, rollout.response_mask
        plan = self._plan(rollout, epoch=0)
        read = self._read(rollout, plan)
        sources = {name: ask(rollout) for name, ask in self.rewards.items()} if scores is None else {"given": scores}
        raw = {name: self._per_row(name, given, rollout) for name, given in sources.items()}
        scores = self._place(rollout, raw) if scores is None else raw["given"]
        for name, tensor in {**{f"score `{name}`": score for name, score in raw.items()}, **read}.items():
            self._refuse_nonfinite(name, tensor)
        penalty = settings.kl_coef * read["kl"] if settings.kl_in == "reward" else torch.zeros_like(read["kl"])
        rewards = formulas.shape_rewards(scores, penalty, mask)
        if settings.whiten_rewards:
            rewards = formulas.masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = gae(rewards, read["values"], mask, settings.gamma, settings.lam)
        if settings.advantage_norm == "batch":
            advantages = formulas.masked_whiten(advantages, mask)
        return Experience(rollout, plan, scores, raw, **read, rewards=rewards, advantages=advantages, returns=returns)

    def _place(self, rollout: Rollout, sources: dict[str, Tensor]) -> Tensor:
        """The score (B,) of each row: the sources by weight, less the penalty for a response that reached its limit."""
        scores = torch.stack([self.weights[name] * raw for name, raw in sources.items()]).sum(0)
        if self.settings.missing_eos_penalty and self.settings.stop_token != "none":
            scores = scores - self.settings.missing_eos_penalty * ~rollout.ended
        return scores

    @staticmethod
    def _per_row(name: str, scores: Any, rollout: Rollout) -> Tensor:
        """Scores as (B,) float32 on the rollout's device. Raises RLHFError R05 for another shape."""
        given = torch.as_tensor(scores, dtype=torch.float32, device=rollout.ids.device)
        if given.shape != (len(rollout),):
            text = f"reward `{name}` gave scores of shape {tuple(given.shape)} for {len(rollout)} responses"
            raise RLHFError("R05", text, hint="return one number a response")
        return given

    def _plan(self, rollout: Rollout, epoch: int) -> tuple[tuple[Tensor, ...], ...]:
        """An epoch's minibatches, drawn at random, each split into micro-batches of rows of like length."""
        settings = self.settings
        draw = torch.Generator().manual_seed(derive(self.seed, "minibatches", self.updates, epoch))
        order = torch.randperm(len(rollout), generator=draw)
        tokens = None if settings.micro_batch_tokens == "auto" else settings.micro_batch_tokens
        size = settings.per_device_train_batch_size
        return tuple(
            tuple(micro_batches(rollout.lengths, rows.to(rollout.ids.device), max_rows=size, max_tokens=tokens))
            for rows in order.tensor_split(settings.num_mini_batches)
        )

    def _read(self, rollout: Rollout, plan: tuple[tuple[Tensor, ...], ...]) -> dict[str, Tensor]:
        """What the models say of each response token, (B, R) each, 0 elsewhere; on the update's own micro-batches."""
        temperature, kind = self.settings.temperature, self.settings.kl_estimator
        read: dict[str, Tensor] = {}
        for rows in chain.from_iterable(plan):
            micro = rollout.micro_batch(rows)
            with self._autocast():
                logits, ref_logits = (reading.response_logits(model, micro) for model in (self.policy, self.ref))
                values = reading.response_values(self.value, micro)
            logprobs = formulas.token_logprobs(logits, micro.targets, temperature)
            ref_logprobs = formulas.token_logprobs(ref_logits, micro.targets, temperature)
            if kind == "full":
                kl = formulas.kl_full(logits, ref_logits, temperature)
            else:
                kl = formulas.kl_tokens(logprobs, ref_logprobs, kind)
            found = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values, "kl": kl}
            for name, flat in found.items():
                read.setdefault(name, flat.new_zeros(rollout.response_mask.shape))[micro.cells] = flat
        return read

    # Update

    def update(self, experience: Experience) -> Stats:
        """num_ppo_epochs passes over the experience, one optimizer step a minibatch; returns the update's metrics."""
        steps: list[Stats] = []
        lr = self.optimizer.param_groups[0]["lr"]
        for epoch in range(self.settings.num_ppo_epochs):
            plan = experience.plan if epoch == 0 else self._plan(experience.rollout, epoch)
            steps += [self._learn(experience, minibatch) for minibatch in plan]
        self.scheduler.step()
        self.updates += 1
        return {
            "episode": self.updates * len(experience.rollout),
            **metrics.objective(experience, kl_coef=self.settings.kl_coef, in_reward=self.settings.kl_in == "reward"),
            **metrics.averages(steps),
            "lr": lr,
        }

    def _learn(self, experience: Experience, minibatch: tuple[Tensor, ...]) -> Stats:
        """One optimizer step. Losses are means over the minibatch's response tokens, whatever its micro-batches."""
        tokens = int(sum(experience.mask[rows].sum() for rows in minibatch))
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=experience.mask.device))
        error = torch.zeros((), device=experience.mask.device)
        self.optimizer.zero_grad(set_to_none=True)
        with reading.recomputing(self.policy, self.value):
            for rows in minibatch:
                loss, gauges, ratio = self._loss(experience, experience.rollout.micro_batch(rows))
                (loss / tokens).backward()
                error = torch.maximum(error, (ratio - 1).abs().max())
                for name, gauge in gauges.items():
                    totals[name] += gauge.detach().sum()
        norms = {
            name: torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.max_grad_norm)
            for name, model in (("policy", self.policy), ("value", self.value))
        }
        for name, norm in norms.items():
            self._refuse_nonfinite(f"{name} gradient", norm)
        self.optimizer.step()
        stats = {name: float(total) / tokens for name, total in totals.items()}
        stats |= {f"{name}/grad_norm": float(norm) for name, norm in norms.items()}
        return stats | {"ratio_error": float(error)}

    def _loss(self, experience: Experience, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Summed loss of a micro-batch, the gauges of each token (N,), and the ratio (N,)."""
        settings = self.settings
        old_logprobs, advantages, old_values, returns = (
            x[micro.cells] for x in (experience.logprobs, experience.advantages, experience.values, experience.returns)
        )
        with self._autocast():
            logits, values = reading.response_logits(self.policy, micro), reading.response_values(self.value, micro)
        logprobs = formulas.token_logprobs(logits, micro.targets, settings.temperature)
        surrogate, ratio, clipped = formulas.policy_loss(logprobs, old_logprobs, advantages, settings.cliprange)
        error, value_clipped = formulas.value_loss(values, old_values, returns, settings.cliprange_value)
        loss = surrogate.sum() + settings.vf_coef * error.sum()
        if settings.kl_in == "loss":
            loss = loss + settings.kl_coef * self._kl_loss(experience, micro, logits, logprobs).sum()
        gauges = {
            "loss/policy_avg": surrogate,
            "loss/value_avg": error,
            "policy/clipfrac_avg": clipped.float(),
            "policy/entropy_avg": formulas.token_entropy(logits, settings.temperature),
            "policy/approxkl_avg": formulas.approx_kl(logprobs, old_logprobs),
            "val/ratio": ratio,
            "val/clipfrac_avg": value_clipped.float(),
        }
        return loss, gauges, ratio.detach()

    def _kl_loss(self, experience: Experience, micro: MicroBatch, logits: Tensor, logprobs: Tensor) -> Tensor:
        if self.settings.kl_estimator == "full":
            with torch.no_grad(), self._autocast():
                ref_logits = reading.response_logits(self.ref, micro)
            return formulas.kl_full(logits, ref_logits, self.settings.temperature)
        old, ref = experience.logprobs[micro.cells], experience.ref_logprobs[micro.cells]
        return formulas.kl_loss_tokens(logprobs, old, ref, self.settings.kl_estimator)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but the frozen models and the settings."""
        parts = {name: getattr(self, name).state_dict() for name in ("policy", "value", "optimizer", "scheduler")}
        return {"updates": self.updates, "seed": self.seed, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Raises ValueError on the state of a run with another seed."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a run with seed {state['seed']}, this one has {self.seed}")
        for name in ("policy", "value", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        self.updates = state["updates"]

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16, enabled=self.settings.bf16)

    def _refuse_nonfinite(self, name: str, numbers: Tensor) -> None:
        bad = ~torch.isfinite(numbers)
        if bad.any():
            at = f" in row {int(bad.nonzero()[0, 0])}" if numbers.ndim else ""
            raise RLHFError(
                "R01",
                f"step {self.updates + 1}: {name} is not finite{at}; no weight was changed in this optimizer step",
                hint="lower ppo.learning_rate, or look at the reward of that row",
            )
