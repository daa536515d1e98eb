"""What happens at each step of a TRL training: progress, metrics.jsonl, evaluations, checkpoints, stops."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import devices, sharding
from rlhf_cli.progress import Progress
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking.logs import MetricsLog

LOG_NAMES = {"learning_rate": "lr"}
NOT_LOGGED = ("runtime", "per_second")  # timings, which differ between identical runs
TRIM_STEPS = 4  # optimizer steps between two looks at freed memory that malloc keeps: giving it back takes time, too
CALLBACK_STATE = "Follower"  # key of TrainingCallback's state in a checkpoint's trainer_state.json


class TrainingCallback(TrainerCallback, ExportableState):
    """Progress, metrics.jsonl, non-finite checks, and graceful stops of a TRL training run."""

    bar: Progress
    evaluation: Progress | None = None
    memory = 0  # of the process, when freed memory was given back the last time

    def __init__(
        self,
        trainer: Any,
        log: MetricsLog,
        stage: str,
        stop: GracefulStop,
        bars: ExitStack,
        resumed: Mapping[str, Any],
    ) -> None:
        self.trainer = trainer
        self.log = log
        self.stage = stage
        self.stop = stop
        self.bars = bars
        self.resumed = resumed  # `state()` of the checkpoint, empty without one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the progress bar, and restore the sums behind the next log line, from the checkpoint."""
        state.compute_steps(args, state.max_steps)  # a checkpoint has the intervals of its start
        self.bar = self.bars.enter_context(Progress(self.stage, state.max_steps, "step", done=state.global_step))
        if self.resumed:
            self._restore_sums(self.resumed)

    def _restore_sums(self, sums: Mapping[str, Any]) -> None:
        """Restore the sums since the last log line, and the tokens so far."""
        trainer = self.trainer
        trainer._tr_loss += sums["losses"][trainer.process_group.rank]
        trainer._globalstep_last_logged = sums["logged_at"]
        trainer._total_train_tokens = sums["tokens"]
        for name, values in sums["metrics"]:
            trainer._metrics["train"][name] = list(values)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **kwargs: Any) -> None:
        """Set the sampler's epoch; accelerate does not when several processes resume within an epoch."""
        batch_sampler = train_dataloader.batch_sampler
        while hasattr(batch_sampler, "batch_sampler"):
            batch_sampler = batch_sampler.batch_sampler
        if hasattr(batch_sampler.sampler, "set_epoch"):
            batch_sampler.sampler.set_epoch(int(state.epoch))

    def state(self) -> dict[str, Any]:
        """Return what transformers' checkpoints lack: the sums since the last log line, and the tokens so far."""
        trainer = self.trainer
        sums = {
            "losses": trainer.losses,
            "logged_at": getattr(trainer, "_globalstep_last_logged", 0),
            "tokens": trainer._total_train_tokens,
            "metrics": [[name, list(values)] for name, values in trainer._metrics["train"].items()],  # ordered
            "log": self.log.position(trainer.state.global_step),
        }
        return {"args": {}, "attributes": sums}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request logging, evaluation and saving. Raises RLHFError R01 before saving weights that are not finite.

        The last step is always logged. A checkpoint that takes too much of the time is omitted, unless the user set the
        interval; a stop signal saves immediately. An epoch's evaluation belongs to its last step: transformers would
        make it after that step's checkpoint, so that a resumed run would miss it. The run's last step has none, because
        the stage measures the finished model itself, unless it is compared with earlier ones.
        """
        self.bar.advance()
        if state.global_step % TRIM_STEPS == 0 and devices.device().type == "cpu":
            self.memory = devices.limit_memory(self.memory)
        self.stop.sync(self.trainer.process_group.all_gather_object)
        last = state.global_step >= state.max_steps
        control.should_log |= last
        if control.should_save and not last and self.trainer.saves_by_time:
            control.should_save = self.trainer.process_group.run_on_main(self.trainer.cost.is_worth_it)
            if not control.should_save:
                text = (
                    "a checkpoint is omitted: they would take over 5 % of the time; output.save_steps sets an interval"
                )
                terminal.log_once(f"{self.stage:<8} {text}")
        control.should_save |= self.stop.requested is not None and not last
        if self.trainer.eval_dataset is not None and args.eval_strategy == "no":
            control.should_evaluate |= state.epoch == int(state.epoch)
        control.should_evaluate &= not last or args.load_best_model_at_end or _compares_steps(self.trainer)
        if control.should_save and not has_finite_weights(self.trainer.model):
            raise _not_finite_error("a weight", math.nan, args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Write a line of metrics.jsonl. Raises RLHFError R01 if the loss or the gradient norm is not finite."""
        metrics: dict[str, float] = {}
        for name, value in logs.items():
            if name.endswith(NOT_LOGGED):
                continue
            if not math.isfinite(value):
                raise _not_finite_error(name, value, args, state)
            metrics[LOG_NAMES.get(name, name)] = value

        if "loss" in metrics:
            self.bar.advance(0, note=f"loss {metrics['loss']:.4f}")
        if "loss" in metrics or "eval_loss" in metrics:
            self.log.log(state.global_step, metrics)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any) -> None:
        """Advance the progress bar of an evaluation."""
        if self.evaluation is None:
            self.evaluation = Progress("evaluation: batch", len(eval_dataloader), "").__enter__()
        self.evaluation.advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the progress bar of an evaluation."""
        if self.evaluation:
            self.evaluation.__exit__(None, None, None)
        self.evaluation = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exit if a stop signal was received."""
        self.stop.sync(self.trainer.process_group.all_gather_object)  # it may arrive during the save
        if self.stop.requested and state.global_step < state.max_steps:
            step = f"step {state.global_step} of {state.max_steps}"
            terminal.say(f"{self.stage:<8} stopped at {step}, saved; the same command resumes")
            self.trainer.process_group.barrier()  # the first process to exit terminates the others
            raise SystemExit(self.stop.exit_code)


def _compares_steps(trainer: Any) -> bool:
    """Return True if earlier steps were evaluated, of which the best may be kept in place of the last one."""
    return trainer.best is not None and bool(trainer.best.right)


TrainingCallback.__name__ = CALLBACK_STATE  # transformers stores a callback's state under its class name


def has_finite_weights(model: Any) -> bool:
    """Return True if no trained weight of this process is nan or infinite.

    Their sums show it. Tensor.isfinite allocates 1.5 times a float32 weight: 0.9 GB for 151,936 embeddings of 1,024.
    """
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        total = sharding.zero3_shard(weight).detach().sum(dtype=torch.float32)
        if not math.isfinite(total):
            return False
    return True


def _not_finite_error(name: str, value: float, args: Any, state: Any) -> RLHFError:
    """Return RLHFError R01 for a loss, gradient norm or weight."""
    hint = f"lower the learning rate, or look for odd rows; good checkpoints are in {shown(args.output_dir)}"
    return RLHFError("R01", f"{name} is {value} at step {state.global_step}", hint=hint)
