"""The PPO algorithm: generate -> make_experience -> update. It works on models and tensors; no disk, no YAML.

Shapes: B rows (episodes), R response width.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlhf_cli.config.ppo import LengthRange, PPOSettings
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, forward, lora, sharding
from rlhf_cli.models.batch import EnsembleScores, Prompts, Rollout, split_into_micro_batches
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo import losses, monitor
from rlhf_cli.ppo.experience import Experience, Minibatch, Stats, estimate_advantages
from rlhf_cli.ppo.forward_backward import (
    MinibatchStats,
    max_micro_batch_tokens,
    mean_over_steps,
    sum_metrics,
)
from rlhf_cli.ppo.model_setup import prepare_models
from rlhf_cli.ppo.optimizer import WeightAverage, build_optimizer, build_scheduler
from rlhf_cli.ppo.rollout import HFEngine, RolloutEngine
from rlhf_cli.ppo.scores import (
    RunningMeanStd,
    ScoreResult,
    apply_penalties,
    as_row_scores,
    call_source,
    normalize_scores,
    weighted_sum,
)
from rlhf_cli.progress import says_if_slow, track_progress
from rlhf_cli.rewards.function import FunctionReward, RolloutReward

LEARNING_RATES = {"policy": "lr", "value": "value/lr"}  # metric of each trained model
CPU = torch.device("cpu")


class PPOTrainer:
    """Trains a policy and a value model by PPO, against a frozen reference and reward sources.

    `policy` and `ref` are causal models. `value` is a one-label sequence classifier with the policy's tokenizer, or a
    `forward.ValueHead` on the policy; None if the advantage is rloo or grpo. `rewards` are named sources; their scores
    are added with `weights` (default 1), after clipping to +-`clips`. `ptx` are rows (prompt ids, completion ids) for
    ptx_coef. `num_updates` is the length of the learning-rate schedule, by default that of total_episodes.

    Dropout is disabled in all models and `ref` is frozen. Policy and value train the parameters that require gradients,
    or all if none does; checkpoints leave out the others, such as the base weights of adapters. Each rank of
    `process_group` has its own trainer of the same models and settings, and batch sizes are totals over the ranks.
    Results equal those of a single process up to rounding.
    """

    engine_has_weights = False  # of the policy as it is now
    experience: Experience | None = None  # of the last step

    def __init__(
        self,
        policy: Any,
        ref: Any,
        value: Any,
        rewards: dict[str, RolloutReward],
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
        process_group: ProcessGroup = SINGLE_PROCESS,
    ):
        assert policy is not ref, "the reference must be a separate copy"
        assert bool(ptx) == bool(settings.ptx_coef), "pass ptx rows if and only if ptx_coef is set"
        assert (value is None) != settings.needs_value_model, "pass a value model if and only if the advantage needs it"
        self.settings = settings.model_copy(update={"bf16": devices.use_bf16(settings.bf16)})
        _check_engine_settings(engine, self.settings)

        self.seed = seed
        self.process_group = process_group
        self.engine = engine
        self.rewards = rewards
        self.reward_weights = dict.fromkeys(rewards, 1.0) | (weights or {})
        self.reward_clips = clips or {}
        self.ptx = ptx

        self.policy = policy
        self.value = value
        self.ref = ref.requires_grad_(False)
        self.trained_models: dict[str, Any] = {"policy": policy}
        if value is not None:
            self.trained_models["value"] = value

        self._frozen_keys: dict[str, set[str]] = {}  # of the state dicts, by model
        for name, model in self.trained_models.items():
            _train_something(model)
            self._frozen_keys[name] = lora.frozen_state_keys(model)

        self.model_runner, self.parallel = prepare_models(policy, self.ref, value, self.settings, process_group)

        self.optimizer = optimizer or build_optimizer(self.trained_models, self.settings)
        num_updates = num_updates or settings.num_updates()
        self.scheduler = scheduler or build_scheduler(self.optimizer, self.settings, num_updates)
        self.average = WeightAverage(policy, settings.average) if settings.average else None

        self.updates = 0
        self.kl_coef = settings.kl_coef
        self.score_moments = RunningMeanStd()

    def step(self, prompts: Prompts) -> Stats:
        """Run one PPO update on num_samples_per_prompt responses to each prompt; return its metrics."""
        start = self._synchronized_time()
        rollout = self.generate(prompts)

        generate_end = self._synchronized_time()
        self.experience = self.make_experience(rollout)

        score_end = self._synchronized_time()
        stats = self.update(self.experience)

        end = self._synchronized_time()
        return {
            **stats,
            "time/rollout_s": generate_end - start,
            "time/judge_s": score_end - generate_end,
            "time/update_s": end - score_end,
            "tokens_per_s": stats["tokens/real"] / (end - start),
        }

    def _synchronized_time(self) -> float:
        """Return a clock's seconds once the accelerator's queued work is done."""
        if self.policy.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    # Generate

    def generate(
        self,
        prompts: Prompts,
        purpose: str = "sample",
        engine: RolloutEngine | None = None,
    ) -> Rollout:
        """Generate responses, with random draws keyed by (seed, purpose, update, row). Each rank generates a part.

        Purpose "sample", for training, gives num_samples_per_prompt responses to each prompt, any other purpose one.
        An `engine` other than the trainer's draws from another model, and its log-probs are not kept.
        """
        if purpose == "sample":
            prompts = prompts.repeat(self.settings.num_samples_per_prompt)
        seeds = tuple(derive_seed(self.seed, purpose, self.updates, row) for row in range(len(prompts)))
        seeded = replace(prompts, seeds=seeds, response_length=self.response_limit)

        if engine is not None:
            return replace(self._generate(seeded, engine), logprobs=None)

        if not self.engine_has_weights:
            self.engine.update_weights(self.updates, self.policy)
            self.engine_has_weights = True
        rollout = self._generate(seeded, self.engine)
        self.engine.release_memory()
        return rollout

    def _generate(self, seeded: Prompts, engine: RolloutEngine) -> Rollout:
        """Return the engine's responses to all prompts, on all ranks."""

        def generate_part(part: slice) -> Rollout:
            return engine.generate(seeded.rows(part)).to(CPU)

        group = self.process_group
        if group.world_size == 1 or not engine.deterministic:  # one process talks to a server
            rollout = group.run_on_main(lambda: engine.generate(seeded))
        else:
            model = getattr(engine, "model", self.policy)
            with self.parallel.gathered_model(model):
                parts = group.map_rows(len(seeded), generate_part)
            rollout = Rollout.concat(parts)

        return replace(rollout, records=seeded.records)

    @property
    def response_limit(self) -> int:
        """Maximum response length of this update, in tokens."""
        length = self.settings.response_length
        if not isinstance(length, LengthRange):
            return length

        num_lengths = length.max - length.min + 1
        draw = derive_seed(self.seed, "length", self.updates)
        return length.min + draw % num_lengths

    # Make experience

    @torch.no_grad()
    def make_experience(self, rollout: Rollout, scores: Tensor | None = None) -> Experience:
        """Compute log-probs, values, scores, rewards and advantages of a rollout. The trainer's state is unchanged.

        `scores` (B,) replace those of the reward sources; they are normalised and clipped, and no penalty is
        subtracted. Raises RLHFError R01 if a number is not finite, R05 if scores have the wrong shape, R19 if the
        rollout was drawn from other weights; ValueError if rollout_correction lacks the engine's log-probs.
        """
        rollout = rollout.to(self.policy.device)
        minibatches = self._make_minibatches(rollout, epoch=0)
        micro_batches = list(chain.from_iterable(minibatches))
        with self.ref_on_device():
            outputs = self._forward(rollout, micro_batches)
        for name, output in outputs.items():
            monitor.check_finite(name, output, self.updates + 1)

        score_result = self._compute_scores(rollout, scores)
        values = outputs.get("values")
        token_rewards = self._token_rewards(rollout, score_result, outputs["kl"])
        advantages, returns = estimate_advantages(rollout, token_rewards, values, self.settings)

        experience = Experience(
            rollout,
            minibatches,
            packed=self.model_runner.packed,
            score_result=score_result,
            kl_coef=self.kl_coef,
            logprobs=outputs["logprobs"],
            ref_logprobs=outputs["ref_logprobs"],
            kl=outputs["kl"],
            rewards=token_rewards,
            advantages=advantages,
            values=values,
            returns=returns,
        )
        self._check_engine(experience)
        return experience.corrected(self.settings.rollout_correction)

    def _token_rewards(self, rollout: Rollout, scores: ScoreResult, kl: Tensor) -> Tensor:
        """Return the rewards (B, R): the score at the last token, less the KL penalty with kl_in reward."""
        mask = rollout.response_mask
        coef = self.kl_coef if self.settings.kl_in == "reward" else 0.0
        rewards = losses.compute_token_rewards(scores.final, coef * kl, mask)
        if self.settings.whiten_rewards:
            rewards = losses.masked_whiten(rewards, mask, shift_mean=False)
        return rewards

    def _compute_scores(self, rollout: Rollout, given: Tensor | None) -> ScoreResult:
        """Score the rollout by all reward sources, or take `given` scores (B,), and process the sum."""
        weights = self.reward_weights
        clips = self.reward_clips
        if given is None:
            results = {name: self._call_source(name, rollout) for name in self.rewards}
        else:
            results = {"given": given}
            weights = {"given": 1.0}
            clips = {}

        raw = {name: as_row_scores(name, result, rollout) for name, result in results.items()}
        ensembles = {name: result for name, result in results.items() if isinstance(result, EnsembleScores)}
        monitor.check_scores(raw, ensembles, self.rewards, self.updates + 1)
        summed = weighted_sum(raw, weights, clips, rollout.records)

        moments = self.score_moments + RunningMeanStd.of(summed)
        final = normalize_scores(summed, moments, self.settings)
        if given is None:
            final = apply_penalties(final, rollout, self.response_limit, self.settings)
        return ScoreResult(raw, ensembles, summed, moments, final)

    def _call_source(self, name: str, rollout: Rollout) -> Any:
        """Return a source's scores; a function that takes long is named on the terminal."""
        source = self.rewards[name]
        is_function = isinstance(source, FunctionReward)
        with says_if_slow(f"ppo      reward `{name}`") if is_function else nullcontext():
            return call_source(source, rollout, self.process_group)

    def _make_minibatches(self, rollout: Rollout, epoch: int) -> tuple[Minibatch, ...]:
        """Shuffle the rows into an epoch's minibatches, and split each into micro-batches."""
        num_rows = len(rollout)
        num_minibatches = min(self.settings.num_mini_batches, num_rows)
        seed = derive_seed(self.seed, "minibatches", self.updates, epoch)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_rows, generator=generator).to(rollout.ids.device)

        minibatches = order.tensor_split(num_minibatches)
        return tuple(self._split_minibatch(rollout, rows) for rows in minibatches)

    def _split_minibatch(self, rollout: Rollout, rows: Tensor) -> Minibatch:
        """Split the rows of a minibatch into micro-batches of rows of similar length."""
        on_cpu = self.policy.device.type == "cpu"
        micro_batches = split_into_micro_batches(
            rollout.lengths,
            rows,
            max_rows=self.settings.per_device_train_batch_size,
            max_tokens=max_micro_batch_tokens(self.settings, on_cpu=on_cpu),
            packed=self.model_runner.packed,
        )
        return tuple(micro_batches)

    def ref_on_device(self) -> AbstractContextManager[None]:
        """Context manager that moves an offloaded reference to the policy's device."""
        if not self.settings.offload:
            return nullcontext()
        return sharding.on_device(self.ref, self.policy.device)

    def _forward(self, rollout: Rollout, micro_batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the models' outputs, (B, R) each and 0 outside the response mask, by the update's micro-batches."""
        runner = self.model_runner
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        outputs = {name: torch.zeros_like(rollout.response_mask, dtype=dtype) for name in runner.outputs}

        with (
            self.parallel.minibatch_context(),
            runner.scoring_context(),
            forward.float32_logits(self.policy, self.ref),
        ):
            assigned = self.parallel.micro_batches_of_rank(micro_batches)
            for rows, is_real in track_progress("log-probs: micro-batch", assigned):
                micro_batch = rollout.micro_batch(rows)
                for name, values in runner.forward(micro_batch).items():
                    if is_real:
                        outputs[name][micro_batch.response_index] = values

        self.process_group.all_reduce(outputs.values())
        return outputs

    # Update

    def update(self, experience: Experience) -> Stats:
        """Train num_ppo_epochs epochs on the experience, one optimizer step per minibatch; return the metrics.

        Raises RLHFError R01 for a loss, gradient or weight that is not finite, for the first two before the step;
        ValueError for an experience without advantages.
        """
        settings = self.settings
        if experience.advantages is None:
            text = f"num_samples_per_prompt {settings.num_samples_per_prompt} adjacent responses to each prompt"
            raise ValueError(f"advantage {settings.advantage} needs {text}")

        trained_policy = self._trains_policy
        learning_rates = {LEARNING_RATES[name]: self._learning_rate(name) for name in self.trained_models}

        step_stats, num_epochs = self._train_epochs(experience)
        self._check_weights()
        self.optimizer.zero_grad(set_to_none=True)  # the memory of the gradients is for the next rollout

        self.scheduler.step()
        self.updates += 1
        if self.average:
            self.average.update()
        self.score_moments = experience.score_result.moments

        num_episodes = len(experience.rollout)
        stats = {
            "episode": self.updates * num_episodes,
            "policy/epochs": num_epochs,
            **experience.metrics(kl_in_reward=settings.kl_in == "reward"),
            **mean_over_steps(step_stats),
            **learning_rates,
        }
        if settings.adap_kl_ctrl and trained_policy:  # otherwise the KL does not depend on the coefficient
            self.kl_coef = losses.adapt_kl_coef(
                self.kl_coef,
                stats["objective/kl"],
                target=settings.target,
                episodes=num_episodes,
                horizon=settings.horizon,
            )
        return stats

    def _train_epochs(self, experience: Experience) -> tuple[list[Stats], int]:
        """Train until the last epoch or early_stopping; return the metrics of each step, and the number of epochs."""
        settings = self.settings
        needs_ref = self.model_runner.exact_kl_in_loss
        minibatches = experience.minibatches
        steps: list[Stats] = []
        self.engine_has_weights = False

        with self.ref_on_device() if needs_ref else nullcontext():
            for epoch in track_progress("update: epoch", range(settings.num_ppo_epochs)):
                if epoch > 0:
                    minibatches = self._make_minibatches(experience.rollout, epoch)
                for minibatch in track_progress("minibatch", minibatches):
                    stats = self._train_minibatch(experience, minibatch, epoch)
                    steps.append(stats)

                if settings.early_stopping and stats["policy/policykl"] > 1.5 * settings.target_kl:
                    break
        return steps, epoch + 1

    def _check_weights(self) -> None:
        """Raise RLHFError R01 for a weight that is not finite, and if the ranks' weights differ."""
        norms: dict[str, Tensor] = {}
        for name, model in self.trained_models.items():
            norms[name] = self.parallel.trainable_norm(model)
            monitor.check_finite(f"a weight of the {name} model", norms[name], self.updates + 1)
        self.parallel.check_replicas(norms)

    def _learning_rate(self, name: str) -> float:
        """Return the learning rate of a model's parameter groups, or the first group's if none has its name."""
        groups = self.optimizer.param_groups
        named = [group for group in groups if group.get("name", "").startswith(name)]
        return float((named or groups)[0]["lr"])

    def _train_minibatch(self, experience: Experience, minibatch: Minibatch, epoch: int = 0) -> Stats:
        """Take one optimizer step on the mean loss over the minibatch's response tokens; return its metrics."""
        runner = self.model_runner
        num_tokens = int(experience.mask[torch.cat(minibatch)].sum())
        results = []
        self.optimizer.zero_grad(set_to_none=True)

        with (
            self.parallel.minibatch_context(),
            forward.gradient_checkpointing(*self.trained_models.values()),
            runner.compiled_layers(),
            runner.accumulate_in_place(),
        ):
            assigned = self.parallel.micro_batches_of_rank(minibatch)
            for rows, is_real in track_progress("micro-batch", assigned):
                micro_batch = experience.rollout.micro_batch(rows)
                tokens = experience.token_batch(micro_batch)
                result = runner.backward(
                    tokens,
                    micro_batch,
                    experience.kl_coef,
                    scale=is_real / num_tokens,
                    train_policy=self._trains_policy,
                )
                if is_real:
                    results.append(result)
            ptx = self._backward_ptx(minibatch, epoch)

        own = MinibatchStats.from_results(results, ptx, self.updates + 1)
        ranks = self.process_group.all_gather_object(own)
        token_sums = sum_metrics(rank.token_sums for rank in ranks)
        stats = {name: total / num_tokens for name, total in token_sums.items()}
        stats |= sum_metrics(rank.ptx for rank in ranks)
        for rank in ranks:
            if rank.error:  # before the ratio: a skipped step would hide the error
                raise rank.error

        limit = self.settings.ratio_threshold
        skipped = limit is not None and stats["val/ratio"] > limit
        if not skipped:
            stats |= self._optimizer_step()
        stats["ratio_error"] = max(rank.max_ratio_error for rank in ranks)
        stats["skipped"] = float(skipped)
        return stats

    @property
    def _trains_policy(self) -> bool:
        """False in the first updates with value_only_updates."""
        return self.updates >= self.settings.value_only_updates

    def _backward_ptx(self, minibatch: Minibatch, epoch: int) -> Stats:
        """Add the gradient of the language-model loss over ptx rows, one sampled for each episode of the minibatch."""
        if not self.ptx or not self._trains_policy:
            return {}

        ptx_rows = self._draw_ptx_rows(minibatch, epoch)
        all_rows = torch.arange(len(ptx_rows), device=ptx_rows.ids.device)
        micro_batches = self._split_minibatch(ptx_rows, all_rows)
        num_tokens = int(ptx_rows.response_mask.sum())

        loss = 0.0
        assigned = self.parallel.micro_batches_of_rank(micro_batches)
        for rows, is_real in assigned:
            micro_batch = ptx_rows.micro_batch(rows)
            loss += self.model_runner.backward_ptx(micro_batch, is_real / num_tokens)
        return {"loss/ptx_avg": loss}

    def _draw_ptx_rows(self, minibatch: Minibatch, epoch: int) -> Rollout:
        """Draw a ptx row for each episode of the minibatch, with prompt and completion as prompt and response."""
        prompts = []
        completions = []
        for episode in torch.cat(minibatch).tolist():
            draw = derive_seed(self.seed, "ptx", self.updates, epoch, episode)
            prompt, completion = self.ptx[draw % len(self.ptx)]
            prompts.append(prompt)
            completions.append(completion)
        return Rollout.from_lists(prompts, completions).to(self.policy.device)

    def _optimizer_step(self) -> Stats:
        """Clip gradients and step; return the norms. Raises RLHFError R01 before stepping if one is not finite."""
        norms: Stats = {}
        for name, model in self.trained_models.items():
            self.parallel.all_reduce_gradients(model)
            norm = self.parallel.clip_grad_norm(model, self.settings.max_grad_norm)
            monitor.check_finite(f"{name} gradient", norm, self.updates + 1)
            norms[f"{name}/grad_norm"] = float(norm)
        self.optimizer.step()
        return norms

    @contextmanager
    def averaged_policy(self) -> Iterator[None]:
        """Context manager: with settings.average the policy has the averaged weights, then its own, bit for bit."""
        if self.average is None:
            yield
            return
        self.engine_has_weights = False
        with self.average.in_model():
            try:
                yield
            finally:
                self.engine_has_weights = False

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on, except frozen weights and settings."""
        state: dict[str, Any] = {
            "updates": self.updates,
            "seed": self.seed,
            "kl_coef": self.kl_coef,
            "moments": asdict(self.score_moments),
        }

        for name, part in self._stateful_parts().items():
            frozen = self._frozen_keys.get(name, set())
            state[name] = {key: value for key, value in part.state_dict().items() if key not in frozen}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`. Raises ValueError if the state's seed differs, or its weights do not fit."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a run with seed {state['seed']}, this one has {self.seed}")

        for name, part in self._stateful_parts().items():
            if name in self.trained_models:
                self._load_weights(name, part, state[name])
            else:
                part.load_state_dict(state[name])

        self.updates = state["updates"]
        self.kl_coef = state["kl_coef"]
        self.score_moments = RunningMeanStd(**state["moments"])
        self.engine_has_weights = False

    def _stateful_parts(self) -> dict[str, Any]:
        """Return the objects with a state by their names in checkpoints."""
        parts = {**self.trained_models, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.average:
            parts["average"] = self.average
        return parts

    def _load_weights(self, name: str, model: Any, weights: dict[str, Tensor]) -> None:
        """Load all weights of a trained model that are not frozen. Raises ValueError for others."""
        missing, unexpected = model.load_state_dict(weights, strict=False)
        lacking = set(missing) - self._frozen_keys[name]
        wrong = unexpected or sorted(lacking)
        if wrong:
            raise ValueError(f"the state does not fit the {name} model: {wrong[0]}")

    # Engine

    def _check_engine(self, experience: Experience) -> None:
        """Raise RLHFError R19 if the engine's log-probs differ by more than max_logprob_gap nats on average."""
        mean = float(experience.logprob_gap.mean())  # NaN without the engine's
        limit = self.settings.max_logprob_gap
        if mean > limit:
            cause, hint = self._gap_cause(experience)
            difference = f"the engine's log-probs differ from the policy's by {mean:.3g} nats a token"
            text = f"step {self.updates + 1}: {difference}, more than ppo.max_logprob_gap {limit:g}"
            text = f"{text}: {cause}; nothing was trained on them"
            raise RLHFError("R19", text, hint=f"the same command resumes; {hint}")

    def _gap_cause(self, experience: Experience) -> tuple[str, str]:
        """Return why the engine's log-probs differ from the policy's, and a hint: by a row that both compute alone."""
        limit = self.settings.max_logprob_gap
        gaps = torch.zeros_like(experience.logprobs)
        gaps[experience.mask] = experience.logprob_gap
        row = int(gaps.sum(1).argmax())

        part = slice(row, row + 1)
        one = experience.rollout.rows(part)

        gap = self._gap_alone(one, experience.logprobs[part])
        if gap > limit:
            cause = f"the policy's passes over a batch differ by {gap:.2g} nats a token from those of row {row} alone"
            return cause, "set ppo.packing: false, or ppo.per_device_train_batch_size: 1"

        if isinstance(self.engine, HFEngine):
            again = self._draw_again(self.engine, one, row)
            assert again.logprobs is not None
            if self._gap_alone(again, again.logprobs) <= limit:
                cause = f"what the engine draws depends on the padding beside a row; row {row} drawn alone is right"
                return cause, "set ppo.local_rollout_forward_batch_size: 1"
        return "it draws from other weights", "check that the engine gets the last weights"

    def _draw_again(self, engine: HFEngine, one: Rollout, row: int) -> Rollout:
        """Return the response to the prompt of a rollout of one row, `row` of the last one, drawn alone."""
        width = one.prompt_width
        seed = derive_seed(self.seed, "sample", self.updates, row)
        prompt = Prompts(
            one.ids[:, :width],
            one.mask[:, :width],
            seeds=(seed,),
            response_length=one.response_mask.shape[1],
        )
        with self.parallel.gathered_model(engine.model):
            return engine.generate(prompt).to(one.ids.device)

    def _gap_alone(self, row: Rollout, logprobs: Tensor) -> float:
        """Return the mean difference, in nats a token, of `logprobs` (1, R) from those of a rollout of one row."""
        micro_batch = torch.zeros(1, dtype=torch.int64, device=row.ids.device)
        with self.ref_on_device():
            outputs = self._forward(row, [micro_batch])
        gaps = outputs["logprobs"] - logprobs
        return float(gaps[row.response_mask].abs().mean())


def _check_engine_settings(engine: RolloutEngine, settings: PPOSettings) -> None:
    """Check that log-probs are computed as the engine samples, for the settings that an engine has."""
    for key in ("temperature", "bf16"):
        read = getattr(settings, key)
        sampled = getattr(engine, key, read)
        assert sampled == read, f"the engine samples with {key} {sampled}, log-probs are computed with {read}"


def _train_something(model: Any) -> None:
    """Train all parameters of a model, if none requires a gradient, e.g. of a copy of a frozen model."""
    if not any(weight.requires_grad for weight in model.parameters()):
        model.requires_grad_(True)
