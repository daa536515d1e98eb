"""Tables of prompts, responses and scores while PPO trains: on the terminal, in samples.jsonl and in trackers."""

from pathlib import Path
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.settings import PPOSettings
from rlhf_cli.stages.ppo.parts import Parts
from rlhf_cli.trackers import Trackers
from rlhf_cli.tracking import Log, Mark

IN_THE_LOG = 8
ON_THE_TERMINAL = 3
WIDTH = 100


class SampleTables:
    """`num_sample_generations` tables over the run.

    Of held-out prompts where `data.eval_prompts` is given, else of the rollout.
    """

    def __init__(self, path: Path, parts: Parts, settings: PPOSettings, mark: Mark | None, trackers: Trackers):
        self.log, self.parts, self.trackers = Log(path, mark), parts, trackers
        self.every = (
            max(1, parts.updates // settings.num_sample_generations) if settings.num_sample_generations else None
        )
        self.episodes, self.with_ref = settings.episodes_per_update, settings.generate_ref_response

    def show(self, step: int) -> None:
        """After update `step`: write and print a table where one is due."""
        if self.every is None or step % self.every:
            return
        experience = judged(self.parts)
        rows = [self._row(step, experience, row) for row in range(min(IN_THE_LOG, len(experience.rollout)))]
        rows[0]["tokens"] = of_tokens(self.parts.tokenizer, experience, 0)
        if self.with_ref:
            rows = [row | extra for row, extra in zip(rows, self._of_reference(experience.rollout), strict=True)]
        for row in rows:
            self.log.append(row)
        self.trackers.table(step, "samples", rows)
        columns = {"prompt": "prompt", "response": "response", "score": "score", "KL": "kl"}
        if self.with_ref:
            columns |= {"reference": "ref_response", "its score": "ref_score"}
        cells = [[_cell(row[key]) for key in columns.values()] for row in rows[:ON_THE_TERMINAL]]
        terminal.table(list(columns), cells, title=f"samples at step {step}")

    def _of_reference(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The reference's own responses to the same prompts, drawn with the same seeds as the table's."""
        trainer, count = self.parts.trainer, min(IN_THE_LOG, len(rollout))
        prompts = Prompts.from_lists([rollout.prompt_tokens(row) for row in range(count)])
        with trainer.ref_on_device():
            rollout = trainer.generate(prompts, "show", self.parts.ref_engine)
        experience = trainer.make_experience(rollout)
        rows = [told(self.parts.tokenizer, experience, row) for row in range(count)]
        return [{"ref_response": row["response"], "ref_score": row["score"]} for row in rows]

    def _row(self, step: int, experience: Experience, row: int) -> dict[str, Any]:
        episode = step * self.episodes if self.parts.eval_prompts else (step - 1) * self.episodes + row
        return {"step": step, "episode": episode, **told(self.parts.tokenizer, experience, row)}


def told(tokenizer: Any, experience: Experience, row: int) -> dict[str, Any]:
    """A row of a table: the response, and what was made of it."""
    rollout, mask = experience.rollout, experience.mask[row]
    prompt, response = rollout.text(tokenizer, row)
    return {
        "index": row,
        "prompt": prompt,
        "response": response,
        "ended": bool(rollout.ended[row]),
        "length": int(rollout.response_lengths[row]),
        "kl": float((experience.logprobs - experience.ref_logprobs)[row][mask].sum()),
        "score": float(experience.scores[row]),
        "scores": {name: float(raw[row]) for name, raw in experience.score_result.raw.items()},
    }


def of_tokens(tokenizer: Any, experience: Experience, row: int) -> dict[str, list[Any]]:
    """What a response's tokens are made of, one number a token; `kl` adds up to the row's."""
    mask = experience.mask[row]
    numbers = {
        "reward": experience.rewards,
        "kl": experience.logprobs - experience.ref_logprobs,
        "value": experience.values,
        "advantage": experience.advantages,
    }
    pieces = token_texts(tokenizer, experience.rollout.response_tokens(row))
    return {"text": pieces, **{name: tensor[row][mask].tolist() for name, tensor in numbers.items()}}


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token's part of the text, special ones by name; a letter of several tokens stands with the last of them."""
    *found, rest = data.pieces(tokenizer, ids, special=True)
    return [*found[:-1], found[-1] + rest]


def judged(parts: Parts) -> Experience:
    """What a table just after an update is of: new responses to held-out prompts, or the update's own rollout."""
    trainer, prompts = parts.trainer, parts.eval_prompts
    if not prompts:
        assert trainer.experience is not None
        return trainer.experience
    picked = prompts[:: max(1, len(prompts) // IN_THE_LOG)][:IN_THE_LOG]  # neighbours in a file may be alike
    rollout = trainer.generate(Prompts.from_lists([prompt.ids for prompt in picked]), purpose="show")
    return trainer.make_experience(rollout)


def _cell(value: str | float) -> str:
    return _short(value) if isinstance(value, str) else f"{value:.2f}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
