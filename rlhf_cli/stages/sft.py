"""`rlhf sft`: fine-tune a causal language model, loaded or newly initialised, with TRL's SFTTrainer."""

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import torch
import trl
from torch.nn.functional import nll_loss

from rlhf_cli import data
from rlhf_cli.config.base import Options
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, load
from rlhf_cli.models.batch import IGNORE_INDEX
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.stages import best_of
from rlhf_cli.stages.common import held_out, lifecycle, training_rows, trl_trainer, trl_training
from rlhf_cli.stages.common.cpu_loss import use_own_lm_head
from rlhf_cli.stages.common.trainable_model import load_tokenizer_and_model

TokenRows = list[dict[str, list[int]]]


class SFTTrainer(trl_trainer.TrainerMixin, trl.SFTTrainer):
    """TRL's trainer with length-grouped batches, a per-token evaluation loss, and a faster loss on a CPU."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.args.device.type == "cpu" and not self.aux_loss_enabled:
            use_own_lm_head(self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Replace transformers' mean of batch means by the mean over tokens."""
        self._summed_loss = 0.0
        self._summed_tokens = 0
        output = super().evaluation_loop(*args, **kwargs)
        mean = self._summed_loss / max(self._summed_tokens, 1)
        return output._replace(metrics={**output.metrics, "eval_loss": mean})

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the loss and the tokens of all ranks' rows, each row once."""
        labelled = inputs["labels"][:, 1:] != IGNORE_INDEX
        tokens = labelled.sum(1)
        output = super().prediction_step(model, inputs, *args, **kwargs)
        mean_losses = output[0]
        row_losses = mean_losses * tokens.to(mean_losses.device)
        losses, tokens = self.accelerator.gather_for_metrics((row_losses, tokens))
        self._summed_loss += float(losses.sum())
        self._summed_tokens += int(tokens.sum())
        return output


def run(config: SFTConfig, options: Options) -> None:
    """Train a model and write RUN/sft; resume from the last checkpoint if there is one.

    Raises RLHFError as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: SFTConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    best = best_of.best_rows(config, stage) if config.best_of else None
    tokenizer, model = load_tokenizer_and_model(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    training_rows.log_packing(config)
    if best:
        rows = best.rows
        eval_rows = best.eval_rows
    else:
        with process_group.main_process_first():
            rows, eval_rows = training_rows.read_train_and_eval(config, tokenizer, model.config)
    fields = lifecycle.manifest_fields(rows, tokenizer, stop_id)

    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    metrics: dict[str, Any] = dict(best.metrics) if best else {}
    with ExitStack() as trackers:
        trained = trl_training.train_and_save(
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
        devices.release_memory()  # before the model is loaded again
        if eval_rows:
            saved = trl_training.load_saved_model(load.load_causal_lm, config, stage.options, trained.base)
            held_out_metrics = evaluate_model(config, saved, eval_rows, tokenizer.pad_token_id, process_group)
            _log_evaluation(trained, held_out_metrics)
            metrics |= held_out_metrics

    stage.complete({**fields, "metrics": metrics, "step": trained.steps})


def _card_note(config: SFTConfig) -> str:
    """Return what the model card says about the loss and the answers."""
    note = f"Loss on {'answers only' if config.sft.completion_only_loss else 'whole rows'}."
    if config.best_of:
        note += f" Each answer is the best of {config.best_of.n} of that model's own, by a reward model."
    return note


def _log_evaluation(trained: trl_training.TrainedModel, metrics: dict[str, float]) -> None:
    """Log the held-out loss, entropy and accuracy by TRL's names."""
    trl_training.log_final_evaluation(
        trained.log,
        trained.steps,
        {
            "loss": metrics["eval_loss"],
            "entropy": metrics["eval_entropy"],
            "mean_token_accuracy": metrics["eval_token_accuracy"],
        },
    )


def make_trainer(
    config: SFTConfig,
    model: Any,
    tokenizer: Any,
    rows: TokenRows,
    eval_rows: TokenRows,
    process_group: ProcessGroup,
) -> Any:
    """Return the trainer. The rows are tokenized and labelled, so that TRL at most packs them."""
    packing: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    strategy = training_rows.packing_strategy(config)
    if strategy:
        packing = {"packing": True, "packing_strategy": strategy}
        random.Random(config.seed).shuffle(rows)  # adjacent rows of a file may be similar

    lengths = None
    if config.sft.group_by_length and not strategy:
        lengths = [len(row["input_ids"]) for row in rows]
    return trl_trainer.build_trainer(
        SFTTrainer,
        config,
        trl_trainer.training_args(trl.SFTConfig, config, max_length=config.sft.max_length, **packing),
        rows=rows,
        eval_rows=eval_rows,
        lengths=lengths,
        process_group=process_group,
        model=model,
        processing_class=tokenizer,
    )


# The saved model on held-out rows


def evaluate_model(
    config: SFTConfig,
    model: Any,
    rows: TokenRows,
    pad_id: int,
    process_group: ProcessGroup,
) -> dict[str, float]:
    """Return loss (nats), perplexity, entropy and accuracy per trained token of a frozen model, on all ranks.

    Raises RLHFError R01 if the loss is not finite.
    """
    windows = _windows(rows, config.sft.max_length)
    batches = held_out.batches_by_length([len(ids) for ids, _ in windows], config.sft.per_device_eval_batch_size)
    rank_sums: list[TokenSums] = []
    with (
        Progress("sft: held-out loss", 1, "pass", brief=True) as bar,
        devices.autocast(bf16=devices.use_bf16(config.sft.bf16)),
    ):
        for batch in track_progress("score: batch", process_group.shard(batches)):
            ids, labels = zip(*[windows[i] for i in batch], strict=True)
            rank_sums.append(_batch_sums(model, ids, labels, pad_id))
        bar.advance()

    batch_sums = list(chain.from_iterable(process_group.all_gather_object(rank_sums)))
    total = TokenSums(
        loss=sum(sums.loss for sums in batch_sums),
        entropy=sum(sums.entropy for sums in batch_sums),
        correct=sum(sums.correct for sums in batch_sums),
        tokens=sum(sums.tokens for sums in batch_sums),
    )
    count = max(total.tokens, 1)
    loss = total.loss / count
    if not math.isfinite(loss):
        text = f"the finished model's loss on the evaluation rows is {loss}: the training diverged"
        raise RLHFError("R01", text, hint="lower sft.learning_rate and start over with --fresh")
    return {
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "eval_entropy": total.entropy / count,
        "eval_token_accuracy": total.correct / count,
        "eval_tokens": total.tokens,
        "eval_rows": len(rows),
    }


class TokenSums(NamedTuple):
    """Sums over trained tokens."""

    loss: float  # nats
    entropy: float  # nats
    correct: int  # tokens that are predicted
    tokens: int


def _windows(rows: TokenRows, width: int) -> list[tuple[list[int], list[int]]]:
    """Return token ids and labels of all rows, those of longer rows in parts of `width`."""
    windows = []
    for row in rows:
        ids = row["input_ids"]
        labels = row["labels"]
        for start in range(0, len(ids), width):
            end = start + width
            windows.append((ids[start:end], labels[start:end]))
    return windows


@torch.no_grad()
def _batch_sums(model: Any, ids: Sequence[list[int]], labels: Sequence[list[int]], pad_id: int) -> TokenSums:
    """Return the sums over the trained tokens of a batch."""
    hidden, targets, _ = held_out.hidden_at_labels(model, ids, labels, pad_id)
    loss = 0.0
    entropy = 0.0
    correct = 0
    for part, logprobs in held_out.logprobs_in_parts(model, hidden):
        loss += float(nll_loss(logprobs, targets[part], reduction="sum"))
        correct += int((logprobs.argmax(-1) == targets[part]).sum())
        entropy -= sum(float((chunk.exp() * chunk).sum()) for chunk in logprobs.split(256))  # chunked to save memory
    return TokenSums(loss, entropy, correct, len(targets))
