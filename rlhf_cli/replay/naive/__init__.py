"""One PPO update the slow way: loops over rows and tokens, in float64, every formula written out with its source.

To be read as the algorithm, seven sections from top to bottom: start, responses, judging, learning, measuring. It is
written from the papers and the options' texts alone, and shares with rlhf_cli/ppo nothing but the settings and the
seeds, which say what random numbers an update draws: no padding, no masks, no micro-batches, no caches, no optimizer of
torch. Autograd and the models' own forward are taken on trust. `draws` looks at the responses, `update` is what is made
of them.

A row is an episode: a prompt and a response, lists of token ids; the response ends with its stop token, or where the
length limit cut it. Logarithms are natural, KL is in nats. `Start` is what goes in, `Numbers` what comes out.
"""

from collections.abc import Callable

from rlhf_cli.replay.naive.judging import function_scores, judge, model_scores
from rlhf_cli.replay.naive.learning import learn, learning_rate
from rlhf_cli.replay.naive.measuring import metrics
from rlhf_cli.replay.naive.responses import draws
from rlhf_cli.replay.naive.start import Adam, Numbers, Scorer, Source, Start

__all__ = [
    "Adam",
    "Numbers",
    "Scorer",
    "Source",
    "Start",
    "draws",
    "function_scores",
    "learning_rate",
    "model_scores",
    "update",
]


def update(start: Start, tick: Callable[[], None] = lambda: None) -> Numbers:
    """The update of responses that are there: judge them, learn from them. `tick` is called after each row."""
    judged = judge(start, tick)
    steps, epochs = learn(start, judged, tick)
    return (
        judged.numbers()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(start, judged, steps, epochs)
    )
