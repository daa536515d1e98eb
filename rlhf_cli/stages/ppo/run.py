"""`rlhf ppo`: load the models and prompts, loop over updates, save the policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig, scale_to_world_size
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation import reward_card
from rlhf_cli.evaluation.report_text import LAST_UPDATE, TRAINING, UNPENALISED, format_reward
from rlhf_cli.models import build, forward, load, lora, save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Experience, Stats
from rlhf_cli.ppo.monitor import Alert, NonFiniteError, StopTraining, Watchdog
from rlhf_cli.progress import Progress
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.ppo import prompt_rows, rollout_engine, setup
from rlhf_cli.stages.ppo.policy_snapshots import Snapshots
from rlhf_cli.stages.ppo.sample_tables import SampleTables
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking.logs import Log, LogPosition, MetricsLog
from rlhf_cli.tracking.trackers import Trackers

HEADLINE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")
RATIO_TOLERANCE = 1e-3  # exactly 0 in float32: scoring and update use the same micro-batches


def run(config: PPOConfig, options: Options) -> None:
    """Train a policy by PPO and write RUN/ppo; resume from the last checkpoint if there is one.

    If ppo.kl_stop or the watchdog stops the run, RUN/ppo is completed with the best policy so far, and R04 or R13 is
    raised. Raises M05 if that policy's snapshot is corrupt, and as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _train, check=partial(reward_card.check_required, config))


def _train(config: PPOConfig, stage: lifecycle.StageRun) -> None:
    config = scale_to_world_size(config, stage.process_group.world_size)
    components = setup.load_components(config, stage.options, stage.parents, stage.process_group)
    rollout_engine.set_rollout_rows(config, stage.parents, components.trainer, components.prompts)
    stage.begin_training()

    runner = PPORunner(config, components, resume=stage.resumes)
    outcome = _run_updates(config, stage, runner)

    save_models(config, components, outcome.step)
    with components.trainer.averaged_policy():
        metrics = headline_metrics(config, components)
    stage.complete(
        {
            **lifecycle.manifest_fields(config, components.tokenizer, components.stop_token_id),
            "metrics": metrics,
            "engine": getattr(components.trainer.engine, "name", None),
            **outcome.manifest_fields(),
            **runner.snapshots.manifest_fields(),
        }
    )
    terminal.say(f"ppo      {format_reward(metrics, TRAINING)} ({UNPENALISED}), KL {metrics['objective/kl_k1']:.2f}")
    if outcome.stopped:
        raise _stop_error(config, outcome.stopped, outcome.step)


@dataclass(frozen=True)
class Outcome:
    """How the updates ended: after the last one, or stopped early with the policy of the best step."""

    step: int  # of the policy
    stopped: StopTraining | None = None

    def manifest_fields(self) -> dict[str, Any]:
        """Return the manifest's fields about the policy's step."""
        if self.stopped is None:
            return {"model_is": "the last step", "step": self.step}
        return {"model_is": "the best step", "stopped": self.stopped.problems[0].text, "step": self.step}


def _run_updates(config: PPOConfig, stage: lifecycle.StageRun, runner: "PPORunner") -> Outcome:
    """Make the remaining updates; if the run is stopped, give the policy the weights of the best step."""
    components = runner.components
    try:
        runner.run()
    except StopTraining as stop:
        step = runner.snapshots.best_step
        stage.process_group.barrier()  # until the first rank has written the snapshot
        snapshot = runs.state_at(runner.snapshots.folder, step)
        setup.restore_policy(config, stage.options, components, snapshot)
        runner.snapshots.prune(components.trainer.updates, finished=True)
        return Outcome(step, stop)
    return Outcome(components.num_updates)


def _stop_error(config: PPOConfig, stopped: StopTraining, step: int) -> RLHFError:
    """Return the error of a run that was stopped and has kept its best policy."""
    (problem,) = stopped.problems
    kept = f"{runs.shown(config.folder / 'model')} holds the best policy, of step {step}"
    return RLHFError(
        problem.code,
        problem.text,
        where=config.where(stopped.key),
        hint=f"{problem.hint}; {kept}",
    )


class PPORunner:
    """The outer PPO loop: updates, logs, monitoring and checkpoints; resumes from the last checkpoint."""

    def __init__(self, config: PPOConfig, components: setup.PPOComponents, *, resume: bool):
        self.config = config
        self.components = components
        self.trainer = components.trainer
        self.state_folder = config.folder / "state"
        self.cost = runs.CheckpointTimer()
        self.watchdog = Watchdog(config.ppo, config.held_out)
        self.snapshots = Snapshots(config, components, self.cost)

        self.trainer.process_group.run_on_main(self._require_free_names)
        positions = self._load_checkpoint() if resume else {}
        self.saved_step = self.trainer.updates

        self.trackers = Trackers(config)
        self.metrics = MetricsLog(config.folder / "metrics.jsonl", positions.get("metrics"), self.trackers)
        self.samples = SampleTables(
            config.folder / "samples.jsonl",
            components,
            config.ppo,
            position=positions.get("samples"),
            trackers=self.trackers,
        )
        self.watchdog_log = Log(config.folder / "watchdog.jsonl", positions.get("watchdog"))
        self.logs = {"metrics": self.metrics, "samples": self.samples.log, "watchdog": self.watchdog_log}

    def _require_free_names(self) -> None:
        """Raise RLHFError if a checkpoint or snapshot could not be written under its name."""
        for folder in (self.state_folder, self.snapshots.folder):
            runs.require_free(folder, "step_", self.components.num_updates)

    def _load_checkpoint(self) -> dict[str, LogPosition]:
        """Restore the last checkpoint, if there is one; return the positions of its logs."""
        group = self.trainer.process_group  # on a network drive each rank might find another one
        state = group.run_on_main(lambda: runs.latest_state(self.state_folder))
        if state is None:
            return {}
        tree = save.load_tree(state, self.trainer.parallel.mesh)
        self.trainer.load_state_dict(tree["trainer"])
        self.watchdog.load_state_dict(tree)
        self.snapshots.load_state_dict(tree["best"])
        self.snapshots.prune(self.trainer.updates)
        terminal.say(f"ppo      resumes at step {self.trainer.updates} of {self.components.num_updates}")
        positions: dict[str, LogPosition] = tree["logs"]
        return positions

    def run(self) -> None:
        """Make the remaining updates. After SIGTERM or SIGINT, save after the step and exit with 143 or 130.

        Raises RLHFError R01, R02, R05, R19, R20, StopTraining R04 and R13.
        """
        self._announce()
        trainer = self.trainer
        num_updates = self.components.num_updates
        save_interval = self.config.output.save_steps or max(1, num_updates // 10)
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

    def _announce(self) -> None:
        """Print the batch arithmetic, and what differs from the settings. Warns C18."""
        config = self.config
        trainer = self.trainer
        batches = prompt_rows.describe_batches(config, self.components.prompts, trainer.process_group.world_size)
        terminal.say(f"ppo      {batches}")
        if config.ppo.packing and not trainer.model_runner.packed:
            reason = "the models' layers are not all transformers' sdpa attention"
            terminal.say(f"ppo      rows are padded, not packed: {reason}")
        if config.ppo.kl_in == "reward" and config.ppo.kl_estimator != "k1":
            text = f"kl_estimator {config.ppo.kl_estimator} in the reward does not have the KL's policy gradient"
            terminal.warn("C18", text, where=config.where("ppo.kl_estimator"), hint="k1 has it; or set kl_in: loss")

    def _update(self) -> Stats:
        """Make one update, and log, check and keep what it gives; return its metrics."""
        step = self.trainer.updates + 1
        batch = self._prompts_of(step)
        with self._error_context(batch):
            stats = self.trainer.step(Prompts.of(batch))
            self.metrics.log(step, stats)

        experience = self.trainer.experience
        assert experience is not None
        if self.trackers:
            self.trackers.histograms(step, experience.histograms())
        with self._error_context():
            self.samples.show(step)
        self._check(step, experience, stats)
        self.snapshots.record_metrics(step, stats, experience)
        self.snapshots.save_if_due(step)
        return stats

    def _prompts_of(self, step: int) -> list[data.Prompt]:
        """Return the prompts of update `step`."""
        prompts = self.components.prompts
        count = self.config.ppo.prompts_per_update
        rows = data.prompt_batch(len(prompts), step, count, self.config.seed)
        return [prompts[row] for row in rows]

    def _check(self, step: int, experience: Experience, stats: Stats) -> None:
        """Warn of problems that the update shows. Raises RLHFError R02, StopTraining R04 and R13."""
        error = stats["policy/first_ratio_error"]
        if error > RATIO_TOLERANCE:
            text = f"the first ratio of an update differs from 1 by {error:.2g}"
            terminal.warn("R07", text, where=f"step {step}", hint="another dtype or attention implementation may help")
        for problem in self.watchdog.check_update(step, experience, stats):
            terminal.warn(problem.code, problem.text, hint=problem.hint)
        self._handle_alerts(self.watchdog.check(step, experience))

    def _handle_alerts(self, alerts: Sequence[Alert]) -> None:
        """Log the watchdog's alerts and take the configured actions. Raises StopTraining R13."""
        hint = "read samples.jsonl; raise ppo.kl_coef, or fix the reward (docs/rewards.md)"
        trainer = self.trainer
        for alert in alerts:
            self.watchdog_log.append({**asdict(alert), "kl_coef": trainer.kl_coef})
        for alert in alerts:
            if alert.action == "stop":
                raise StopTraining("R13", alert.text, key=f"ppo.watchdog.{alert.signal}", hint=hint)
            effect = ""
            if alert.action == "raise_kl_coef":
                assert self.watchdog.limits is not None  # required for an alert
                trainer.kl_coef *= self.watchdog.limits.kl_factor
                effect = f"; kl_coef is {trainer.kl_coef:.4g} from here on"
            if effect or alert.times == 1:
                terminal.warn("R13", alert.text + effect, hint=hint)

    def _save_checkpoint(self) -> None:
        step = self.trainer.updates
        self.saved_step = step
        tree = {
            "trainer": self.trainer.state_dict(),
            **self.watchdog.state_dict(),
            "best": self.snapshots.state_dict(),
            "logs": {name: log.position(step) for name, log in self.logs.items()},
        }

        def write(path: Path) -> None:
            main_path, *_ = self.trainer.process_group.all_gather_object(path)
            save.save_tree(main_path, tree)

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
            raise self._explained(error, batch) from error
        except RLHFError as error:
            failed = error.problems[0].code in ("R05", "R19", "R20")
            if failed and batch and self.trainer.updates > self.saved_step:
                self._save_checkpoint()
            raise

    def _explained(self, error: NonFiniteError, batch: Sequence[data.Prompt]) -> RLHFError:
        """Return the error with the row's prompt and the last checkpoint."""
        (problem,) = error.problems
        text = problem.text
        if batch and error.row is not None:
            prompt = batch[error.row // self.config.ppo.num_samples_per_prompt]
            prompt_text = self.components.tokenizer.decode(prompt.ids)
            text += f"; its prompt: {prompt_text[:80]!r}"

        last = runs.latest_state(self.state_folder)
        checkpoint = "no checkpoint was saved before it"
        if last:
            checkpoint = f"last good checkpoint: {shown(last)}"
        return RLHFError("R01", text, hint=f"{problem.hint}; {checkpoint}")


def status_line(stats: Stats) -> str:
    """Return the summary of an update for the progress bar."""
    return "  ".join(
        [
            format_reward(stats, LAST_UPDATE),
            f"KL {stats['objective/kl_k1']:.2f}",
            f"length {stats['objective/response_length']:.1f}",
            f"{stats['tokens_per_s']:.0f} tokens/s",
        ]
    )


def save_models(config: PPOConfig, components: setup.PPOComponents, step: int) -> None:
    """Save the policy after `step`, averaged with ppo.average, to model/ and the value model to value/.

    Both are full weights, or adapters of a base. A value head is saved as a sequence classifier, and not at all if the
    policy's family has none. Without a value model, and for the best step of a run that stopped, there is no value/.
    """
    tokenizer = components.tokenizer
    trained = f"{step} PPO updates of {config.ppo.episodes_per_update} episodes, KL coefficient {config.ppo.kl_coef}"
    average = f" with averaged weights (decay {config.ppo.average:g} an update)" if config.ppo.average else ""
    with components.trainer.averaged_policy():
        card = f"Policy{average} after {trained}."
        save.save_trained(components.policy, tokenizer, config.folder / "model", card)

    if step != components.trainer.updates:  # snapshots have no value model
        return
    value = _value_to_save(components)
    if value is not None:
        save.save_trained(value, tokenizer, config.folder / "value", f"Value model after {trained}.")


def _value_to_save(components: setup.PPOComponents) -> Any:
    """Return the value model; a value head on the trained policy: it has learned from the policy's hidden states."""
    policy = components.policy
    value = components.value
    if not isinstance(value, forward.ValueHead):
        return value
    if not build.scores_by_one_matrix(lora.unwrap(policy).config):
        reason = "transformers has no classifier of the policy's family that scores by one matrix"
        terminal.say(f"ppo      value/ is not written: {reason}")
        return None
    if components.base:
        return components.base.value_from_head(policy, value.score)
    return load.reward_model_from_backbone(policy, value.score)


def headline_metrics(config: PPOConfig, components: setup.PPOComponents) -> Stats:
    """Compute score, KL and length of the finished policy on new responses to the run's first prompts."""
    trainer = components.trainer
    prompts = Prompts.of(components.prompts[: config.ppo.episodes_per_update])
    rollout = trainer.generate(prompts, purpose="headline")
    experience = trainer.make_experience(rollout)
    metrics = experience.metrics(kl_in_reward=config.ppo.kl_in == "reward")
    return {name: metrics[name] for name in HEADLINE}
