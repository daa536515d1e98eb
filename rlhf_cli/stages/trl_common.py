"""TRL training shared by SFT, reward and DPO: arguments, trainer mixin, log, checkpoints, stopping and resuming."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
import trl
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_cli import __version__, data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.training import TRLConfig
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import build, devices, load, lora, save, sharding
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import setup
from rlhf_cli.stages.training_setup import describe_batches, packing_strategy, settings_of
from rlhf_cli.system import GracefulStop
from rlhf_cli.tracking import MetricsLog, Trackers, read_log

LOG_NAMES = {"learning_rate": "lr"}
NOT_LOGGED = ("runtime", "per_second")  # timings, which differ between identical runs
STATE_FILE = "trainer_state.json"  # the last file transformers writes into a checkpoint
TRIM_STEPS = 4  # optimizer steps between two looks at freed memory that malloc keeps: giving it back takes time, too
CALLBACK_STATE = "Follower"  # key of TrainingCallback's state in STATE_FILE


# Trainer


class TrainerMixin:
    """Mixin for TRL's trainers: length-grouped batches that resume exactly, and sealed checkpoints.

    A checkpoint counts once every process has written its part. TRL's model card and the pickled arguments are omitted.
    """

    lengths: Sequence[int] | None = None
    process_group = SINGLE_PROCESS
    keep = 2
    cost: runs.CheckpointTimer
    losses: Sequence[float] = ()  # summed since the last log line, per rank: transformers accumulates them separately

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: `save.save_model` writes the model card."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write transformers' files in place, then seal them as a checkpoint to resume from."""
        trainer: Any = self
        states, name = Path(trainer.args.output_dir), f"checkpoint-{trainer.state.global_step}"
        with self.cost.measure():
            self.process_group.run_on_main(lambda: runs.begin_state(states, name))
            self.losses = self.process_group.all_gather_object(float(trainer._tr_loss))
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
            self.process_group.barrier()  # until every rank has written its random state
            best = Path(trainer.state.best_model_checkpoint or "").name
            self.process_group.run_on_main(lambda: runs.seal_state(states / name, keep=self.keep, spare={best}))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Delete the pickled arguments, which contain the Hub token, before the checkpoint is sealed."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)  # type: ignore[attr-defined]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.lengths is None:
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        return data.LengthGroupedSampler(self.lengths, args.train_batch_size * self.process_group.world_size, args.seed)


def training_args(args_class: Any, config: TRLConfig, **overrides: Any) -> Any:
    """Build TRL's arguments, of one of its config classes. Raises RLHFError C17 if TRL rejects them."""
    section: Any = settings_of(config)
    gpu = devices.device().type == "cuda"
    same_names = (
        "learning_rate num_train_epochs per_device_train_batch_size per_device_eval_batch_size weight_decay adam_beta1 "
        "gradient_accumulation_steps lr_scheduler_type max_grad_norm adam_beta2 adam_epsilon gradient_checkpointing "
        "logging_steps eval_steps"
    )
    warmup = section.warmup_ratio if section.warmup_steps is None else section.warmup_steps
    fields = {
        **{name: getattr(section, name) for name in same_names.split()},
        "output_dir": str(config.folder / "state"),
        "seed": config.seed,
        "max_steps": section.max_steps or -1,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1} if "min_lr" in section.lr_scheduler_type else None,  # as in PPO
        "warmup_steps": warmup,  # below 1: a ratio
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
    rows: list[dict[str, Any]],
    eval_rows: list[dict[str, Any]],
    lengths: Sequence[int] | None,
    process_group: ProcessGroup,
    **models: Any,
) -> Any:
    """Build a TRL trainer; `trainer_class` has TrainerMixin mixed in. `lengths` groups rows of similar length.

    Raises RLHFError C17 if TRL rejects the settings, E04 if accelerate found another number of processes.
    """
    if config.trainer.get("lr_scheduler_kwargs") is None and args.lr_scheduler_type == "warmup_stable_decay":
        steps = settings_of(config).steps(len(rows), process_group.world_size)  # MiniCPM, arXiv 2404.06395, section 4
        args.lr_scheduler_kwargs = {"num_decay_steps": math.ceil(steps / 10)}
    datasets = {
        "train_dataset": data.as_dataset(rows),
        "eval_dataset": data.as_dataset(eval_rows) if eval_rows else None,
    }
    text_config = models["model"].config.get_text_config()
    if getattr(text_config, "is_moe", True) is False:  # Doge without experts, whose config has their fields
        args.router_aux_loss_coef = 0.0
    trainer = _construct(config, trainer_class, args=args, **datasets, **models)
    if (count := trainer.accelerator.num_processes) != process_group.world_size:
        text = f"accelerate found {count} process{'es' * (count > 1)}, {process_group.world_size} train together"
        raise RLHFError("E04", text, hint="start them with --nproc N, or with torchrun")
    if getattr(trainer, "aux_loss_enabled", False) and not hasattr(text_config, "num_experts"):
        text = f"TRL has no balancing loss for the experts of {text_config.model_type} models"
        raise RLHFError("C17", text, where=config.where("trainer"), hint="set trainer: {router_aux_loss_coef: 0}")
    trainer.lengths, trainer.keep, trainer.process_group = lengths, config.output.keep, process_group
    trainer.remove_callback(PrinterCallback)
    return trainer


def _construct(config: TRLConfig, trl_class: Any, **kwargs: Any) -> Any:
    """Construct a TRL object without its warnings. Raises RLHFError C17 if TRL rejects the arguments."""
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of fields that are not set
            return trl_class(**kwargs)
    except (ValueError, TypeError, ImportError) as error:
        text = f"TRL rejects these settings: {' '.join(str(error).split())}"
        raise RLHFError("C17", text, where=config.where("trainer")) from error


# Training


def train_and_save(
    trainer: Any, config: TRLConfig, stage: setup.StageRun, rows: Sequence[Mapping[str, Sequence[int]]], tokenizer: Any,
    stop_token_id: int, note: str, trackers: ExitStack,
) -> tuple[int, MetricsLog, Any]:  # fmt: skip
    """Train to the end, resuming from the newest valid checkpoint in state/, and save to RUN/STAGE/model.

    Return the number of steps, the log and `trained_base`. The log stays open, with its trackers, until the stack
    `trackers` closes. `rows` are the trainer's, for the line printed before the first step; the card has `note`.
    After SIGTERM or SIGINT, save after the step and raise SystemExit(143 or 130).
    Raises RLHFError R01 if the loss is not finite.
    """
    folder, world_size, count = config.folder, trainer.process_group.world_size, len(trainer.train_dataset)
    steps = settings_of(config).steps(count, world_size)
    setup.warn_long_intervals(config, steps)
    packed = count if packing_strategy(config) else None
    terminal.say(f"{config.stage:<8} {describe_batches(config, rows, world_size, packed=packed)}")
    checkpoint = trainer.process_group.run_on_main(partial(_newest_checkpoint, folder / "state", steps))
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")) if checkpoint else {}
    resumed = state["stateful_callbacks"][CALLBACK_STATE]["attributes"] if checkpoint else {}
    run_trackers = Trackers(config)
    log = MetricsLog(folder / "metrics.jsonl", resumed.get("log"), run_trackers)
    trackers.enter_context(run_trackers)
    # Before the first checkpoint: transformers saves no generation config as Llama 2's, a temperature without sampling.
    save.set_special_token_ids(trainer.model, tokenizer, stop_token_id)
    if checkpoint:
        terminal.say(f"{config.stage:<8} resumes at step {state['global_step']} of {state['max_steps']}")
    if checkpoint and state["global_step"] >= state["max_steps"]:
        steps = int(state["max_steps"])
        with _reject_unsafe_pickles(checkpoint):
            best = state.get("best_model_checkpoint") if trainer.args.load_best_model_at_end else None
            trainer._load_from_checkpoint(str(best or checkpoint))  # train() would make one step too many
    else:
        steps = _run_trainer(trainer, checkpoint, log, config.stage, resumed)
    sharding.disable_zero3()
    card, model = model_card(config, stage.parents, len(rows), steps, note), trainer.model
    build.disable_router_logits(model)
    trainer.process_group.gather_results(partial(save.save_trained, model, tokenizer, config.folder / "model", card))
    return steps, log, trained_base(trainer, config)


def _newest_checkpoint(folder: Path, steps: int) -> Path | None:
    runs.require_free(folder, "checkpoint-", steps)
    return runs.latest_state(folder)


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
    folder, bf16 = config.folder / "model", devices.use_bf16(settings_of(config).bf16)
    if base is None:
        model = loader(folder, **load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16))
        return setup.place_frozen(model, bf16=bf16)
    adapted = load.read_config(folder, options.trust_remote_code)
    if bf16 or base.dtype != torch.float32:
        base = lora.load_adapter(base, folder, adapted, folder).get_base_model()
    else:
        lora.merge_adapter(base, folder, adapted)
    return setup.place_frozen(base, bf16=bf16)


def log_final_evaluation(log: MetricsLog, steps: int, metrics: Mapping[str, float]) -> None:
    """Log the finished model's evaluation like the trainer's own ones, with `eval_` before each name."""
    last: dict[str, Any] = next((line for line in reversed(read_log(log.path)) if "num_tokens" in line), {})
    columns = {"num_tokens": "eval_num_tokens", "epoch": "epoch"}
    progress = {columns[name]: last[name] for name in columns if name in last}
    log.log(steps, {f"eval_{name}": value for name, value in metrics.items()} | progress)


def _run_trainer(trainer: Any, checkpoint: Path | None, log: MetricsLog, stage: str, resumed: Mapping[str, Any]) -> int:
    trainer.cost = runs.CheckpointTimer()
    with GracefulStop() as stop, ExitStack() as bars:
        trainer.add_callback(TrainingCallback(trainer, log, stage, stop, bars, resumed))
        with _reject_unsafe_pickles(checkpoint), trainer.process_group.translate_dist_errors():
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


class TrainingCallback(TrainerCallback, ExportableState):
    """Progress, metrics.jsonl, non-finite checks, and graceful stops of a TRL training run."""

    bar: Progress
    evaluation: Progress | None = None
    memory = 0  # of the process, when freed memory was given back the last time

    def __init__(
        self, trainer: Any, log: MetricsLog, stage: str, stop: GracefulStop, bars: ExitStack, resumed: Mapping[str, Any]
    ) -> None:
        self.trainer, self.log, self.stage, self.stop, self.bars = trainer, log, stage, stop, bars
        self.resumed = resumed  # `state()` of the checkpoint, empty without one

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the progress bar, and restore the sums behind the next log line, from the checkpoint."""
        state.compute_steps(args, state.max_steps)  # a checkpoint has the intervals of its start
        self.bar = self.bars.enter_context(Progress(self.stage, state.max_steps, "step", done=state.global_step))
        trainer = self.trainer
        if sums := self.resumed:
            trainer._tr_loss += sums["losses"][trainer.process_group.rank]
            trainer._globalstep_last_logged = sums["logged_at"]
            trainer._total_train_tokens = sums["tokens"]
            trainer._metrics["train"].update((name, list(values)) for name, values in sums["metrics"])

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

        The last step is always logged, and a stop signal saves immediately. An epoch's evaluation belongs to its last
        step: transformers would make it after that step's checkpoint, so that a resumed run would miss it. The run's
        last step has none, because the stage measures the finished model itself, unless the best checkpoint is loaded.
        """
        self.bar.advance()
        if state.global_step % TRIM_STEPS == 0 and devices.device().type == "cpu":
            self.memory = devices.limit_memory(self.memory)
        self.stop.sync(self.trainer.process_group.all_gather_object)
        last = state.global_step >= state.max_steps
        control.should_log |= last
        control.should_save |= self.stop.requested is not None and not last
        if self.trainer.eval_dataset is not None and args.eval_strategy == "no":
            control.should_evaluate |= state.epoch == int(state.epoch)
        control.should_evaluate &= not last or args.load_best_model_at_end
        if control.should_save and not has_finite_weights(self.trainer.model):
            raise _not_finite_error("a weight", math.nan, args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Write a line of metrics.jsonl. Raises RLHFError R01 if the loss or the gradient norm is not finite."""
        metrics = {name: value for name, value in logs.items() if not name.endswith(NOT_LOGGED)}
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise _not_finite_error(name, value, args, state)
        if "loss" in metrics:
            self.bar.advance(0, note=f"loss {metrics['loss']:.4f}")
        if {"loss", "eval_loss"} & metrics.keys():
            self.log.log(state.global_step, {LOG_NAMES.get(name, name): value for name, value in metrics.items()})

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any) -> None:
        if self.evaluation is None:
            self.evaluation = Progress("evaluation: batch", len(eval_dataloader), "").__enter__()
        self.evaluation.advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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


TrainingCallback.__name__ = CALLBACK_STATE  # transformers stores a callback's state under its class name


def has_finite_weights(model: Any) -> bool:
    """Return True if no trained weight of this process is nan or infinite.

    Their sums show it. Tensor.isfinite allocates 1.5 times a float32 weight: 0.9 GB for 151,936 embeddings of 1,024.
    """
    trained = (sharding.zero3_shard(weight).detach() for weight in model.parameters() if weight.requires_grad)
    return all(math.isfinite(weight.sum(dtype=torch.float32)) for weight in trained)


def _not_finite_error(name: str, value: float, args: Any, state: Any) -> RLHFError:
    hint = f"lower the learning rate, or look for odd rows; good checkpoints are in {shown(args.output_dir)}"
    return RLHFError("R01", f"{name} is {value} at step {state.global_step}", hint=hint)


# Model card


def model_card(config: TRLConfig, parents: Mapping[str, Parent], num_rows: int, steps: int, note: str) -> str:
    """Return a model card: how the model was trained, `note`, the kind of adapters, and the library versions."""
    parent, adapters = parents.get("model.path"), config.model.adapters
    settings: Any = settings_of(config)
    origin = "fresh weights"
    if parent:  # without local paths
        origin = parent.hub or (f"the {parent.stage} stage" if parent.stage != runs.FOREIGN else parent.path.name)
    kind, tag = ("reward", "reward-model") if config.stage == "reward" else ("causal language", config.stage)
    text = (
        f"A {kind} model, trained from {origin} on {num_rows} rows of {Path(config.data.train).name}: {steps} steps, "
        f"learning rate {settings.learning_rate:g}. {note}"
    )
    if adapters:
        text += (
            f"\n\nThese are only adapters ({'LoRA' if adapters.kind == 'lora' else 'QLoRA'}, rank {adapters.r}, alpha "
            f"{adapters.lora_alpha}) of the weights that `adapter_config.json` names."
        )
    versions = f"Made by rlhf-cli {__version__} with TRL {trl.__version__} and transformers {transformers.__version__}."
    head = f"library_name: {'peft' if adapters else 'transformers'}\ntags: [rlhf-cli, {tag}]"
    return f"---\n{head}\n---\n\n{text}\n\n{versions}\n"
