"""The loop over updates: steps, logs, alarms, states to resume from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli.config import PPOConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.inputs import ppo as inputs
from rlhf_cli.models import trees
from rlhf_cli.ppo.alarms import Alarms, RunStop
from rlhf_cli.ppo.finite import NotFinite
from rlhf_cli.ppo.metrics import Stats, distributions
from rlhf_cli.ppo.records import Prompts
from rlhf_cli.ppo.watchdog import Firing, Watchdog
from rlhf_cli.progress import Progress
from rlhf_cli.signals import StopWish
from rlhf_cli.stages.ppo.parts import Parts
from rlhf_cli.stages.ppo.samples import SampleTables
from rlhf_cli.stages.ppo.snapshots import Snapshots
from rlhf_cli.trackers import Trackers
from rlhf_cli.tracking import Log, MetricsLog
from rlhf_cli.verdict.rewards import LAST_UPDATE, reward

RATIO_TOLERANCE = 1e-3  # in float32 it is 0, the update runs on the judge's own micro-batches


class Training:
    """One run of PPO, from its last state where there is one."""

    def __init__(self, config: PPOConfig, parts: Parts, *, resume: bool):
        self.config, self.parts, self.trainer = config, parts, parts.trainer
        self.states, self.alarms, self.cost = config.folder / "state", Alarms(), checkpoints.Cost()
        self.watchdog = Watchdog(config.ppo, config.held_out)
        self.snapshots = Snapshots(config, parts, self.cost)
        state = checkpoints.latest_state(self.states) if resume else None
        logs: dict[str, Any] = {}
        if state:
            tree = trees.load_tree(state)
            self.trainer.load_state_dict(tree["trainer"])
            self.alarms = Alarms(**tree["alarms"])
            self.watchdog.load_state_dict(tree["watchdog"])
            self.snapshots.load_state_dict(tree["best"])
            logs = tree["logs"]
            self.snapshots.tidy(self.trainer.updates)
            terminal.say(f"ppo      resumes at step {self.trainer.updates} of {parts.updates}")
        self.saved_at = self.trainer.updates
        self.trackers = Trackers(config)
        self.metrics = MetricsLog(config.folder / "metrics.jsonl", logs.get("metrics"), self.trackers)
        samples = config.folder / "samples.jsonl"
        self.samples = SampleTables(samples, parts, config.ppo, logs.get("samples"), self.trackers)
        self.firings = Log(config.folder / "watchdog.jsonl", logs.get("watchdog"))
        self.logs: dict[str, Log] = {"metrics": self.metrics, "samples": self.samples.log, "watchdog": self.firings}

    def run(self) -> None:
        """All updates that are still to make. SIGTERM or SIGINT: saves after the step and exits 143 or 130.

        Raises RLHFError R01, R02, R05, RunStop R04 and R13.
        """
        config, trainer, updates = self.config, self.trainer, self.parts.updates
        terminal.say(f"ppo      {inputs.arithmetic(config, self.parts.prompts, trainer.ranks.count)}")
        if config.ppo.packing and not trainer.passes.packed:
            terminal.say("ppo      rows are padded, not packed: the models' attention is not transformers' sdpa")
        self._warn_of_the_estimator()
        save_every = config.output.save_steps or max(1, updates // 10)
        with (
            StopWish() as stop,
            self.trackers,
            Progress("ppo", updates, "update", done=trainer.updates) as bar,
        ):
            if trainer.updates == 0:
                self.snapshots.keep(0)
            while trainer.updates < updates:
                stats = self._update()
                step = trainer.updates
                bar.advance(note=status_line(stats))
                stop.settle(trainer.ranks.told)
                if step % save_every == 0 or step == updates or stop.wished:
                    self._save()
                if stop.wished and step < updates:
                    text = f"ppo      stopped at step {step} of {updates}, saved; the same command goes on from here"
                    terminal.say(text)
                    trainer.ranks.wait()  # who ends first has the others ended
                    raise SystemExit(stop.exit_code)
        terminal.say(f"ppo      {self.cost}")

    def _update(self) -> Stats:
        """One PPO step, logged and looked at."""
        config, trainer, prompts = self.config, self.trainer, self.parts.prompts
        count, step = config.ppo.prompts_per_update, trainer.updates + 1
        picked = [prompts[i] for i in data.prompt_batch(len(prompts), step, count, config.seed)]
        with self._explained(picked):
            stats = trainer.step(Prompts.from_lists([prompt.ids for prompt in picked]))
            self.metrics.log(step, stats)
        assert trainer.experience is not None
        if self.trackers:
            self.trackers.histograms(step, distributions(trainer.experience))
        with self._explained():
            self.samples.show(step)
        self._look(step, stats)
        self.snapshots.look(step, stats, trainer.experience)
        self.snapshots.keep(step)
        return stats

    def _look(self, step: int, stats: Stats) -> None:
        if (error := stats["policy/first_ratio_error"]) > RATIO_TOLERANCE:
            text = f"the first ratio of an update is off 1 by {error:.2g}"
            terminal.warn("R07", text, where=f"step {step}", hint="another precision or attention code may help")
        assert self.trainer.experience is not None
        for problem in self.alarms.look(step, self.trainer.experience, stats, self.config.ppo):
            terminal.warn(problem.code, problem.text, hint=problem.hint)

        self._obey(self.watchdog.look(step, self.trainer.experience))

    def _obey(self, firings: Sequence[Firing]) -> None:
        """Log what the watchdog found, and do what the settings say about it. Raises RunStop R13."""
        hint = "read samples.jsonl; raise ppo.kl_coef, or mend the reward (docs/rewards.md)"
        for firing in firings:
            self.firings.append(asdict(firing) | {"kl_coef": self.trainer.kl_coef})
        for firing in firings:
            if firing.action == "stop":
                raise RunStop("R13", firing.text, key=f"ppo.watchdog.{firing.signal}", hint=hint)
            told = ""
            if firing.action == "raise_kl_coef":
                assert self.watchdog.settings is not None  # or nothing fires
                self.trainer.kl_coef *= self.watchdog.settings.kl_factor
                told = f"; kl_coef is {self.trainer.kl_coef:.4g} from here on"
            if told or firing.times == 1:
                terminal.warn("R13", firing.text + told, hint=hint)

    def _save(self) -> None:
        """A state to resume from."""
        self.saved_at = step = self.trainer.updates
        tree = {
            "trainer": self.trainer.state_dict(),
            "alarms": self.alarms.state_dict(),
            "watchdog": self.watchdog.state_dict(),
            "best": self.snapshots.state_dict(),
            "logs": {name: log.mark(step) for name, log in self.logs.items()},
        }
        name = f"step_{step:06d}"

        def write(path: Path) -> None:
            trees.save_tree(self.trainer.ranks.told(path)[0], tree)

        with self.cost.one():
            checkpoints.commit_state(self.states, name, write, keep=self.config.output.keep)
            self.snapshots.tidy(step)

    @contextmanager
    def _explained(self, picked: Sequence[data.Prompt] = ()) -> Iterator[None]:
        """Within, an error is told with the prompt of its row and the state to go on from.

        Where a source of reward fails nothing was learned yet in this update, and the updates before it are saved.
        """
        try:
            yield
        except NotFinite as error:
            (problem,) = error.problems
            text, last = problem.text, checkpoints.latest_state(self.states)
            if picked and error.row is not None:
                ids = picked[error.row // self.config.ppo.num_samples_per_prompt].ids
                text += f"; its prompt: {self.parts.tokenizer.decode(ids)[:80]!r}"
            good = f"last good checkpoint: {shown(last)}" if last else "no checkpoint was saved before it"
            raise RLHFError("R01", text, hint=f"{problem.hint}; {good}") from error
        except RLHFError as error:
            if error.problems[0].code == "R05" and self.trainer.updates > self.saved_at:
                self._save()
            raise

    def _warn_of_the_estimator(self) -> None:
        settings = self.config.ppo
        if settings.kl_in == "reward" and settings.kl_estimator != "k1":
            text = f"kl_estimator {settings.kl_estimator} in the reward does not have the KL's policy gradient"
            where = self.config.where("ppo.kl_estimator")
            terminal.warn("C18", text, where=where, hint="k1 has it; or set kl_in: loss")


def status_line(stats: Stats) -> str:
    """What an update came to, behind its number."""
    kl, length = stats["objective/kl_k1"], stats["objective/response_length"]
    return f"{reward(stats, LAST_UPDATE)}  KL {kl:.2f}  length {length:.1f}  {stats['tokens_per_s']:.0f} tokens/s"
