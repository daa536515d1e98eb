"""Models out of the folders that a config names, each checked against the tokenizer that writes its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Config, Options
from rlhf_cli.errors import RLHFError, placed
from rlhf_cli.inputs.machine import POLICIES
from rlhf_cli.models import forward, load, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards import ModelReward, RetokenizingReward

# Another padding moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}

RETOLD = "has a tokenizer or template of its own, so the policy's text is encoded for it anew"


def tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """The tokenizer in a parent's folder. Raises RLHFError M01, M08."""
    with placed(config.where(parent.key)):
        return tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)


def causal(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model, on the CPU. Raises RLHFError M01, M06-M08, M10."""
    with placed(config.where(parent.key)):
        model = load.load_causal_lm(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def scorer(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A trained reward model, on the CPU. Raises RLHFError M01-M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.load_reward_model(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def check_alike(config: Any, options: Options, parents: Mapping[str, Parent]) -> None:
    """Refuses policies and value models that read text in another way than models.sft (T04, T05).

    What only scores may: models.reward stands in a PPO run only where the value model starts as its copy. But what
    evaluation scores with is looked at before anything is written, too: M01, M08.
    """
    same = (*POLICIES, "models.value", *(["models.reward"] if config.stage == "ppo" else []))
    known = {key: parent for key, parent in parents.items() if key in same}
    tokenizers.check_same_tokenization(known, config.where, trust_remote_code=options.trust_remote_code)
    for key, parent in parents.items() if config.stage == "eval" else ():
        if key not in known:
            with placed(config.where(key)):
                tokenizers.same_tokenization(parents["models.sft"], parent, trust_remote_code=options.trust_remote_code)


@dataclass(frozen=True)
class Writing:
    """What reward models are given to read: how the policy writes, and to which prompts."""

    sft: Parent
    tokenizer: Any
    stop_token_id: int | None
    prompts: Sequence[data.Prompt]


def own_tokenizer(config: Any, options: Options, sft: Parent, parent: Parent) -> Any:
    """The tokenizer of a reward model that reads text in another way than the policy; None where it reads its tokens.

    Raises RLHFError M01, M08.
    """
    with placed(config.where(parent.key)):
        if tokenizers.same_tokenization(sft, parent, trust_remote_code=options.trust_remote_code):
            return None
    return tokenizer(config, options, parent)


def retold_prompts(
    config: Any, key: str, theirs: Any, prompts: Sequence[data.Prompt], body: Any
) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's tokens -> those that `theirs` makes of its text or conversation, for a model of config `body`.

    Raises RLHFError C13 for a prompt that fills its context, D06, D14 for a conversation that its template refuses or
    cannot render.
    """
    texts = {tuple(prompt.ids): prompt.text for prompt in prompts}
    with placed(config.where(key)):
        encoded = data.encode_many(theirs, list(texts.values()), [None] * len(texts))
        longest, context = max((len(ids) for ids, _ in encoded), default=0), load.context_length(body)
        if context is not None and longest >= context:
            text = f"{key}: a prompt has {longest} of its tokens, and its model reads {context} at most"
            raise RLHFError("C13", text, hint="take longer prompts out, or name another reward model")
    return dict(zip(texts, (ids for ids, _ in encoded), strict=True))


def reward(config: Any, key: str, writing: Writing, model: Any, theirs: Any, *, rows: int, **how: bool) -> ModelReward:
    """A loaded reward model as a source that reads `rows` at a time; `theirs` as `own_tokenizer` gives it.

    `how` (packed, offloaded) is as ModelReward takes it.

    Raises RLHFError as `retold_prompts` does.
    """
    if theirs is None:
        return ModelReward(model, rows, **how)
    terminal.say(f"{config.stage:<8} {key}: {RETOLD}")
    prompts = retold_prompts(config, key, theirs, writing.prompts, model.config)
    return RetokenizingReward(
        model, rows, **how, name=key, tokenizer=writing.tokenizer, encode=partial(data.encode_many, theirs),
        stop_token_id=writing.stop_token_id, context=load.context_length(model.config), prompts=prompts,
    )  # fmt: skip


def classifier(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """The text classifier of a reward's `pipeline`, on the CPU. Raises RLHFError M01, M02, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.load_classifier(parent.model, trust_remote_code=options.trust_remote_code)
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def scorer_to_train(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model with a fresh one-label head, on the CPU. Raises RLHFError M01, M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.init_reward_model(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """The reward model must give the scores that its stage stored with it, read in PPO's own way (M09)."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    scores = forward.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
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
    return load.load_kwargs(section, options.trust_remote_code)
