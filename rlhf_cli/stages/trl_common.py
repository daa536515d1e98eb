"""What the SFT and reward stages share: TRL's arguments out of our config, the log, saving, stopping and resuming."""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import transformers
import trl
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_cli import __version__, data, runs, terminal
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.data.texts import Rows
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import devices, sharding
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import setup
from rlhf_cli.system import StopWish
from rlhf_cli.tracking import Trackers
from rlhf_cli.tracking.metrics_log import MetricsLog, read_log

TOKENS = ("input_ids", "chosen_ids", "rejected_ids")  # columns of the rows that are read


def product(size: int, parts: int, processes: int, unit: str) -> str:
    """The batch of a step: `8 x 2 x 4 processes = 64 rows`."""
    group = f" x {processes} processes" if processes > 1 else ""
    return f"{size} x {parts}{group} = {size * parts * processes} {unit}"


def tokens_of(rows: Iterable[Mapping[str, Sequence[int]]]) -> int:
    """Tokens of all rows; 0 where they were read without a tokenizer."""
    return sum(len(row[column]) for row in rows for column in TOKENS if column in row)


def counted(rows: Sequence[Any], unit: str) -> str:
    """How many rows there are, and how many were left out of how many where some were."""
    left_out = rows.dropped_text() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}" + (f", {left_out}" if left_out else "")


def arithmetic(
    config: SFTConfig | RewardConfig,
    rows: Sequence[Mapping[str, Sequence[int]]],
    processes: int = 1,
    *,
    packed: int | None = None,
) -> str:
    """Of SFT and reward training. `packed`: the sequences that the rows were packed into, 0 before that is known."""
    settings, unit = (config.sft, "rows") if isinstance(config, SFTConfig) else (config.reward, "pairs")
    tokens, count = tokens_of(rows), len(rows) if packed is None else packed
    there = (
        counted(rows, unit) + (f", {tokens} tokens" if tokens else "") + (f" in {packed} sequences" if packed else "")
    )
    size, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    step = product(size, parts, processes, unit if packed is None else "sequences")
    whole = f"; in all {settings.steps(count, processes)} steps" if count or settings.max_steps else ""
    return f"{there}; a step: {step}{whole}"


NAMES = {"learning_rate": "lr"}
NOT_LOGGED = ("runtime", "per_second")  # times, which differ from run to run
STATE = "trainer_state.json"  # what transformers writes last into a checkpoint


class PlainTrainer:
    """Mixed into TRL's trainers: no model card of TRL's, batches of rows of like length that resume exactly, and
    checkpoints that count once each of several processes wrote its part.
    """

    lengths: Sequence[int] | None = None
    process_group = SINGLE_PROCESS
    keep = 2
    cost: runs.Cost
    losses: Sequence[float] = ()  # of each rank, since the last line of the log: transformers adds them up apart

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Ours is written with the model."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Transformers' own files, written in place: from the seal on they are a state to resume from."""
        trainer: Any = self
        states, name = Path(trainer.args.output_dir), f"checkpoint-{trainer.state.global_step}"
        with self.cost.one():
            self.process_group.run_on_main(lambda: runs.make_room(states, name))
            self.losses = self.process_group.all_gather_object(float(trainer._tr_loss))
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
            self.process_group.barrier()  # each has written the state of its random numbers
            best = Path(trainer.state.best_model_checkpoint or "").name
            self.process_group.run_on_main(lambda: runs.seal_state(states / name, keep=self.keep, spare={best}))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """No pickle of the arguments, which hold the hub's token: gone before the checkpoint can count as whole."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)  # type: ignore[attr-defined]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.lengths is None:
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        return data.LengthGroupedSampler(self.lengths, args.train_batch_size * self.process_group.world_size, args.seed)


def arguments(kind: Any, config: SFTConfig | RewardConfig, **changes: Any) -> Any:
    """TRL's arguments (`kind` is SFTConfig or RewardConfig of TRL). Raises RLHFError C17 for what TRL refuses."""
    ours = config.sft if isinstance(config, SFTConfig) else config.reward
    gpu = devices.device().type == "cuda"
    same = (
        "learning_rate num_train_epochs per_device_train_batch_size per_device_eval_batch_size weight_decay adam_beta1 "
        "gradient_accumulation_steps lr_scheduler_type max_grad_norm adam_beta2 adam_epsilon gradient_checkpointing"
    )
    settings = {
        **{name: getattr(ours, name) for name in same.split()},
        "output_dir": str(config.folder / "state"),
        "seed": config.seed,
        "max_steps": ours.max_steps or -1,
        "warmup_steps": ours.warmup_steps if ours.warmup_steps is not None else ours.warmup_ratio,  # below 1: a share
        "bf16": devices.use_bf16(ours.bf16),
        "use_cpu": not gpu,
        "ddp_find_unused_parameters": False,  # what learns takes part in each pass; the search for others takes time
        "dataloader_pin_memory": gpu,
        "logging_steps": ours.logging_steps,
        "logging_nan_inf_filter": False,  # it would hide what R01 is about
        "save_steps": config.output.save_steps or 0.1,
        # Without eval_steps the Follower asks for it, see there.
        "eval_strategy": "steps" if "data.eval" in config.sources() and ours.eval_steps else "no",
        "eval_steps": ours.eval_steps,
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cache": True,  # for what is saved: TRL's own forwards do without a cache
        **changes,
        **config.trainer,
    }
    args = _trl(config, kind, **settings)
    args._n_gpu = min(args.n_gpu, 1)  # transformers would split each batch over all GPUs, and call it one of that size
    return args


def build(
    kind: Any,
    config: SFTConfig | RewardConfig,
    lengths: Sequence[int] | None,
    process_group: ProcessGroup,
    **parts: Any,
) -> Any:
    """TRL's trainer (`kind` with PlainTrainer mixed in) of its parts.

    Raises RLHFError C17 for what TRL refuses, E04 where accelerate has found other processes than `ranks`.
    """
    trainer = _trl(config, kind, **parts)
    if (found := trainer.accelerator.num_processes) != process_group.world_size:
        text = f"accelerate found {found} process{'es' * (found > 1)}, {process_group.world_size} train together"
        raise RLHFError("E04", text, hint="take the variables ACCELERATE_* out of the environment, or use --nproc N")
    trainer.lengths, trainer.keep, trainer.process_group = lengths, config.output.keep, process_group
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


def train(
    trainer: Any,
    config: SFTConfig | RewardConfig,
    label: str,
    rows: Sequence[Mapping[str, Sequence[int]]],
    trackers: ExitStack,
) -> tuple[int, MetricsLog]:
    """Train to the end, from the newest whole checkpoint in state/ where there is one.

    Returns the steps, and the log for what is measured of the finished model: its trackers are open as long as the
    stack `trackers`. `rows`, what the trainer was given, are counted in a line before the first step.
    SIGTERM or SIGINT: saves after the step and raises SystemExit(143 or 130).
    Raises RLHFError R01 for a loss that is not finite.
    """
    folder, process_group = config.folder, trainer.process_group
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    count = len(trainer.train_dataset)
    setup.warn_intervals(config, settings.steps(count, process_group.world_size))
    packed = count if isinstance(config, SFTConfig) and config.sft.packing else None
    terminal.say(f"{label:<8} {arithmetic(config, rows, process_group.world_size, packed=packed)}")
    checkpoint = process_group.run_on_main(lambda: runs.latest_state(folder / "state"))
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8")) if checkpoint else {}
    sums = state["stateful_callbacks"]["Follower"]["attributes"] if checkpoint else {}
    told = Trackers(config)
    log = MetricsLog(folder / "metrics.jsonl", sums.get("log"), told)
    trackers.enter_context(told)
    if checkpoint:
        terminal.say(f"{label:<8} resumes at step {state['global_step']} of {state['max_steps']}")
    if checkpoint and state["global_step"] >= state["max_steps"]:
        steps = int(state["max_steps"])
        with _numbers_alone(checkpoint):
            best = state.get("best_model_checkpoint") if trainer.args.load_best_model_at_end else None
            trainer._load_from_checkpoint(str(best or checkpoint))  # train() would take one step too many
    else:
        steps = _take_steps(trainer, checkpoint, log, label, sums)
    sharding.disable_zero3()
    return steps, log


def log_last(log: MetricsLog, steps: int, measured: Mapping[str, float]) -> None:
    """Log the evaluation of the finished model as the trainer logs its own, with `eval_` before each name."""
    newest: dict[str, Any] = next((line for line in reversed(read_log(log.path)) if "num_tokens" in line), {})
    known = {
        ours: newest[name] for name, ours in (("num_tokens", "eval_num_tokens"), ("epoch", "epoch")) if name in newest
    }
    log.log(steps, {**{f"eval_{name}": value for name, value in measured.items()}, **known})


def _take_steps(trainer: Any, checkpoint: Path | None, log: MetricsLog, label: str, sums: Mapping[str, Any]) -> int:
    trainer.cost = runs.Cost()
    with StopWish() as stop:
        follower = Follower(trainer, log, label, stop, sums)
        trainer.add_callback(follower)
        try:
            with _numbers_alone(checkpoint), trainer.process_group.translate_dist_errors():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            follower.close()
    terminal.say(f"{label:<8} {trainer.cost}")
    return int(trainer.state.max_steps)


@contextmanager
def _numbers_alone(checkpoint: Path | None) -> Iterator[None]:
    """Within, a checkpoint whose pickles would run code is refused (M05): torch reads numbers out of them, no more."""
    try:
        yield
    except UnpicklingError as error:
        if checkpoint is None:
            raise
        text = f"{shown(checkpoint)} holds something else than numbers, none of which was run"
        raise RLHFError("M05", text, hint="remove that checkpoint; an older one is used where there is one") from error


class Follower(TrainerCallback, ExportableState):
    """Goes along with a training: progress, metrics.jsonl, and a checkpoint that a stop signal asks for."""

    def __init__(self, trainer: Any, log: MetricsLog, label: str, stop: StopWish, resumed: Mapping[str, Any]) -> None:
        self.trainer, self.log, self.label, self.stop, self.resumed = trainer, log, label, stop, resumed
        self.bar: Progress | None = None
        self.evaluation: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The progress starts where the checkpoint left off, and so do the sums behind the next line of the log."""
        self.bar = Progress(self.label, state.max_steps, "step", done=state.global_step)
        self.bar.__enter__()
        trainer = self.trainer
        if sums := self.resumed:
            trainer._tr_loss += sums["losses"][trainer.process_group.rank]
            trainer._globalstep_last_logged = sums["logged_at"]
            trainer._total_train_tokens = sums["tokens"]
            for name, values in sums["metrics"]:
                trainer._metrics["train"][name] = list(values)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **kwargs: Any) -> None:
        """The sampler is told the epoch: where several processes go on in the middle of one, accelerate does not."""
        inner = train_dataloader.batch_sampler
        while hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        if hasattr(inner.sampler, "set_epoch"):
            inner.sampler.set_epoch(int(state.epoch))

    def state(self) -> dict[str, Any]:
        """What transformers forgets of the log in a checkpoint: sums since the last line, tokens since the start."""
        trainer = self.trainer
        sums = {
            "losses": trainer.losses,
            "logged_at": getattr(trainer, "_globalstep_last_logged", 0),
            "tokens": trainer._total_train_tokens,
            "metrics": [[name, list(values)] for name, values in trainer._metrics["train"].items()],  # in this order
            "log": self.log.mark(trainer.state.global_step),
        }
        return {"args": {}, "attributes": sums}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is always logged, a stop signal saves at once, and what is saved is never broken (R01).

        An epoch's evaluation comes with its last step: transformers would make it after that step's checkpoint, so
        that a run which goes on from there lacks it. After the run's last step there is none: the stage measures the
        finished model by a pass of its own. Only where the best checkpoint is looked for the last one counts, too.
        """
        assert self.bar
        self.bar.advance()
        self.stop.settle(self.trainer.process_group.all_gather_object)
        last = state.global_step >= state.max_steps
        control.should_log |= last
        control.should_save |= self.stop.wished is not None and not last
        if self.trainer.eval_dataset is not None and args.eval_strategy == "no":
            control.should_evaluate |= state.epoch == int(state.epoch)
        control.should_evaluate &= not last or args.load_best_model_at_end
        if control.should_save and not all(
            bool(sharding.zero3_shard(w).isfinite().all()) for w in self.trainer.model.parameters()
        ):
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

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any) -> None:
        """The batches of an evaluation are counted within the step."""
        if self.evaluation is None:
            self.evaluation = Progress("evaluation: batch", len(eval_dataloader), "")
            self.evaluation.__enter__()
        self.evaluation.advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The evaluation has ended."""
        if self.evaluation:
            self.evaluation.__exit__(None, None, None)
        self.evaluation = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The stop signal is obeyed."""
        self.stop.settle(self.trainer.process_group.all_gather_object)  # it may come during the save
        if self.stop.wished and state.global_step < state.max_steps:
            step = f"step {state.global_step} of {state.max_steps}"
            terminal.say(f"{self.label:<8} stopped at {step}, saved; the same command goes on from here")
            self.trainer.process_group.barrier()  # who ends first has the others ended
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
    return parent.hub or (f"the {parent.stage} stage" if parent.stage != runs.FOREIGN else parent.path.name)


def card(config: SFTConfig | RewardConfig, tag: str, text: str) -> str:
    """A model card: what the model is, and with what it was made."""
    ours, library = config.model.adapters, "transformers"
    if ours:
        library = "peft"
        text += (
            f"\n\nThese are adapters alone ({'LoRA' if ours.kind == 'lora' else 'QLoRA'}, rank {ours.r}, alpha "
            f"{ours.lora_alpha}): they belong beside the weights that they were trained on, which "
            "`adapter_config.json` names."
        )
    made = f"Made by rlhf-cli {__version__} with TRL {trl.__version__} and transformers {transformers.__version__}."
    return f"---\nlibrary_name: {library}\ntags: [rlhf-cli, {tag}]\n---\n\n{text}\n\n{made}\n"
