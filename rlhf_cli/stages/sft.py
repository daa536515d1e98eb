"""`rlhf sft`: a causal model, from a folder or from fresh weights, fine-tuned by TRL's SFTTrainer on our tokens."""

import functools
import gc
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import set_seed

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.training import SFTConfig
from rlhf_cli.errors import RLHFError, all_of, placed, shown
from rlhf_cli.models import build, devices, load, lora, save, tokenizers
from rlhf_cli.models.batch import right_pad
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup, open_process_group
from rlhf_cli.progress import Progress, counted
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import hardware, setup, trl_common

TRAINED_ON = "model.new.tokenizer.train"
CUT = ("wrapped", "bfd_split")  # packing strategies that cut long rows, so that none is too long
IGNORED = -100  # label of a token that is not trained


def sft_tokenizer(config: SFTConfig, given: Any) -> Any:
    """The tokenizer as training has it: `given`, that of model.path, or for None a new one; with a pad of its own.

    Raises RLHFError C06, C07, C17, D01-D05.
    """
    if given is None:
        assert config.model.new is not None
        with placed(config.where("model.new.tokenizer")):
            given = tokenizers.train_tokenizer(config.sources()[TRAINED_ON], config.model.new.tokenizer.vocab_size)
    before = len(given)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(given, config.model.chat_template)
    lora.refuse_new_tokens(config, given, before)
    tokenizers.ensure_pad_token(given, stop_token_id=data.stop_token_id(given))
    return given


def new_body(config: SFTConfig, vocab_size: int) -> Any:
    """The transformers config of model.new, special tokens left out. Raises RLHFError C01, C07, C13, C17."""
    assert config.model.new is not None
    with placed(config.where("model.new")):
        unknown = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos"))
        body = build.new_config(config.model.new.config_fields(), vocab_size=vocab_size, **unknown)
    setup.check_context(config, body, 0, strict=True)
    return body


def packing_strategy(config: SFTConfig, *, say: bool = True) -> str | None:
    """How rows are packed into sequences of max_length; None where they are not.

    `bfd` keeps whole rows apart, by flash attention or by a mask as large as the batch's tokens squared. `wrapped` cuts
    one long text, in which neighbours see each other: the usual way for plain text, and about twice as fast on a CPU.
    """
    if not config.sft.packing:
        return None
    plain = data.is_plain_text(config.sources()["data.train"])
    strategy = config.trainer.get("packing_strategy", "wrapped" if plain else "bfd")
    apart = "cut out of one long text, neighbours see each other" if strategy == "wrapped" else "rows stay apart"
    if say:
        terminal.say(f"sft      packing: {strategy} ({apart}; trainer.packing_strategy changes it)")
    return strategy


def read_data(
    config: SFTConfig, key: str, tokenizer: Any, strategy: str | None, body: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Rows of data.train or data.eval for a model `body`, within max_length unless packing cuts them.

    Of more rows than `sample` a sample. Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    read = partial(
        data.sft_rows,
        config.sources()[f"data.{key}"],
        tokenizer,
        max_length=None if strategy in CUT else config.sft.max_length,
        on_long=config.data.on_long,
        sample=sample,
    )
    return setup.read_usable(config, f"data.{key}", setup.longer_rows(config, body), read)


def check_rows(
    config: SFTConfig, rows: data.Rows[Any], held_out: data.Rows[Any] | None, body: Any, strategy: str | None
) -> None:
    """Warns D13. Raises RLHFError C13 (`body` None: the context is not known), D11."""
    if held_out is not None:
        data.warn_shared(rows, held_out, where=config.where("data.eval"))
    longest, strict = max(rows.longest, held_out.longest if held_out else 0), config.model.new is not None
    all_of(
        lambda: setup.check_context(config, body, longest, strict=strict or strategy in CUT),
        lambda: _check_batch(config, rows, strategy),
    )


def _check_batch(config: SFTConfig, rows: data.Rows[Any], strategy: str | None) -> None:
    if strategy not in CUT:
        setup.check_batch(config, rows, len(rows))
    elif rows.longest:
        setup.check_batch(config, rows, sequences(config, rows), "packed sequences")


def sequences(config: SFTConfig, rows: data.Rows[Any]) -> int:
    """How many sequences of max_length the rows fill: with packing there are about so many, or some more."""
    return -(-sum(len(row["input_ids"]) for row in rows) // config.sft.max_length)


def labelled(config: SFTConfig, rows: data.Rows[Any]) -> data.Rows[dict[str, list[int]]]:
    """{input_ids, labels} of each row."""
    only = config.sft.completion_only_loss
    return rows.with_rows(
        {
            "input_ids": row["input_ids"],
            "labels": [
                token if wanted or not only else IGNORED
                for token, wanted in zip(row["input_ids"], row["completion_mask"], strict=True)
            ],
        }
        for row in rows
    )


Rows = list[dict[str, list[int]]]


class SFTTrainer(trl_common.PlainTrainer, trl.SFTTrainer):
    """TRL's, with our batches, and on a CPU with the model's own head."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        if self.args.device.type == "cpu" and not self.aux_loss_enabled:
            _score_by_own_head(self.model.get_base_model() if is_peft_model(self.model) else self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers', whose loss is the mean of its batches' means: by token here, as the headline has it."""
        self._batches: list[tuple[float, int]] = []
        found = super().evaluation_loop(*args, **kwargs)
        loss, tokens = map(sum, zip(*self._batches, strict=True))
        return found._replace(metrics={**found.metrics, "eval_loss": loss / max(tokens, 1)})

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's; of all ranks' rows, none of them twice, the loss and the tokens are kept."""
        tokens = (inputs["labels"][:, 1:] != IGNORED).sum(1)
        found = super().prediction_step(model, inputs, *args, **kwargs)
        loss, tokens = self.accelerator.gather_for_metrics((found[0] * tokens.to(found[0].device), tokens))
        self._batches.append((float(loss.sum()), int(tokens.sum())))
        return found


def _score_by_own_head(model: Any) -> None:
    """Serve TRL's `model(..., labels=, fused_lm_head=True)` on a CPU: the same numbers in less than half the time.

    TRL's fused head saves a GPU's memory by computing the logits twice, and on a CPU also those of unlabelled tokens.
    """
    plain = type(model).forward

    def forward(*args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        if not fused_lm_head or labels is None:
            return plain(model, *args, labels=labels, **inputs)
        mask = labels[:, 1:] != IGNORED
        head = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, hidden: (hidden[0][:, :-1][mask][None],))
        try:
            logits = plain(model, *args, **inputs).logits[0].float()
        finally:
            hook.remove()
        targets = labels[:, 1:][mask]
        logprobs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy, top = -(logprobs.exp() * logprobs).sum(-1), (logits.argmax(-1) == targets).float()
        zeros = torch.zeros(mask.shape)
        picked, entropy, top = (
            zeros.masked_scatter(mask, values) for values in (logprobs.gather(-1, targets[:, None]), entropy, top)
        )
        return SimpleNamespace(log_probs=picked, entropy=entropy, is_top1=top, label_mask=mask)

    model.forward = functools.wraps(plain)(forward)


def run(config: SFTConfig, options: Options) -> None:
    """Train and leave RUN/sft. Goes on from the last checkpoint where there is one.

    Raises RLHFError E04 and R14 as `ProcessGroup` does.
    """
    with open_process_group() as process_group:
        _run(config, options, process_group)


def _run(config: SFTConfig, options: Options, process_group: ProcessGroup) -> None:
    parents = runs.open_parents(config)
    identity = runs.identity(config, parents, config.sources())
    status = process_group.run_on_main(
        lambda: runs.begin(config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"sft      finished already: {shown(config.folder)}")
        return
    memory = hardware.check(config, parents)
    tokenizer, model = start(config, options, parents)
    runs.require_unchanged(parents)
    stop = data.stop_token_id(tokenizer)
    strategy = packing_strategy(config)
    with process_group.main_process_first():
        rows, eval_rows = read(config, tokenizer, model.config, strategy)
    if memory:
        terminal.say(f"sft      {memory}")
    with ExitStack() as trackers:
        steps, log = trl_common.train(
            make_trainer(config, model, tokenizer, rows, eval_rows, strategy, process_group),
            config,
            "sft",
            rows,
            trackers,
        )
        save.set_special_token_ids(model, tokenizer, stop)
        text = card(config, parents, len(rows), steps)
        process_group.gather_results(
            functools.partial(save.save_model, model, tokenizer, config.folder / "model", text)
        )
        del model
        gc.collect()  # it is read again
        measured = headline(config, options, eval_rows, tokenizer.pad_token_id, process_group) if eval_rows else {}
        if measured:
            own = {name: measured[f"eval_{name}"] for name in ("loss", "entropy")}
            trl_common.log_last(log, steps, {**own, "mean_token_accuracy": measured["eval_token_accuracy"]})
    fields = {
        **tokenizers.manifest_fields(tokenizer, stop),
        "metrics": measured,
        "step": steps,
        "trust_remote_code": options.trust_remote_code,
    }
    process_group.run_on_main(lambda: runs.finish(config, identity, parents=parents, fields=fields))


def start(config: SFTConfig, options: Options, parents: Mapping[str, Parent]) -> tuple[Any, Any]:
    """Tokenizer and model before training, with a pad token that is nothing else.

    Raises RLHFError C01, C06, C07, C13 and C17 for model.new, M01 and M06-M08 for model.path, C07 and C17 for
    model.adapters.
    """
    new, parent = config.model.new, parents.get("model.path")
    given = model = None
    if parent is not None:
        given = setup.tokenizer(config, options, parent)
        model = setup.causal(config, options, parent, given)
    elif new is not None:
        new_body(config, new.tokenizer.vocab_size)
    tokenizer = sft_tokenizer(config, given)
    set_seed(config.seed)
    if model is None:
        assert new is not None
        with placed(config.where("model.new")):
            attention = config.model.attn_implementation
            model = build.new_causal_lm(new.config_fields(), tokenizer, attn_implementation=attention)
    return tokenizer, lora.prepare_for_training(config, parent, model, tokenizer)


def read(config: SFTConfig, tokenizer: Any, body: Any, strategy: str | None) -> tuple[Rows, Rows]:
    """Token rows {input_ids, labels} of data.train and of the evaluation data; [] where there is none."""
    rows = read_data(config, "train", tokenizer, strategy, body)
    held_out = read_data(config, "eval", tokenizer, strategy, body) if "data.eval" in config.sources() else None
    check_rows(config, rows, held_out, body, strategy)
    return labelled(config, rows), labelled(config, held_out) if held_out is not None else []


def make_trainer(
    config: SFTConfig,
    model: Any,
    tokenizer: Any,
    rows: Rows,
    eval_rows: Rows,
    strategy: str | None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Any:
    """TRL's trainer on tokens and labels of ours: without packing it prepares nothing, with it only packs."""
    packing: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if strategy:
        packing = {"packing": True, "packing_strategy": strategy}
        random.Random(config.seed).shuffle(rows)  # neighbours in the file may be alike
    args = trl_common.arguments(trl.SFTConfig, config, max_length=config.sft.max_length, **packing)
    lengths = [len(row["input_ids"]) for row in rows] if config.sft.group_by_length and not strategy else None
    return trl_common.build(
        SFTTrainer,
        config,
        lengths,
        process_group,
        model=model,
        args=args,
        train_dataset=data.as_dataset(rows),
        eval_dataset=data.as_dataset(eval_rows) if eval_rows else None,
        processing_class=tokenizer,
    )


def headline(
    config: SFTConfig, options: Options, rows: Rows, pad: int, process_group: ProcessGroup
) -> dict[str, float]:
    """Loss per trained token of the saved model over the evaluation rows, in nats, by our own pass, shared by all."""
    model = load.load_causal_lm(config.folder / "model", **load.load_kwargs(config.model, options.trust_remote_code))
    model.to(devices.device()).eval()
    width = config.sft.max_length
    cut = [
        (row["input_ids"][i : i + width], row["labels"][i : i + width])
        for row in rows
        for i in range(0, len(row["input_ids"]), width)
    ]
    cut.sort(key=lambda window: len(window[0]))
    size = config.sft.per_device_eval_batch_size
    batches = [zip(*cut[first : first + size], strict=True) for first in range(0, len(cut), size)]
    with Progress("sft: held-out loss", 1, "pass", brief=True) as bar:
        own = [_sums(model, ids, labels, pad) for ids, labels in counted("score: batch", process_group.shard(batches))]
        bar.advance()
    loss, entropy, correct, tokens = map(
        sum, zip(*chain.from_iterable(process_group.all_gather_object(own)), strict=True)
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
def _sums(model: Any, ids: Sequence[list[int]], labels: Sequence[list[int]], pad: int) -> tuple[float, float, int, int]:
    """Summed loss, summed entropy, tokens predicted right, and tokens, of one batch; loss and entropy in nats."""
    inputs, mask = right_pad(ids, pad)
    targets = right_pad(labels, IGNORED)[0][:, 1:]
    given = {"input_ids": inputs.to(model.device), "attention_mask": mask.long().to(model.device)}
    logits = model(**given, use_cache=False).logits[:, :-1]
    row, column = (targets != IGNORED).nonzero(as_tuple=True)
    wanted = targets[row, column].to(model.device)
    logprobs = logits[row, column].float().log_softmax(-1)
    loss = torch.nn.functional.nll_loss(logprobs, wanted, reduction="sum")
    entropy = -sum(float((part.exp() * part).sum()) for part in logprobs.split(256))  # a part at a time: no second copy
    return float(loss), entropy, int((logprobs.argmax(-1) == wanted).sum()), len(wanted)


def card(config: SFTConfig, parents: Mapping[str, Parent], rows: int, steps: int) -> str:
    """The model's README."""
    origin = "fresh weights" if config.model.new else trl_common.name_of(parents["model.path"])
    ours = config.sft
    loss = "the answers alone" if ours.completion_only_loss else "whole rows"
    return trl_common.card(
        config,
        "sft",
        f"A causal language model, fine-tuned from {origin} on {rows} rows of {Path(config.data.train).name}: "
        f"{steps} steps, learning rate {ours.learning_rate:g}, loss on {loss}.",
    )
