"""The loop over the updates of a PPO run: restore, update, log, check, save."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation.report_text import LAST_UPDATE, format_reward
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Experience, Stats
from rlhf_cli.ppo.monitor import Alert, NonFiniteError, StopTraining, Watchdog
from rlhf_cli.progress import Progress
from rlhf_cli.stages.common.lifecycle import StageRun
from rlhf_cli.stages.ppo import prompt_rows, setup
from rlhf_cli.stages.ppo.policy_snapshots import Snapshots
from rlhf_cli.stages.ppo.sample_tables import SampleTables
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking.logs import Log, LogPosition, MetricsLog
from rlhf_cli.tracking.trackers import Trackers

# Largest distance of the first ratio from 1. It is 0 in float32: scoring and update use the same micro-batches. Other
# dtypes round. report/rules.toml has the same limit.
RATIO_TOLERANCE = 1e-3
BEFORE_TRAINING = ("R05", "R19", "R20")  # errors of a reward source or the engine: the update has trained nothing yet


class RunLogs:
    """The open logs and trackers of a run, cut to their positions in the checkpoint that it resumes from."""

    def __init__(self, config: PPOConfig, components: setup.PPOComponents, positions: dict[str, LogPosition]):
        folder = config.folder
        self.trackers = Trackers(config)
        self.metrics = MetricsLog(folder / "metrics.jsonl", positions.get("metrics"), self.trackers)
        self.samples = SampleTables(
            folder / "samples.jsonl",
            components,
            config.ppo,
            position=positions.get("samples"),
            trackers=self.trackers,
        )
        self.watchdog = Log(folder / "watchdog.jsonl", positions.get("watchdog"))

    def positions(self, step: int) -> dict[str, LogPosition]:
        """Return the positions after `step`, for a checkpoint."""
        logs = {"metrics": self.metrics, "samples": self.samples.log, "watchdog": self.watchdog}
        return {name: log.position(step) for name, log in logs.items()}


class PPORunner:
    """The outer PPO loop: updates, logs, monitoring and checkpoints. Call `restore`, then `run`."""

    logs: RunLogs  # opened by `restore`

    def __init__(self, config: PPOConfig, components: setup.PPOComponents):
        self.config = config
        self.components = components
        self.trainer = components.trainer
        self.state_folder = config.folder / "state"
        self.saved_step = 0  # of the newest checkpoint
        self.checkpoint_timer = runs.CheckpointTimer()
        self.watchdog = Watchdog(config.ppo, config.held_out)
        self.snapshots = Snapshots(config, components, self.checkpoint_timer)

    def restore(self, stage: StageRun) -> None:
        """Continue from the checkpoint of an earlier start if there is one, and open the logs.

        Raises RLHFError C15 if a checkpoint or snapshot of another run has a name that this one needs.
        """
        num_updates = self.components.num_updates
        checkpoint = stage.find_checkpoint("step_", num_updates)
        self.trainer.process_group.run_on_main(lambda: runs.require_free(self.snapshots.folder, "step_", num_updates))
        log_positions: dict[str, LogPosition] = {}
        if checkpoint:
            log_positions = self._load_checkpoint(checkpoint)
            terminal.say(f"ppo      resumes at step {self.trainer.updates} of {num_updates}")
        self.logs = RunLogs(self.config, self.components, log_positions)

    def _load_checkpoint(self, path: Path) -> dict[str, LogPosition]:
        """Load what `_save_checkpoint` saved; return the positions of the logs."""
        tree = save.load_tree(path, self.trainer.parallel.mesh)
        self.trainer.load_state_dict(tree["trainer"])
        self.watchdog.load_state_dict(tree)
        self.snapshots.load_state_dict(tree["best"])

        self.saved_step = self.trainer.updates
        self.snapshots.prune(self.saved_step)
        log_positions: dict[str, LogPosition] = tree["logs"]
        return log_positions

    def _save_checkpoint(self) -> None:
        step = self.trainer.updates
        self.saved_step = step
        tree = {
            "trainer": self.trainer.state_dict(),
            **self.watchdog.state_dict(),  # "alarms" and "watchdog"
            "best": self.snapshots.state_dict(),
            "logs": self.logs.positions(step),
        }

        def write(path: Path) -> None:
            main_path, *_ = self.trainer.process_group.all_gather_object(path)  # each rank writes its shards there
            save.save_tree(main_path, tree)

        with self.checkpoint_timer.measure():
            runs.commit_state(self.state_folder, runs.step_name(step), write, keep=self.config.output.keep)
            self.snapshots.prune(step)

    def run(self) -> None:
        """Make the remaining updates. After a signal to stop, save after the step and exit with 128 + its number.

        Raises RLHFError R01, R02, R05, R19, R20, StopTraining R04 and R13.
        """
        self._announce()
        trainer = self.trainer
        first = trainer.updates + 1
        last = self.components.num_updates
        save_interval = self.config.output.save_steps or max(1, last // 10)
        with GracefulStop() as stop, self.logs.trackers, Progress("ppo", last, "update", done=first - 1) as bar:
            if first == 1:
                self.snapshots.save_if_due(0)
            for step in range(first, last + 1):
                stats = self._update(step)
                bar.advance(note=status_line(stats))

                stop.sync(trainer.process_group.all_gather_object)
                if step % save_interval == 0 or step == last or stop.requested:
                    self._save_checkpoint()
                if stop.requested and step < last:
                    terminal.say(f"ppo      stopped at step {step} of {last}, saved; the same command resumes")
                    trainer.process_group.barrier()  # the first process to exit terminates the others
                    raise SystemExit(stop.exit_code)
        terminal.say(f"ppo      {self.checkpoint_timer}")

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

    def _update(self, step: int) -> Stats:
        """Make update `step`, and log, check and keep what it gives; return its metrics."""
        batch = prompt_rows.prompts_of_update(self.config, self.components.prompts, step)
        with self._explain_non_finite(batch), self._save_before_failure():
            stats = self.trainer.step(Prompts.of(batch))
            self.logs.metrics.log(step, stats)

        experience = self.trainer.experience
        assert experience is not None
        if self.logs.trackers:  # some are open
            self.logs.trackers.histograms(step, experience.histograms())
        with self._explain_non_finite():
            self.logs.samples.show_if_due(step)

        # An update that stops the run is not to make the policy before it, which it measures, the best one.
        self._warn_or_stop(step, experience, stats)
        self.snapshots.record_metrics(step, stats, experience)
        self.snapshots.save_if_due(step)
        return stats

    def _warn_or_stop(self, step: int, experience: Experience, stats: Stats) -> None:
        """Warn of problems that the update shows. Raises RLHFError R02, StopTraining R04 and R13."""
        error = stats["policy/first_ratio_error"]
        if error > RATIO_TOLERANCE:
            text = f"the first ratio of an update differs from 1 by {error:.2g}"
            terminal.warn("R07", text, where=f"step {step}", hint="another dtype or attention implementation may help")
        for problem in self.watchdog.check_update(step, experience, stats):
            terminal.warn(problem.code, problem.text, hint=problem.hint)
        self._handle_alerts(self.watchdog.check(step, experience))

    def _handle_alerts(self, alerts: Sequence[Alert]) -> None:
        """Log the watchdog's alerts, all before one stops the run, and take their actions. Raises StopTraining R13."""
        hint = "read samples.jsonl; raise ppo.kl_coef, or fix the reward (docs/reward-hacking.md)"
        trainer = self.trainer
        for alert in alerts:
            self.logs.watchdog.append({**asdict(alert), "kl_coef": trainer.kl_coef})
        for alert in alerts:
            if alert.action == "stop":
                raise StopTraining("R13", alert.text, key=f"ppo.watchdog.{alert.signal}", hint=hint)
            effect = ""
            if alert.action == "raise_kl_coef":
                assert self.watchdog.limits is not None  # required for an alert
                trainer.kl_coef *= self.watchdog.limits.kl_factor
                effect = f"; kl_coef is {trainer.kl_coef:.4g} from here on"
            is_first = alert.times == 1
            if effect or is_first:
                terminal.warn("R13", alert.text + effect, hint=hint)

    @contextmanager
    def _save_before_failure(self) -> Iterator[None]:
        """Context manager of an update that saves the updates before it if the update fails before it trains."""
        try:
            yield
        except RLHFError as error:
            nothing_trained = error.problems[0].code in BEFORE_TRAINING
            if nothing_trained and self.trainer.updates > self.saved_step:
                self._save_checkpoint()
            raise

    @contextmanager
    def _explain_non_finite(self, batch: Sequence[data.Prompt] = ()) -> Iterator[None]:
        """Context manager that adds the last checkpoint, and the row's prompt in `batch`, to an R01 error."""
        try:
            yield
        except NonFiniteError as error:
            problem = error.problems[0]
            text = problem.text
            if batch and error.row is not None:
                prompt = batch[error.row // self.config.ppo.num_samples_per_prompt]
                prompt_text = self.components.tokenizer.decode(prompt.ids)
                text += f"; its prompt: {prompt_text[:80]!r}"

            last = runs.latest_state(self.state_folder)
            checkpoint = "no checkpoint was saved before it"
            if last:
                checkpoint = f"last good checkpoint: {shown(last)}"
            raise RLHFError("R01", text, hint=f"{problem.hint}; {checkpoint}") from error


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
