"""Tables of sampled responses during a PPO run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.rewards.function import FunctionReward
from rlhf_cli.rewards.signature import named_columns
from rlhf_cli.stages.ppo.setup import PPOComponents
from rlhf_cli.tracking.logs import Log, LogPosition
from rlhf_cli.tracking.trackers import Trackers

ROWS_LOGGED = 8
ROWS_PRINTED = 3
CELL_WIDTH = 100


def num_rows_scored(config: PPOConfig, num_updates: int) -> int:
    """Return how many responses the tables of a run let the rewards score beside those of the updates, at most."""
    settings = config.ppo
    per_table = ROWS_LOGGED * (bool(config.data.eval_prompts) + settings.generate_ref_response)
    interval = _interval(settings, num_updates)
    return per_table * (num_updates // interval) if interval else 0


def _interval(settings: PPOSettings, num_updates: int) -> int | None:
    """Return the updates from one table to the next; None without tables."""
    if not settings.num_sample_generations:
        return None
    return max(1, num_updates // settings.num_sample_generations)


class SampleTables:
    """`num_sample_generations` tables over a run: on the terminal, in samples.jsonl and in trackers.

    Rows are responses to data.eval_prompts if set, else to the prompts of the update. They have the columns of the data
    that reward functions name.
    """

    def __init__(
        self,
        path: Path,
        components: PPOComponents,
        settings: PPOSettings,
        position: LogPosition | None,
        trackers: Trackers,
    ):
        self.log = Log(path, position)
        self.components = components
        self.settings = settings
        self.trackers = trackers
        self.interval = _interval(settings, components.num_updates)
        rewards = components.trainer.rewards.values()
        functions = [reward.function for reward in rewards if isinstance(reward, FunctionReward)]
        self.columns = named_columns(functions, components.prompts)

    def show_if_due(self, step: int) -> None:
        """Write and print the table of update `step` if one is due."""
        if self.interval is None or step % self.interval:
            return
        rows = self._rows(step)
        for row in rows:
            self.log.append(row)
        self.trackers.table(step, "samples", rows)

        shown = {"prompt": "prompt", "response": "response", "score": "score", "KL": "kl"}
        if self.settings.generate_ref_response:
            shown |= {"reference": "ref_response", "its score": "ref_score"}
        cells = [[_format_cell(row[key]) for key in shown.values()] for row in rows[:ROWS_PRINTED]]
        terminal.table(list(shown), cells, title=f"samples at step {step}")

    def _rows(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of samples.jsonl for the table of update `step`."""
        tokenizer = self.components.tokenizer
        experience = experience_to_show(self.components)
        rows = []
        for index in range(min(ROWS_LOGGED, len(experience.rollout))):
            row = {"step": step, "episode": self._episode(step, index), **sample_row(tokenizer, experience, index)}
            if self.columns:
                row["columns"] = jsonl.values_of(experience.rollout.records[index], self.columns)
            rows.append(row)
        rows[0]["tokens"] = token_columns(tokenizer, experience)

        if self.settings.generate_ref_response:
            for row, sample in zip(rows, self._reference_samples(experience.rollout), strict=True):
                row["ref_response"] = sample["response"]
                row["ref_score"] = sample["score"]
        return rows

    def _episode(self, step: int, index: int) -> int:
        """Return the episode of a row: of evaluation prompts the number trained so far."""
        episodes = self.settings.episodes_per_update
        return step * episodes if self.components.eval_prompts else (step - 1) * episodes + index

    def _reference_samples(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Sample and score the reference model's responses to the same prompts, seeded as evaluation prompts."""
        trainer = self.components.trainer
        count = min(ROWS_LOGGED, len(rollout))
        prompts = replace(
            Prompts.from_lists([rollout.prompt_tokens(row) for row in range(count)]),
            records=rollout.records[:count],
        )
        with trainer.ref_on_device():
            rollout = trainer.generate(prompts, "show", self.components.ref_engine)
        experience = trainer.make_experience(rollout)
        return [sample_row(self.components.tokenizer, experience, row) for row in range(count)]


def experience_to_show(components: PPOComponents) -> Experience:
    """Return new responses to evaluation prompts if there are any, else the update's own experience."""
    trainer = components.trainer
    prompts = components.eval_prompts
    if not prompts:
        assert trainer.experience is not None
        return trainer.experience
    stride = max(1, len(prompts) // ROWS_LOGGED)  # adjacent rows of a file may be similar
    selected = prompts[::stride][:ROWS_LOGGED]
    return trainer.make_experience(trainer.generate(Prompts.of(selected), "show"))


def sample_row(tokenizer: Any, experience: Experience, row: int) -> dict[str, Any]:
    """Return one row of samples.jsonl, without its step."""
    rollout = experience.rollout
    prompt, response = rollout.text(tokenizer, row)
    token_kl = experience.log_ratio[row][experience.mask[row]]
    return {
        "index": row,
        "prompt": prompt,
        "response": response,
        "ended": bool(rollout.ended[row]),
        "length": int(rollout.response_lengths[row]),
        "kl": float(token_kl.sum()),
        "score": float(experience.scores[row]),
        "scores": {name: _score(raw[row]) for name, raw in experience.score_result.raw.items()},
    }


def _score(score: Tensor) -> float | None:
    """Return a raw score, None if the source gave none."""
    return None if score.isnan() else float(score)


def token_columns(tokenizer: Any, experience: Experience) -> dict[str, list[Any]]:
    """Return text, reward, kl, value and advantage, if any, of each token of the first response; `kl` is in nats.

    Special tokens have texts; a character of several tokens goes to the last one.
    """
    ids = experience.rollout.response_tokens(0)
    columns: dict[str, list[Any]] = {"text": data.token_texts(tokenizer, ids)}
    tensors = {
        "reward": experience.rewards,
        "kl": experience.log_ratio,
        "value": experience.values,
        "advantage": experience.advantages,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            columns[name] = tensor[0][experience.mask[0]].tolist()
    return columns


def _format_cell(value: str | float) -> str:
    """Return a value as a short text for the terminal."""
    if not isinstance(value, str):
        return f"{value:.2f}"
    text = " ".join(value.split())
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 3] + "..."
