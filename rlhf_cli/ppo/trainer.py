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
from rlhf_cli.models import devices, forward, lora, sharding
from rlhf_cli.models.batch import EnsembleScores, Prompts, Rollout, split_into_micro_batches
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo import engine_check, losses, monitor
from rlhf_cli.ppo.experience import Experience, Minibatch, Stats, estimate_advantages, kl_loss_coef
from rlhf_cli.ppo.forward_backward import (
    MinibatchStats,
    StepResult,
    max_micro_batch_tokens,
    mean_over_steps,
    sum_metrics,
)
from rlhf_cli.ppo.model_setup import prepare_models
from rlhf_cli.ppo.optimizer import WeightAverage, build_optimizer, build_scheduler
from rlhf_cli.ppo.rollout import RolloutEngine
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

LEARNING_RATE_METRICS = {"policy": "lr", "value": "value/lr"}  # of each trained model
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
        settings = settings.model_copy(update={"bf16": devices.use_bf16(settings.bf16)})
        engine_check.require_same_settings(engine, settings)

        self.settings = settings
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
            _train_all_if_none(model)
            self._frozen_keys[name] = lora.frozen_state_keys(model)

        # After the frozen keys: layers that the policy shares with the reference are frozen, but are in checkpoints.
        # `process_group` exchanges data between processes, `parallel` the models' weights and gradients.
        self.model_runner, self.parallel = prepare_models(policy, self.ref, value, settings, process_group)

        # After the models: sharding replaces their weights.
        self.optimizer = optimizer or build_optimizer(self.trained_models, settings)
        num_updates = num_updates or settings.num_updates()
        self.scheduler = scheduler or build_scheduler(self.optimizer, settings, num_updates)
        self.weight_average = WeightAverage(policy, settings.average) if settings.average else None

        self.updates = 0
        self.kl_coef = settings.kl_coef
        self.score_moments = RunningMeanStd()
        self.experience: Experience | None = None  # of the last step
        self.engine_is_current = False  # it has the policy's weights as they are now

    def step(self, prompts: Prompts) -> Stats:
        """Run one PPO update on num_samples_per_prompt responses to each prompt; return its metrics."""
        start = self._synchronized_time()
        rollout = self.generate(prompts)

        generate_end = self._synchronized_time()
        self.experience = self.make_experience(rollout)

        experience_end = self._synchronized_time()
        stats = self.update(self.experience)

        end = self._synchronized_time()
        return {
            **stats,
            "time/rollout_s": generate_end - start,
            "time/judge_s": experience_end - generate_end,
            "time/update_s": end - experience_end,
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
            return replace(self.draw(seeded, engine), logprobs=None)

        if not self.engine_is_current:
            self.engine.update_weights(self.updates, self.policy)
            self.engine_is_current = True
        rollout = self.draw(seeded, self.engine)
        self.engine.release_memory()
        self.engine_is_current = not getattr(self.engine, "sleeps", False)
        return rollout

    @property
    def response_limit(self) -> int:
        """Maximum response length, in tokens, of the update after the first `updates`."""
        length = self.settings.response_length
        if not isinstance(length, LengthRange):
            return length

        num_lengths = length.max - length.min + 1
        draw = derive_seed(self.seed, "length", self.updates)
        return length.min + draw % num_lengths

    def draw(self, prompts: Prompts, engine: RolloutEngine) -> Rollout:
        """Return an engine's responses to prompts with seeds, on all ranks."""
        group = self.process_group
        if group.world_size == 1 or not engine.deterministic:  # a server: its draws depend on the batch
            rollout = group.run_on_main(lambda: engine.generate(prompts), getattr(engine, "join", None))
        else:
            with self.parallel.gathered_model(getattr(engine, "model", self.policy)):
                parts = group.map_rows(len(prompts), lambda part: engine.generate(prompts.rows(part)).to(CPU))
            rollout = Rollout.concat(parts)
        return replace(rollout, records=prompts.records)

    # Make experience

    @torch.no_grad()
    def make_experience(self, rollout: Rollout, scores: Tensor | None = None) -> Experience:
        """Compute log-probs, values, scores, rewards and advantages of a rollout. The trainer's state is unchanged.

        `scores` (B,) replace those of the reward sources; they are normalised and clipped, and no penalty is
        subtracted. Raises RLHFError R01 if a number is not finite, R05 if scores have the wrong shape, R19 if the
        engine's log-probs are not the policy's; ValueError if rollout_correction lacks the engine's log-probs.
        """
        rollout = rollout.to(self.policy.device)
        minibatches = self._make_minibatches(rollout, epoch=0)  # in the shapes of the first epoch: its ratios are 1
        micro_batches = list(chain.from_iterable(minibatches))
        with self.ref_on_device():
            outputs = self._forward(rollout, micro_batches)
        for name, output in outputs.items():
            monitor.check_finite(name, output, self.updates + 1)

        score_result = self._compute_scores(rollout, scores)
        token_rewards = self._token_rewards(rollout, score_result, outputs["kl"])
        advantages, returns, scale = estimate_advantages(rollout, token_rewards, outputs.get("values"), self.settings)

        experience = Experience(
            rollout,
            minibatches,
            packed=self.model_runner.packed,
            score_result=score_result,
            kl_coef=self.kl_coef,
            kl_loss_coef=kl_loss_coef(self.kl_coef, scale, self.settings),
            rewards=token_rewards,
            advantages=advantages,
            returns=returns,
            **outputs,
        )
        engine_check.require_small_gap(
            experience,
            self.settings.max_logprob_gap,
            self.updates + 1,
            logprobs_alone=self._logprobs_alone,
            draw_alone=self._draw_alone,
        )
        return experience.corrected(self.settings.rollout_correction)

    def _compute_scores(self, rollout: Rollout, given: Tensor | None) -> ScoreResult:
        """Score the rollout by all reward sources, or take `given` scores (B,), which get no penalties."""
        if given is not None:
            return self._sum_scores(rollout, {"given": given}, {"given": 1.0}, clips={})

        by_source = {name: self._call_source(name, rollout) for name in self.rewards}
        result = self._sum_scores(rollout, by_source, self.reward_weights, self.reward_clips)
        final = apply_penalties(result.final, rollout, self.response_limit, self.settings)
        return replace(result, final=final)

    def _call_source(self, name: str, rollout: Rollout) -> Any:
        """Return a source's scores; a function that takes long is named on the terminal."""
        source = self.rewards[name]
        is_function = isinstance(source, FunctionReward)
        with says_if_slow(f"ppo      reward `{name}`") if is_function else nullcontext():
            return call_source(source, rollout, self.process_group)

    def _sum_scores(
        self,
        rollout: Rollout,
        by_source: dict[str, Any],
        weights: dict[str, float],
        clips: dict[str, float],
    ) -> ScoreResult:
        """Add the sources' scores, and normalise the sum by the moments with this rollout, which `update` keeps."""
        raw = {name: as_row_scores(name, result, rollout) for name, result in by_source.items()}
        ensembles = {name: result for name, result in by_source.items() if isinstance(result, EnsembleScores)}
        monitor.check_scores(raw, ensembles, self.rewards, self.updates + 1)

        summed = weighted_sum(raw, weights, clips, rollout.records)
        moments = self.score_moments + RunningMeanStd.of(summed)
        final = normalize_scores(summed, moments, self.settings)
        return ScoreResult(raw, ensembles, summed, moments, final)

    def _token_rewards(self, rollout: Rollout, scores: ScoreResult, kl: Tensor) -> Tensor:
        """Return the rewards (B, R): the score at the last token, less the KL penalty unless kl_in is loss."""
        mask = rollout.response_mask
        coef = self.kl_coef if self.settings.kl_in_reward else 0.0
        rewards = losses.compute_token_rewards(scores.final, coef * kl, mask)
        if self.settings.whiten_rewards:
            rewards = losses.masked_whiten(rewards, mask, shift_mean=False)
        return rewards

    def _logprobs_alone(self, one: Rollout) -> Tensor:
        """Return the policy's log-probs (1, R) of a rollout of one row."""
        micro_batch = torch.zeros(1, dtype=torch.int64, device=one.ids.device)
        with self.ref_on_device():
            return self._forward(one, [micro_batch])["logprobs"]

    def _draw_alone(self, one: Rollout, row: int) -> Rollout | None:
        """Draw the response of a rollout of one row, `row` of the last one, again; None if the batch decides it."""
        if not self.engine.deterministic:
            return None
        prompt = Prompts.from_lists([one.prompt_tokens(0)])
        seed = derive_seed(self.seed, "sample", self.updates, row)
        seeded = replace(prompt, seeds=(seed,), response_length=one.response_mask.shape[1])
        return self.draw(seeded, self.engine).to(one.ids.device)

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

        # Of this update: before the scheduler and `updates` advance.
        trained_policy = self._trains_policy
        learning_rates = {LEARNING_RATE_METRICS[name]: self._learning_rate(name) for name in self.trained_models}

        steps, num_epochs = self._train_epochs(experience)
        self._check_weights()
        self.optimizer.zero_grad(set_to_none=True)  # the memory of the gradients is for the next rollout

        self.scheduler.step()
        self.updates += 1
        if self.weight_average:
            self.weight_average.update(self.updates)
        self.score_moments = experience.score_result.moments  # only now: an experience may be made for show

        num_episodes = len(experience.rollout)
        stats = {
            "episode": self.updates * num_episodes,
            "policy/epochs": num_epochs,
            **experience.metrics(kl_in_reward=settings.kl_in_reward),
            **mean_over_steps(steps),
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

    def _train_epochs(self, experience: Experience) -> tuple[list[StepResult], int]:
        """Train until the last epoch or early_stopping; return each step's result, and the number of epochs."""
        settings = self.settings
        needs_ref = settings.exact_kl_in_loss
        minibatches = experience.minibatches
        steps: list[StepResult] = []
        self.engine_is_current = False

        with self.ref_on_device() if needs_ref else nullcontext():
            for epoch in track_progress("update: epoch", range(settings.num_ppo_epochs)):
                if epoch > 0:
                    minibatches = self._make_minibatches(experience.rollout, epoch)
                for minibatch in track_progress("minibatch", minibatches):
                    steps.append(self._train_minibatch(experience, minibatch, epoch))

                last_kl = steps[-1].metrics["policy/policykl"]  # before the step of the epoch's last minibatch
                if settings.early_stopping and last_kl > 1.5 * settings.target_kl:  # 1.5 as in TRL 0.11
                    break
        return steps, epoch + 1

    def _train_minibatch(self, experience: Experience, minibatch: Minibatch, epoch: int) -> StepResult:
        """Take one optimizer step on the mean loss over the minibatch's response tokens."""
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
                    experience.kl_loss_coef,
                    scale=1 / num_tokens if is_real else 0.0,  # padding takes part in the collectives only
                    train_policy=self._trains_policy,
                )
                if is_real:
                    results.append(result)
            ptx = self._backward_ptx(minibatch, epoch)

        of_this_rank = MinibatchStats.from_results(results, ptx, self.updates + 1)
        ranks = self.process_group.all_gather_object(of_this_rank)
        token_sums = sum_metrics(rank.token_sums for rank in ranks)
        stats = {name: total / num_tokens for name, total in token_sums.items()}
        stats |= sum_metrics(rank.ptx for rank in ranks)
        for rank in ranks:
            if rank.error:  # before the ratio: a skipped step would hide the error
                raise rank.error

        max_ratio = self.settings.ratio_threshold
        skipped = max_ratio is not None and stats["val/ratio"] > max_ratio
        if not skipped:
            stats |= self._optimizer_step()
        return StepResult(stats, max(rank.max_ratio_error for rank in ranks), skipped)

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
            loss += self.model_runner.backward_ptx(micro_batch, 1 / num_tokens if is_real else 0.0)
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

    # Shared by make_experience and update

    def ref_on_device(self) -> AbstractContextManager[None]:
        """Context manager that moves an offloaded reference to the policy's device."""
        if not self.settings.offload:
            return nullcontext()
        return sharding.on_device(self.ref, self.policy.device)

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

    def _forward(self, rollout: Rollout, micro_batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the models' outputs, (B, R) each and 0 outside the response mask, by the update's micro-batches."""
        runner = self.model_runner
        # At least float32; float64 models, as in tests, keep their precision.
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        outputs = {name: torch.zeros_like(rollout.response_mask, dtype=dtype) for name in runner.output_names}

        with (
            self.parallel.minibatch_context(),
            runner.forward_context(),
            forward.float32_logits(self.policy, self.ref),
        ):
            assigned = self.parallel.micro_batches_of_rank(micro_batches)
            for rows, is_real in track_progress("log-probs: micro-batch", assigned):
                micro_batch = rollout.micro_batch(rows)
                for name, values in runner.forward(micro_batch).items():
                    if is_real:  # each row is of one rank: the sum over the ranks below is its value
                        outputs[name][micro_batch.response_index] = values

        self.process_group.all_reduce(outputs.values())
        return outputs

    # After the updates, and checkpoints

    @contextmanager
    def averaged_policy(self) -> Iterator[None]:
        """Context manager: with settings.average the policy has the averaged weights, then its own, bit for bit."""
        if self.weight_average is None:
            yield
            return
        self.engine_is_current = False
        with self.weight_average.in_model():
            try:
                yield
            finally:
                self.engine_is_current = False

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
        self.engine_is_current = False

    def _stateful_parts(self) -> dict[str, Any]:
        """Return the objects with a state by their names in checkpoints."""
        parts = {**self.trained_models, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.weight_average:
            parts["average"] = self.weight_average
        return parts

    def _load_weights(self, name: str, model: Any, weights: dict[str, Tensor]) -> None:
        """Load all weights of a trained model that are not frozen. Raises ValueError for others."""
        missing, unexpected = model.load_state_dict(weights, strict=False)
        lacking = set(missing) - self._frozen_keys[name]
        wrong = unexpected or sorted(lacking)
        if wrong:
            raise ValueError(f"the state does not fit the {name} model: {wrong[0]}")


def _train_all_if_none(model: Any) -> None:
    """Train all parameters of a model, if none requires a gradient, e.g. of a copy of a frozen model."""
    if not any(weight.requires_grad for weight in model.parameters()):
        model.requires_grad_(True)
