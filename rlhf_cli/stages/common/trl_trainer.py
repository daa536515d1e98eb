"""TRL's trainers as SFT, reward and DPO use them: arguments, construction, batches, checkpoints."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.stages.common.best_step import BestStep

SAME_NAMES = (  # options of TRL with the name and the value of ours
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "eval_steps",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "learning_rate",
    "logging_steps",
    "lr_scheduler_type",
    "max_grad_norm",
    "num_train_epochs",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "weight_decay",
)


class TrainerMixin:
    """Mixin for TRL's trainers: length-grouped batches that resume exactly, and sealed checkpoints.

    A checkpoint counts once every process has written its part. TRL's model card and the pickled arguments are omitted.
    """

    lengths: Sequence[int] | None = None
    process_group = SINGLE_PROCESS
    keep = 2
    saves_by_time = False  # omits checkpoints that take too much of the time
    cost: runs.CheckpointTimer
    best: BestStep | None = None  # of the reward stage's evaluations
    losses: Sequence[float] = ()  # summed since the last log line, per rank: transformers accumulates them separately

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: `save.save_model` writes the model card."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write transformers' files in place, then seal them as a checkpoint to resume from."""
        trainer: Any = self
        states = Path(trainer.args.output_dir)
        name = f"checkpoint-{trainer.state.global_step}"
        with self.cost.measure():
            self.process_group.run_on_main(lambda: runs.begin_state(states, name))
            self.losses = self.process_group.all_gather_object(float(trainer._tr_loss))
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
            self.process_group.barrier()  # until every rank has written its random state
            spared = {Path(trainer.state.best_model_checkpoint or "").name}
            if self.best:
                spared |= self.best.spared
            self.process_group.run_on_main(lambda: runs.seal_state(states / name, keep=self.keep, spare=spared))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Delete the pickled arguments, which contain the Hub token, before the checkpoint is sealed."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        trainer: Any = self
        folder = Path(output_dir or trainer.args.output_dir)
        (folder / "training_args.bin").unlink(missing_ok=True)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of length-grouped batches, TRL's own without lengths."""
        if self.lengths is None:
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        trainer: Any = self
        batch_size = trainer.args.train_batch_size * self.process_group.world_size
        return data.LengthGroupedSampler(self.lengths, batch_size, trainer.args.seed)


def training_args(args_class: Any, config: TRLConfig, **overrides: Any) -> Any:
    """Build TRL's arguments, of one of its config classes. Raises RLHFError C17 if TRL rejects them."""
    section: Any = settings_of(config)
    gpu = devices.device().type == "cuda"
    fields = {
        **{name: getattr(section, name) for name in SAME_NAMES},
        "output_dir": str(config.folder / "state"),
        "seed": config.seed,
        "max_steps": section.max_steps or -1,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1} if "min_lr" in section.lr_scheduler_type else None,  # as in PPO
        "warmup_steps": section.warmup_ratio if section.warmup_steps is None else section.warmup_steps,  # < 1: a ratio
        "bf16": devices.use_bf16(section.bf16),
        "use_cpu": not gpu,
        "ddp_find_unused_parameters": False,  # every pass uses all trained parameters; searching takes time
        "dataloader_pin_memory": gpu,
        "logging_nan_inf_filter": False,  # it would hide the losses that R01 reports
        "save_steps": config.output.save_steps or 0.1,
        # Without eval_steps, TrainingCallback.on_step_end requests evaluations.
        "eval_strategy": "steps" if "data.eval" in config.sources() and section.eval_steps else "no",
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cache": True,  # in the saved config; TRL's own forward passes use no cache
        **overrides,
        **config.trainer,
    }
    threads = torch.get_num_threads()
    args = _construct(config, args_class, **fields)
    torch.set_num_threads(threads)  # accelerate takes all cores in a group on a CPU; see devices.set_num_threads
    args._n_gpu = min(args.n_gpu, 1)  # transformers would split each batch over all GPUs without counting them
    return args


def build_trainer(
    trainer_class: Any,
    config: TRLConfig,
    args: Any,
    *,
    rows: list[dict[str, Any]],
    eval_rows: list[dict[str, Any]],
    lengths: Sequence[int] | None,
    process_group: ProcessGroup,
    **models: Any,
) -> Any:
    """Build a TRL trainer; `trainer_class` has TrainerMixin mixed in. `lengths` groups rows of similar length.

    Raises RLHFError C17 if TRL rejects the settings, E04 if accelerate found another number of processes.
    """
    world_size = process_group.world_size
    if config.trainer.get("lr_scheduler_kwargs") is None and args.lr_scheduler_type == "warmup_stable_decay":
        steps = settings_of(config).steps(len(rows), world_size)
        args.lr_scheduler_kwargs = {"num_decay_steps": math.ceil(steps / 10)}  # MiniCPM, arXiv 2404.06395, section 4

    text_config = models["model"].config.get_text_config()
    if getattr(text_config, "is_moe", True) is False:  # Doge without experts, whose config has their fields
        args.router_aux_loss_coef = 0.0
    trainer = _construct(
        config,
        trainer_class,
        args=args,
        train_dataset=data.as_dataset(rows),
        eval_dataset=data.as_dataset(eval_rows) if eval_rows else None,
        **models,
    )
    _check_trainer(trainer, config, world_size)
    trainer.lengths = lengths
    trainer.keep = config.output.keep
    interval_is_set = config.output.save_steps is not None or "save_steps" in config.trainer
    trainer.saves_by_time = not interval_is_set and not args.load_best_model_at_end
    trainer.process_group = process_group
    trainer.remove_callback(PrinterCallback)
    return trainer


def _check_trainer(trainer: Any, config: TRLConfig, world_size: int) -> None:
    """Raise RLHFError E04 if accelerate found other processes, C17 if TRL would leave out a loss."""
    count = trainer.accelerator.num_processes
    if count != world_size:
        processes = "process" if count == 1 else "processes"
        text = f"accelerate found {count} {processes}, {world_size} train together"
        raise RLHFError("E04", text, hint="start them with --nproc N, or with torchrun")

    text_config = trainer.model.config.get_text_config()
    if getattr(trainer, "aux_loss_enabled", False) and not hasattr(text_config, "num_experts"):
        text = f"TRL has no balancing loss for the experts of {text_config.model_type} models"
        raise RLHFError("C17", text, where=config.where("trainer"), hint="set trainer: {router_aux_loss_coef: 0}")


def _construct(config: TRLConfig, trl_class: Any, **kwargs: Any) -> Any:
    """Construct a TRL object without its warnings. Raises RLHFError C17 if TRL rejects the arguments."""
    if not terminal.has_mode("verbose"):
        transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of fields that are not set
            return trl_class(**kwargs)
    except (ValueError, TypeError, ImportError) as error:
        text = f"TRL rejects these settings: {' '.join(str(error).split())}"
        raise RLHFError("C17", text, where=config.where("trainer")) from error
