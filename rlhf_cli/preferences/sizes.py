"""The numbers of a run out of what is known of its data, its model and its machine. Pure arithmetic."""

import math
from dataclasses import dataclass, replace

from rlhf_cli.preferences.facts import Facts

# Peak learning rates at 1 G parameters; they grow by parameters ** -0.6 towards smaller models. Anchors: the defaults
# of this package (2e-5, 1e-5, 3e-6: see `rlhf schema`), and what the demo's 0.6 M bear (docs/demo.md).
RATES = {"sft": 2e-5, "reward": 1e-5, "ppo": 3e-6}
MOST = {"sft": 1e-3, "reward": 1e-3, "ppo": 2e-4}  # for the smallest; PPO with more ran away from SFT within 20 updates
GROWTH = 0.6
WORTH_IT = 1.25  # times the 99th percentile: up to there the longest rows are taken too
CONTEXT = 4096  # for a model that names no limit
ACTIVATIONS = 68  # bytes a token, layer, hidden unit: twice the 34 of 16 bits (Korthikanti et al. 2022, eq. 1)
PER_WEIGHT = {"train": 16, "ppo": 40}  # bytes a parameter: AdamW in float32; two such models and two that are only read
SHARE = {"sft": 0.2, "reward": 0.2, "ppo": 0.5}  # of the minutes; the rest is for eval
MINUTES = {"cpu": 30.0, "cuda": 480.0}
UPDATES = 50  # of PPO, at least: the demo's reward is near its peak by then (docs/demo.md)
EPISODES = 64  # an update
EPOCHS = 4  # of PPO: its default
FEWEST = 10  # updates, steps: less is no training
# SFT of few rows makes more passes, up to this many steps or passes: docs/your-own-data.md has what they are worth.
FEW_STEPS, MOST_PASSES = 100, 8
STEPS_EVAL = 64  # prompts, at least


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


@dataclass(frozen=True)
class Sizes:
    """What the YAMLs say."""

    max_length: int
    response_length: int
    sft: Training
    reward: Training
    ppo_rate: str
    total_episodes: int
    ppo_rows: int
    ppo_parts: int
    samples: int  # responses to each prompt of an update
    eval_n: int
    eval_rows: int
    checkpointing: bool
    minutes: int | None  # in all, expected; None where nothing could be measured
    notes: tuple[str, ...]

    @property
    def updates(self) -> int:
        """Of PPO."""
        return self.total_episodes // (self.ppo_rows * self.ppo_parts)


def choose(known: Facts, minutes: float | None) -> Sizes:
    """Sizes that fit; `minutes` is what the whole run may take (None: 30 on a CPU, 480 on a GPU)."""
    context = known.context or CONTEXT
    response_length = min(_up(known.answer_p95, 8), max(8, context - _up(known.prompt_p99, 8)), context // 2)
    longest = known.row_max if known.row_max <= WORTH_IT * known.row_p99 else known.row_p99
    max_length = min(_up(longest, 8), context)
    memory = {name: 0.8 * known.memory - weight * known.parameters for name, weight in PER_WEIGHT.items()}
    tight = min(memory.values()) < _row_bytes(known, max_length) * 8
    rows = _rows(memory["train"], _row_bytes(known, max_length))
    ppo_rows = min(_rows(memory["ppo"], _row_bytes(known, max_length) * 2), EPISODES)
    samples = _samples(known.prompts["prompts"])
    sizes = Sizes(
        max_length=max_length,
        response_length=response_length,
        sft=_training("sft", known, known.pairs["sft"], rows),
        reward=_training("reward", known, known.pairs["pairs"], max(1, rows // 2)),
        ppo_rate=rate("ppo", known.parameters),
        total_episodes=_whole_updates(max(UPDATES * EPISODES, 3 * known.prompts["prompts"])),
        ppo_rows=ppo_rows,
        ppo_parts=EPISODES // ppo_rows,
        samples=samples,
        eval_n=min(512, known.prompts["held-out"]),
        eval_rows=min(64, 4 * ppo_rows),
        checkpointing=tight,
        minutes=None,
        notes=_notes(known, longest, max_length, memory),
    )
    return _within(sizes, known, minutes)


def rate(stage: str, parameters: int) -> str:
    """A peak learning rate for a model of this size, to one digit, as YAML writes it."""
    exact = min(MOST[stage], RATES[stage] * (1e9 / parameters) ** GROWTH)
    return f"{exact:.0e}".replace("e-0", "e-")


def _training(stage: str, known: Facts, count: int, rows: int) -> Training:
    """Batches of 32 rows (of few data fewer, so that there are steps enough); the fewer rows, the more epochs."""
    batch = 32 if count >= 5000 else 16 if count >= 300 else 8
    batch = min(batch, _power_of_two(count / 2))
    epochs = 1 if count >= 10_000 else 2 if count >= 2000 else 3
    if stage == "reward":  # they overfit early (InstructGPT, appendix C.2)
        epochs = 1 if count >= 5000 else 2
    a_pass, usual = math.ceil(count / batch), epochs
    if stage == "sft":
        epochs = max(usual, min(MOST_PASSES, math.ceil(FEW_STEPS / a_pass)))
    rows = min(rows, batch)
    return Training(rate(stage, known.parameters), epochs, None, rows, batch // rows, a_pass * epochs, usual)


def _within(sizes: Sizes, known: Facts, minutes: float | None) -> Sizes:
    """The sizes cut down to the minutes, by the speeds that were measured."""
    if known.trained is None or known.written is None:
        return sizes
    limit = minutes or MINUTES["cpu" if known.device.startswith("CPU") else "cuda"]
    a_step = {"sft": 1.0, "reward": 2.0}
    cut, spent = {}, 0.0
    for stage, training in (("sft", sizes.sft), ("reward", sizes.reward)):
        step = training.rows * training.parts * a_step[stage] * known.row_mean / known.trained / 60
        allowed = max(FEWEST, _round(int(SHARE[stage] * limit / step)))
        cut[stage] = replace(training, max_steps=allowed, steps=allowed) if allowed < training.steps else training
        spent += cut[stage].steps * step
    episode = _episode(known) / 60
    allowed = _whole_updates(int(SHARE["ppo"] * limit / episode))
    episodes = max(FEWEST * EPISODES, min(sizes.total_episodes, allowed))
    answered = 2 * 2 + 4  # two models in two ways, and the best of four
    a_prompt = answered * (known.answer_mean / known.written + known.row_mean / known.trained) / 60
    eval_n = max(min(STEPS_EVAL, sizes.eval_n), min(sizes.eval_n, int(0.1 * limit / a_prompt)))
    spent += episodes * episode + eval_n * a_prompt
    notes = sizes.notes
    if spent > 1.5 * limit:
        notes = (
            *notes,
            f"even the least that makes sense takes longer than {limit:.0f} minutes here; a smaller base helps",
        )
    return replace(
        sizes, sft=cut["sft"], reward=cut["reward"], total_episodes=episodes, eval_n=eval_n,
        minutes=max(1, math.ceil(spent)), notes=notes,
    )  # fmt: skip


def _episode(known: Facts) -> float:
    """Seconds of one PPO episode: written, read by four models, then learnt from by two in each epoch."""
    assert known.trained and known.written
    read = 4 / 3 + 2 * EPOCHS  # a pass without gradients is a third of one with
    return known.answer_mean / known.written + read * known.row_mean / known.trained


def _row_bytes(known: Facts, length: int) -> float:
    return length * (ACTIVATIONS * known.hidden * known.layers + 8 * known.vocabulary)


def _rows(free: float, row: float) -> int:
    """The power of two from 1 to 32 that fits."""
    return min(32, _power_of_two(free / row))


def _power_of_two(limit: float) -> int:
    """The largest that does not pass the limit, at least 1."""
    return 2 ** int(math.log2(max(1.0, limit)))


def _samples(prompts: int) -> int:
    """Responses to a prompt, so that an update never asks for more prompts than there are."""
    return next(count for count in (1, 2, 4, 8, 16, 32, 64) if EPISODES // count <= max(prompts, 1))


def _notes(known: Facts, longest: int, max_length: int, memory: dict[str, float]) -> tuple[str, ...]:
    notes = []
    if memory["ppo"] < 0:
        needed = PER_WEIGHT["ppo"] * known.parameters / 1e9
        notes.append(
            f"PPO of {known.parameters / 1e9:.1f} G parameters needs about {needed:.0f} GB for its four models, this "
            f"machine has {known.memory / 1e9:.0f} GB: take a smaller base model, or run the folder on a larger machine"
        )
    if longest > max_length:
        notes.append(f"some rows are longer than the model's context of {known.context} tokens and will be left out")
    return tuple(notes)


def _whole_updates(episodes: int) -> int:
    return max(1, round(episodes / EPISODES)) * EPISODES


def _round(count: int) -> int:
    """Two leading digits: more would only tell how busy the machine was."""
    digits = max(0, len(str(count)) - 2)
    return count // 10**digits * 10**digits


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
