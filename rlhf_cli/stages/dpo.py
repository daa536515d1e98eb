"""`rlhf dpo`: train a policy on preference pairs with TRL's DPOTrainer, a baseline for PPO.

DPO (Rafailov et al. 2023, arXiv 2305.18290) needs no reward model and no rollouts. The reference is model.path.
"""

import copy
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
import trl
from torch.nn.functional import logsigmoid

from rlhf_cli import data, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.dpo import DPOConfig, DPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, devices, forward, load, lora
from rlhf_cli.models.batch import right_pad
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.stages.common import lifecycle, model_loading, trl_trainer
from rlhf_cli.stages.common.training import (
    IGNORE_INDEX,
    PAIR_SIDES,
    load_sft_model,
    load_tokenizer_and_model,
    pair_lengths,
    read_rows,
    use_own_lm_head,
)
from rlhf_cli.statistics import share_interval, with_interval

PairRows = list[dict[str, Any]]
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # TRL asks in each step
os.environ.setdefault("TQDM_DISABLE", "1")  # TRL's bar of precompute_ref_log_probs


class DPOTrainer(trl_trainer.TrainerMixin, trl.DPOTrainer):
    """TRL's trainer with length-grouped batches of pairs that are tokenized, and a faster loss on a CPU."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if lora.is_peft_model(self.model):
            self.model.delete_adapter("ref")  # TRL's copy of the new adapters; the base without adapters is the same
        if self.args.device.type == "cpu" and not (self.aux_loss_enabled or self.use_weighting):
            use_own_lm_head(self.model)
            if self.ref_model is not None:  # accelerate has prepared it already
                use_own_lm_head(self.ref_model)
                self.ref_model.forward = devices.autocast(bf16=self.args.bf16)(self.ref_model.forward)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        """Return the dataset unchanged: TRL would tokenize texts."""
        return dataset


def run(config: DPOConfig, options: Options) -> None:
    """Train a policy and write RUN/dpo; resume from the last checkpoint if there is one.

    Raises RLHFError as `setup.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: DPOConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    tokenizer, model = load_tokenizer_and_model(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = read_rows(config, tokenizer, model.config)
    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    note = f"DPO (arXiv 2305.18290), beta {config.dpo.beta:g}, loss {config.dpo.loss_type}."
    with ExitStack() as trackers:
        steps, log, base = trl_trainer.train_and_save(trainer, config, stage, rows, tokenizer, stop_id, note, trackers)
        del trainer
        devices.release_memory()  # before a model is loaded again
        metrics: dict[str, Any] = {}
        if eval_rows:
            metrics = evaluate_saved_model(config, stage, tokenizer, base, eval_rows)
            logged = {"loss": metrics["loss"], "rewards/margins": metrics["margin"]}
            trl_trainer.log_final_evaluation(log, steps, {**logged, "rewards/accuracies": metrics["accuracy"]})
    stage.complete({**lifecycle.manifest_fields(config, tokenizer, stop_id), "metrics": metrics, "step": steps})
    if metrics:
        accuracy = with_interval(metrics["accuracy"], metrics["accuracy_ci95"])
        terminal.say(f"dpo      {metrics['n']} held-out pairs: accuracy {accuracy}, margin {metrics['margin']:.4g}")


def make_trainer(
    config: DPOConfig, model: Any, tokenizer: Any, rows: PairRows, eval_rows: PairRows, process_group: ProcessGroup
) -> Any:
    """Return the trainer. The rows {prompt_ids, chosen_ids, rejected_ids} are tokenized, and none is too long.

    TRL adds the prompt to the answers again, so they are passed without it.
    """
    settings, sharded = config.dpo, config.trainer.get("fsdp") or config.trainer.get("deepspeed")
    args = trl_trainer.training_args(
        trl.DPOConfig, config, max_length=None, beta=settings.beta, loss_type=[settings.loss_type],
        label_smoothing=settings.label_smoothing,
    )  # fmt: skip
    reference = None
    if config.keeps_reference:  # its matrices in bfloat16 give the same numbers under autocast
        reference = model_loading.place_frozen(copy.deepcopy(model), bf16=args.bf16 and not sharded)
    train_rows, heldout_rows = (
        [
            {"prompt_ids": row["prompt_ids"], **{side: row[side][len(row["prompt_ids"]) :] for side in PAIR_SIDES}}
            for row in pairs
        ]
        for pairs in (rows, eval_rows)
    )
    return trl_trainer.build_trainer(
        DPOTrainer, config, args, train_rows, heldout_rows, pair_lengths(config, rows), process_group,
        model=model, ref_model=reference, processing_class=tokenizer,
    )  # fmt: skip


# The saved model on held-out pairs


def evaluate_saved_model(
    config: DPOConfig, stage: lifecycle.StageRun, tokenizer: Any, base: Any, rows: PairRows
) -> dict[str, Any]:
    """Measure the saved model on held-out pairs; `base` as `trl_common.trained_base` returns it.

    Raises RLHFError R01 if log-probs are not finite.
    """
    reference = base
    if base is None:
        reference = load_sft_model(config, stage.options, stage.parents["model.path"], tokenizer)
    model_loading.place_frozen(reference, bf16=devices.use_bf16(config.dpo.bf16))
    before = pair_logprobs(config, reference, rows, tokenizer.pad_token_id, stage.process_group)
    del reference
    devices.release_memory()
    policy = trl_trainer.load_saved_model(load.load_causal_lm, config, stage.options, base)
    after = pair_logprobs(config, policy, rows, tokenizer.pad_token_id, stage.process_group)
    metrics = summarize_pairs(config.dpo, rows, after, before)
    if not math.isfinite(metrics["loss"]):
        text = f"the finished model's loss on the evaluation pairs is {metrics['loss']}: the training diverged"
        raise RLHFError("R01", text, hint="lower dpo.learning_rate and start over with --fresh")
    return metrics


def summarize_pairs(
    settings: DPOSettings, rows: PairRows, logprobs: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return loss, accuracy with its interval, and margin of pairs; both log-probs are (chosen, rejected) per pair.

    The implicit reward of an answer is beta log(pi / pi_ref) (equation 5 of the DPO paper); a pair is right if that of
    the chosen answer is higher.
    """
    ratios = torch.tensor(logprobs, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    margins = settings.beta * (ratios[:, 0] - ratios[:, 1])
    losses = -logsigmoid(margins)
    if settings.loss_type == "ipo":
        lengths = torch.tensor([[len(row[side]) - len(row["prompt_ids"]) for side in PAIR_SIDES] for row in rows])
        per_token = ratios / lengths
        losses = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * settings.beta)) ** 2
    if share := settings.label_smoothing:
        losses = ((1 - share) * losses + share * logsigmoid(-margins)) / (1 - 2 * share)
    right = (margins > 0).double().tolist()
    means = {"loss": fmean(losses.tolist()), "margin": fmean(margins.tolist()), "accuracy": fmean(right)}
    interval = share_interval(right, [tuple(row["prompt_ids"]) for row in rows])
    return {**means, "accuracy_ci95": list(interval), "n": len(rows)}


@torch.no_grad()
def pair_logprobs(
    config: DPOConfig, model: Any, rows: PairRows, pad_id: int, process_group: ProcessGroup
) -> list[list[float]]:
    """Return the log-probs of the chosen and of the rejected answer of each pair, on all ranks."""
    answers = [(row[side], len(row["prompt_ids"])) for row in rows for side in PAIR_SIDES]
    order, size = sorted(range(len(answers)), key=lambda i: len(answers[i][0])), config.dpo.per_device_eval_batch_size
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    sums: dict[int, float] = {}
    with (
        Progress("dpo: held-out pairs", 1, "pass", brief=True) as bar,
        devices.autocast(bf16=devices.use_bf16(config.dpo.bf16)),
    ):
        for batch in track_progress("score: batch", process_group.shard(batches)):
            sums |= zip(batch, _answer_logprobs(model, [answers[i] for i in batch], pad_id), strict=True)
        bar.advance()
    every = {number: value for part in process_group.all_gather_object(sums) for number, value in part.items()}
    return [[every[2 * pair], every[2 * pair + 1]] for pair in range(len(rows))]


def _answer_logprobs(model: Any, answers: Sequence[tuple[list[int], int]], pad_id: int) -> list[float]:
    """Return the log-prob of each row's tokens after its prompt; a row is (token ids, tokens of the prompt)."""
    input_ids, mask = right_pad([ids for ids, _ in answers], pad_id)
    labels = right_pad([[IGNORE_INDEX] * start + ids[start:] for ids, start in answers], IGNORE_INDEX)[0][:, 1:]
    inputs = {"input_ids": input_ids.to(model.device), "attention_mask": mask.long().to(model.device)}
    row, column = (index.to(model.device) for index in (labels != IGNORE_INDEX).nonzero(as_tuple=True))
    targets = labels.to(model.device)[row, column]
    hidden = build.decoder(model)(**inputs, use_cache=False).last_hidden_state[row, column]
    sums = torch.zeros(len(answers), dtype=torch.float64, device=model.device)
    for part in forward.logit_chunks(model, len(targets)):
        logprobs = forward.lm_head_logits(model, hidden[part]).float().log_softmax(-1)
        sums.index_add_(0, row[part], logprobs.gather(-1, targets[part, None])[:, 0].double())
    return sums.tolist()
