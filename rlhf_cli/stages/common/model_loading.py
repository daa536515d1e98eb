"""Tokenizers and models that a stage reads from its parents."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_cli import data, runs
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.stages import AnyConfig, TRLConfig
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import chat_templates, devices, load, lora, tokenizers
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import is_policy_key
from rlhf_cli.stages.common.prompt_forms import training_prompt_form


def load_tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """Load the tokenizer of an input model. Raises RLHFError M01, M08.

    Policies of PPO and evaluation get data.chat_template_kwargs: C17, T05 as `set_template_variables`.
    """
    with at_location(config.where(parent.key)):
        tokenizer = tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)
    if config.stage in ("ppo", "eval") and is_policy_key(parent.key):
        set_template_variables(config, tokenizer, parent.stage)
    set_turns(tokenizer, parent)
    return tokenizer


def set_turns(tokenizer: Any, parent: Parent) -> None:
    """Set whether a chat model takes texts as turns: as in its training, if that is known."""
    if tokenizer.chat_template and (form := training_prompt_form(parent)):
        data.set_speaks_in_turns(tokenizer, form != "text")


def set_template_variables(config: Config, tokenizer: Any, parent_stage: str) -> None:
    """Write data.chat_template_kwargs into the chat template. Raises RLHFError C17 if one has no effect.

    A later stage must keep the template of its parent if that was trained here: T05.
    """
    template = tokenizer.chat_template
    where = config.where("data.chat_template_kwargs")
    trained_here = parent_stage not in ("", runs.FOREIGN) and config.stage != "sft"
    if trained_here and config.data.chat_template_kwargs is None:
        return
    chat_templates.set_template_variables(tokenizer, config.data.chat_template_kwargs, where=where)
    if trained_here and tokenizer.chat_template != template:
        text = "data.chat_template_kwargs is not that of the stage which trained the model"
        raise RLHFError("T05", text, where=where, hint="remove it: the values come with the model")


def load_model(
    loader: Callable[..., Any],
    config: Config,
    options: Options,
    parent: Parent,
    tokenizer: Any,
    loading: ProcessGroup = SINGLE_PROCESS,
    *,
    bf16_matrices: bool = False,
) -> Any:
    """Load a model on the CPU with `loader`, of models.load, and check that it has an embedding for each token.

    Of the processes `loading` only the main one loads weights (`sharding.broadcast_weights`). Raises RLHFError as the
    loader does, and M06 if the vocabulary is too small.
    """
    assert isinstance(config, AnyConfig)
    is_classifier = loader is load.load_classifier  # of a reward's `pipeline`, which keeps its own dtype
    section = config.model if isinstance(config, TRLConfig) else config.models
    kwargs = load.load_kwargs(section, options.trust_remote_code, bf16_matrices=bf16_matrices)
    if is_classifier:
        kwargs = {"trust_remote_code": options.trust_remote_code}

    def load_weights(empty: bool) -> Any:
        return loader(parent.model, **kwargs, empty=True) if empty else loader(parent.model, **kwargs)

    with at_location(config.where(parent.key)):
        model = loading.load_on_main(load_weights)
        tokenizers.check_vocabulary(model, tokenizer, guarded=not is_classifier)
    return model


def check_same_tokenization(config: Config, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError T04 or T05 if a policy or value model tokenizes differently from models.sft.

    Models that only score may differ; models.reward must not in a PPO run whose value model starts as its copy. The
    tokenizers of an evaluation's judges are still loaded, to raise M01 and M08 before anything is written.
    """
    must_match: dict[str, Parent] = {}
    may_differ: dict[str, Parent] = {}
    for key, parent in parents.items():
        starts_value_model = key == "models.value" or (key == "models.reward" and config.stage == "ppo")
        group = must_match if is_policy_key(key) or starts_value_model else may_differ
        group[key] = parent

    assert isinstance(config, AnyConfig)
    tokenizers.check_same_tokenization(
        must_match,
        config.where,
        trust_remote_code=options.trust_remote_code,
        template_variables=config.data.chat_template_kwargs,
    )
    if config.stage == "eval":
        for key, parent in may_differ.items():
            with at_location(config.where(key)):
                tokenizers.same_tokenization(parents["models.sft"], parent, trust_remote_code=options.trust_remote_code)


def stop_token_id(tokenizer: Any, parent: Parent, vocab_size: int) -> StopTokenId:
    """Return the tokens that end a response: the chat template's, and those of the model's generation config.

    Llama 3 has <|eot_id|>, <|end_of_text|> and <|eom_id|>, Qwen <|im_end|> and <|endoftext|>.
    """
    known = [stop for stop in load.read_eos_token_ids(parent.model) if stop < vocab_size]
    stops = tuple(dict.fromkeys([data.stop_token_id(tokenizer), *known]))
    return stops if len(stops) > 1 else stops[0]


def place_frozen(model: Any, *, bf16: bool) -> Any:
    """Freeze a model and move it to the device; with bf16 its matrices are stored in bfloat16, for `autocast`."""
    model.requires_grad_(False).eval()
    if bf16 and not lora.has_bf16_matrices(model):
        lora.autocast_matrices(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype == torch.float32:  # a view of a memory-mapped file keeps all of it in memory
                tensor.data = tensor.data.clone()
    return model.to(devices.device())
