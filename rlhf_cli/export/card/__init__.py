"""The README of an exported folder, a model card as the hub reads it: what the model is, how it is used and was made,
what is known of it, and what is not. Every number is read from the run's files; what they do not tell is not in it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_cli import __version__
from rlhf_cli.checkpoints.adapters import read_adapter
from rlhf_cli.export.card import front, limits, making, results, usage
from rlhf_cli.export.card.example import held_out
from rlhf_cli.export.card.markdown import code, text
from rlhf_cli.export.card.subject import Subject, is_of_the_hub, subject

__all__ = ["held_out", "subject", "write"]

PPO = "[Schulman et al. 2017](https://arxiv.org/abs/1707.06347)"
KINDS = {
    "ppo": f"A language model trained by PPO ({PPO}) to earn more of a reward while it stays near the model that it "
    "started from.",
    "sft": "A language model, fine-tuned on examples of good answers.",
    "reward": "A reward model: it scores an answer to a prompt. It was trained on pairs of a better and a worse one.",
}


def write(about: Subject) -> str:
    """The card of a model that is about to be written."""
    blocks = [front.matter(about), f"# {text(about.name)}", *_description(about), "## How to use it"]
    blocks += [usage.snippet(about), *_as_in_training(about), *making.blocks(about), *results.blocks(about)]
    return "\n\n".join([*blocks, *limits.blocks(about)]) + "\n"


def _description(about: Subject) -> Iterator[str]:
    yield KINDS[about.stage.name] + "".join(f" {each}" for each in (_which(about), _picked(about)) if each)
    model, told = about.model, read_adapter(about.chosen.model.model)
    base = f", from {code(about.base['path'])}" if is_of_the_hub(about.base) else ""
    size = f"{model.num_parameters():,} parameters ({text(model.config.model_type)}{base}), {about.dtype}, safetensors."
    merged = ""
    if told:
        kind = "adapters (DoRA)" if told.get("use_dora") else "adapters"
        merged = f" It was trained as {kind} of rank {told['r']}, which are added into the weights of their base here."
    yield f"{size}{merged} Made and exported with rlhf-cli {__version__}."


def _which(about: Subject) -> str:
    """Of PPO's policies: which one it is, and why that one."""
    step, manifest = about.chosen.step, about.stage.manifest or {}
    if step is None:
        return ""
    which = f"This is the policy after update {step} of {about.updates}"
    if not about.chosen.last or not manifest.get("stopped"):
        return f"{which}, the last one." if step == about.updates else f"{which}."
    best = f"the highest by {code(manifest['best']['metric'])}" if "best" in manifest else "the best one"
    return f"{which}, {best}: the training was stopped ({text(manifest['stopped'])})."


def _picked(about: Subject) -> str:
    """That the evaluation selected it, and what its numbers are worth then."""
    report: Mapping[str, Any] = about.report
    if about.chosen.step is None or about.chosen.step != report.get("selected_step"):
        return ""
    told = report["selected"]
    said = f"The evaluation picked it by {text(told['rule'])}: on these prompts its mean flatters it by some "
    noise = ", ".join(map(str, told["within_noise"]))
    more = f" Within the noise of it: update {noise}." if noise else ""
    return f"{said}{told['optimism']:.3f}.{more}"


def _as_in_training(about: Subject) -> Iterator[str]:
    yield usage.PROMPTS[about.prompts]
    found = usage.sampling(about)
    if about.model.can_generate() and found:
        when = "evaluation" if about.is_evaluated else "training"
        how = f"from the whole distribution at temperature {found[0]:g}, with at most {found[1]} tokens"
        yield f"This is how its answers were sampled in its {when}: {how}."
    if hasattr(about.model.config, "reward_mean"):
        yield (
            "`reward_mean` and `reward_std` in config.json are those of the SFT model's own answers: 0 is an answer as "
            "good as they are on the mean."
        )
