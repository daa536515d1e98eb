"""Scale of the scores: mean, deviation and length trend over the SFT model's own answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from rlhf_cli import data, terminal
from rlhf_cli.config.reward import MIN_DEBIAS_ANSWERS, SAMPLING_BATCH_SIZE, RewardConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.evaluation import length_bias
from rlhf_cli.evaluation.length_bias import LengthTrend
from rlhf_cli.models import devices, load, save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import lifecycle, model_loading, scoring, trainable_model, trl_training
from rlhf_cli.stages.common.engines import Drawing, best_engine
from rlhf_cli.stages.common.training_rows import PairRows
from rlhf_cli.stages.reward.scores import raw_scores, use_bf16


@dataclass
class ModelsInMemory:
    """Models that are still in memory after the training; None: they must be read."""

    sft: Any
    base: Any  # of the saved adapters, as `trl_training.trained_base` returns it


@dataclass(frozen=True)
class SampledAnswer:
    """An answer of the SFT model, in token ids."""

    prompt: list[int]
    response: list[int]  # with its end, if it has one
    ended: bool

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response


def load_normalized(
    config: RewardConfig,
    stage: lifecycle.StageRun,
    in_memory: ModelsInMemory,
    tokenizer: Any,
    rows: PairRows,
) -> tuple[Any, dict[str, float], LengthTrend | None]:
    """Load the saved model; with `reward.normalize: sft` store the scale, which is returned with the length trend."""
    answers: list[SampledAnswer] = []
    if config.reward.normalize == "sft":  # before the trained model is in memory, too
        answers = sample_sft_answers(config, stage, in_memory, tokenizer, rows)
    in_memory.sft = None
    devices.release_memory()

    scorer = trl_training.load_saved_model(load.load_reward_model, config, stage.options, in_memory.base)
    if not answers:
        return scorer, {}, None

    with Progress("reward: normalize", 1, "pass", brief=True) as bar:
        scale, trend = normalize_scores(config, scorer, answers, stage.process_group)
        bar.advance()
    stage.process_group.run_on_main(lambda: save.save_config(scorer, config.folder / "model"))
    return scorer, scale, trend


def sample_sft_answers(
    config: RewardConfig,
    stage: lifecycle.StageRun,
    in_memory: ModelsInMemory,
    tokenizer: Any,
    rows: PairRows,
) -> list[SampledAnswer]:
    """Sample answers of the SFT model, as `sample_answers`; read it if it is not in memory.

    Saved adapters that have no base yet get the SFT model as their base.
    """
    parent = stage.parents["model.path"]
    if in_memory.base is None or in_memory.sft is None:
        in_memory.base = None  # before the next one is in memory
        in_memory.sft = None
        in_memory.sft = trainable_model.load_sft_model(config, stage.options, parent, tokenizer)

    with Progress("reward: sample answers", 1, "pass", brief=True) as bar:
        answers = sample_answers(config, in_memory.sft, parent, tokenizer, rows, stage.process_group)
        bar.advance()
    if in_memory.base is None and config.model.adapters is not None:
        in_memory.base = load.init_reward_model_on(in_memory.sft, parent.model, stage.options.trust_remote_code)
    return answers


def sample_answers(
    config: RewardConfig,
    model: Any,
    parent: Parent,
    tokenizer: Any,
    rows: PairRows,
    process_group: ProcessGroup,
) -> list[SampledAnswer]:
    """Sample answers of the SFT model to prompts of the training pairs.

    Each rank samples a part. An answer that ended has the stop token of the pairs, as where PPO scores it.
    """
    model_loading.place_frozen(model, bf16=use_bf16(config))
    prompts = _sampled_prompts(config, rows)
    length = max(len(row["chosen_ids"]) - len(row["prompt_ids"]) for row in rows)
    context = load.context_length(model.config)
    if context is not None:
        room = context - max(map(len, prompts))
        length = max(1, min(length, room))

    stop_id = model_loading.stop_token_id(tokenizer, parent, model.get_input_embeddings().weight.shape[0])
    drawing = Drawing(
        "reward",
        stop_id,
        tokenizer.pad_token_id,
        temperature=1.0,
        bf16=use_bf16(config),
        batch_size=SAMPLING_BATCH_SIZE,
    )
    engine = best_engine(model, drawing)
    seeds = tuple(derive_seed(config.seed, "normalize", number) for number in range(len(prompts)))
    batch = replace(
        Prompts.from_lists(prompts, tokenizer.pad_token_id),
        seeds=seeds,
        response_length=length,
    )

    def generate(part: slice) -> list[SampledAnswer]:
        rollout = engine.generate(batch.rows(part)).with_one_end(scoring.end_token_ids(tokenizer, stop_id))
        ended = rollout.ended.tolist()
        return [
            SampledAnswer(rollout.prompt_tokens(row), rollout.response_tokens(row), ended[row])
            for row in range(len(rollout))
        ]

    return list(chain.from_iterable(process_group.map_rows(len(prompts), generate)))


def _sampled_prompts(config: RewardConfig, rows: PairRows) -> list[list[int]]:
    """Return normalize_samples of the pairs' distinct prompts, in an order that depends on the seed."""
    distinct = list(dict.fromkeys(tuple(row["prompt_ids"]) for row in rows))
    drawn = data.prompt_batch(len(distinct), 1, config.reward.normalize_samples, config.seed)
    return [list(distinct[i]) for i in drawn]


def normalize_scores(
    config: RewardConfig,
    scorer: Any,
    answers: Sequence[SampledAnswer],
    process_group: ProcessGroup,
) -> tuple[dict[str, float], LengthTrend | None]:
    """Store the scale of the SFT answers' scores in the model's config; return it for the manifest, and the trend.

    With `reward.length_debias` the trend is stored, too, and the deviation is that of the scores without it. Warns R22
    if there is none.
    """
    scores = raw_scores(
        scorer,
        [answer.ids for answer in answers],
        config.reward.per_device_eval_batch_size,
        process_group,
        bf16=use_bf16(config),
    )
    lengths = [len(answer.response) for answer in answers]
    trend = length_bias.fit_trend(scores, lengths, [answer.ended for answer in answers])
    scale: dict[str, float] = {}
    if config.reward.length_debias and trend is None:
        _warn_no_trend(answers)
    elif config.reward.length_debias and trend is not None:
        scores = list(map(trend.without, scores, lengths))
        scale = {"reward_length_slope": trend.slope, "reward_length_mean": trend.mean_length}

    scale |= _mean_and_deviation(scores)
    for field, value in scale.items():
        setattr(scorer.config, field, value)
    return scale, trend


def _warn_no_trend(answers: Sequence[SampledAnswer]) -> None:
    num_ended = sum(answer.ended for answer in answers)
    text = f"all {num_ended} answers of the SFT model that ended have one length"
    if num_ended < MIN_DEBIAS_ANSWERS:
        text = f"{num_ended} of {len(answers)} answers of the SFT model ended, {MIN_DEBIAS_ANSWERS} are needed"
    terminal.warn("R22", f"reward.length_debias changes no score: {text}")


def _mean_and_deviation(scores: Sequence[float]) -> dict[str, float]:
    """Return `reward_mean` and `reward_std` of the SFT answers' scores."""
    raw = torch.tensor(scores, dtype=torch.float64)
    mean = float(raw.mean())
    deviation = float(raw.std(correction=0))
    if deviation < 1e-6:
        terminal.warn("R02", f"all {len(scores)} answers of the SFT model get the same score ({mean:.4g})")
        deviation = 1.0
    return {"reward_mean": mean, "reward_std": deviation}
