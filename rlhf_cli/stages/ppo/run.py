"""`rlhf ppo`: load the models and prompts, loop over updates, save the policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation import reward_card
from rlhf_cli.evaluation.report_text import LAST_UPDATE, TRAINING, UNPENALISED, format_reward
from rlhf_cli.models import build, forward, load, lora, save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Experience, Stats
from rlhf_cli.ppo.monitor import Alert, NonFiniteError, StopTraining, Watchdog
from rlhf_cli.progress import Progress
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.ppo import setup
from rlhf_cli.stages.ppo.samples import SampleTables, Snapshots
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking import Log, MetricsLog, Trackers

HEADLINE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")
RATIO_TOLERANCE = 1e-3  # exactly 0 in float32: scoring and update use the same micro-batches


def run(config: PPOConfig, options: Options) -> None:
    """Train a policy by PPO and write RUN/ppo; resume from the last checkpoint if there is one.

    If ppo.kl_stop or the watchdog stops the run, RUN/ppo is completed with the best policy so far, and R04 or R13 is
    raised. Raises M05 if that policy's snapshot is corrupt, and as `setup.run_stage`.
    """
    lifecycle.run_stage(config, options, _train, check=partial(reward_card.check_required, config))


def _train(config: PPOConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    config = setup.scale_to_world_size(config, process_group.world_size)
    components = setup.load_components(config, stage.options, stage.parents, process_group)
    setup.set_rollout_rows(config, stage.parents, components)
    stage.begin_training()
    runner = PPORunner(config, components, resume=stage.resumes)
    stopped: StopTraining | None = None
    step, outcome = components.num_updates, {"model_is": "the last step"}
    try:
        runner.run()
    except StopTraining as stop:
        stopped, step = stop, runner.snapshots.best_step
        process_group.barrier()  # until the first rank has written the snapshot
        setup.restore_policy(config, stage.options, components, runs.state_at(runner.snapshots.folder, step))
        outcome = {"model_is": "the best step", "stopped": stop.problems[0].text}
        runner.snapshots.prune(components.trainer.updates, finished=True)
    save_models(config, components, step)
    with components.trainer.averaged_policy():
        metrics = headline_metrics(config, components)
    stage.complete(
        {
            **lifecycle.manifest_fields(config, components.tokenizer, components.stop_token_id),
            "metrics": metrics,
            "engine": getattr(components.trainer.engine, "name", None),
            **outcome,
            "step": step,
            **runner.snapshots.manifest_fields(),
        }
    )
    terminal.say(f"ppo      {format_reward(metrics, TRAINING)} ({UNPENALISED}), KL {metrics['objective/kl_k1']:.2f}")
    if stopped:
        (problem,) = stopped.problems
        kept = f"{runs.shown(config.folder / 'model')} holds the best policy, of step {step}"
        where, hint = config.where(stopped.key), f"{problem.hint}; {kept}"
        raise RLHFError(problem.code, problem.text, where=where, hint=hint)


class PPORunner:
    """The outer PPO loop: updates, logs, monitoring and checkpoints; resumes from the last checkpoint."""

    def __init__(self, config: PPOConfig, components: setup.PPOComponents, *, resume: bool):
        self.config, self.components, self.trainer = config, components, components.trainer
        self.state_folder, self.cost = config.folder / "state", runs.CheckpointTimer()
        self.watchdog = Watchdog(config.ppo, config.held_out)
        self.snapshots = Snapshots(config, components, self.cost)
        group = components.trainer.process_group  # on a network drive each rank might find another one
        group.run_on_main(self._require_free_names)
        state = group.run_on_main(lambda: runs.latest_state(self.state_folder)) if resume else None
        log_positions: dict[str, Any] = {}
        if state:
            tree = save.load_tree(state, self.trainer.parallel.mesh)
            self.trainer.load_state_dict(tree["trainer"])
            self.watchdog.load_state_dict(tree)
            self.snapshots.load_state_dict(tree["best"])
            log_positions = tree["logs"]
            self.snapshots.prune(self.trainer.updates)
            terminal.say(f"ppo      resumes at step {self.trainer.updates} of {components.num_updates}")
        self.saved_step = self.trainer.updates
        self.trackers = Trackers(config)
        self.metrics = MetricsLog(config.folder / "metrics.jsonl", log_positions.get("metrics"), self.trackers)
        samples = config.folder / "samples.jsonl"
        self.samples = SampleTables(samples, components, config.ppo, log_positions.get("samples"), self.trackers)
        self.watchdog_log = Log(config.folder / "watchdog.jsonl", log_positions.get("watchdog"))
        self.logs = {"metrics": self.metrics, "samples": self.samples.log, "watchdog": self.watchdog_log}

    def _require_free_names(self) -> None:
        for folder in (self.state_folder, self.snapshots.folder):
            runs.require_free(folder, "step_", self.components.num_updates)

    def run(self) -> None:
        """Make the remaining updates. After SIGTERM or SIGINT, save after the step and exit with 143 or 130.

        Raises RLHFError R01, R02, R05, R19, R20, StopTraining R04 and R13.
        """
        config, trainer, num_updates = self.config, self.trainer, self.components.num_updates
        terminal.say(
            f"ppo      {setup.describe_batches(config, self.components.prompts, trainer.process_group.world_size)}"
        )
        if config.ppo.packing and not trainer.model_runner.packed:
            terminal.say(
                "ppo      rows are padded, not packed: the models' layers are not all transformers' sdpa attention"
            )
        if config.ppo.kl_in == "reward" and config.ppo.kl_estimator != "k1":
            text = f"kl_estimator {config.ppo.kl_estimator} in the reward does not have the KL's policy gradient"
            terminal.warn("C18", text, where=config.where("ppo.kl_estimator"), hint="k1 has it; or set kl_in: loss")
        save_interval = config.output.save_steps or max(1, num_updates // 10)
        with GracefulStop() as stop, self.trackers, Progress("ppo", num_updates, "update", done=trainer.updates) as bar:
            if trainer.updates == 0:
                self.snapshots.save_if_due(0)
            while trainer.updates < num_updates:
                stats = self._update()
                step = trainer.updates
                bar.advance(note=status_line(stats))
                stop.sync(trainer.process_group.all_gather_object)
                if step % save_interval == 0 or step == num_updates or stop.requested:
                    self._save_checkpoint()
                if stop.requested and step < num_updates:
                    terminal.say(f"ppo      stopped at step {step} of {num_updates}, saved; the same command resumes")
                    trainer.process_group.barrier()  # the first process to exit terminates the others
                    raise SystemExit(stop.exit_code)
        terminal.say(f"ppo      {self.cost}")

    def _update(self) -> Stats:
        config, trainer, prompts = self.config, self.trainer, self.components.prompts
        count, step = config.ppo.prompts_per_update, trainer.updates + 1
        batch = [prompts[i] for i in data.prompt_batch(len(prompts), step, count, config.seed)]
        with self._error_context(batch):
            stats = trainer.step(Prompts.of(batch))
            self.metrics.log(step, stats)
        experience = trainer.experience
        assert experience is not None
        if self.trackers:
            self.trackers.histograms(step, experience.histograms())
        with self._error_context():
            self.samples.show(step)
        self._check(step, experience, stats)
        self.snapshots.record_metrics(step, stats, experience)
        self.snapshots.save_if_due(step)
        return stats

    def _check(self, step: int, experience: Experience, stats: Stats) -> None:
        """Warn of problems that the update shows. Raises RLHFError R02, StopTraining R04 and R13."""
        if (error := stats["policy/first_ratio_error"]) > RATIO_TOLERANCE:
            text = f"the first ratio of an update differs from 1 by {error:.2g}"
            terminal.warn("R07", text, where=f"step {step}", hint="another dtype or attention implementation may help")
        for problem in self.watchdog.check_update(step, experience, stats):
            terminal.warn(problem.code, problem.text, hint=problem.hint)
        self._handle_alerts(self.watchdog.check(step, experience))

    def _handle_alerts(self, alerts: Sequence[Alert]) -> None:
        """Log the watchdog's alerts and take the configured actions. Raises StopTraining R13."""
        hint = "read samples.jsonl; raise ppo.kl_coef, or fix the reward (docs/rewards.md)"
        for alert in alerts:
            self.watchdog_log.append(asdict(alert) | {"kl_coef": self.trainer.kl_coef})
        for alert in alerts:
            if alert.action == "stop":
                raise StopTraining("R13", alert.text, key=f"ppo.watchdog.{alert.signal}", hint=hint)
            effect = ""
            if alert.action == "raise_kl_coef":
                assert self.watchdog.limits is not None  # required for an alert
                self.trainer.kl_coef *= self.watchdog.limits.kl_factor
                effect = f"; kl_coef is {self.trainer.kl_coef:.4g} from here on"
            if effect or alert.times == 1:
                terminal.warn("R13", alert.text + effect, hint=hint)

    def _save_checkpoint(self) -> None:
        self.saved_step = step = self.trainer.updates
        tree = {
            "trainer": self.trainer.state_dict(),
            **self.watchdog.state_dict(),
            "best": self.snapshots.state_dict(),
            "logs": {name: log.position(step) for name, log in self.logs.items()},
        }

        def write(path: Path) -> None:
            save.save_tree(self.trainer.process_group.all_gather_object(path)[0], tree)

        with self.cost.measure():
            runs.commit_state(self.state_folder, f"step_{step:06d}", write, keep=self.config.output.keep)
            self.snapshots.prune(step)

    @contextmanager
    def _error_context(self, batch: Sequence[data.Prompt] = ()) -> Iterator[None]:
        """Context manager that adds the row's prompt and the last checkpoint to an R01 error.

        If a reward source or the engine fails (R05, R19, R20) while an update's `batch` is sampled and scored, nothing
        was trained in this update, and the updates before it are saved. A sample table is after the training.
        """
        try:
            yield
        except NonFiniteError as error:
            (problem,) = error.problems
            text, last = problem.text, runs.latest_state(self.state_folder)
            if batch and error.row is not None:
                ids = batch[error.row // self.config.ppo.num_samples_per_prompt].ids
                text += f"; its prompt: {self.components.tokenizer.decode(ids)[:80]!r}"
            checkpoint = f"last good checkpoint: {shown(last)}" if last else "no checkpoint was saved before it"
            raise RLHFError("R01", text, hint=f"{problem.hint}; {checkpoint}") from error
        except RLHFError as error:
            if batch and error.problems[0].code in ("R05", "R19", "R20") and self.trainer.updates > self.saved_step:
                self._save_checkpoint()
            raise


def status_line(stats: Stats) -> str:
    """Return the summary of an update for the progress bar."""
    kl, length = stats["objective/kl_k1"], stats["objective/response_length"]
    reward = format_reward(stats, LAST_UPDATE)
    return f"{reward}  KL {kl:.2f}  length {length:.1f}  {stats['tokens_per_s']:.0f} tokens/s"


def save_models(config: PPOConfig, components: setup.PPOComponents, step: int) -> None:
    """Save the policy after `step`, averaged with ppo.average, to model/ and the value model to value/.

    Both are full weights, or adapters of a base. A value head is saved as a sequence classifier, and not at all if the
    policy's family has none. Without a value model, and for the best step of a run that stopped, there is no value/.
    """
    policy, value = components.policy, components.value
    trained = f"{step} PPO updates of {config.ppo.episodes_per_update} episodes, KL coefficient {config.ppo.kl_coef}"
    average = f" with averaged weights (decay {config.ppo.average:g} an update)" if config.ppo.average else ""
    with components.trainer.averaged_policy():
        save.save_trained(policy, components.tokenizer, config.folder / "model", f"Policy{average} after {trained}.")
    if value is None or step != components.trainer.updates:  # snapshots have no value model
        return
    if isinstance(value, forward.ValueHead):  # saved on the trained policy: it has learned from its hidden states
        if not build.scores_by_one_matrix(lora.unwrap(policy).config):
            reason = "transformers has no classifier of the policy's family that scores by one matrix"
            terminal.say(f"ppo      value/ is not written: {reason}")
            return
        head, base = value.score, components.base
        value = base.value_from_head(policy, head) if base else load.reward_model_from_backbone(policy, head)
    save.save_trained(value, components.tokenizer, config.folder / "value", f"Value model after {trained}.")


def headline_metrics(config: PPOConfig, components: setup.PPOComponents) -> Stats:
    """Compute score, KL and length of the finished policy on new responses to the run's first prompts."""
    prompts = Prompts.of(components.prompts[: config.ppo.episodes_per_update])
    experience = components.trainer.make_experience(components.trainer.generate(prompts, purpose="headline"))
    metrics = experience.metrics(kl_in_reward=config.ppo.kl_in == "reward")
    return {name: metrics[name] for name in HEADLINE}
