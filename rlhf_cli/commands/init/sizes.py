"""Batch sizes, epochs and learning rates of a run, from its texts, its model and the machine it is for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli.commands.init.limits import TokenLimits
from rlhf_cli.commands.init.templates import format_rate
from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import apply_overrides
from rlhf_cli.config.machinery.section import Origin
from rlhf_cli.config.machinery.yaml_io import YamlFile
from rlhf_cli.config.sections import LEARNING_RATE_FACTOR
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.models import build, devices, load, weight_files
from rlhf_cli.planning.duration import measure_passes
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.planning.placement import EPISODES_PER_UPDATE, FIRST, MemoryPlanner, Placement
from rlhf_cli.planning.target import Target
from rlhf_cli.runs.parents import Parent

# Peak learning rates at 1 G parameters; they grow by parameters ** -0.6 towards smaller models. Anchors: the defaults
# of this package (2e-5, 1e-5, 3e-6: see `rlhf schema`), and what works for the demo's 0.6 M (docs/results/demo.md).
BASE_LEARNING_RATES = {"sft": 2e-5, "reward": 1e-5, "ppo": 3e-6}
MAX_LEARNING_RATES = {"sft": 1e-3, "reward": 1e-3, "ppo": 2e-4}  # higher PPO rates diverged
LEARNING_RATE_EXPONENT = 0.6
TRAIN_FILES = {"sft": "sft", "reward": "pairs"}  # training file of a stage in data/
TIME_SHARES = {"sft": 0.2, "reward": 0.2, "ppo": 0.5, "eval": 0.1}  # of the time budget
CPU_MINUTES = 30.0  # the default time budget; `rlhf init --help` has both
GPU_MINUTES = 480.0
MIN_UPDATES = 50  # of PPO; the demo's reward is near its peak by then (docs/results/demo.md)
ANSWERS_PER_PROMPT = 3  # of PPO, if the time allows
PPO_EPOCHS = (4, 2, 1)  # the default of num_ppo_epochs, and fewer if that leaves time for more updates
TOLERANCE = 1.5  # times the budget, beyond which a note says so
MIN_STEPS = 10  # optimizer steps, or PPO updates
# SFT on few rows takes more epochs, up to this many steps or epochs (measured in docs/your-own-data.md).
TARGET_SFT_STEPS = 100
MAX_SFT_EPOCHS = 8
MIN_EVAL_PROMPTS = 64  # if there are so many; a share is then known to 0.12
MAX_EVAL_PROMPTS = 512  # the default of eval.n; a share is then known to 0.04
MAX_EVAL_ROWS = 512  # of sft and reward
NUM_SNAPSHOTS = 7  # of PPO that are evaluated: output.snapshots without the final policy
FORWARD_COST = 1 / 3  # of a forward pass, as a share of a training step
EVAL_BEST_OF = 4  # answers to a prompt in the evaluation
MIN_BF16_GAIN = 1.2  # on a CPU; a smaller one may be noise
UNMEASURED = "--minutes has no effect: the speed of this model cannot be measured here, so the data decide the sizes"
# The batch whose speed is measured.
BATCH_ROWS = 8
BATCH_TOKENS = 64
NEW_TOKENS = 16


@dataclass(frozen=True)
class Speed:
    """Speed of the base model in tokens per second."""

    training: float  # forward and backward
    generation: float
    bf16_gain: float | None = None  # on a CPU that is faster in bfloat16: the factor in training; these are its speeds


@dataclass(frozen=True)
class SizingInputs:
    """Measurements of the data, the model and the machine."""

    file_rows: Mapping[str, int]  # file of data/ -> its rows before truncation
    limits: TokenLimits
    parameters: int
    placement: Placement
    whole: Placement | None  # what whole weights would need, if they do not fit
    target: Target
    speed: Speed | None  # None if it cannot be measured here

    @property
    def dpo_rows(self) -> int | None:
        """Pairs at a time of the DPO baseline; None without it."""
        return (self.placement.rows or {}).get("dpo")


def measure_inputs(
    base: Parent,
    limits: TokenLimits,
    files: Mapping[str, Sequence[Any]],
    target: Target,
    *,
    adapters: str,
    hint: str,
    baselines: bool,
) -> SizingInputs:
    """Inspect the base model, choose how it is kept in memory, and measure its speed if it will run here.

    `files` has the rows of each file of data/, `adapters` is one of ADAPTERS; `baselines`: DPO must fit, too. Raises
    RLHFError M01, M07, M08, and E03 with `hint` if nothing fits.
    """
    config = load.read_config(base.model)
    planner = memory_planner(config, limits, target, baselines=baselines)
    placement, whole = planner.choose(adapters, hint=hint)

    parameters = build.causal_lm_from_config(config).num_parameters()
    runs_here = not target.planned and weight_files.count_parameters(base) > 0
    can_train = 20 * parameters < target.memory  # float32 weights, gradients and some activations
    return SizingInputs(
        file_rows={name: len(rows) for name, rows in files.items()},
        limits=limits,
        parameters=parameters,
        placement=placement,
        whole=whole,
        target=target,
        speed=measure_speed(base.model) if runs_here and can_train else None,
    )


def memory_planner(body: Any, limits: TokenLimits, target: Target, *, baselines: bool = False) -> MemoryPlanner:
    """Return the planner of a run from a base model with config `body`; with `baselines` for DPO, too."""
    generated = Lengths(limits.prompt_max, limits.response_length)
    lengths = {stage: Lengths(1, limits.max_length - 1) for stage in ("sft", "reward", "dpo")}
    lengths |= {"ppo": generated, "eval": generated}
    if not baselines:
        del lengths["dpo"]
    return MemoryPlanner(
        body,
        target,
        first={stage: FIRST[stage] for stage in lengths},
        lengths=lengths,
        make=lambda stage, overrides: _config(stage, overrides, limits),
    )


def _config(stage: str, overrides: Sequence[str], limits: TokenLimits) -> Config:
    """Return the config of a stage as far as its memory depends on it; no file of that name is read."""
    models = {"sft": "/sft", "reward": "/reward"}
    length = limits.response_length
    tree: dict[str, Any]
    if stage == "ppo":
        sizes = {"total_episodes": EPISODES_PER_UPDATE, "response_length": length}
        tree = {"models": models, "data": {"prompts": "none"}, "ppo": sizes}
    elif stage == "eval":
        models["ppo"] = "/ppo"
        tree = {"models": models, "data": {"prompts": "none"}, "eval": {"temperature": 1.0, "response_length": length}}
    else:
        tree = {"model": {"path": "/base"}, "data": {"train": "none"}, stage: {"max_length": limits.max_length}}

    source = YamlFile("", {"run": "/run", **tree}, {}, [])
    apply_overrides(overrides, source, CONFIGS[stage])
    config = CONFIGS[stage].model_validate(source.tree)
    config._origin = Origin(Path(f"/run/{stage}.yaml"), f"{stage}.yaml")
    return config


def measure_speed(folder: Path) -> Speed:
    """Measure the speed of a folder's model, in both formats on a CPU that multiplies in bfloat16."""
    model = load.load_causal_lm(folder).to(devices.device())
    context = load.context_length(model.config.get_text_config())
    width = min(BATCH_TOKENS, context or BATCH_TOKENS)
    new_tokens = min(NEW_TOKENS, width // 2)

    def measure(*, bf16: bool) -> Speed:
        times = measure_passes(
            model, BATCH_ROWS, new_tokens, width - new_tokens, new_tokens, EPISODES_PER_UPDATE, bf16=bf16
        )
        return Speed(BATCH_ROWS * width / times.train, EPISODES_PER_UPDATE * new_tokens / times.generate)

    if not devices.cpu_multiplies_bf16():
        return measure(bf16=devices.use_bf16(None))
    plain = measure(bf16=False)
    faster = measure(bf16=True)
    gain = faster.training / plain.training
    return replace(faster, bf16_gain=gain) if gain >= MIN_BF16_GAIN else plain


@dataclass(frozen=True)
class Training:
    """RunSizes of sft or reward."""

    learning_rate: str
    epochs: int
    max_steps: int | None  # if the time does not allow full epochs
    batch_rows: int  # per device
    accumulation_steps: int
    steps: int
    usual_epochs: int  # without the minimum number of steps
    eval_rows: int


@dataclass(frozen=True)
class RunSizes:
    """Values for the YAMLs."""

    sft: Training
    reward: Training
    ppo_rate: str
    total_episodes: int
    ppo_epochs: int
    samples: int  # responses per prompt
    eval_n: int
    minutes: int | None = None  # expected total; None if the speed could not be measured
    note: str = ""

    @property
    def updates(self) -> int:
        """Number of PPO updates."""
        return self.total_episodes // EPISODES_PER_UPDATE


def choose_sizes(inputs: SizingInputs, minutes: float | None) -> RunSizes:
    """Choose sizes that fit the memory and the time budget in minutes (None: 30 on a CPU, 480 on a GPU)."""
    rows = inputs.placement.rows
    assert rows
    prompts = inputs.file_rows["prompts"]
    sizes = RunSizes(
        sft=_training_sizes("sft", inputs, rows["sft"]),
        reward=_training_sizes("reward", inputs, rows["reward"]),
        ppo_rate=learning_rate("ppo", inputs.parameters, inputs.placement.adapters),
        total_episodes=_whole_updates(max(MIN_UPDATES * EPISODES_PER_UPDATE, ANSWERS_PER_PROMPT * prompts)),
        ppo_epochs=PPO_EPOCHS[0],
        samples=_samples_per_prompt(prompts),
        eval_n=min(MAX_EVAL_PROMPTS, inputs.file_rows["heldout"]),
    )
    if inputs.speed is None:
        return replace(sizes, note=UNMEASURED) if minutes else sizes
    default = GPU_MINUTES if inputs.target.gpu else CPU_MINUTES
    return _fit_time(sizes, inputs, inputs.speed, 60 * (minutes or default))


def learning_rate(stage: str, parameters: int, adapters: str | None = None) -> str:
    """Return the peak learning rate for a model of this size, to one digit, as written in YAML."""
    rate = BASE_LEARNING_RATES[stage] * (1e9 / parameters) ** LEARNING_RATE_EXPONENT
    if adapters:
        rate *= LEARNING_RATE_FACTOR
    return format_rate(min(MAX_LEARNING_RATES[stage], rate))


def _training_sizes(stage: str, inputs: SizingInputs, most_rows: int) -> Training:
    """Choose batches of 32 rows, or fewer for small data, and more epochs the fewer rows there are."""
    file = TRAIN_FILES[stage]
    count = inputs.file_rows[file]
    half = 2 ** int(math.log2(max(1.0, count / 2)))  # a power of two up to half of the rows
    batch = min(half, 32 if count >= 5000 else 16 if count >= 300 else 8)
    steps_per_epoch = math.ceil(count / batch)

    if stage == "reward":  # reward models overfit early (InstructGPT, appendix C.2)
        usual = 1 if count >= 5000 else 2
        epochs = usual
    else:
        usual = 1 if count >= 10_000 else 2 if count >= 2000 else 3
        epochs = max(usual, min(MAX_SFT_EPOCHS, math.ceil(TARGET_SFT_STEPS / steps_per_epoch)))

    batch_rows = min(most_rows, batch)
    return Training(
        learning_rate=learning_rate(stage, inputs.parameters, inputs.placement.adapters),
        epochs=epochs,
        max_steps=None,
        batch_rows=batch_rows,
        accumulation_steps=batch // batch_rows,
        steps=steps_per_epoch * epochs,
        usual_epochs=usual,
        eval_rows=min(inputs.file_rows[f"{file}_eval"], MAX_EVAL_ROWS),
    )


def _samples_per_prompt(prompts: int) -> int:
    """Return the fewest answers to a prompt, a power of two, with which an update takes no prompt twice."""
    samples = 1
    while EPISODES_PER_UPDATE // samples > prompts:
        samples *= 2
    return samples


def _whole_updates(episodes: int) -> int:
    return max(1, round(episodes / EPISODES_PER_UPDATE)) * EPISODES_PER_UPDATE


# Time


@dataclass(frozen=True)
class Pace:
    """Seconds that one row takes in training, and one response in generation."""

    row: float
    response: float  # a batch lasts until its last response ends

    def episode(self, epochs: int) -> float:
        """Generation, four forward passes, and two models trained per epoch."""
        return self.response + (4 * FORWARD_COST + 2 * epochs) * self.row

    @property
    def evaluated_prompt(self) -> float:
        """The responses of two models in two modes, best-of-n and the snapshots."""
        answers = 2 * 2 + EVAL_BEST_OF + NUM_SNAPSHOTS
        return answers * (self.response + self.row)


def _fit_time(sizes: RunSizes, inputs: SizingInputs, speed: Speed, limit: float) -> RunSizes:
    """Reduce the sizes to `limit` seconds, by the measured speed."""
    limits = inputs.limits
    pace = Pace(row=limits.row_mean / speed.training, response=limits.response_length / speed.generation)

    sft, sft_s = _fit_training_time(sizes.sft, pace.row, TIME_SHARES["sft"] * limit)
    # a pair is two rows
    reward, reward_s = _fit_training_time(sizes.reward, 2 * pace.row, TIME_SHARES["reward"] * limit)

    epochs, episodes = _fit_ppo_time(sizes.total_episodes, pace, TIME_SHARES["ppo"] * limit)

    allowed_prompts = _round_to_two_digits(int(TIME_SHARES["eval"] * limit / pace.evaluated_prompt))
    eval_n = min(sizes.eval_n, max(MIN_EVAL_PROMPTS, allowed_prompts))

    total = sft_s + reward_s
    if inputs.dpo_rows:  # beyond the time limit
        total += (1 + FORWARD_COST) * reward_s
    total += episodes * pace.episode(epochs)
    total += eval_n * pace.evaluated_prompt
    slow = f"even the minimum takes longer than {limit / 60:.0f} minutes here; a smaller base model helps"
    return replace(
        sizes,
        sft=sft,
        reward=reward,
        total_episodes=episodes,
        ppo_epochs=epochs,
        eval_n=eval_n,
        minutes=max(1, math.ceil(total / 60)),
        note=slow if total > TOLERANCE * limit else "",
    )


def _fit_ppo_time(most: int, pace: Pace, limit: float) -> tuple[int, int]:
    """Return the most epochs that leave time for MIN_UPDATES, and the episodes in `limit` seconds, up to `most`."""
    for epochs in PPO_EPOCHS:
        episodes = min(most, _whole_updates(int(limit / pace.episode(epochs))))
        if episodes >= MIN_UPDATES * EPISODES_PER_UPDATE:
            return epochs, episodes
    return epochs, max(MIN_STEPS * EPISODES_PER_UPDATE, episodes)


def _fit_training_time(training: Training, row_s: float, limit: float) -> tuple[Training, float]:
    """Reduce a training to `limit` seconds including an evaluation after each epoch; return it and its seconds.

    `row_s` is the time of one row in training, in seconds.
    """
    step_s = training.batch_rows * training.accumulation_steps * row_s
    steps_per_epoch = training.steps / training.epochs
    steps_without_eval = min(training.steps, max(MIN_STEPS, limit / step_s))
    evaluations = math.ceil(steps_without_eval / steps_per_epoch)
    eval_s = evaluations * training.eval_rows * FORWARD_COST * row_s

    allowed = _round_to_two_digits(int((limit - eval_s) / step_s))
    steps = min(training.steps, max(MIN_STEPS, allowed))
    max_steps = steps if steps < training.steps else None
    return replace(training, max_steps=max_steps, steps=steps), steps * step_s + eval_s


def _round_to_two_digits(count: int) -> int:
    """Round down to two leading digits, since the time measurement is noisy."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return count // unit * unit
