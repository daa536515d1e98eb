"""A TRL training from its newest checkpoint to the saved model."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import transformers
import trl

from rlhf_cli import __version__, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import build, devices, load, lora, save, sharding
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import KeptStep
from rlhf_cli.stages.common import batch_sizes, lifecycle, model_loading
from rlhf_cli.stages.common.batch_sizes import TokenRow
from rlhf_cli.stages.common.best_step import BestStep
from rlhf_cli.stages.common.training_rows import packing_strategy
from rlhf_cli.stages.common.trl_callback import CALLBACK_STATE, TrainingCallback
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking.logs import MetricsLog, read_log
from rlhf_cli.tracking.trackers import Trackers

STATE_FILE = "trainer_state.json"  # the last file transformers writes into a checkpoint


class TrainedModel(NamedTuple):
    """A training that has ended, and whose model is saved."""

    steps: int
    log: MetricsLog
    base: Any  # as `trained_base` returns it
    kept_step: KeptStep | None  # None: the last one, because there was no choice


@dataclass(frozen=True)
class Resumed:
    """Where a training starts: at a checkpoint, or with the first step."""

    checkpoint: Path | None
    state: Mapping[str, Any]  # transformers' state in the checkpoint
    sums: Mapping[str, Any]  # `TrainingCallback.state()` of the checkpoint

    @property
    def is_complete(self) -> bool:
        """True if the checkpoint is of the last step."""
        return self.checkpoint is not None and self.state["global_step"] >= self.state["max_steps"]


def train_and_save(
    trainer: Any,
    config: TRLConfig,
    stage: lifecycle.StageRun,
    rows: Sequence[TokenRow],
    tokenizer: Any,
    *,
    stop_token_id: int,
    note: str,
    trackers: ExitStack,
) -> TrainedModel:
    """Train to the end, resuming from the newest valid checkpoint in state/, and save to RUN/STAGE/model.

    The log stays open, with its trackers, until the stack `trackers` closes. `rows` are the trainer's, for the line
    printed before the first step; the card has `note`. After SIGTERM or SIGINT, save after the step and raise
    SystemExit(143 or 130). Raises RLHFError R01 if the loss is not finite.
    """
    world_size = trainer.process_group.world_size
    count = len(trainer.train_dataset)
    steps = settings_of(config).steps(count, world_size)
    batch_sizes.warn_long_intervals(config, steps)
    packed = count if packing_strategy(config) else None
    terminal.say(f"{config.stage:<8} {batch_sizes.describe_batches(config, rows, world_size, packed=packed)}")

    resumed = _read_checkpoint(stage.find_checkpoint("checkpoint-", steps))
    run_trackers = Trackers(config)
    log = MetricsLog(config.folder / "metrics.jsonl", resumed.sums.get("log"), run_trackers)
    trackers.enter_context(run_trackers)
    # Before the first checkpoint: transformers saves no generation config as Llama 2's, a temperature without sampling.
    save.set_special_token_ids(trainer.model, tokenizer, stop_token_id)
    if resumed.checkpoint:
        state = resumed.state
        terminal.say(f"{config.stage:<8} resumes at step {state['global_step']} of {state['max_steps']}")
    if trainer.best:
        trainer.best.restore(resumed.state)
    if resumed.is_complete:
        steps = int(resumed.state["max_steps"])
        _load_weights(trainer, resumed)
    else:
        steps = _run_trainer(trainer, log, config.stage, resumed)

    kept_step = _keep_step(trainer, resumed) if trainer.best else None
    card = model_card(config, stage.parents, len(rows), kept_step.step if kept_step else steps, note)
    _save(trainer, tokenizer, stop_token_id, config.folder / "model", card)
    return TrainedModel(steps, log, trained_base(trainer, config), kept_step)


def _read_checkpoint(checkpoint: Path | None) -> Resumed:
    """Return where the training starts."""
    if checkpoint is None:
        return Resumed(None, {}, {})
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return Resumed(checkpoint, state, state["stateful_callbacks"][CALLBACK_STATE]["attributes"])


def _load_weights(trainer: Any, resumed: Resumed) -> None:
    """Load the weights of a complete training: train() would make one step too many."""
    checkpoint = resumed.checkpoint
    best = resumed.state.get("best_model_checkpoint") if trainer.args.load_best_model_at_end else None
    with _reject_unsafe_pickles(checkpoint):
        trainer._load_from_checkpoint(str(best or checkpoint))


def _keep_step(trainer: Any, resumed: Resumed) -> KeptStep | None:
    """Load the weights of the best step if they are kept; return which step is the model, None without a choice."""
    best: BestStep = trainer.best
    kept, checkpoint = best.keep(trainer)
    if checkpoint is None:
        return kept

    with _reject_unsafe_pickles(checkpoint):
        if resumed.is_complete:
            trainer._load_from_checkpoint(str(checkpoint))
        else:
            trainer.state.best_model_checkpoint = str(checkpoint)
            trainer._load_best_model()
    return kept


def _run_trainer(trainer: Any, log: MetricsLog, stage: str, resumed: Resumed) -> int:
    """Train from the checkpoint to the last step; return the number of steps."""
    checkpoint = resumed.checkpoint
    trainer.cost = runs.CheckpointTimer()
    with GracefulStop() as stop, ExitStack() as bars:
        trainer.add_callback(TrainingCallback(trainer, log, stage, stop=stop, bars=bars, resumed=resumed.sums))
        if trainer.best:
            trainer.add_callback(trainer.best)
        with _reject_unsafe_pickles(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    terminal.say(f"{stage:<8} {trainer.cost}")
    return int(trainer.state.max_steps)


@contextmanager
def _reject_unsafe_pickles(checkpoint: Path | None) -> Iterator[None]:
    """Context manager that raises RLHFError M05 if torch finds non-tensor objects in a checkpoint's pickles."""
    try:
        yield
    except UnpicklingError as error:
        if checkpoint is None:
            raise
        text = f"{shown(checkpoint)} contains non-tensor objects; they were not executed"
        raise RLHFError("M05", text, hint="remove that checkpoint; an older one is used if there is one") from error


def _save(trainer: Any, tokenizer: Any, stop_token_id: int, folder: Path, card: str) -> None:
    """Write the trained model to `folder`, with its tokenizer and card."""
    model = trainer.model
    sharding.disable_zero3()
    save.set_special_token_ids(model, tokenizer, stop_token_id)  # the trainer may have put the tokenizer's first
    build.disable_router_logits(model)
    trainer.process_group.gather_results(partial(save.save_trained, model, tokenizer, folder, card))


def trained_base(trainer: Any, config: TRLConfig) -> Any:
    """Take the trained adapters off and return their base, which is unchanged, to be used again without reading it.

    None if it must be read: without adapters it was trained, with qlora it is in 4 bits, and FSDP and DeepSpeed shard
    it.
    """
    adapters = config.model.adapters
    if adapters is None or adapters.kind != "lora" or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return None
    return trainer.model.unload()


def load_saved_model(loader: Callable[..., Any], config: TRLConfig, options: Options, base: Any) -> Any:
    """Return the stage's saved model, frozen, on the device: by `loader`, or its adapters on `base`.

    They are merged into a float32 base. In bfloat16 they stay beside it, as in PPO and evaluations: a sum stored in
    bfloat16 would lose changes of less than 1/512 of a weight.
    """
    folder = config.folder / "model"
    bf16 = devices.use_bf16(settings_of(config).bf16)
    if base is None:
        model = loader(folder, **load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16))
        return model_loading.place_frozen(model, bf16=bf16)

    adapted = load.read_config(folder, options.trust_remote_code)
    if bf16 or base.dtype != torch.float32:
        base = lora.load_adapter(base, folder, adapted, folder).get_base_model()
    else:
        lora.merge_adapter(base, folder, adapted)
    return model_loading.place_frozen(base, bf16=bf16)


def log_final_evaluation(log: MetricsLog, steps: int, metrics: Mapping[str, float]) -> None:
    """Log the finished model's evaluation like the trainer's own ones, with `eval_` before each name."""
    line: dict[str, Any] = {f"eval_{name}": value for name, value in metrics.items()}
    for trained in reversed(read_log(log.path)):
        if "num_tokens" in trained:  # of the last step
            line["eval_num_tokens"] = trained["num_tokens"]
            if "epoch" in trained:
                line["epoch"] = trained["epoch"]
            break
    log.log(steps, line)


def model_card(config: TRLConfig, parents: Mapping[str, Parent], num_rows: int, steps: int, note: str) -> str:
    """Return a model card: how the model was trained, `note`, the kind of adapters, and the library versions."""
    settings: Any = settings_of(config)
    adapters = config.model.adapters
    kind, tag = ("reward", "reward-model") if config.stage == "reward" else ("causal language", config.stage)
    names = ", ".join(Path(source.name).name for source in config.sources()["data.train"].each())
    text = (
        f"A {kind} model, trained from {_origin(parents)} on {num_rows} rows of "
        f"{names}: {steps} steps, learning rate {settings.learning_rate:g}. {note}"
    )
    if adapters:
        text += (
            f"\n\nThese are only adapters ({'LoRA' if adapters.kind == 'lora' else 'QLoRA'}, rank {adapters.r}, alpha "
            f"{adapters.lora_alpha}) of the weights that `adapter_config.json` names."
        )
    versions = f"Made by rlhf-cli {__version__} with TRL {trl.__version__} and transformers {transformers.__version__}."
    head = f"library_name: {'peft' if adapters else 'transformers'}\ntags: [rlhf-cli, {tag}]"
    return f"---\n{head}\n---\n\n{text}\n\n{versions}\n"


def _origin(parents: Mapping[str, Parent]) -> str:
    """Return what a model was trained from, for its card: without local paths."""
    parent = parents.get("model.start") or parents.get("model.path")
    if parent is None:
        return "fresh weights"
    if parent.hub:
        return parent.hub
    return parent.path.name if parent.stage == runs.FOREIGN else f"the {parent.stage} stage"
