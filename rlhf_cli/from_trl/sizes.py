"""The arithmetic of batches: the same episodes an update, and the same optimizer steps, in our three keys.

All sizes are of one process, there as here.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd


@dataclass(frozen=True)
class Sizes:
    """Our three keys. Episodes of an update = rows x parts; optimizer steps of an epoch = minibatches."""

    rows: int  # per_device_train_batch_size
    parts: int  # gradient_accumulation_steps
    minibatches: int  # num_mini_batches

    @property
    def episodes(self) -> int:
        return self.rows * self.parts


def of_old(batch_size: int, mini_batch_size: int, gradient_accumulation_steps: int) -> tuple[Sizes, str]:
    """TRL 0.11's sizes in ours, and what there is to say.

    There an update has batch_size episodes, a forward pass mini_batch_size rows, and an optimizer step
    gradient_accumulation_steps such passes (trl/trainer/ppo_trainer.py, `step`).
    """
    rows = gcd(batch_size, mini_batch_size)
    if batch_size % (mini_batch_size * gradient_accumulation_steps):
        wanted = f"{mini_batch_size} x {gradient_accumulation_steps}"
        return Sizes(rows, batch_size // rows, 1), f"TRL refuses this batch_size: it is no multiple of {wanted}"
    steps = batch_size // (mini_batch_size * gradient_accumulation_steps)
    return Sizes(rows, batch_size // rows, steps), f"{batch_size} episodes an update, {_steps(steps)}, as there"


def of_new(rows: int, parts: int, minibatches: int, *, grown: bool) -> tuple[Sizes, str]:
    """TRL 1.12's sizes in ours, and what there is to say; `grown`: those of TRL before 0.17.

    Before 0.17 an update had per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches episodes.
    Since then num_mini_batches cuts them up, and accelerate still steps once in gradient_accumulation_steps
    forward passes: as asked here, num_mini_batches makes so many steps an epoch.
    """
    if grown:
        sizes = Sizes(rows, parts * minibatches, minibatches)
        return sizes, f"{sizes.episodes} episodes an update, {_steps(minibatches)}, as in TRL before 0.17"
    sizes = Sizes(rows, parts, minibatches)
    made = steps_made(parts, minibatches)
    if made == minibatches:
        return sizes, f"{sizes.episodes} episodes an update, {_steps(minibatches)}, as there"
    told = f"{_steps(minibatches)} here; TRL since 0.17 made {float(made):.3g}"
    if made.denominator == 1 and sizes.episodes % made == 0:
        told += f" (for that: num_mini_batches: {made})"
    return sizes, f"{told}, and before, an update had {minibatches} times the episodes"


def steps_made(parts: int, minibatches: int) -> Fraction:
    """Optimizer steps that an epoch made in TRL 1.12: forward passes / gradient_accumulation_steps.

    A minibatch of parts / minibatches x per_device_train_batch_size rows takes as many passes, rounded up.
    """
    return Fraction(minibatches * ceil(Fraction(parts, minibatches)), parts)


def _steps(count: int) -> str:
    return f"{count} optimizer step{'s' if count > 1 else ''} an epoch"
