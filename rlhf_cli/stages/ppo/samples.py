"""Outputs of a PPO run besides its metrics: tables of sampled responses, and snapshots of the policy."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.models import hub, save
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.experience import Experience, Stats, unscaled_scores
from rlhf_cli.rewards.function import FunctionReward
from rlhf_cli.rewards.signature import named_columns
from rlhf_cli.stages.ppo.setup import PPOComponents
from rlhf_cli.tracking.logs import Log, LogPosition
from rlhf_cli.tracking.trackers import Trackers

ROWS_LOGGED = 8
ROWS_PRINTED = 3
CELL_WIDTH = 100
NUM_CANDIDATES = 20


class SampleTables:
    """`num_sample_generations` tables over a run: on the terminal, in samples.jsonl and in trackers.

    Rows are responses to data.eval_prompts if set, else to the prompts of the update. They have the columns of the data
    that reward functions name.
    """

    def __init__(
        self, path: Path, components: PPOComponents, settings: PPOSettings, mark: LogPosition | None, trackers: Trackers
    ):
        self.log, self.components, self.trackers, self.settings = Log(path, mark), components, trackers, settings
        count = settings.num_sample_generations
        self.interval = max(1, components.num_updates // count) if count else None
        functions = [each.function for each in components.trainer.rewards.values() if isinstance(each, FunctionReward)]
        self.columns = named_columns(functions, components.prompts)

    def show(self, step: int) -> None:
        """Write and print the table of update `step` if one is due."""
        if self.interval is None or step % self.interval:
            return
        experience, tokenizer = experience_to_show(self.components), self.components.tokenizer
        episodes, from_eval = self.settings.episodes_per_update, bool(self.components.eval_prompts)
        rows = []
        for index in range(min(ROWS_LOGGED, len(experience.rollout))):
            episode = step * episodes if from_eval else (step - 1) * episodes + index
            rows.append({"step": step, "episode": episode, **sample_row(tokenizer, experience, index)})
            if self.columns:
                rows[-1]["columns"] = jsonl.values_of(experience.rollout.records[index], self.columns)
        rows[0]["tokens"] = token_columns(tokenizer, experience, 0)
        columns = {"prompt": "prompt", "response": "response", "score": "score", "KL": "kl"}
        if self.settings.generate_ref_response:
            columns |= {"reference": "ref_response", "its score": "ref_score"}
            for row, sample in zip(rows, self._reference_samples(experience.rollout), strict=True):
                row |= {"ref_response": sample["response"], "ref_score": sample["score"]}
        for row in rows:
            self.log.append(row)
        self.trackers.table(step, "samples", rows)
        cells = [[_format_cell(row[key]) for key in columns.values()] for row in rows[:ROWS_PRINTED]]
        terminal.table(list(columns), cells, title=f"samples at step {step}")

    def _reference_samples(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Sample and score the reference model's responses to the same prompts, seeded as evaluation prompts."""
        trainer, count = self.components.trainer, min(ROWS_LOGGED, len(rollout))
        prompts = Prompts.from_lists([rollout.prompt_tokens(row) for row in range(count)])
        prompts = replace(prompts, records=rollout.records[:count])
        with trainer.ref_on_device():
            rollout = trainer.generate(prompts, "show", self.components.ref_engine)
        experience = trainer.make_experience(rollout)
        return [sample_row(self.components.tokenizer, experience, row) for row in range(count)]


def experience_to_show(components: PPOComponents) -> Experience:
    """Return new responses to evaluation prompts if there are any, else the update's own experience."""
    trainer, prompts = components.trainer, components.eval_prompts
    if not prompts:
        assert trainer.experience is not None
        return trainer.experience
    selected = prompts[:: max(1, len(prompts) // ROWS_LOGGED)][:ROWS_LOGGED]  # adjacent rows of a file may be similar
    return trainer.make_experience(trainer.generate(Prompts.of(selected), "show"))


def sample_row(tokenizer: Any, experience: Experience, row: int) -> dict[str, Any]:
    """Return one row of samples.jsonl, without its step."""
    rollout = experience.rollout
    prompt, response = rollout.text(tokenizer, row)
    return {
        "index": row,
        "prompt": prompt,
        "response": response,
        "ended": bool(rollout.ended[row]),
        "length": int(rollout.response_lengths[row]),
        "kl": float(experience.log_ratio[row][experience.mask[row]].sum()),
        "score": float(experience.scores[row]),
        "scores": {name: _score(raw[row]) for name, raw in experience.score_result.raw.items()},
    }


def _score(score: Tensor) -> float | None:
    return None if score.isnan() else float(score)


def token_columns(tokenizer: Any, experience: Experience, row: int) -> dict[str, list[Any]]:
    """Return text, reward, kl, value and advantage, if any, per response token; `kl` sums to the row's KL in nats.

    Special tokens have texts; a character of several tokens goes to the last one.
    """
    tensors = {
        "reward": experience.rewards,
        "kl": experience.log_ratio,
        "value": experience.values,
        "advantage": experience.advantages,
    }
    *texts, last, rest = data.decode_stream(tokenizer, experience.rollout.response_tokens(row), special=True)
    given = {name: tensor[row][experience.mask[row]] for name, tensor in tensors.items() if tensor is not None}
    return {"text": [*texts, last + rest], **{name: values.tolist() for name, values in given.items()}}


def _format_cell(value: str | float) -> str:
    if not isinstance(value, str):
        return f"{value:.2f}"
    text = " ".join(value.split())
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 3] + "..."


class Snapshots:
    """RUN/ppo/snapshots: the best policy, and `output.snapshots` evenly spaced ones with the last among them.

    With ppo.average they are averaged policies, and the metrics are still those of the trained policies, which sampled.

    The best is the candidate step with the highest mean of a metric over its window. The metrics of an update describe
    the policy before it, which sampled the responses. A candidate's window therefore ends with the update after it, and
    starts after the previous candidate's.
    """

    def __init__(self, config: PPOConfig, components: PPOComponents, cost: runs.CheckpointTimer):
        self.folder, self.components, self.cost = config.folder / runs.SNAPSHOTS, components, cost
        self.settings = config.ppo
        self.best_step, self.best_value = 0, -math.inf
        self.window: list[float] = []  # metric of the updates since the previous candidate
        self.judge = next(iter(config.held_out), None)
        scores = "objective/scores" + " before use_score_scaling" * config.ppo.use_score_scaling
        objective = f"{scores} - {config.ppo.kl_coef:g} * objective/kl"
        self.metric = f"objective/score/{self.judge}" if self.judge else objective
        self.schedule = evenly_spaced_steps(components.num_updates, config.output.snapshots)
        # Steps that may become the best, from the SFT policy (0) on. Independent of output.save_steps, so that the
        # choice of the best policy is.
        self.candidates = {0} | {step - 1 for step in evenly_spaced_steps(components.num_updates, NUM_CANDIDATES)}

    def save_if_due(self, step: int) -> None:
        """Save the policy after update `step` (0: the SFT policy) if it is scheduled or a candidate."""
        if step not in self.schedule and step not in self.candidates:
            return
        policy, tokenizer = self.components.policy, self.components.tokenizer
        card = f"Policy after {step} of {self.components.num_updates} PPO updates."
        with self.cost.measure(), self.components.trainer.averaged_policy():
            runs.commit_state(
                self.folder,
                self.path(step).name,
                lambda path: save.save_model(policy, tokenizer, path, card),
                keep=None,  # `prune` deletes them
            )

    def record_metrics(self, step: int, stats: Stats, experience: Experience) -> None:
        """Add the metrics of update `step` to the window of the policy before it, and push a new best to the Hub."""
        if not self.judge:
            self.window.append(self._objective(stats, experience))
        elif self.metric in stats:  # a judge may score no response of an update
            self.window.append(stats[self.metric])
        candidate = step - 1
        if candidate not in self.candidates or not self.window:
            return
        value, self.window = fmean(self.window), []
        if value > self.best_value:
            self.best_step, self.best_value = candidate, value
            if repo := self.settings.push_to_hub_if_best:
                text = f"Policy after {candidate} PPO updates, {self.metric} {value:.4g}"
                hub.push_best(self.path(candidate), repo, text)

    def _objective(self, stats: Stats, experience: Experience) -> float:
        """Return PPO's objective, for both values of kl_in, in units that are the same for all updates.

        The coefficient and the score deviation of an update differ between updates: the initial kl_coef counts, and
        the scores before scaling.
        """
        score = stats["objective/scores"]
        if self.settings.use_score_scaling:
            score = float(unscaled_scores(experience.score_result, self.settings).mean())
        return score - self.settings.kl_coef * stats["objective/kl"]

    def prune(self, step: int, *, finished: bool = False) -> None:
        """Delete snapshots that are neither scheduled nor the best, and those after `step`.

        Call it only after a checkpoint of `step`: a run resumed from an older one may end with the best policy of that
        one.
        """
        for saved in runs.state_steps(self.folder):
            undecided = saved == step and saved in self.candidates and not finished  # the next update measures it
            if saved > step or not (saved in self.schedule or saved == self.best_step or undecided):
                runs.delete_state(self.path(saved))

    def manifest_fields(self) -> dict[str, Any]:
        value = self.best_value if math.isfinite(self.best_value) else None  # the judge scored no response
        return {"best": {"step": self.best_step, "metric": self.metric, "value": value}}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.best_step, "value": self.best_value, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_step, self.best_value, self.window = (state[key] for key in ("step", "value", "window"))

    def path(self, step: int) -> Path:
        """Return the folder of the policy after `step`."""
        return self.folder / f"step_{step:06d}"


def evenly_spaced_steps(num_updates: int, count: int) -> set[int]:
    """Return `count` evenly spaced steps, the last update among them."""
    return {round(num_updates * k / count) for k in range(1, count + 1)} - {0} if count else set()
