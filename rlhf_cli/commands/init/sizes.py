"""What the sizes of a run follow from: lengths of the texts, the model, and how fast this machine is."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from rlhf_cli import runs
from rlhf_cli.commands.init import lengths as init_lengths
from rlhf_cli.commands.init.lengths import Lengths, Speed
from rlhf_cli.commands.init.split import Parts, distinct
from rlhf_cli.models import devices, load


@dataclass(frozen=True)
class Facts:
    """What is known of the data, the model and the machine."""

    prompts: Mapping[str, int]  # part -> different prompts
    pairs: Mapping[str, int]  # part -> pairs
    rows: Mapping[str, int]  # file of data/ -> its rows, where all of them are taken
    lengths: Lengths
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    device: str
    memory: int  # bytes
    speed: Speed | None  # None where the model does not fit

    def __str__(self) -> str:
        speed = ""
        if self.speed:
            speed = f", trains {self.speed.trained:.0f} and writes {self.speed.written:.0f} tokens a second"
        return (
            f"prompts of {self.lengths.prompt_mean:.0f} tokens, answers of {self.lengths.answer_mean:.0f}; the base "
            f"model has {_short(self.parameters)} parameters; {self.device} with {self.memory / 1e9:.0f} GB{speed}"
        )


def gather(folder: Path, lengths: Lengths, parts: Parts, rows: Mapping[str, int]) -> Facts:
    """Look at the model of a folder, and measure the machine. Raises RLHFError M01, M07, M08."""
    config = load.read_config(folder).get_text_config()
    parameters = count_parameters(folder)
    memory = _memory()
    fits = 20 * parameters < memory  # weights, gradients and some activations
    return Facts(
        prompts={name: len(distinct(part)) for name, part in parts.items()},
        pairs={name: len(part) for name, part in parts.items()},
        rows=rows,
        lengths=lengths,
        parameters=parameters,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        device=_device_name(),
        memory=memory,
        speed=init_lengths.measure_speed(folder) if fits else None,
    )


def count_parameters(folder: Path) -> int:
    """Parameters in the safetensors files of a folder, by their headers alone; of an adapter those of its base."""
    if base := runs.find_base(folder):
        return count_parameters(base)
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                shape = file.get_slice(name).get_shape()
                total += torch.Size(shape).numel()
    return total


def _memory() -> int:
    return devices.memory_bytes()


def _device_name() -> str:
    return torch.cuda.get_device_name() if devices.device().type == "cuda" else f"CPU, {os.cpu_count()} cores"


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


# Peak learning rates at 1 G parameters; they grow by parameters ** -0.6 towards smaller models. Anchors: the defaults
# of this package (2e-5, 1e-5, 3e-6: see `rlhf schema`), and what the demo's 0.6 M bear (docs/results/demo.md).
RATES = {"sft": 2e-5, "reward": 1e-5, "ppo": 3e-6}
MOST = {"sft": 1e-3, "reward": 1e-3, "ppo": 2e-4}  # for the smallest; PPO with more ran away from SFT within 20 updates
GROWTH = 0.6
ACTIVATIONS = 68  # bytes a token, layer, hidden unit: twice the 34 of 16 bits (Korthikanti et al. 2022, eq. 1)
PER_WEIGHT = {"train": 16, "ppo": 40}  # bytes a parameter: AdamW in float32; two such models and two that are only read
FILES = {"sft": "sft", "reward": "pairs"}  # what a stage trains on, in data/
SHARE = {"sft": 0.2, "reward": 0.2, "ppo": 0.5}  # of the minutes; the rest is for eval
EVALUATION = 0.25  # of the minutes of sft and reward, for their evaluations
MINUTES = {"cpu": 30.0, "cuda": 480.0}
UPDATES = 50  # of PPO, at least: the demo's reward is near its peak by then (docs/results/demo.md)
EPISODES = 64  # an update
EPOCHS = 4  # of PPO: its default
FEWEST = 10  # updates, steps: less is no training
# SFT of few rows makes more passes, up to this many steps or passes: docs/your-own-data.md has what they are worth.
FEW_STEPS, MOST_PASSES = 100, 8
FEWEST_HELD_OUT = 64  # rows, prompts, where there are so many: a share is then known to 0.12
MOST_JUDGED = 512  # prompts of eval: eval.n's default
BEST_OF = 4
SNAPSHOTS = 7  # of PPO, which answer too: those of output.snapshots but the finished policy
READ = 1 / 3  # of the time that learning from a row takes: a pass without gradients


@dataclass(frozen=True)
class Training:
    """Sizes of sft or reward."""

    learning_rate: str
    epochs: int
    max_steps: int | None  # where the minutes do not allow whole epochs
    rows: int  # a device reads at once
    parts: int  # gradient accumulation
    steps: int
    usual: int  # epochs, were there no fewest steps
    held_out: int  # rows of the evaluation
    of_held_out: int  # rows there are, of which the time may not allow all

    def evaluated(self, unit: str) -> str:
        """How many rows are evaluated, in words."""
        return _of(self.held_out, self.of_held_out, unit)


@dataclass(frozen=True)
class Sizes:
    """What the YAMLs say."""

    sft: Training
    reward: Training
    ppo_rate: str
    total_episodes: int
    ppo_rows: int
    ppo_parts: int
    samples: int  # responses to each prompt of an update
    eval_n: int
    of_eval_n: int  # prompts there are
    eval_rows: int
    checkpointing: bool
    minutes: int | None  # in all, expected; None where nothing could be measured
    notes: tuple[str, ...]

    @property
    def updates(self) -> int:
        """Of PPO."""
        return self.total_episodes // (self.ppo_rows * self.ppo_parts)

    @property
    def judged(self) -> str:
        """How many prompts `rlhf eval` takes, in words."""
        if self.eval_n == MOST_JUDGED < self.of_eval_n:
            return f"of {self.of_eval_n} held-out prompts: these tell a win rate to 0.04"
        return _of(self.eval_n, self.of_eval_n, "held-out prompts")


def choose(known: Facts, minutes: float | None) -> Sizes:
    """Sizes that fit; `minutes` is what the whole run may take (None: 30 on a CPU, 480 on a GPU)."""
    memory = {name: 0.8 * known.memory - weight * known.parameters for name, weight in PER_WEIGHT.items()}
    tight = min(memory.values()) < _row_bytes(known) * 8
    rows = _rows(memory["train"], _row_bytes(known))
    ppo_rows = min(_rows(memory["ppo"], _row_bytes(known) * 2), EPISODES)
    samples = _samples(known.prompts["prompts"])
    sizes = Sizes(
        sft=_training("sft", known, rows),
        reward=_training("reward", known, max(1, rows // 2)),
        ppo_rate=rate("ppo", known.parameters),
        total_episodes=_whole_updates(max(UPDATES * EPISODES, 3 * known.prompts["prompts"])),
        ppo_rows=ppo_rows,
        ppo_parts=EPISODES // ppo_rows,
        samples=samples,
        eval_n=min(MOST_JUDGED, known.prompts["held-out"]),
        of_eval_n=known.prompts["held-out"],
        eval_rows=min(64, 4 * ppo_rows),
        checkpointing=tight,
        minutes=None,
        notes=_notes(known, memory),
    )
    return _within(sizes, known, minutes)


def rate(stage: str, parameters: int) -> str:
    """A peak learning rate for a model of this size, to one digit, as YAML writes it."""
    exact = min(MOST[stage], RATES[stage] * (1e9 / parameters) ** GROWTH)
    return f"{exact:.0e}".replace("e-0", "e-")


def _training(stage: str, known: Facts, rows: int) -> Training:
    """Batches of 32 rows (of few data fewer, so that there are steps enough); the fewer rows, the more epochs."""
    count, held_out = known.rows[FILES[stage]], known.rows[f"{FILES[stage]}_eval"]
    batch = 32 if count >= 5000 else 16 if count >= 300 else 8
    batch = min(batch, _power_of_two(count / 2))
    epochs = 1 if count >= 10_000 else 2 if count >= 2000 else 3
    if stage == "reward":  # they overfit early (InstructGPT, appendix C.2)
        epochs = 1 if count >= 5000 else 2
    a_pass, usual = math.ceil(count / batch), epochs
    if stage == "sft":
        epochs = max(usual, min(MOST_PASSES, math.ceil(FEW_STEPS / a_pass)))
    rows, steps = min(rows, batch), a_pass * epochs
    learning_rate = rate(stage, known.parameters)
    return Training(learning_rate, epochs, None, rows, batch // rows, steps, usual, held_out, held_out)


def _within(sizes: Sizes, known: Facts, minutes: float | None) -> Sizes:
    """The sizes cut down to the minutes, by the speeds that were measured."""
    if known.speed is None:
        return sizes
    limit = 60 * (minutes or MINUTES["cpu" if known.device.startswith("CPU") else "cuda"])
    sft, sft_takes = _trained(sizes.sft, 1, known, SHARE["sft"] * limit)
    reward, reward_takes = _trained(sizes.reward, 2, known, SHARE["reward"] * limit)
    episode = _episode(known)
    allowed = _whole_updates(int(SHARE["ppo"] * limit / episode))
    episodes = max(FEWEST * EPISODES, min(sizes.total_episodes, allowed))
    answers = 2 * 2 + BEST_OF + SNAPSHOTS  # two models in two ways
    a_prompt = answers * (_writing(known) + known.lengths.row_mean / known.speed.trained)
    eval_n = _held_out(sizes.eval_n, 0.1 * limit / a_prompt)
    spent = sft_takes + reward_takes + episodes * episode + eval_n * a_prompt
    notes = sizes.notes
    if spent > 1.5 * limit:
        text = f"even the least that makes sense takes longer than {limit / 60:.0f} minutes here; a smaller base helps"
        notes = (*notes, text)
    return replace(
        sizes, sft=sft, reward=reward, total_episodes=episodes, eval_n=eval_n,
        minutes=max(1, math.ceil(spent / 60)), notes=notes,
    )  # fmt: skip


def _trained(training: Training, texts: int, known: Facts, limit: float) -> tuple[Training, float]:
    """A training of rows with so many texts each, cut down to `limit` seconds with its evaluations; and its seconds.

    It is evaluated after each pass.
    """
    assert known.speed
    a_row = texts * known.lengths.row_mean / known.speed.trained
    a_step, a_pass = training.rows * training.parts * a_row, training.steps / training.epochs
    evaluations = math.ceil(min(training.steps, max(FEWEST, limit / a_step)) / a_pass)
    held_out = _held_out(training.held_out, EVALUATION * limit / (evaluations * READ * a_row))
    evaluating = evaluations * held_out * READ * a_row
    steps = min(training.steps, max(FEWEST, _round(int((limit - evaluating) / a_step))))
    cut = steps if steps < training.steps else None
    return replace(training, max_steps=cut, steps=steps, held_out=held_out), steps * a_step + evaluating


def _held_out(there: int, allowed: float) -> int:
    """How many of the rows there are evaluated: what the time allows, but never so few that they tell nothing."""
    return min(there, max(FEWEST_HELD_OUT, _round(int(allowed))))


def _episode(known: Facts) -> float:
    """Seconds of one PPO episode: written, read by four models, then learnt from by two in each epoch."""
    assert known.speed
    return _writing(known) + (4 * READ + 2 * EPOCHS) * known.lengths.row_mean / known.speed.trained


def _writing(known: Facts) -> float:
    """Seconds of one response: those of a batch are written together, until the last of them ends."""
    assert known.speed
    return known.lengths.response_length / known.speed.written


def _row_bytes(known: Facts) -> float:
    return known.lengths.max_length * (ACTIVATIONS * known.hidden * known.layers + 8 * known.vocabulary)


def _rows(free: float, row: float) -> int:
    """The power of two from 1 to 32 that fits."""
    return min(32, _power_of_two(free / row))


def _power_of_two(limit: float) -> int:
    """The largest that does not pass the limit, at least 1."""
    return 2 ** int(math.log2(max(1.0, limit)))


def _samples(prompts: int) -> int:
    """Responses to a prompt, so that an update never asks for more prompts than there are."""
    return next(count for count in (1, 2, 4, 8, 16, 32, 64) if EPISODES // count <= max(prompts, 1))


def _notes(known: Facts, memory: dict[str, float]) -> tuple[str, ...]:
    if memory["ppo"] >= 0:
        return ()
    needed = PER_WEIGHT["ppo"] * known.parameters / 1e9
    return (
        f"PPO of {known.parameters / 1e9:.1f} G parameters needs about {needed:.0f} GB for its four models, this "
        f"machine has {known.memory / 1e9:.0f} GB: take a smaller base model, or run the folder on a larger machine",
    )


def _whole_updates(episodes: int) -> int:
    return max(1, round(episodes / EPISODES)) * EPISODES


def _round(count: int) -> int:
    """Two leading digits: more would only tell how busy the machine was."""
    digits = max(0, len(str(count)) - 2)
    return count // 10**digits * 10**digits


def _of(count: int, there: int, unit: str) -> str:
    return f"{count} of {there} {unit}, as the time allows" if count < there else f"all {count} {unit}"
