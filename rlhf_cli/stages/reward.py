"""`rlhf reward`: train a one-label head on the SFT model with TRL's RewardTrainer, and evaluate it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import torch
import trl
from transformers import set_seed

from rlhf_cli import data, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import header_of_answers
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation import reward_model, reward_probes
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.evaluation.reward_probes import POLITE_ANSWER
from rlhf_cli.models import build, devices, load, lora, row_trial, save
from rlhf_cli.models.batch import Prompts, right_pad
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import RewardModelCard
from rlhf_cli.stages.common import lifecycle, model_loading, scoring, training, trl_trainer

NUM_PROBES = 8
SCORES = "It scores a prompt with its answer at the last token, the token that ended the answers of its training."
CARD = {  # by reward.normalize
    "none": SCORES,
    "sft": f"{SCORES} The raw score is `logits[:, 0]`. `reward_mean` and `reward_std` in config.json are those of the "
    "SFT model's own answers; the score that PPO uses is `(raw - reward_mean) / reward_std`.",
}
PairRows = list[dict[str, Any]]


class RewardTrainer(trl_trainer.TrainerMixin, trl.RewardTrainer):
    """TRL's trainer with length-grouped batches."""


def run(config: RewardConfig, options: Options) -> None:
    """Train a reward model and write RUN/reward; resume from the last checkpoint if there is one.

    Raises RLHFError as `setup.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: RewardConfig, stage: lifecycle.StageRun) -> None:
    parent, process_group = stage.parents["model.path"], stage.process_group
    tokenizer, model, sft_model = load_tokenizer_and_models(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = training.read_rows(config, tokenizer, model.config)
    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    note = CARD[config.reward.normalize]
    with ExitStack() as trackers:
        steps, log, base = trl_trainer.train_and_save(trainer, config, stage, rows, tokenizer, stop_id, note, trackers)
        del trainer
        devices.release_memory()  # before a model is loaded again
        # Everything measured describes the saved files.
        answers: list[list[int]] = []
        if config.reward.normalize == "sft":  # before the trained model is in memory, too
            if base is None or sft_model is None:
                base = sft_model = None  # before the next one is in memory
                sft_model = training.load_sft_model(config, stage.options, parent, tokenizer)
            with Progress("reward: sample answers", 1, "pass", brief=True) as bar:
                answers = sample_answers(config, sft_model, parent, tokenizer, rows, process_group)
                bar.advance()
            if base is None and config.model.adapters is not None:
                base = load.init_reward_model_on(sft_model, parent.model, stage.options.trust_remote_code)
        del sft_model
        devices.release_memory()
        scorer = trl_trainer.load_saved_model(load.load_reward_model, config, stage.options, base)
        report_card, metrics = make_report_card(config, scorer, tokenizer, eval_rows, process_group)
        if report_card:
            trl_trainer.log_final_evaluation(log, steps, metrics)
    scale = {}
    if answers:
        with Progress("reward: normalize", 1, "pass", brief=True) as bar:
            scale = normalize_scores(config, scorer, answers, process_group)
            bar.advance()
        process_group.run_on_main(lambda: save.save_config(scorer, config.folder / "model"))
    stage.complete(
        {
            **lifecycle.manifest_fields(config, tokenizer, stop_id),
            "metrics": report_card.headline() if report_card else {},
            **({"card": report_card.to_json()} if report_card else {}),
            "probes": reference_probes(scorer, eval_rows or rows, bf16=use_bf16(config)),
            **({"probes_dtype": "bfloat16"} if use_bf16(config) else {}),
            **scale,
            "step": steps,
        }
    )
    if report_card:
        print_card(report_card)


def load_tokenizer_and_models(
    config: RewardConfig, options: Options, parents: Mapping[str, Parent]
) -> tuple[Any, Any, Any]:
    """Load the tokenizer, the model to train, and with LoRA the SFT model on the same weights, to sample from.

    The SFT model is None if training changes these weights (without adapters, or to 4 bits), or if it is not needed.
    Raises RLHFError C07, C17, M01-M03, M06-M08, M10, T05.
    """
    parent, adapters, sft_model = parents["model.path"], config.model.adapters, None
    tokenizer = model_loading.load_tokenizer(config, options, parent)
    with at_location(config.where(parent.key)):
        training.check_can_sample(config, load.read_init_config(parent.model, options.trust_remote_code))
    shares = adapters is not None and adapters.kind == "lora" and config.reward.normalize == "sft"
    set_seed(config.seed)  # for the random initial head
    loader = load.load_causal_lm if shares else load.init_reward_model
    bf16_base = lora.trains_on_bf16(config)
    model = model_loading.load_model(loader, config, options, parent, tokenizer, bf16_matrices=bf16_base)
    tokenizer = training.prepare_tokenizer(config, tokenizer, parent.stage)
    if shares:
        sft_model = training.grow_embeddings(model, tokenizer)
        model = load.init_reward_model_on(sft_model, parent.model, options.trust_remote_code)
        if model is None:
            sft_model = None
            kwargs = load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16_base)
            model = load.init_reward_model(parent.model, **kwargs)
    row_trial.require_rows_alone(model, config.where(parent.key))
    trained = lora.prepare_for_training(config, parent, model, tokenizer)
    trained.config.reward_at_stop_token = True  # where its scores are read, also of a copy without the stage's manifest
    return tokenizer, trained, sft_model


def make_trainer(
    config: RewardConfig, model: Any, tokenizer: Any, rows: PairRows, eval_rows: PairRows, process_group: ProcessGroup
) -> Any:
    """Return the trainer. The rows {chosen_ids, rejected_ids[, margin]} are tokenized, and none is too long."""
    coefficient = config.reward.center_rewards_coefficient or None
    args = trl_trainer.training_args(trl.RewardConfig, config, max_length=None, center_rewards_coefficient=coefficient)
    train_rows, heldout_rows = (
        [{name: value for name, value in row.items() if name != "prompt_ids"} for row in pairs]
        for pairs in (rows, eval_rows)
    )
    return trl_trainer.build_trainer(
        RewardTrainer, config, args, train_rows, heldout_rows, training.pair_lengths(config, rows), process_group,
        model=model, processing_class=tokenizer,
    )  # fmt: skip


# Scores of the saved model


def use_bf16(config: RewardConfig) -> bool:
    """Return True if the stage computes in bfloat16."""
    return devices.use_bf16(config.reward.bf16)


@torch.no_grad()
def raw_scores(
    scorer: Any, rows: list[list[int]], size: int, process_group: ProcessGroup = SINGLE_PROCESS, *, bf16: bool = False
) -> list[float]:
    """Return the logit at the last token of each row of ids, in batches of `size` rows of similar length.

    The batches are shared among the ranks, and all of them get all scores.
    """
    rank_scores: dict[int, float] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = [order[first : first + size] for first in range(0, len(rows), size)]
    for batch in track_progress("score: batch", process_group.shard(batches)):
        ids, mask = right_pad([rows[i] for i in batch], build.pad_token_id(scorer.config) or 0)
        inputs = {"input_ids": ids.to(scorer.device), "attention_mask": mask.long().to(scorer.device)}
        with devices.autocast(bf16=bf16):
            states = scorer.base_model(**inputs, use_cache=False).last_hidden_state
        last = states[range(len(batch)), mask.sum(1) - 1]
        logits = scorer.score(last.to(scorer.score.weight.dtype))  # rounding a score to bfloat16 would lose two digits
        rank_scores |= zip(batch, logits[:, 0].float().tolist(), strict=True)
    scores: dict[int, float] = {}
    for part in process_group.all_gather_object(rank_scores):
        scores |= part
    return [scores[i] for i in range(len(rows))]


def reference_probes(scorer: Any, rows: PairRows, *, bf16: bool = False) -> list[dict[str, Any]]:
    """Return some rows, chosen and rejected alternating, with the normalized scores PPO must reproduce (M09)."""
    mean, deviation = getattr(scorer.config, "reward_mean", 0.0), getattr(scorer.config, "reward_std", 1.0)
    probes = []
    for number, row in enumerate(rows[:NUM_PROBES]):
        ids, start = row["rejected_ids" if number % 2 else "chosen_ids"], len(row["prompt_ids"])
        score = (raw_scores(scorer, [ids], 1, bf16=bf16)[0] - mean) / deviation
        probes.append({"prompt_ids": ids[:start], "response_ids": ids[start:], "score": score})
    return probes


# Normalization


def sample_answers(
    config: RewardConfig, model: Any, parent: Parent, tokenizer: Any, rows: PairRows, process_group: ProcessGroup
) -> list[list[int]]:
    """Sample answers of the SFT model to prompts of the training pairs. Return prompt and answer token ids.

    Each rank samples a part. An answer that ended has the stop token of the pairs, as where PPO scores it.
    """
    model_loading.place_frozen(model, bf16=use_bf16(config))
    prompts = [list(ids) for ids in dict.fromkeys(tuple(row["prompt_ids"]) for row in rows)]
    selected = [prompts[i] for i in data.prompt_batch(len(prompts), 1, config.reward.normalize_samples, config.seed)]
    length = max(len(row["chosen_ids"]) - len(row["prompt_ids"]) for row in rows)
    if (context := load.context_length(model.config)) is not None:
        length = max(1, min(length, context - max(map(len, selected))))
    stop_id = model_loading.stop_token_id(tokenizer, parent, model.get_input_embeddings().weight.shape[0])
    pad_id = tokenizer.pad_token_id
    engine = HFEngine(model, stop_id, pad_id, 1.0, training.SAMPLING_BATCH_SIZE, bf16=use_bf16(config))
    seeds = tuple(derive_seed(config.seed, "normalize", number) for number in range(len(selected)))
    batch = replace(Prompts.from_lists(selected, pad_id), seeds=seeds, response_length=length)

    def generate(part: slice) -> list[list[int]]:
        rollout = engine.generate(batch.rows(part)).with_one_end(scoring.end_token_ids(tokenizer, stop_id))
        return [rollout.prompt_tokens(i) + rollout.response_tokens(i) for i in range(len(rollout))]

    return list(chain.from_iterable(process_group.map_rows(len(selected), generate)))


def normalize_scores(
    config: RewardConfig, scorer: Any, rows: list[list[int]], process_group: ProcessGroup
) -> dict[str, float]:
    """Store mean and deviation of the raw scores of `rows` in the model's config; return them for the manifest."""
    scores = raw_scores(scorer, rows, config.reward.per_device_eval_batch_size, process_group, bf16=use_bf16(config))
    raw = torch.tensor(scores, dtype=torch.float64)
    mean, deviation = float(raw.mean()), float(raw.std(correction=0))
    if deviation < 1e-6:
        terminal.warn("R02", f"all {len(rows)} answers of the SFT model get the same score ({mean:.4g})")
        deviation = 1.0
    scorer.config.reward_mean, scorer.config.reward_std = mean, deviation
    return {"reward_mean": mean, "reward_std": deviation}


# Report card


def make_report_card(
    config: RewardConfig, scorer: Any, tokenizer: Any, rows: PairRows, process_group: ProcessGroup
) -> tuple[RewardModelCard | None, dict[str, float]]:
    """Return the report card on the evaluation pairs, in raw scores, and TRL's metrics; None and {} without pairs.

    Warns R10-R12 of the card's flags. Raises RLHFError R01 if scores are not finite.
    """
    if not rows:
        terminal.say("reward   no report card: there are no evaluation pairs (data.eval or data.eval_fraction)")
        return None, {}
    probed = reward_probes.probe_rows(rows)
    inputs = {key: [row[key] for row in rows] for key in ("chosen_ids", "rejected_ids")}
    inputs |= build_probes(tokenizer, [rows[i] for i in probed], load.context_length(scorer.config), config.seed)
    scores = {}
    with Progress("reward: report card", len(inputs), "pass", brief=True) as bar:
        for name, answers in inputs.items():
            size = config.reward.per_device_eval_batch_size
            scores[name] = raw_scores(scorer, answers, size, process_group, bf16=use_bf16(config))
            if not all(map(math.isfinite, scores[name])):
                text = "the finished model gives scores that are not finite: the training diverged"
                raise RLHFError("R01", text, hint="lower reward.learning_rate and start over with --fresh")
            bar.advance()
    chosen, rejected = scores.pop("chosen_ids"), scores.pop("rejected_ids")
    lengths = [[len(row[key]) - len(row["prompt_ids"]) for key in ("chosen_ids", "rejected_ids")] for row in rows]
    prompts = [tuple(row["prompt_ids"]) for row in rows]
    columns = zip(chosen, rejected, *zip(*lengths, strict=True), prompts, strict=True)
    pairs = [ScoredPair(*column) for column in columns]
    adversarial = reward_probes.score_probes(scores, [chosen[i] for i in probed])
    card = reward_model.make_card(pairs, adversarial, seed=config.seed)
    problems = reward_model.find_problems(card)
    for problem in problems:
        terminal.warn(problem.code, problem.text, where=shown(config.folder), hint=problem.hint)
    card = reward_model.with_flags(card, problems)

    loss = _evaluation_loss(config, pairs, [row.get("margin", 0.0) for row in rows])
    metrics = {"loss": loss, "accuracy": card.accuracy, "margin": sum(pair.margin for pair in pairs) / len(pairs)}
    batch_size = config.reward.per_device_eval_batch_size * process_group.world_size
    return card, metrics | _score_range(pairs, batch_size)


def build_probes(tokenizer: Any, rows: PairRows, context: int | None, seed: int) -> dict[str, list[list[int]]]:
    """Return probe name -> token ids per row. The polite answer starts as the chosen one: by header and whitespace."""
    answers = tokenizer.batch_decode([row["chosen_ids"][len(row["prompt_ids"]) :] for row in rows])
    header = header_of_answers(tokenizer) if tokenizer.chat_template else ""
    texts = []
    for answer in answers:
        text = answer.removeprefix(header).lstrip()
        beginning = answer[: len(answer) - len(text)]
        texts.append(beginning + POLITE_ANSWER)
    encoded = data.encode_many(tokenizer, [None] * len(texts), texts)
    polite = [ids[:-1] for _, ids in encoded]
    return reward_probes.build_probes(rows, polite, context=context, seed=seed)


def _score_range(pairs: Sequence[ScoredPair], batch_size: int) -> dict[str, float]:
    """Return minimum, mean and maximum score per batch, averaged over batches as TRL's reward trainer does."""
    batches = [
        [score for pair in pairs[first : first + batch_size] for score in (pair.chosen, pair.rejected)]
        for first in range(0, len(pairs), batch_size)
    ]
    reductions = (("min", min), ("mean", fmean), ("max", max))
    return {f"{name}_reward": fmean(map(reduction, batches)) for name, reduction in reductions}


def _evaluation_loss(config: RewardConfig, pairs: Sequence[ScoredPair], row_margins: Sequence[float]) -> float:
    """Return the training loss: -log sigmoid(margin - the row's margin), plus center_rewards_coefficient's penalty."""
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64) - torch.tensor(row_margins)
    sums = torch.tensor([pair.chosen + pair.rejected for pair in pairs], dtype=torch.float64)
    coefficient = config.reward.center_rewards_coefficient or 0.0
    return float((torch.nn.functional.softplus(-margins) + coefficient * sums**2).mean())
