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
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli import data, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.dpo import DPOConfig, DPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, load, lora
from rlhf_cli.models.batch import IGNORE_INDEX
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.stages.common import (
    batch_sizes,
    held_out,
    lifecycle,
    model_loading,
    training_rows,
    trl_trainer,
    trl_training,
)
from rlhf_cli.stages.common.cpu_loss import use_own_lm_head
from rlhf_cli.stages.common.trainable_model import load_sft_model, load_tokenizer_and_model
from rlhf_cli.stages.common.training_rows import PairRows
from rlhf_cli.statistics import share_interval, with_interval

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

    Raises RLHFError as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: DPOConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    tokenizer, model = load_tokenizer_and_model(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = training_rows.read_train_and_eval(config, tokenizer, model.config)
    fields = lifecycle.manifest_fields(rows, tokenizer, stop_id)

    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    metrics: dict[str, Any] = {}
    with ExitStack() as trackers:
        trained = trl_training.train_and_save(
            trainer,
            config,
            stage,
            rows,
            tokenizer,
            stop_token_id=stop_id,
            note=f"DPO (arXiv 2305.18290), beta {config.dpo.beta:g}, loss {config.dpo.loss_type}.",
            trackers=trackers,
        )
        del trainer
        devices.release_memory()  # before a model is loaded again
        if eval_rows:
            metrics = evaluate_saved_model(config, stage, tokenizer, trained.base, eval_rows)
            _log_evaluation(trained, metrics)

    stage.complete({**fields, "metrics": metrics, "step": trained.steps})
    if metrics:
        accuracy = with_interval(metrics["accuracy"], metrics["accuracy_ci95"])
        terminal.say(f"dpo      {metrics['n']} held-out pairs: accuracy {accuracy}, margin {metrics['margin']:.4g}")


def _log_evaluation(trained: trl_training.TrainedModel, metrics: dict[str, Any]) -> None:
    """Log the held-out loss, margin and accuracy by TRL's names."""
    trl_training.log_final_evaluation(
        trained.log,
        trained.steps,
        {
            "loss": metrics["loss"],
            "rewards/margins": metrics["margin"],
            "rewards/accuracies": metrics["accuracy"],
        },
    )


def make_trainer(
    config: DPOConfig,
    model: Any,
    tokenizer: Any,
    rows: PairRows,
    eval_rows: PairRows,
    process_group: ProcessGroup,
) -> Any:
    """Return the trainer. The rows {prompt_ids, chosen_ids, rejected_ids} are tokenized, and none is too long.

    TRL adds the prompt to the answers again, so they are passed without it.
    """
    settings = config.dpo
    args = trl_trainer.training_args(
        trl.DPOConfig,
        config,
        max_length=None,
        beta=settings.beta,
        loss_type=[settings.loss_type],
        label_smoothing=settings.label_smoothing,
    )
    reference = None
    if config.keeps_reference:
        sharded = config.trainer.get("fsdp") or config.trainer.get("deepspeed")
        bf16 = args.bf16 and not sharded  # matrices in bfloat16 give the same numbers under autocast
        reference = model_loading.place_frozen(copy.deepcopy(model), bf16=bf16)

    return trl_trainer.build_trainer(
        DPOTrainer,
        config,
        args,
        rows=[_without_prompts(row) for row in rows],
        eval_rows=[_without_prompts(row) for row in eval_rows],
        lengths=batch_sizes.pair_lengths(config, rows),
        process_group=process_group,
        model=model,
        ref_model=reference,
        processing_class=tokenizer,
    )


def _without_prompts(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair whose answers do not begin with the prompt."""
    start = len(row["prompt_ids"])
    return {
        "prompt_ids": row["prompt_ids"],
        "chosen_ids": row["chosen_ids"][start:],
        "rejected_ids": row["rejected_ids"][start:],
    }


# The saved model on held-out pairs


def evaluate_saved_model(
    config: DPOConfig,
    stage: lifecycle.StageRun,
    tokenizer: Any,
    base: Any,
    rows: PairRows,
) -> dict[str, Any]:
    """Measure the saved model on held-out pairs; `base` as `trl_training.trained_base` returns it.

    Raises RLHFError R01 if log-probs are not finite.
    """
    pad_id = tokenizer.pad_token_id
    reference = base
    if base is None:
        reference = load_sft_model(config, stage.options, stage.parents["model.path"], tokenizer)
    model_loading.place_frozen(reference, bf16=devices.use_bf16(config.dpo.bf16))
    before = pair_logprobs(config, reference, rows, pad_id, stage.process_group)
    del reference
    devices.release_memory()

    policy = trl_training.load_saved_model(load.load_causal_lm, config, stage.options, base)
    after = pair_logprobs(config, policy, rows, pad_id, stage.process_group)

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
    losses = _pair_losses(settings, rows, ratios, margins)
    right = (margins > 0).double().tolist()
    prompts = [tuple(row["prompt_ids"]) for row in rows]
    return {
        "loss": fmean(losses.tolist()),
        "margin": fmean(margins.tolist()),
        "accuracy": fmean(right),
        "accuracy_ci95": list(share_interval(right, prompts)),
        "n": len(rows),
    }


def _pair_losses(settings: DPOSettings, rows: PairRows, ratios: Tensor, margins: Tensor) -> Tensor:
    """Return the training loss of each pair, (n,), from log pi / pi_ref (n, 2) and their differences times beta."""
    losses = -logsigmoid(margins)
    if settings.loss_type == "ipo":
        answers = [_without_prompts(row) for row in rows]
        lengths = torch.tensor([[len(row["chosen_ids"]), len(row["rejected_ids"])] for row in answers])
        per_token = ratios / lengths
        losses = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * settings.beta)) ** 2
    share = settings.label_smoothing
    if share:
        losses = ((1 - share) * losses + share * logsigmoid(-margins)) / (1 - 2 * share)
    return losses


@torch.no_grad()
def pair_logprobs(
    config: DPOConfig,
    model: Any,
    rows: PairRows,
    pad_id: int,
    process_group: ProcessGroup,
) -> list[list[float]]:
    """Return the log-probs of the chosen and of the rejected answer of each pair, on all ranks."""
    answers = []
    for row in rows:
        start = len(row["prompt_ids"])
        answers += [(row["chosen_ids"], start), (row["rejected_ids"], start)]

    batches = held_out.batches_by_length([len(ids) for ids, _ in answers], config.dpo.per_device_eval_batch_size)
    rank_sums: dict[int, float] = {}
    with (
        Progress("dpo: held-out pairs", 1, "pass", brief=True) as bar,
        devices.autocast(bf16=devices.use_bf16(config.dpo.bf16)),
    ):
        for batch in track_progress("score: batch", process_group.shard(batches)):
            sums = _answer_logprobs(model, [answers[i] for i in batch], pad_id)
            rank_sums.update(zip(batch, sums, strict=True))
        bar.advance()

    logprobs = held_out.gather_rows(process_group, rank_sums)
    return [logprobs[first : first + 2] for first in range(0, len(logprobs), 2)]


def _answer_logprobs(model: Any, answers: Sequence[tuple[list[int], int]], pad_id: int) -> list[float]:
    """Return the log-prob of each row's tokens after its prompt; a row is (token ids, tokens of the prompt)."""
    ids = [row for row, _ in answers]
    labels = [[IGNORE_INDEX] * start + row[start:] for row, start in answers]
    hidden, targets, row_index = held_out.hidden_at_labels(model, ids, labels, pad_id)

    sums = torch.zeros(len(answers), dtype=torch.float64, device=model.device)
    for part, logprobs in held_out.logprobs_in_parts(model, hidden):
        of_targets = logprobs.gather(-1, targets[part, None])[:, 0]
        sums.index_add_(0, row_index[part], of_targets.double())
    result: list[float] = sums.tolist()
    return result
