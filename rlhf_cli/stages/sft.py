"""`rlhf sft`: fine-tune a causal language model, loaded or newly initialised, with TRL's SFTTrainer."""

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import trl

from rlhf_cli import data
from rlhf_cli.config.base import Options
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, devices, forward, load
from rlhf_cli.models.batch import right_pad
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.stages import best_of
from rlhf_cli.stages.common import lifecycle, trl_trainer
from rlhf_cli.stages.common.training import (
    IGNORE_INDEX,
    load_tokenizer_and_model,
    log_packing,
    packing_strategy,
    read_rows,
    use_own_lm_head,
)

TokenRows = list[dict[str, list[int]]]


class SFTTrainer(trl_trainer.TrainerMixin, trl.SFTTrainer):
    """TRL's trainer with length-grouped batches, a per-token evaluation loss, and a faster loss on a CPU."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.args.device.type == "cpu" and not self.aux_loss_enabled:
            use_own_lm_head(self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Replace transformers' mean of batch means by the mean over tokens."""
        self._batches: list[tuple[float, int]] = []
        output = super().evaluation_loop(*args, **kwargs)
        loss, tokens = map(sum, zip(*self._batches, strict=True))
        return output._replace(metrics={**output.metrics, "eval_loss": loss / max(tokens, 1)})

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the loss and the tokens of all ranks' rows, each row once."""
        tokens = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum(1)
        output = super().prediction_step(model, inputs, *args, **kwargs)
        loss, tokens = self.accelerator.gather_for_metrics((output[0] * tokens.to(output[0].device), tokens))
        self._batches.append((float(loss.sum()), int(tokens.sum())))
        return output


def run(config: SFTConfig, options: Options) -> None:
    """Train a model and write RUN/sft; resume from the last checkpoint if there is one.

    Raises RLHFError as `setup.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: SFTConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    best = best_of.best_rows(config, stage) if config.best_of else None
    tokenizer, model = load_tokenizer_and_model(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    log_packing(config)
    if best:
        rows, eval_rows = best.rows, best.eval_rows
    else:
        with process_group.main_process_first():
            rows, eval_rows = read_rows(config, tokenizer, model.config)
    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    note = f"Loss on {'answers only' if config.sft.completion_only_loss else 'whole rows'}."
    if config.best_of:
        note += f" Each answer is the best of {config.best_of.n} of that model's own, by a reward model."
    with ExitStack() as trackers:
        steps, log, base = trl_trainer.train_and_save(trainer, config, stage, rows, tokenizer, stop_id, note, trackers)
        del trainer
        devices.release_memory()  # before the model is loaded again
        metrics = best.metrics if best else {}
        if eval_rows:
            model = trl_trainer.load_saved_model(load.load_causal_lm, config, stage.options, base)
            metrics |= evaluate_model(config, model, eval_rows, tokenizer.pad_token_id, process_group)
            logged = {name: metrics[f"eval_{name}"] for name in ("loss", "entropy")}
            logged["mean_token_accuracy"] = metrics["eval_token_accuracy"]
            trl_trainer.log_final_evaluation(log, steps, logged)
    stage.complete({**lifecycle.manifest_fields(config, tokenizer, stop_id), "metrics": metrics, "step": steps})


def make_trainer(
    config: SFTConfig, model: Any, tokenizer: Any, rows: TokenRows, eval_rows: TokenRows, process_group: ProcessGroup
) -> Any:
    """Return the trainer. The rows are tokenized and labelled, so that TRL at most packs them."""
    packing: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if strategy := packing_strategy(config):
        packing = {"packing": True, "packing_strategy": strategy}
        random.Random(config.seed).shuffle(rows)  # adjacent rows of a file may be similar
    args = trl_trainer.training_args(trl.SFTConfig, config, max_length=config.sft.max_length, **packing)
    lengths = [len(row["input_ids"]) for row in rows] if config.sft.group_by_length and not strategy else None
    models = {"model": model, "processing_class": tokenizer}
    return trl_trainer.build_trainer(SFTTrainer, config, args, rows, eval_rows, lengths, process_group, **models)


def evaluate_model(
    config: SFTConfig, model: Any, rows: TokenRows, pad_id: int, process_group: ProcessGroup
) -> dict[str, float]:
    """Return loss (nats), perplexity, entropy and accuracy per trained token of a frozen model, on all ranks.

    Raises RLHFError R01 if the loss is not finite.
    """
    width, bf16 = config.sft.max_length, devices.use_bf16(config.sft.bf16)
    windows = [
        (row["input_ids"][i : i + width], row["labels"][i : i + width])
        for row in rows
        for i in range(0, len(row["input_ids"]), width)
    ]
    windows.sort(key=lambda window: len(window[0]))
    size = config.sft.per_device_eval_batch_size
    batches = [zip(*windows[first : first + size], strict=True) for first in range(0, len(windows), size)]
    with Progress("sft: held-out loss", 1, "pass", brief=True) as bar, devices.autocast(bf16=bf16):
        rank_batches = track_progress("score: batch", process_group.shard(batches))
        rank_sums = [_batch_sums(model, ids, labels, pad_id) for ids, labels in rank_batches]
        bar.advance()
    loss, entropy, correct, tokens = map(
        sum, zip(*chain.from_iterable(process_group.all_gather_object(rank_sums)), strict=True)
    )
    mean = loss / max(tokens, 1)
    if not math.isfinite(mean):
        text = f"the finished model's loss on the evaluation rows is {mean}: the training diverged"
        raise RLHFError("R01", text, hint="lower sft.learning_rate and start over with --fresh")
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(min(mean, 700.0)),
        "eval_entropy": entropy / max(tokens, 1),
        "eval_token_accuracy": correct / max(tokens, 1),
        "eval_tokens": tokens,
        "eval_rows": len(rows),
    }


@torch.no_grad()
def _batch_sums(
    model: Any, ids: Sequence[list[int]], labels: Sequence[list[int]], pad_id: int
) -> tuple[float, float, int, int]:
    """Return a batch's summed loss and entropy in nats, correctly predicted tokens, and trained tokens."""
    input_ids, mask = right_pad(ids, pad_id)
    labels_tensor = right_pad(labels, IGNORE_INDEX)[0][:, 1:]
    inputs = {"input_ids": input_ids.to(model.device), "attention_mask": mask.long().to(model.device)}
    row, column = (labels_tensor != IGNORE_INDEX).nonzero(as_tuple=True)
    targets = labels_tensor[row, column].to(model.device)
    hidden = build.decoder(model)(**inputs, use_cache=False).last_hidden_state[row, column]
    loss, entropy, correct = 0.0, 0.0, 0
    for part in forward.logit_chunks(model, len(targets)):
        logprobs = forward.lm_head_logits(model, hidden[part]).float().log_softmax(-1)
        loss += float(torch.nn.functional.nll_loss(logprobs, targets[part], reduction="sum"))
        entropy -= sum(float((chunk.exp() * chunk).sum()) for chunk in logprobs.split(256))  # chunked to save memory
        correct += int((logprobs.argmax(-1) == targets[part]).sum())
    return loss, entropy, correct, len(targets)
