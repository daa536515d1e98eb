"""`rlhf reward`: train a one-label head on the SFT model with TRL's RewardTrainer, and evaluate it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
import trl
from torch.nn.functional import softplus
from torch.utils.data import SequentialSampler
from transformers import set_seed

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import MIN_DEBIAS_ANSWERS, SAMPLING_BATCH_SIZE, RewardConfig
from rlhf_cli.data.label_noise import label_noise
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import header_of_answers
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation import length_bias, reward_model, reward_probes
from rlhf_cli.evaluation.length_bias import LengthTrend
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.evaluation.reward_probes import POLITE_ANSWER
from rlhf_cli.models import build, devices, forward, load, lora, row_trial, save
from rlhf_cli.models.batch import Prompts, Rollout, right_pad, stop_ids
from rlhf_cli.models.initial import check_initial, find_initial
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.runs.parents import Parent, parent_entry
from rlhf_cli.runs.report import EnsembleCard, KeptStep, LabelErrors, RewardModelCard
from rlhf_cli.stages.common import (
    batch_sizes,
    held_out,
    lifecycle,
    model_loading,
    scoring,
    trainable_model,
    training_rows,
    trl_trainer,
    trl_training,
)
from rlhf_cli.stages.common.best_step import BestStep

NUM_PROBES = 8
SCORES = "It scores a prompt with its answer at the last token, the token that ended the answers of its training."
CARD = {  # by reward.normalize
    "none": SCORES,
    "sft": f"{SCORES} The raw score is `logits[:, 0]`. `reward_mean` and `reward_std` in config.json are those of the "
    "SFT model's own answers; the score that PPO uses is `(raw - reward_mean) / reward_std`.",
}
DEBIASED = (
    " Where config.json has a `reward_length_slope`, first `reward_length_slope * (tokens - reward_length_mean)` is "
    "subtracted from the raw score; the tokens are those of the answer with its end."
)
PairRows = list[dict[str, Any]]


class RewardTrainer(trl_trainer.TrainerMixin, trl.RewardTrainer):
    """TRL's trainer with length-grouped batches, and the margins of its evaluations."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return TRL's loss; in an evaluation also note the margins."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.best and not self.model.training:
            chosen, rejected = outputs.logits.detach().squeeze(-1).chunk(2)
            self.best.note(self.accelerator.gather_for_metrics(chosen - rejected))
        return (loss, outputs) if return_outputs else loss

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return a sampler in the order of the rows, whatever `trainer.train_sampling_strategy` is."""
        return SequentialSampler(eval_dataset)


def run(config: RewardConfig, options: Options) -> None:
    """Train a reward model and write RUN/reward; resume from the last checkpoint if there is one.

    The other members of an ensemble are trained first, each as a separate stage. Raises RLHFError as
    `lifecycle.run_stage`.
    """
    for number, member in enumerate(config.other_members, start=2):
        terminal.say(f"reward   member {number} of {config.reward.ensemble}: {shown(member.folder)}")
        lifecycle.run_stage(member, options, _train)
    lifecycle.run_stage(config, options, _train)


def _train(config: RewardConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    tokenizer, model, sft_model = load_tokenizer_and_models(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = training_rows.read_train_and_eval(config, tokenizer, model.config)
    fields = lifecycle.manifest_fields(rows, tokenizer, stop_id)

    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    with ExitStack() as trackers:
        steps, log, base, kept_step = trl_training.train_and_save(
            trainer,
            config,
            stage,
            rows,
            tokenizer,
            stop_token_id=stop_id,
            note=_card_note(config),
            trackers=trackers,
        )
        del trainer
        devices.release_memory()  # before a model is loaded again

        # Everything measured describes the saved files.
        in_memory = ModelsInMemory(sft_model, base)
        del sft_model, base
        answers: list[list[int]] = []
        if config.reward.normalize == "sft":  # before the trained model is in memory, too
            answers = sample_sft_answers(config, stage, in_memory, tokenizer, rows)
        in_memory.sft = None
        devices.release_memory()

        scorer = trl_training.load_saved_model(load.load_reward_model, config, stage.options, in_memory.base)
        scale: dict[str, float] = {}
        trend = None
        if answers:
            with Progress("reward: normalize", 1, "pass", brief=True) as bar:
                lengths = answer_lengths(config, stage.parents["model.path"], tokenizer, rows, answers=answers)
                scale, trend = normalize_scores(config, scorer, answers, lengths, process_group)
                bar.advance()
            process_group.run_on_main(lambda: save.save_config(scorer, config.folder / "model"))

        card, metrics = make_report_card(config, scorer, tokenizer, eval_rows, trend, process_group=process_group)
        if card:
            card = card.with_changes(label_errors=label_errors(rows))
        if card and kept_step:  # the log has an evaluation of the last step
            card = card.with_changes(kept_step=kept_step)
        elif card:
            trl_training.log_final_evaluation(log, steps, metrics)

    if config.reward.ensemble:
        fields["members"] = open_members(config)
        if card:
            card = card.with_changes(ensemble=measure_ensemble(config, stage, scorer, eval_rows))

    fields["metrics"] = card.headline() if card else {}
    if card:
        fields["card"] = card.to_json()
    fields["probes"] = reference_probes(scorer, eval_rows or rows, bf16=use_bf16(config))
    if use_bf16(config):
        fields["probes_dtype"] = "bfloat16"
    stage.complete({**fields, **scale, **_step_fields(steps, kept_step)})
    if card:
        print_card(card)


def _step_fields(steps: int, kept: KeptStep | None) -> dict[str, Any]:
    """Return the manifest's fields about the model's step; `model_is` only if there was a choice."""
    if kept is None:
        return {"step": steps}
    return {"model_is": "the last step" if kept.step == steps else "the best step", "step": kept.step}


def _card_note(config: RewardConfig) -> str:
    """Return the sentences of the model card on the scores."""
    return CARD[config.reward.normalize] + (DEBIASED if config.reward.length_debias else "")


def load_tokenizer_and_models(
    config: RewardConfig, options: Options, parents: Mapping[str, Parent]
) -> tuple[Any, Any, Any]:
    """Load the tokenizer, the model to train, and with LoRA the SFT model on the same weights, to sample from.

    The model to train is model.start if that is set, with its head.

    The SFT model is None if training changes these weights (without adapters, or to 4 bits), or if it is not needed.
    Raises RLHFError C07, C17, M01-M03, M06-M08, M10, T04, T05.
    """
    parent = parents["model.path"]
    tokenizer = model_loading.load_tokenizer(config, options, parent)
    with at_location(config.where(parent.key)):
        model_config = load.read_init_config(parent.model, options.trust_remote_code)
        trainable_model.check_can_sample(config, model_config)
    check_initial(config, options, parents)
    initial = find_initial(config, parents)

    adapters = config.model.adapters
    shares = adapters is not None and adapters.kind == "lora" and config.reward.normalize == "sft"
    set_seed(config.seed)  # for the random initial head
    bf16_base = lora.trains_on_bf16(config)
    model = model_loading.load_model(
        load.load_causal_lm if shares else load.init_reward_model,
        config,
        options,
        parent if adapters or initial is None else initial,
        tokenizer,
        bf16_matrices=bf16_base,
    )
    tokenizer = trainable_model.prepare_tokenizer(config, tokenizer, parent.stage)

    sft_model = None
    if shares:
        sft_model = trainable_model.grow_embeddings(model, tokenizer)
        model = load.init_reward_model_on(sft_model, parent.model, options.trust_remote_code)
        if model is None:
            sft_model = None
            kwargs = load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16_base)
            model = load.init_reward_model(parent.model, **kwargs)

    row_trial.require_rows_alone(model, config.where(parent.key))
    trained = lora.prepare_for_training(config, parent, model, tokenizer)
    if adapters and initial:
        lora.load_adapter_weights(trained, initial.model)
    trained.config.reward_at_stop_token = True  # where its scores are read, also of a copy without the stage's manifest
    for field in lora.SCALE_FIELDS:  # of the reward model that it starts from
        vars(trained.config).pop(field, None)
    return tokenizer, trained, sft_model


def make_trainer(
    config: RewardConfig,
    model: Any,
    tokenizer: Any,
    rows: PairRows,
    eval_rows: PairRows,
    process_group: ProcessGroup,
) -> Any:
    """Return the trainer. The rows {chosen_ids, rejected_ids[, margin]} are tokenized, and none is too long."""
    args = trl_trainer.training_args(
        trl.RewardConfig,
        config,
        max_length=None,
        center_rewards_coefficient=config.reward.center_rewards_coefficient or None,
    )
    trainer = trl_trainer.build_trainer(
        RewardTrainer,
        config,
        args,
        rows=[_without_prompt_ids(row) for row in rows],
        eval_rows=[_without_prompt_ids(row) for row in eval_rows],
        lengths=batch_sizes.pair_lengths(config, rows),
        process_group=process_group,
        model=model,
        processing_class=tokenizer,
    )
    if eval_rows and not args.load_best_model_at_end:
        prompts = [tuple(row["prompt_ids"]) for row in eval_rows]
        trainer.best = BestStep(prompts, keeps_best=config.reward.keep == "best")
    return trainer


def _without_prompt_ids(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair as TRL's trainer takes it."""
    return {name: value for name, value in row.items() if name != "prompt_ids"}


# Scores of the saved model


def use_bf16(config: RewardConfig) -> bool:
    """Return True if the stage computes in bfloat16."""
    return devices.use_bf16(config.reward.bf16)


@torch.no_grad()
def raw_scores(
    scorer: Any,
    rows: list[list[int]],
    size: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    *,
    bf16: bool = False,
) -> list[float]:
    """Return the logit at the last token of each row of ids, in batches of `size` rows of similar length.

    The batches are shared among the ranks, and all of them get all scores.
    """
    rank_scores: dict[int, float] = {}
    batches = held_out.batches_by_length([len(ids) for ids in rows], size)
    for batch in track_progress("score: batch", process_group.shard(batches)):
        scores = _batch_scores(scorer, [rows[i] for i in batch], bf16=bf16)
        rank_scores.update(zip(batch, scores, strict=True))
    return held_out.gather_rows(process_group, rank_scores)


def _batch_scores(scorer: Any, rows: list[list[int]], *, bf16: bool) -> list[float]:
    """Return the logit at the last token of each row of a batch."""
    ids, mask = right_pad(rows, build.pad_token_id(scorer.config) or 0)
    with devices.autocast(bf16=bf16):
        output = scorer.base_model(
            input_ids=ids.to(scorer.device),
            attention_mask=mask.long().to(scorer.device),
            use_cache=False,
        )
    last = output.last_hidden_state[range(len(rows)), mask.sum(1) - 1]
    logits = scorer.score(last.to(scorer.score.weight.dtype))  # rounding a score to bfloat16 would lose two digits
    scores: list[float] = logits[:, 0].float().tolist()
    if not all(map(math.isfinite, scores)):
        text = "the finished model gives scores that are not finite: the training diverged"
        raise RLHFError("R01", text, hint="lower reward.learning_rate and start over with --fresh")
    return scores


def reference_probes(scorer: Any, rows: PairRows, *, bf16: bool = False) -> list[dict[str, Any]]:
    """Return some rows, chosen and rejected alternating, with the normalized scores PPO must reproduce (M09)."""
    probes = []
    for number, row in enumerate(rows[:NUM_PROBES]):
        ids = row["rejected_ids" if number % 2 else "chosen_ids"]
        start = len(row["prompt_ids"])
        (raw,) = raw_scores(scorer, [ids], 1, bf16=bf16)
        probes.append(
            {
                "prompt_ids": ids[:start],
                "response_ids": ids[start:],
                "score": forward.scale_scores(scorer.config, raw, len(ids) - start),
            }
        )
    return probes


# Normalization


@dataclass
class ModelsInMemory:
    """Models that are still in memory after the training; None: they must be read."""

    sft: Any
    base: Any  # of the saved adapters, as `trl_training.trained_base` returns it


def sample_sft_answers(
    config: RewardConfig,
    stage: lifecycle.StageRun,
    in_memory: ModelsInMemory,
    tokenizer: Any,
    rows: PairRows,
) -> list[list[int]]:
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
) -> list[list[int]]:
    """Sample answers of the SFT model to prompts of the training pairs. Return prompt and answer token ids.

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
    engine = HFEngine(
        model,
        stop_id,
        tokenizer.pad_token_id,
        temperature=1.0,
        batch_size=SAMPLING_BATCH_SIZE,
        bf16=use_bf16(config),
    )
    seeds = tuple(derive_seed(config.seed, "normalize", number) for number in range(len(prompts)))
    batch = replace(
        Prompts.from_lists(prompts, tokenizer.pad_token_id),
        seeds=seeds,
        response_length=length,
    )

    def generate(part: slice) -> list[list[int]]:
        rollout = engine.generate(batch.rows(part)).with_one_end(scoring.end_token_ids(tokenizer, stop_id))
        return [rollout.prompt_tokens(i) + rollout.response_tokens(i) for i in range(len(rollout))]

    return list(chain.from_iterable(process_group.map_rows(len(prompts), generate)))


def _sampled_prompts(config: RewardConfig, rows: PairRows) -> list[list[int]]:
    """Return normalize_samples of the pairs' distinct prompts, in an order that depends on the seed."""
    distinct = list(dict.fromkeys(tuple(row["prompt_ids"]) for row in rows))
    drawn = data.prompt_batch(len(distinct), 1, config.reward.normalize_samples, config.seed)
    return [list(distinct[i]) for i in drawn]


@dataclass
class AnswerLengths:
    """Tokens of each sampled answer, with its end, and whether it has an end."""

    tokens: list[int]
    ended: list[bool]


def answer_lengths(
    config: RewardConfig, parent: Parent, tokenizer: Any, rows: PairRows, *, answers: list[list[int]]
) -> AnswerLengths:
    """Return the lengths of the answers of `sample_answers`."""
    prompts = _sampled_prompts(config, rows)
    stops = stop_ids(model_loading.stop_token_id(tokenizer, parent, len(tokenizer)))
    return AnswerLengths(
        tokens=[len(ids) - len(prompt) for ids, prompt in zip(answers, prompts, strict=True)],
        ended=[ids[-1] in stops for ids in answers],
    )


def normalize_scores(
    config: RewardConfig,
    scorer: Any,
    rows: list[list[int]],
    lengths: AnswerLengths,
    process_group: ProcessGroup,
) -> tuple[dict[str, float], LengthTrend | None]:
    """Store the scale of the SFT answers' scores in the model's config; return it for the manifest, and the trend.

    With `reward.length_debias` the trend is stored, too, and the deviation is that of the scores without it. Warns R22
    if there is none.
    """
    scores = raw_scores(scorer, rows, config.reward.per_device_eval_batch_size, process_group, bf16=use_bf16(config))
    trend = length_bias.fit_trend(scores, lengths.tokens, lengths.ended)
    scale: dict[str, float] = {}
    if config.reward.length_debias and trend is None:
        _warn_no_trend(lengths)
    elif config.reward.length_debias and trend is not None:
        scores = list(map(trend.without, scores, lengths.tokens))
        scale = {"reward_length_slope": trend.slope, "reward_length_mean": trend.mean_length}

    scale |= _mean_and_deviation(scores)
    for field, value in scale.items():
        setattr(scorer.config, field, value)
    return scale, trend


def _warn_no_trend(lengths: AnswerLengths) -> None:
    ended = [length for length, has_ended in zip(lengths.tokens, lengths.ended, strict=True) if has_ended]
    text = f"all {len(ended)} answers of the SFT model that ended have one length"
    if len(ended) < MIN_DEBIAS_ANSWERS:
        text = f"{len(ended)} of {len(lengths.tokens)} answers of the SFT model ended, {MIN_DEBIAS_ANSWERS} are needed"
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


# Ensemble


def open_members(config: RewardConfig) -> dict[str, Any]:
    """Return the manifest's entries of the other members, by number. Raises RLHFError M10 if one was damaged since."""
    members = {}
    for number, member in enumerate(config.other_members, start=2):
        parent = runs.open_parent(
            str(member.folder), expect=("reward",), key="reward.ensemble", where=config.where("reward.ensemble")
        )
        members[str(number)] = parent_entry(parent, config.folder).model_dump(exclude_none=True)
    return members


def measure_ensemble(config: RewardConfig, stage: lifecycle.StageRun, scorer: Any, rows: PairRows) -> EnsembleCard:
    """Score the held-out pairs by each member, of which `scorer` is the first, and compare the scores."""
    scores = [_scores_of_pairs(config, scorer, rows)]
    for member in config.other_members:
        other = trl_training.load_saved_model(load.load_reward_model, member, stage.options, base=None)
        scores.append(_scores_of_pairs(config, other, rows))
        del other
    return reward_model.compare_members(scores)


def _scores_of_pairs(config: RewardConfig, scorer: Any, rows: PairRows) -> list[float]:
    """Return the scores of the chosen answers, then those of the rejected ones, as PPO sees them."""
    prompts = [row["prompt_ids"] for row in rows]
    chosen = [row["chosen_ids"][len(row["prompt_ids"]) :] for row in rows]
    rejected = [row["rejected_ids"][len(row["prompt_ids"]) :] for row in rows]
    rollout = Rollout.from_lists(prompts * 2, chosen + rejected).to(scorer.device)
    with devices.autocast(bf16=use_bf16(config)):
        scores = forward.rollout_scores(scorer, rollout, max_rows=config.reward.per_device_eval_batch_size)
    return list(map(float, scores))


# Report card


def make_report_card(
    config: RewardConfig,
    scorer: Any,
    tokenizer: Any,
    rows: PairRows,
    trend: LengthTrend | None,
    *,
    process_group: ProcessGroup,
) -> tuple[RewardModelCard | None, dict[str, float]]:
    """Return the report card on the evaluation pairs, in raw scores, and TRL's metrics; None and {} without pairs.

    With `reward.length_debias` the card is of the scores without the `trend`, and the metrics of all, as in training.
    Warns R10-R12 of the card's flags. Raises RLHFError R01 if scores are not finite.
    """
    if not rows:
        terminal.say("reward   no report card: there are no evaluation pairs (data.eval or data.eval_fraction)")
        return None, {}

    probed = reward_probes.probe_rows(rows)
    context = load.context_length(scorer.config)
    probe_rows = [rows[i] for i in probed]
    probes = build_probes(tokenizer, probe_rows, context, config.seed)
    scores = _score_all(
        config,
        scorer,
        {
            "chosen_ids": [row["chosen_ids"] for row in rows],
            "rejected_ids": [row["rejected_ids"] for row in rows],
            **probes,
        },
        process_group,
    )
    pairs = scored_pairs(rows, scores.pop("chosen_ids"), scores.pop("rejected_ids"))

    judged = pairs
    applied = trend if config.reward.length_debias else None
    if applied:
        judged = length_bias.debias(pairs, applied)
        scores = {name: _without_trend(applied, scores[name], probe_rows, probes[name]) for name in probes}
    adversarial = reward_probes.score_probes(scores, [judged[i].chosen for i in probed])
    card = reward_model.make_card(judged, adversarial, seed=config.seed)
    if trend and (applied or reward_model.is_length_biased(card)):
        card = card.with_changes(length_debiasing=length_bias.compare(pairs, trend, applied=bool(applied)))
    problems = reward_model.find_problems(card)
    for problem in problems:
        terminal.warn(problem.code, problem.text, where=shown(config.folder), hint=problem.hint)
    card = reward_model.with_flags(card, problems)
    batch_size = config.reward.per_device_eval_batch_size * process_group.world_size
    metrics = {
        "loss": _evaluation_loss(config, pairs, [row.get("margin", 0.0) for row in rows]),
        "accuracy": sum(pair.right for pair in pairs) / len(pairs),
        "margin": sum(pair.margin for pair in pairs) / len(pairs),
        **_score_range(pairs, batch_size),
    }
    return card, metrics


def _score_all(
    config: RewardConfig, scorer: Any, answers: Mapping[str, list[list[int]]], process_group: ProcessGroup
) -> dict[str, list[float]]:
    """Return the raw scores of each list of answers, by name. Raises RLHFError R01 if one is not finite."""
    size = config.reward.per_device_eval_batch_size
    scores: dict[str, list[float]] = {}
    with Progress("reward: report card", len(answers), "pass", brief=True) as bar:
        for name, rows in answers.items():
            scores[name] = raw_scores(scorer, rows, size, process_group, bf16=use_bf16(config))
            bar.advance()
    return scores


def _without_trend(
    trend: LengthTrend, scores: Sequence[float], rows: PairRows, answers: Sequence[list[int]]
) -> list[float]:
    """Return the raw scores of answers, {prompt and answer ids} to the prompts of `rows`, without the trend."""
    lengths = [len(ids) - len(row["prompt_ids"]) for row, ids in zip(rows, answers, strict=True)]
    return list(map(trend.without, scores, lengths))


def scored_pairs(rows: PairRows, chosen: Sequence[float], rejected: Sequence[float]) -> list[ScoredPair]:
    """Return the pairs with their raw scores, as the report card reads them."""
    pairs = []
    for row, chosen_score, rejected_score in zip(rows, chosen, rejected, strict=True):
        start = len(row["prompt_ids"])
        chosen_length = len(row["chosen_ids"]) - start
        rejected_length = len(row["rejected_ids"]) - start
        prompt = tuple(row["prompt_ids"])
        pairs.append(ScoredPair(chosen_score, rejected_score, chosen_length, rejected_length, prompt))
    return pairs


def label_errors(rows: PairRows) -> LabelErrors | None:
    """Return the share of wrong labels by the pairs that were labelled more than once."""
    labels = []
    for row in rows:
        chosen = tuple(row["chosen_ids"])
        rejected = tuple(row["rejected_ids"])
        labels.append((hash((chosen, rejected)), hash((rejected, chosen))))

    noise = label_noise(labels)
    if noise is None:
        return None
    return LabelErrors(repeats=noise.repeats, wrong=noise.wrong, wrong_ci95=list(noise.wrong_ci95))


def build_probes(tokenizer: Any, rows: PairRows, context: int | None, seed: int) -> dict[str, list[list[int]]]:
    """Return probe name -> token ids per row. The polite answer starts as the chosen one: by header and whitespace."""
    header = header_of_answers(tokenizer) if tokenizer.chat_template else ""
    answer_ids = [row["chosen_ids"][len(row["prompt_ids"]) :] for row in rows]
    texts = []
    for answer in tokenizer.batch_decode(answer_ids):
        text = answer.removeprefix(header).lstrip()
        beginning = answer[: len(answer) - len(text)]
        texts.append(beginning + POLITE_ANSWER)
    encoded = data.encode_many(tokenizer, [None] * len(texts), texts)
    polite = [ids[:-1] for _, ids in encoded]
    return reward_probes.build_probes(rows, polite, context=context, seed=seed)


def _score_range(pairs: Sequence[ScoredPair], batch_size: int) -> dict[str, float]:
    """Return minimum, mean and maximum score per batch, averaged over batches as TRL's reward trainer does."""
    batches = []
    for first in range(0, len(pairs), batch_size):
        batch = pairs[first : first + batch_size]
        batches.append(list(chain.from_iterable((pair.chosen, pair.rejected) for pair in batch)))
    return {
        "min_reward": fmean(map(min, batches)),
        "mean_reward": fmean(map(fmean, batches)),
        "max_reward": fmean(map(max, batches)),
    }


def _evaluation_loss(config: RewardConfig, pairs: Sequence[ScoredPair], row_margins: Sequence[float]) -> float:
    """Return the training loss: -log sigmoid(margin - the row's margin), plus center_rewards_coefficient's penalty."""
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    sums = torch.tensor([pair.chosen + pair.rejected for pair in pairs], dtype=torch.float64)
    excess = torch.tensor(row_margins) - margins
    penalties = (config.reward.center_rewards_coefficient or 0.0) * sums**2
    losses = softplus(excess) + penalties
    return float(losses.mean())
