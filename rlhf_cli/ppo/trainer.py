"""PPO's loop: generate -> judge -> update. Knows models and numbers; no disk, no YAML."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward, sharding
from rlhf_cli.ppo import finite, formulas, metrics, scoring
from rlhf_cli.ppo import optimizer as default
from rlhf_cli.ppo.advantages import gae
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.ppo.moments import Moments
from rlhf_cli.ppo.passes import Learned, Made, Passes, most_tokens
from rlhf_cli.ppo.placement import Cut, Whole
from rlhf_cli.ppo.ranks import ALONE, Ranks
from rlhf_cli.ppo.records import Experience, Opinions, Prompts, Rollout, Scored, micro_batches
from rlhf_cli.ppo.rollout import RolloutEngine
from rlhf_cli.ppo.seeds import derive
from rlhf_cli.ppo.settings import LengthRange, PPOSettings
from rlhf_cli.progress import counted
from rlhf_cli.rewards import RewardSource

Minibatch = tuple[Tensor, ...]  # micro-batches, each the rows of the rollout that are in it


READ = ("logprobs", "ref_logprobs", "kl", "values")  # what the judge reads of each response token
CPU = torch.device("cpu")


class PPOTrainer:
    """Four models and a schedule of updates.

    `policy` and `ref` are causal models, `value` a one-label sequence classifier with the policy's tokenizer, or a
    `reading.ValueHead` on the policy; `rewards` are named sources whose scores are added with `weights` (1 each by
    default). `ptx` are rows (prompt ids, completion ids) for ptx_coef. Dropout is switched off in all models, and
    `ref` is frozen; of policy and value learns what requires a gradient (all of it where nothing does), and the state
    leaves out what does not, such as weights below adapters. `num_updates` is the length of the learning-rate schedule;
    by default what total_episodes makes. `ranks`: the processes that train together, each with a trainer of the same
    models and settings; a batch is of all of them. Their numbers are those of one process, but for rounding.
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
        clips: dict[str, float] | None = None,
        ptx: Sequence[tuple[list[int], list[int]]] = (),
        num_updates: int | None = None,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ):
        assert policy is not ref, "the reference must be a copy of its own"
        assert bool(ptx) == bool(settings.ptx_coef), "ptx_coef and rows for it go together"
        drawn = getattr(engine, "temperature", settings.temperature)
        assert drawn == settings.temperature, (
            f"the engine samples at {drawn}, log-probs are read at {settings.temperature}"
        )
        assert getattr(engine, "bf16", settings.bf16) == settings.bf16, "the engine and log-probs differ in bf16"
        for model in (policy, value):
            if not any(weight.requires_grad for weight in model.parameters()):  # a copy of a frozen one learns whole
                model.requires_grad_(True)
        self.policy, self.ref, self.value = policy, ref.requires_grad_(False), value
        self._stands_still = {name: _frozen(model) for name, model in (("policy", policy), ("value", value))}
        self.rewards, self.engine, self.settings, self.seed, self.ranks = rewards, engine, settings, seed, ranks
        self.weights, self.clips, self.ptx = weights or dict.fromkeys(rewards, 1.0), clips or {}, ptx
        for model in (policy, ref, value):
            forward.disable_dropout(model)
        if settings.num_shared_layers:
            sharding.share_layers(policy, ref, settings.num_shared_layers)
        self.passes = Passes(policy, ref, value, settings)
        if settings.offload:
            sharding.offload_to_cpu(ref)
        self.placement = Whole(ranks)
        if settings.fsdp and ranks.count > 1:
            trained = [policy] if self.passes.head_on_policy else [policy, value]
            self.placement = Cut(ranks, trained, [] if settings.offload else [ref])
        if settings.gradient_checkpointing:
            forward.enable_gradient_checkpointing(policy)
            if not self.passes.head_on_policy:
                forward.enable_gradient_checkpointing(value)
        self.optimizer = optimizer or default.adamw({"policy": policy, "value": value}, settings)
        self.scheduler = scheduler or default.schedule(self.optimizer, settings, num_updates or settings.num_updates())
        self.updates, self.kl_coef, self.moments = 0, settings.kl_coef, Moments()
        self.experience: Experience | None = None  # of the last step, for sample tables

    def step(self, prompts: Prompts) -> Stats:
        """One PPO update on num_samples_per_prompt responses to each of `prompts`; returns its metrics."""
        clock = [self._now()]
        rollout = self.generate(prompts)
        clock.append(self._now())
        self.experience = self.judge(rollout)
        clock.append(self._now())
        stats = self.update(self.experience)
        clock.append(self._now())
        phases = dict(zip(("rollout", "judge", "update"), (b - a for a, b in pairwise(clock)), strict=True))
        stats |= {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
        return stats | {"tokens_per_s": stats["tokens/real"] / (clock[-1] - clock[0])}

    def _now(self) -> float:
        """Seconds of a clock; what an accelerator was asked before is done."""
        if self.policy.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    # Generate

    def generate(self, prompts: Prompts, purpose: str = "sample", engine: RolloutEngine | None = None) -> Rollout:
        """Responses, their draws keyed by (seed, purpose, update, row), by the trainer's engine or another one.

        For training ("sample") num_samples_per_prompt to each prompt, for another purpose one. Each rank writes a part.
        """
        if purpose == "sample":
            prompts = prompts.repeat(self.settings.num_samples_per_prompt)
        asked, engine = self.keyed(prompts, purpose), engine or self.engine
        if self.ranks.count == 1:
            return engine.generate(asked)
        with self.placement.writing(getattr(engine, "model", self.policy)):
            total, rows = len(asked), asked.rows
            parts = self.ranks.parted(total, lambda part: engine.generate(rows(part.start, part.stop)).to(CPU))
        return Rollout.joined(parts)

    def keyed(self, prompts: Prompts, purpose: str) -> Prompts:
        """The prompts as an engine takes them: with this update's seeds and length limit."""
        seeds = tuple(derive(self.seed, purpose, self.updates, row) for row in range(len(prompts)))
        return replace(prompts, seeds=seeds, response_length=self.response_length)

    @property
    def response_length(self) -> int:
        """The length limit of this update's responses."""
        length = self.settings.response_length
        if not isinstance(length, LengthRange):
            return length
        return length.min + derive(self.seed, "length", self.updates) % (length.max - length.min + 1)

    # Judge

    @torch.no_grad()
    def judge(self, rollout: Rollout, scores: Tensor | None = None) -> Experience:
        """Log-probs, values, scores, rewards and advantages of a rollout. Changes nothing of the trainer's.

        `scores` (B,), where given, stand in for the sources; they are scaled and clipped like them, and no penalty is
        taken off. Raises RLHFError R01 where a number is not finite, R05 for scores of another shape.
        """
        rollout = rollout.to(self.policy.device)
        settings, mask = self.settings, rollout.response_mask
        plan = self._plan(rollout, epoch=0)
        with self.reference_at_hand():
            read = self._read(rollout, plan)
        finite.check(read, self.updates + 1)
        scored = self._score(rollout, scores)
        penalty = self.kl_coef * read["kl"] if settings.kl_in == "reward" else torch.zeros_like(read["kl"])
        rewards = formulas.shape_rewards(scored.placed, penalty, mask)
        if settings.whiten_rewards:
            rewards = formulas.masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = gae(rewards, read["values"], mask, settings.gamma, settings.lam)
        if settings.advantage_norm == "batch":
            advantages = formulas.masked_whiten(advantages, mask)
        numbers = {**read, "rewards": rewards, "advantages": advantages, "returns": returns}
        return Experience(rollout, plan, self.passes.packed, scored, self.kl_coef, **numbers)

    def _score(self, rollout: Rollout, given: Tensor | None) -> Scored:
        asked = (
            {name: self._ask(source, rollout) for name, source in self.rewards.items()}
            if given is None
            else {"given": given}
        )
        opinions = {name: said for name, said in asked.items() if isinstance(said, Opinions)}
        asked |= {name: said.score for name, said in opinions.items()}
        raw = {name: self._per_row(name, said, rollout) for name, said in asked.items()}
        members = {f"{name}/{each}": score for name, said in opinions.items() for each, score in said.members.items()}
        finite.check({f"score `{name}`": scores for name, scores in (members | raw).items()}, self.updates + 1)
        summed = scoring.weighted(raw, self.weights, self.clips) if given is None else raw["given"]
        moments = self.moments.merged(summed)
        placed = scoring.scaled(summed, moments, self.settings)
        if given is None:
            placed = scoring.penalised(placed, rollout, self.response_length, self.settings)
        return Scored(raw, opinions, summed, moments, placed)

    def _ask(self, source: RewardSource, rollout: Rollout) -> Any:
        """Score all rows: ranks share the rows of a `shardable` source, else the first rank scores all."""
        if self.ranks.count == 1:
            return source(rollout)
        if not getattr(source, "shardable", False):
            return self.ranks.first(lambda: _on_cpu(source(rollout)))
        parts: list[Any] = self.ranks.parted(len(rollout), lambda part: _on_cpu(source(rollout.rows(part))))
        return Opinions.joined(parts) if isinstance(parts[0], Opinions) else torch.cat(parts)

    @staticmethod
    def _per_row(name: str, scores: Any, rollout: Rollout) -> Tensor:
        """Scores as (B,) float32 on the rollout's device. Raises RLHFError R05 for another shape."""
        given = torch.as_tensor(scores, dtype=torch.float32, device=rollout.ids.device)
        if given.shape != (len(rollout),):
            text = f"reward `{name}` gave scores of shape {tuple(given.shape)} for {len(rollout)} responses"
            raise RLHFError("R05", text, hint="return one number a response")
        return given

    def _plan(self, rollout: Rollout, epoch: int) -> tuple[Minibatch, ...]:
        """An epoch's minibatches, drawn at random, each split into micro-batches of rows of like length."""
        draw = torch.Generator().manual_seed(derive(self.seed, "minibatches", self.updates, epoch))
        order = torch.randperm(len(rollout), generator=draw).to(rollout.ids.device)
        parts = order.tensor_split(min(self.settings.num_mini_batches, len(order)))
        return tuple(self._split(rollout, rows) for rows in parts)

    def _split(self, rollout: Rollout, rows: Tensor) -> Minibatch:
        tokens = most_tokens(self.settings, on_cpu=self.policy.device.type == "cpu")
        size = self.settings.per_device_train_batch_size
        return tuple(micro_batches(rollout.lengths, rows, max_rows=size, max_tokens=tokens, packed=self.passes.packed))

    def reference_at_hand(self) -> AbstractContextManager:
        """Within, the reference can be read where the policy is; with settings.offload it waits elsewhere."""
        return sharding.on_device(self.ref, self.policy.device) if self.settings.offload else nullcontext()

    def _read(self, rollout: Rollout, plan: tuple[Minibatch, ...]) -> dict[str, Tensor]:
        """What the models say of each response token, (B, R) each, 0 elsewhere; on the update's own micro-batches."""
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        read = {name: torch.zeros_like(rollout.response_mask, dtype=dtype) for name in READ}
        with self.placement.learning():
            micros = self.placement.turns(list(chain.from_iterable(plan)))
            for rows, counts in counted("judge: micro-batch", micros):
                micro = rollout.micro_batch(rows)
                for name, flat in self.passes.read(micro).items():
                    if counts:
                        read[name][micro.cells] = flat
        self.ranks.add(read.values())
        return read

    # Update

    def update(self, experience: Experience) -> Stats:
        """num_ppo_epochs passes over the experience, one optimizer step a minibatch; returns the update's metrics.

        Raises RLHFError R01 for a loss, gradient or weight that is not finite; a bad loss or gradient changes nothing.
        """
        settings = self.settings
        rates = {"lr": self._rate("policy"), "value/lr": self._rate("value")}
        steps: list[Stats] = []
        with self.reference_at_hand() if self.passes.exact_kl_in_loss else nullcontext():
            for epoch in counted("update: epoch", range(settings.num_ppo_epochs)):
                plan = experience.plan if epoch == 0 else self._plan(experience.rollout, epoch)
                steps += [self._learn(experience, minibatch, epoch) for minibatch in counted("minibatch", plan)]
                if settings.early_stopping and steps[-1]["policy/policykl"] > 1.5 * settings.target_kl:
                    break
        norms = {"policy": self.placement.norm(self.policy), "value": self.placement.norm(self.value)}
        finite.check_weights(norms, self.updates + 1)
        learns = self._policy_learns  # else the KL is no answer to the coefficient
        self.scheduler.step()
        self.updates += 1
        stats = metrics.objective(experience, in_reward=settings.kl_in == "reward") | metrics.averages(steps)
        self.moments = experience.scored.moments
        if settings.adap_kl_ctrl and learns:
            self.kl_coef = formulas.adapted_kl_coef(
                self.kl_coef, stats["objective/kl"], target=settings.target, episodes=len(experience.rollout),
                horizon=settings.horizon,
            )  # fmt: skip
        return {
            "episode": self.updates * len(experience.rollout),
            **stats,
            "policy/epochs": epoch + 1,
            **rates,
        }

    def _rate(self, name: str) -> float:
        """The learning rate of a model's parameter groups; of the first group where none has that name."""
        groups = self.optimizer.param_groups
        return next((group["lr"] for group in groups if group.get("name", "").startswith(name)), groups[0]["lr"])

    def _learn(self, experience: Experience, minibatch: Minibatch, epoch: int = 0) -> Stats:
        """One optimizer step. Losses are means over the minibatch's response tokens, whatever its micro-batches."""
        tokens = int(sum(experience.mask[rows].sum() for rows in minibatch))
        self.optimizer.zero_grad(set_to_none=True)
        with self.placement.learning(), forward.gradient_checkpointing(self.policy, self.value), self.passes.adding():
            turns = self.placement.turns(minibatch)
            found = [
                self._backward(experience, rows, counts / tokens) for rows, counts in counted("micro-batch", turns)
            ]
            ptx = self._learn_ptx(minibatch, epoch)
        found = [learned for learned, (_, counts) in zip(found, turns, strict=True) if counts]
        made = self.ranks.told(Made.of(found, ptx, self.updates + 1))
        stats = {name: total / tokens for name, total in metrics.sums([each.gauges for each in made]).items()}
        stats |= metrics.sums([each.ptx for each in made])
        limit = self.settings.ratio_threshold
        skipped = limit is not None and stats["val/ratio"] > limit
        if not skipped:
            stats |= self._optimize(made)
        return stats | {"ratio_error": max(each.ratio_error for each in made), "skipped": float(skipped)}

    def _backward(self, experience: Experience, rows: Tensor, share: float) -> Learned:
        micro = experience.rollout.micro_batch(rows)
        told, learns = experience.of(micro), self._policy_learns
        return self.passes.backward(told, micro, experience.kl_coef, share, learn_policy=learns)

    @property
    def _policy_learns(self) -> bool:
        return self.updates >= self.settings.value_only_updates

    def _learn_ptx(self, minibatch: Minibatch, epoch: int) -> Stats:
        """Add the gradient of the language-model loss over ptx rows, one drawn for each episode of the minibatch."""
        if not self.ptx or not self._policy_learns:
            return {}
        draws = [derive(self.seed, "ptx", self.updates, epoch, row) for row in torch.cat(minibatch).tolist()]
        chosen = [self.ptx[draw % len(self.ptx)] for draw in draws]
        rows = Rollout.from_lists(*zip(*chosen, strict=True)).to(self.policy.device)
        tokens, total = int(rows.response_mask.sum()), 0.0
        parts = self._split(rows, torch.arange(len(rows), device=rows.ids.device))
        for part, counts in self.placement.turns(parts):
            total += self.passes.backward_ptx(rows.micro_batch(part), counts / tokens)
        return {"loss/ptx_avg": total}

    def _optimize(self, made: list[Made]) -> Stats:
        """Clip and step. Raises RLHFError R01, and steps nowhere, where a loss or gradient is not finite."""
        for each in made:
            if each.problem:
                raise each.problem
        models, norms = {"policy": self.policy, "value": self.value}, {}
        for name, model in models.items():
            self.placement.add_gradients(model)
            norms[name] = self.placement.clip(model, self.settings.max_grad_norm)
        finite.check({f"{name} gradient": norm for name, norm in norms.items()}, self.updates + 1)
        self.optimizer.step()
        return {f"{name}/grad_norm": float(norm) for name, norm in norms.items()}

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but the frozen weights and the settings."""
        parts = {name: getattr(self, name).state_dict() for name in ("policy", "value", "optimizer", "scheduler")}
        for name, still in self._stands_still.items():
            parts[name] = {key: tensor for key, tensor in parts[name].items() if key not in still}
        numbers = {"updates": self.updates, "seed": self.seed, "kl_coef": self.kl_coef}
        return {**numbers, "moments": asdict(self.moments), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Raises ValueError on the state of a run with another seed."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a run with seed {state['seed']}, this one has {self.seed}")
        for name in ("optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        for name, still in self._stands_still.items():
            model = getattr(self, name)
            here = {key: tensor for key, tensor in model.state_dict().items() if key in still}
            model.load_state_dict({**here, **state[name]})
        self.updates, self.kl_coef, self.moments = state["updates"], state["kl_coef"], Moments(**state["moments"])


def _on_cpu(said: Any) -> Any:
    return said.cpu() if isinstance(said, Tensor | Opinions) else said


def _frozen(model: Any) -> set[str]:
    """The names of what does not learn, as a state dict has them: what is tied has several."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
