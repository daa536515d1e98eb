"""Models out of the folders that a config names, each checked against the tokenizer that writes its tokens."""

from typing import Any

import torch

from rlhf_cli import checkpoints
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Config, Options
from rlhf_cli.errors import RLHFError, placed
from rlhf_cli.models import loading, reading, tokenizers
from rlhf_cli.ppo.records import Rollout

# Another padding moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """The tokenizer in a parent's folder. Raises RLHFError M01, M08."""
    with placed(config.where(parent.key)):
        return tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)


def causal(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model, on the CPU. Raises RLHFError M01, M06-M08, M10."""
    with placed(config.where(parent.key)):
        model = loading.load_causal(parent.model, **_how(config, options))
        loading.check_vocabulary(model, tokenizer)
    return model


def scorer(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A trained reward model, on the CPU. Raises RLHFError M01-M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = loading.load_scorer(parent.model, **_how(config, options))
        loading.check_vocabulary(model, tokenizer)
    return model


def scorer_to_train(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model with a fresh one-label head, on the CPU. Raises RLHFError M01, M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = loading.scorer_from_causal(parent.model, **_how(config, options))
        loading.check_vocabulary(model, tokenizer)
    return model


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """The reward model must give the scores that its stage stored with it, read in PPO's own way (M09)."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    scores = reading.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
    stored = torch.tensor([probe["score"] for probe in probes])
    off = ((scores - stored).abs() > PROBE_TOLERANCE[model.dtype]).nonzero()[:, 0].tolist()
    if off:
        rows = ", ".join(f"row {row}: {scores[row]:.4f}, stored {stored[row]:.4f}" for row in off[:3])
        raise RLHFError(
            "M09",
            f"{len(off)} of {len(probes)} held-out rows get another score than the reward stage stored ({rows}); "
            "nothing was trained",
            where=where,
            hint=f"run the reward stage again: {checkpoints.shown(parent.path)} or a library under it changed",
        )


def _how(config: Any, options: Options) -> dict[str, Any]:
    section = config.model if config.stage in ("sft", "reward") else config.models
    return loading.how(section, options.trust_remote_code)
