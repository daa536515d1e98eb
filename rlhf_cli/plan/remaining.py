"""What remains of a stage's data, read as the stage reads it: lengths of rows, and what its steps are counted by."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_cli import data, sources, terminal
from rlhf_cli.config import Config, EvalConfig, PPOConfig, RewardConfig, SFTConfig
from rlhf_cli.inputs import reward as of_reward
from rlhf_cli.inputs import sft as of_sft
from rlhf_cli.plan.ghosts import Lengths
from rlhf_cli.stages import eval_setup, ppo_setup

WHOLE = 5000  # rows of which all are tokenised; of more at most so many, spread over the file
How = Literal["exact", "about", "at most"]


@dataclass(frozen=True)
class Remaining:
    """Rows that are not left out: their lengths, what they are, and how many.

    `how` true the number is: "about" from a sample, "at most" where no row's length is known.
    """

    lengths: Lengths
    unit: str
    rows: int
    left_out: int = 0
    asked: int = 0
    how: How = "exact"


def of(config: Config, body: Any, tokenizer: Any, response: int) -> Remaining:
    """Of the data of a stage that starts from a model `body`. Raises RLHFError D01-D14, D16, C13."""
    sources.locate({key: source for key, source in config.sources().items() if sources.is_local(source)})
    with terminal.muted_warnings():
        if isinstance(config, SFTConfig):
            return _examples(config, tokenizer, body)
        if isinstance(config, RewardConfig):
            pairs = of_reward.read(config, "train", tokenizer, body, sample=WHOLE)
            mean = _mean(row[side] for row in pairs for side in ("chosen_ids", "rejected_ids"))
            return _counted(pairs, Lengths(pairs.longest - 1, 1, mean), "pairs")
        if isinstance(config, PPOConfig):
            prompts = ppo_setup.read_prompts(config, "prompts", tokenizer, body, sample=WHOLE)
            return _counted(prompts, Lengths(prompts.longest, response), "prompts")
        assert isinstance(config, EvalConfig)
        prompts = eval_setup.read_prompts(config, tokenizer, body, response, sample=WHOLE)
        found = _counted(prompts, Lengths(prompts.longest, response), "prompts")
        return replace(found, rows=min(config.eval.n, found.rows))


def unread(config: Config, prompt: int, response: int) -> Remaining:
    """Of data whose rows are not to be tokenised: they are as long as they may be. Raises RLHFError D01-D04, D12."""
    if isinstance(config, SFTConfig):
        lengths = Lengths(1, config.sft.max_length - 1)
    elif isinstance(config, RewardConfig):
        lengths = Lengths(config.reward.max_length - 1, 1)
    else:
        lengths = Lengths(prompt, response)
    if isinstance(config, EvalConfig):
        return Remaining(lengths, "prompts", config.eval.n, how="at most")
    source = config.sources()["data.prompts" if isinstance(config, PPOConfig) else "data.train"]
    count = sum(1 for _ in sources.read_rows(source)) if steps_go_by_rows(config) else 0
    # A conversation is an example for each of its answers, and a part may be held out.
    return Remaining(lengths, "rows", count, how="about" if isinstance(config, SFTConfig) else "at most")


def steps_go_by_rows(config: Config) -> bool:
    """Whether more rows make more steps."""
    if isinstance(config, SFTConfig | RewardConfig):
        return (config.sft if isinstance(config, SFTConfig) else config.reward).max_steps is None
    return isinstance(config, PPOConfig) and config.ppo.total_episodes is None


def _examples(config: SFTConfig, tokenizer: Any, body: Any) -> Remaining:
    """The longest row, and the most tokens of a row that the loss counts."""
    strategy = of_sft.packing_strategy(config, say=False)
    rows = of_sft.read(config, "train", tokenizer, strategy, body, sample=WHOLE)
    if strategy:
        lengths = Lengths(1, config.sft.max_length - 1)
        sequences = of_sft.sequences(config, rows) * rows.every
        return replace(_counted(rows, lengths, "sequences"), rows=sequences, how="about")
    most = max((sum(row["completion_mask"]) for row in rows), default=1)
    counted = min(most, rows.longest - 1) if config.sft.completion_only_loss else rows.longest - 1
    mean = _mean(row["input_ids"] for row in rows)
    return _counted(rows, Lengths(rows.longest - counted, counted, mean), "rows")


def _counted(rows: data.Rows[Any], lengths: Lengths, unit: str) -> Remaining:
    count, left_out, asked = (number * rows.every for number in (len(rows), rows.left_out, rows.asked))
    return Remaining(lengths, unit, count, left_out, asked, "exact" if rows.every == 1 else "about")


def _mean(rows: Iterable[list[int]]) -> float:
    lengths = list(map(len, rows))
    return sum(lengths) / max(1, len(lengths))
