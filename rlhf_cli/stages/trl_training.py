"""What the SFT and reward stages share: TRL's arguments out of our config, the log, saving, stopping and resuming."""

import json
import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
import trl
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_cli import __version__, checkpoints, data, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import RewardConfig, SFTConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.inputs import limits
from rlhf_cli.models import loading
from rlhf_cli.signals import StopWish
from rlhf_cli.tracking import MetricsLog

NAMES = {"learning_rate": "lr"}
NOT_LOGGED = ("runtime", "per_second")  # times, which differ from run to run
STATE = "trainer_state.json"  # what transformers writes last into a checkpoint


class PlainTrainer:
    """Mixed into TRL's trainers: no model card of TRL's, and batches of rows of like length that resume exactly."""

    lengths: Sequence[int] | None = None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Ours is written with the model."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.lengths is None:
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        return data.LikeLengths(self.lengths, args.train_batch_size, args.seed)


def arguments(kind: Any, config: SFTConfig | RewardConfig, **changes: Any) -> Any:
    """TRL's arguments (`kind` is SFTConfig or RewardConfig of TRL). Raises RLHFError C17 for what TRL refuses."""
    ours = config.sft if isinstance(config, SFTConfig) else config.reward
    gpu = loading.device().type == "cuda"
    same = (
        "learning_rate num_train_epochs per_device_train_batch_size per_device_eval_batch_size weight_decay adam_beta1 "
        "gradient_accumulation_steps lr_scheduler_type max_grad_norm adam_beta2 adam_epsilon gradient_checkpointing"
    )
    evaluation = "no" if "data.eval" not in config.sources() else "epoch" if ours.eval_steps is None else "steps"
    settings = {
        **{name: getattr(ours, name) for name in same.split()},
        "output_dir": str(config.folder / "state"),
        "seed": config.seed,
        "max_steps": ours.max_steps or -1,
        "warmup_steps": ours.warmup_steps if ours.warmup_steps is not None else ours.warmup_ratio,  # below 1: a share
        "bf16": loading.can_use("bfloat16") and (gpu if ours.bf16 is None else ours.bf16),
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
        "logging_steps": ours.logging_steps,
        "logging_nan_inf_filter": False,  # it would hide what R01 is about
        "save_steps": config.output.save_steps or 0.1,
        "save_total_limit": config.output.keep,
        "eval_strategy": evaluation,
        "eval_steps": ours.eval_steps,
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cache": True,  # for what is saved: TRL's own forwards do without a cache
        **changes,
        **config.trainer,
    }
    return _trl(config, kind, **settings)


def build(kind: Any, config: SFTConfig | RewardConfig, lengths: Sequence[int] | None, **parts: Any) -> Any:
    """TRL's trainer (`kind` with PlainTrainer mixed in) of its parts. Raises RLHFError C17 for what TRL refuses."""
    trainer = _trl(config, kind, **parts)
    trainer.lengths = lengths
    trainer.remove_callback(PrinterCallback)
    return trainer


def _trl(config: SFTConfig | RewardConfig, kind: Any, **settings: Any) -> Any:
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of fields that nobody set
            return kind(**settings)
    except (ValueError, TypeError, ImportError) as error:
        text = f"TRL refuses these settings: {' '.join(str(error).split())}"
        raise RLHFError("C17", text, where=config.where("trainer")) from error


def train(trainer: Any, config: SFTConfig | RewardConfig, label: str) -> int:
    """Train to the end, from the newest whole checkpoint in state/ where there is one; returns the steps.

    SIGTERM or SIGINT: saves after the step and raises SystemExit(143 or 130).
    Raises RLHFError R01 for a loss that is not finite.
    """
    folder = config.folder
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    limits.warn_intervals(config, settings.steps(len(trainer.train_dataset)))
    checkpoint = newest_checkpoint(folder / "state")
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8")) if checkpoint else {}
    log = MetricsLog(folder / "metrics.jsonl", resume_at=state.get("global_step", 0))
    if checkpoint:
        terminal.say(f"{label:<8} resumes at step {state['global_step']} of {state['max_steps']}")
        if state["global_step"] >= state["max_steps"]:
            trainer._load_from_checkpoint(str(checkpoint))  # train() would take one step too many
            return int(state["max_steps"])
    with StopWish() as stop:
        follower = Follower(trainer, log, label, stop, resumed=state.get("stateful_callbacks", {}).get("Follower"))
        trainer.add_callback(follower)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            follower.close()
    return int(trainer.state.max_steps)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole `checkpoint-N` of the folder. One that a killed process left half written is removed (M05)."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        if _is_whole(path):
            return path
        terminal.warn("M05", f"{shown(path)} is only half written; an older checkpoint is used where there is one")
        shutil.rmtree(path)
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() for name in ("optimizer.pt", "scheduler.pt"))


class Follower(TrainerCallback, ExportableState):
    """Goes along with a training: progress, metrics.jsonl, and a checkpoint that a stop signal asks for."""

    def __init__(
        self, trainer: Any, log: MetricsLog, label: str, stop: StopWish, resumed: dict[str, Any] | None = None
    ) -> None:
        self.trainer, self.log, self.label, self.stop, self.resumed = trainer, log, label, stop, resumed
        self.bar: terminal.Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The progress starts where the checkpoint left off, and so do the sums behind the next line of the log."""
        self.bar = terminal.Progress(self.label, state.max_steps, "step")
        self.bar.__enter__()
        self.bar.advance(state.global_step)
        trainer = self.trainer
        if self.resumed:
            sums = self.resumed["attributes"]
            trainer._tr_loss += sums["loss"]
            trainer._globalstep_last_logged = sums["logged_at"]
            trainer._total_train_tokens = sums["tokens"]
            for name, values in sums["metrics"].items():
                trainer._metrics["train"][name] = list(values)

    def state(self) -> dict[str, Any]:
        """What transformers forgets of the log in a checkpoint: sums since the last line, tokens since the start."""
        trainer = self.trainer
        sums = {
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "logged_at": getattr(trainer, "_globalstep_last_logged", 0),
            "tokens": trainer._total_train_tokens,
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        }
        return {"args": {}, "attributes": sums}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is always logged, a stop signal saves at once, and what is saved is never broken (R01)."""
        assert self.bar
        self.bar.advance()
        if state.global_step >= state.max_steps:
            control.should_log = True
        elif self.stop.wished:
            control.should_save = True
        if control.should_save and not all(bool(w.isfinite().all()) for w in self.trainer.model.parameters()):
            raise _not_finite("a weight", math.nan, args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """One line of metrics.jsonl. Raises RLHFError R01 where the loss or the gradient is no finite number."""
        kept = {name: value for name, value in logs.items() if not name.endswith(NOT_LOGGED)}
        for name, value in kept.items():
            if not math.isfinite(value):
                raise _not_finite(name, value, args, state)
        if "loss" in kept and self.bar:
            self.bar.advance(0, note=f"loss {kept['loss']:.4f}")
        if {"loss", "eval_loss"} & kept.keys():
            self.log.log(state.global_step, {NAMES.get(name, name): value for name, value in kept.items()})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No pickle of ours stays behind; then the stop signal is obeyed."""
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "training_args.bin").unlink(missing_ok=True)
        if self.stop.wished and state.global_step < state.max_steps:
            step = f"step {state.global_step} of {state.max_steps}"
            terminal.say(f"{self.label:<8} stopped at {step}, saved; the same command goes on from here")
            raise SystemExit(self.stop.exit_code)

    def close(self) -> None:
        """Ends the progress, however the training ended."""
        if self.bar:
            self.bar.__exit__(None, None, None)


def _not_finite(name: str, value: float, args: Any, state: Any) -> RLHFError:
    hint = f"lower the learning rate, or look for odd rows; good checkpoints are in {shown(args.output_dir)}"
    return RLHFError("R01", f"{name} is {value} at step {state.global_step}", hint=hint)


def name_of(parent: Parent) -> str:
    """A parent as a model card names it: without a path of this machine."""
    return parent.hub or (f"the {parent.stage} stage" if parent.stage != checkpoints.FOREIGN else parent.path.name)


def card(stage: str, text: str) -> str:
    """A model card: what the model is, and with what it was made."""
    made = f"Made by rlhf-cli {__version__} with TRL {trl.__version__} and transformers {transformers.__version__}."
    return f"---\nlibrary_name: transformers\ntags: [rlhf-cli, {stage}]\n---\n\n{text}\n\n{made}\n"
