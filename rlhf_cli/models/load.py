"""Load models from folders: safetensors only, float32 by default, one-label heads for reward models.

All functions for a folder raise RLHFError: M01 (no readable model), M04 (an adapter's base is missing), M07 (pickled
weights), M08 (custom code), M13 (weights that do not fit the config), M15 (other or quantized weights would be loaded).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_cli import runs, system, terminal
from rlhf_cli.config.eval import EvalModels
from rlhf_cli.config.ppo import PPOModelSettings
from rlhf_cli.config.sections import RewardModel, SFTModel
from rlhf_cli.errors import RLHFError, first_names, short_reason, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import build, devices, lora
from rlhf_cli.models.tokenizers import refuse_code, remote_code_error
from rlhf_cli.models.weight_files import refuse_other_weights, refuse_pickles, weight_files
from rlhf_cli.runs.model_files import read_adapter

MAX_COUNTS = {"layer": 10_000, "expert": 2**16}  # more than any model has; building more would take minutes
transformers.utils.logging.disable_progress_bar()  # rlhf draws its own


ModelSection = SFTModel | RewardModel | PPOModelSettings | EvalModels  # `model:` or `models:` of a config


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of the load functions."""

    dtype: str  # default: "auto", which is float32
    attn_implementation: str | None
    trust_remote_code: bool
    bf16_matrices: bool  # of a base that is not trained and computes under autocast, if its file is in bfloat16
    empty: bool  # without weights, on the meta device: for `sharding.broadcast_weights`


def load_kwargs(section: ModelSection, trust_remote_code: bool, *, bf16_matrices: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of the load functions for a config section."""
    return {
        "dtype": section.dtype,
        "attn_implementation": section.attn_implementation,
        "trust_remote_code": trust_remote_code,
        "bf16_matrices": bf16_matrices,
    }


def context_length(config: Any) -> int | None:
    """Return the maximum number of positions of a model with this config; None without a limit."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context if context and context > 0 else None


def max_prompt_tokens(config: Any, response_length: int, where: str) -> int | None:
    """Return context length minus `response_length`; None without a limit. Raises RLHFError C13 at `where` below 1."""
    context = context_length(config)
    if context is None:
        return None
    if response_length < context:
        return context - response_length
    text = f"response_length {response_length} leaves no room for a prompt in the model's context of {context} tokens"
    raise RLHFError("C13", text, where=where, hint=f"lower it by at least {response_length - context + 1}")


def load_causal_lm(folder: Path | str, **options: Unpack[LoadOptions]) -> Any:
    """Load the causal LM of a folder on the CPU."""
    read_causal_lm_config(folder, options.get("trust_remote_code", False))
    return _load(AutoModelForCausalLM, folder, options)[0]


def read_causal_lm_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a causal LM's folder. Raises RLHFError M10 if it is not a decoder-only LM."""
    config = read_config(folder, trust_remote_code)
    if build.is_classifier(config):
        text = f"{shown(folder)} is a sequence classifier, not a language model"
        raise RLHFError("M10", text, hint="name the folder of an SFT or PPO stage, or another language model")
    if getattr(config, "is_encoder_decoder", False):
        text = f"{shown(folder)} is an encoder-decoder model ({config.model_type}), which no stage can train yet"
        raise RLHFError("M10", text, hint="start from a decoder-only language model, such as Llama, Qwen or GPT-2")
    _missing_head(AutoModelForCausalLM, folder, config, trust_remote_code)
    return config


def load_reward_model(folder: Path | str, **options: Unpack[LoadOptions]) -> Any:
    """Load a trained one-label sequence classifier on the CPU. Raises as `read_reward_model_config`."""
    read_reward_model_config(folder, options.get("trust_remote_code", False))
    return _load_with_head(folder, options)


def read_reward_model_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a reward model's folder. Raises RLHFError M02 (no head), M03 (labels), M10 (other head)."""
    config = read_classifier_config(folder, trust_remote_code)
    if config.num_labels != 1:
        text = f"{shown(folder)} has a head of {config.num_labels} labels, a reward model needs one"
        raise RLHFError("M03", text, hint="train a reward model with `rlhf reward`, or name one with num_labels 1")
    _require_score(folder, config, "use it as rewards: {NAME: {pipeline: FOLDER, input: both}} of ppo.yaml")
    return config


def _require_score(folder: Path | str, config: Any, hint: str) -> None:
    if not build.scores_by_one_matrix(config):
        text = f"{shown(folder)} ({config.model_type}) does not score the last token by one matrix"
        raise RLHFError("M10", text, hint=hint)


def load_classifier(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Load a trained sequence classifier with any number of labels on the CPU. Raises RLHFError M02 without a head."""
    read_classifier_config(folder, trust_remote_code)
    return _load_with_head(folder, LoadOptions(trust_remote_code=trust_remote_code))


def read_classifier_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a sequence classifier's folder. Raises RLHFError M02 without a head."""
    config = read_config(folder, trust_remote_code)
    if not build.is_classifier(config):
        kinds = config.architectures or [config.model_type]
        raise _no_head(folder, f"it is a {kinds[0]}")
    missing = _missing_head(AutoModelForSequenceClassification, folder, config, trust_remote_code)
    _require_head(folder, missing)
    return config


def init_reward_model(folder: Path | str, **options: Unpack[LoadOptions]) -> Any:
    """Load a causal LM's backbone with a new random one-label head; a one-label classifier keeps its head."""
    config = read_init_config(folder, options.get("trust_remote_code", False))
    if build.is_classifier(config):
        return load_reward_model(folder, **options)
    return _load(AutoModelForSequenceClassification, folder, options, num_labels=1)[0]


def read_init_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of the model that a reward model is trained from: a causal LM or a one-label classifier.

    Raises RLHFError M10 if the family's classifier has no linear `score`.
    """
    config = read_config(folder, trust_remote_code)
    if build.is_classifier(config):
        return read_reward_model_config(folder, trust_remote_code)
    _missing_head(AutoModelForSequenceClassification, folder, build.one_label(config), trust_remote_code)
    hint = "use a reward model of another family, and models.value: policy_head in ppo.yaml"
    _require_score(folder, config, hint)
    return config


def init_reward_model_on(causal_lm: Any, folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the model of `init_reward_model` on the backbone (shared, not copied) of the folder's causal LM.

    None if the family's classifier is custom code or has another backbone.
    """
    config = read_init_config(folder, trust_remote_code)
    if getattr(config, "auto_map", None):
        return None
    model = build.reward_model_from_config(config)
    if type(getattr(model, model.base_model_prefix)) is not type(causal_lm.base_model):
        return None
    head = model.score.to_empty(device="cpu").to(causal_lm.dtype)
    model._init_weights(head)
    return reward_model_from_backbone(causal_lm, head).eval()


def reward_model_from_backbone(causal_lm: Any, head: torch.nn.Linear) -> Any:
    """Return a one-label sequence classifier of a causal LM's backbone (shared, not copied) and a head."""
    config = build.one_label(causal_lm.config)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=causal_lm.dtype)
    setattr(model, model.base_model_prefix, causal_lm.base_model)
    model.score = head
    model.is_loaded_in_4bit = lora.is_quantized(causal_lm)  # read by peft
    return model


def load_unmerged(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Load a stage's float32 model on the CPU; with adapters as a peft model, not merged into the base weights."""
    is_classifier = build.is_classifier(read_config(folder, trust_remote_code))
    if runs.find_base(Path(folder)) is None:
        load_model = load_reward_model if is_classifier else load_causal_lm
        return load_model(folder, trust_remote_code=trust_remote_code)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    model, missing = _load(auto_class, folder, LoadOptions(trust_remote_code=trust_remote_code), merge=False)
    _require_head(folder, missing)
    return model


def read_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a folder's model, for an adapter of the merged one. Raises RLHFError S03, too."""
    refuse_code(folder, trust_remote_code)
    refuse_pickles(Path(folder))
    path = config_folder(Path(folder))
    _refuse_oversized(path / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise ValueError("text_config is not a config")
        if not all(isinstance(name, str) for name in config.architectures or []):
            raise ValueError("architectures is not a list of names")
    except Exception as error:  # each model family validates its config with different exceptions
        if "trust_remote_code" in str(error):
            raise remote_code_error(folder) from error
        raise RLHFError("M01", f"{shown(folder)}: not a model's config.json: {short_reason(error)}") from error
    refuse_other_weights(Path(folder), config)
    return config


def read_eos_token_ids(folder: Path | str) -> list[int]:
    """Return the tokens that end a text by the generation config of a folder's model, or else by its config."""
    place = config_folder(Path(folder))
    for name in ("generation_config.json", "config.json"):
        settings = read_json_object(place / name) or {}
        known = settings.get("eos_token_id")
        if known is not None:
            ids = known if isinstance(known, list) else [known]
            return [token for token in ids if isinstance(token, int) and token >= 0]
    return []


def config_folder(folder: Path) -> Path:
    """Return the folder of the config.json of the model in `folder`; an adapter's merged config has a subfolder."""
    return folder / runs.MERGED if read_adapter(folder) else folder


def lost_weights(model: Any, folder: Path) -> str:
    """Return which weights of a transformers model its saved folder lacks, "" for none.

    Raises RLHFError M01, M13 and M15 for a folder that would not load as this model.
    """
    refuse_other_weights(folder, model.config)
    if not weight_files(folder):  # custom code has no other check
        return "there are none"
    is_classifier = build.is_classifier(model.config)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    lost = build.check_headers(auto_class, folder, model.config)
    return f"missing {first_names(lost)}" if lost else ""


def _refuse_oversized(path: Path) -> None:
    """Raise RLHFError M01 for a config with more layers or experts than any model has."""
    settings = read_json_object(path) or {}
    sections = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    for name, value in chain.from_iterable(section.items() for section in sections):
        for kind, limit in MAX_COUNTS.items():
            is_count = name.removesuffix("s").endswith(kind) and isinstance(value, int)
            if is_count and value > limit:
                text = f"{name} is {value}, and no model has more than {limit}"
                raise RLHFError("M01", text, where=shown(path), hint="copy or download config.json again")


def _missing_head(auto_class: Any, folder: Path | str, config: Any, trust_remote_code: bool) -> tuple[str, ...]:
    """Return the weights of a classifier's head that the files lack. Raises RLHFError M13 if weights do not fit.

    For an adapter this checks its base and returns nothing, because the adapter has its own head.
    """
    base = runs.find_base(Path(folder))
    if base is not None:
        base_config = read_config(base, trust_remote_code)
        if build.is_classifier(config):
            base_config.num_labels = config.num_labels
        _missing_head(auto_class, base, base_config, trust_remote_code)
        return ()
    with _translate_load_errors(folder):
        return build.check_headers(auto_class, Path(folder), config)


def _require_head(folder: Path | str, missing: Collection[str]) -> None:
    if missing:
        raise _no_head(folder, f"the weights of {', '.join(sorted(missing)[:3])} are missing")


def _no_head(folder: Path | str, reason: str) -> RLHFError:
    text = f"{shown(folder)} has no trained reward head: {reason}"
    hint = "name the folder of a finished `rlhf reward`, or a sequence classifier with one label"
    return RLHFError("M02", text, hint=hint)


def _load_with_head(folder: Path | str, options: LoadOptions) -> Any:
    model, missing = _load(AutoModelForSequenceClassification, folder, options)
    _require_head(folder, missing)
    return model


def _load(
    auto_class: Any,
    folder: Path | str,
    options: LoadOptions,
    *,
    merge: bool = True,
    num_labels: int | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Return the model, with adapters merged or as a peft model, and the weights that a classifier's head lacks."""
    config = read_config(folder, options.get("trust_remote_code", False))
    base = runs.find_base(Path(folder))
    if base is None or options.get("empty", False):
        return _load_whole(auto_class, folder, config, options, num_labels)

    if build.is_classifier(config):
        num_labels = config.num_labels
    model, missing = _load(auto_class, base, options, num_labels=num_labels)
    lora.grow_embeddings(model, config.get_text_config().vocab_size)
    if merge:
        lora.merge_adapter(model, Path(folder), config)
    else:
        model = lora.load_adapter(model, Path(folder), config, base)
    lacking = set(missing) - lora.head_weights(Path(folder))
    return model, tuple(sorted(lacking))


def _load_whole(
    auto_class: Any,
    folder: Path | str,
    config: Any,
    options: LoadOptions,
    num_labels: int | None,
) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a folder without adapters, and the weights that a classifier's head lacks."""
    dtype = options.get("dtype", "auto")
    attention = options.get("attn_implementation")
    settings: dict[str, Any] = {
        "attn_implementation": attention,
        "trust_remote_code": options.get("trust_remote_code", False),
    }
    missing: tuple[str, ...] = ()
    with _translate_load_errors(folder):
        if options.get("empty", False):
            model = build.empty_model(auto_class, config, dtype=dtype, **settings)
        else:
            if num_labels is not None:
                settings["num_labels"] = num_labels
            loaded_dtype = devices.resolve_dtype(dtype)
            narrows = options.get("bf16_matrices", False) and loaded_dtype == torch.float32
            if narrows and build.can_load_bf16(Path(folder), config):
                loaded_dtype = torch.bfloat16
            model, report = auto_class.from_pretrained(
                folder,
                dtype=loaded_dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **settings,
            )
            missing = build.require_fit(folder, model, report, auto_class, config)
            build.check_tied_embeddings(folder, model)
            if narrows and loaded_dtype == torch.bfloat16:
                lora.widen_all_but_matrices(model)

    build.disable_router_logits(model)
    devices.set_num_threads(model.num_parameters())
    if attention is None:
        _log_eager_attention(model)
    return model, missing


def _log_eager_attention(model: Any) -> None:
    """Log on a GPU that transformers chose attention whose memory is quadratic (soft-capping, sinks)."""
    config = model.config
    if devices.device().type == "cuda" and config._attn_implementation == "eager":
        text = f"transformers computes the attention of {config.model_type} by `eager`"
        hint = "attn_implementation: flex_attention may need less"
        terminal.log_once(f"models   {text}: (rows, heads, length, length) numbers a layer; {hint}")


@contextmanager
def _translate_load_errors(folder: Path | str) -> Iterator[None]:
    """Context manager that raises RLHFError M01 for any error except lack of memory, such as a missing file."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        if system.is_out_of_memory(error):
            raise
        raise RLHFError("M01", f"{shown(folder)} cannot be loaded: {short_reason(error)}") from error
