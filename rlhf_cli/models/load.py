"""Load models from folders: safetensors only, float32 by default, one-label heads for reward models."""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_cli import runs, system
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import devices, lora, weights
from rlhf_cli.models.tokenizers import refuse_code, remote_code_error
from rlhf_cli.runs.adapters import read_adapter

MAX_REASON_CHARS = 200  # of a library's error message
MAX_LAYERS = 10_000  # or experts: more than any model has; building more would take minutes
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
transformers.utils.logging.disable_progress_bar()  # rlhf draws its own


def load_kwargs(section: Any, trust_remote_code: bool) -> dict[str, Any]:
    """Return the keyword arguments of the load functions for a config section (`model:` or `models:`)."""
    return {
        "dtype": section.dtype,
        "attn_implementation": section.attn_implementation,
        "trust_remote_code": trust_remote_code,
    }


def context_length(config: Any) -> int | None:
    """Return the maximum number of positions of a model with this config; None without a limit."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context if context and context > 0 else None


def max_prompt_tokens(config: Any, response_length: int, where: str) -> int | None:
    """Return the context length minus `response_length`; None without a limit.

    Raises RLHFError C13 if nothing remains. `where` is the location of the key of the response length.
    """
    context = context_length(config)
    if context is None or response_length < context:
        return context and context - response_length
    text = f"response_length {response_length} leaves no room for a prompt in the model's context of {context} tokens"
    raise RLHFError("C13", text, where=where, hint=f"lower it by at least {response_length - context + 1}")


def load_causal_lm(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the causal LM of a folder on the CPU. Raises RLHFError M01, M07, M08, M13, M10 for any other model."""
    read_causal_lm_config(folder, trust_remote_code)
    return _load(AutoModelForCausalLM, folder, dtype, attn_implementation, trust_remote_code)[0]


def read_causal_lm_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a causal LM's folder.

    Raises RLHFError M01, M07, M08, M10 if it is not a decoder-only LM, M13 if the weights do not fit the config.
    """
    config = read_config(folder, trust_remote_code)
    if weights.is_classifier(config):
        text = f"{shown(folder)} holds a sequence classifier, not a language model"
        raise RLHFError("M10", text, hint="name the folder of an SFT or PPO stage, or another language model")
    if getattr(config, "is_encoder_decoder", False):
        text = f"{shown(folder)} is an encoder-decoder model ({config.model_type}), which no stage can train yet"
        raise RLHFError("M10", text, hint="start from a decoder-only language model, such as Llama, Qwen or GPT-2")
    _missing_head(AutoModelForCausalLM, folder, config, trust_remote_code)
    return config


def load_reward_model(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the trained reward model of a folder, a sequence classifier with one label, on the CPU.

    Raises RLHFError M02 without a trained head, M03 for several labels, M01, M07, M08, M13.
    """
    read_reward_model_config(folder, trust_remote_code)
    return _load_with_head(folder, dtype, attn_implementation, trust_remote_code)


def read_reward_model_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a reward model's folder. Raises RLHFError M02 without a head, M03 for many labels."""
    config = read_classifier_config(folder, trust_remote_code)
    if config.num_labels != 1:
        raise RLHFError(
            "M03",
            f"{shown(folder)} has a head of {config.num_labels} labels, a reward model needs one",
            hint="train a reward model with `rlhf reward`, or name one with num_labels 1",
        )
    return config


def load_classifier(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Load the trained sequence classifier of a folder, with any number of labels, on the CPU.

    Raises RLHFError M01, M02, M07, M08, M13.
    """
    read_classifier_config(folder, trust_remote_code)
    return _load_with_head(folder, "auto", None, trust_remote_code)


def _load_with_head(folder: Path | str, dtype: str, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """Load a sequence classifier. Raises RLHFError M02 if its files have no head."""
    model, head = _load(AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code)
    _require_head(folder, head)
    return model


def _require_head(folder: Path | str, missing: Collection[str]) -> None:
    if missing:
        raise _no_head(folder, f"the weights of {', '.join(sorted(missing)[:3])} are missing")


def read_classifier_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a sequence classifier's folder. Raises RLHFError M02 without a head, M01, M07, M08, M13."""
    config = read_config(folder, trust_remote_code)
    if not weights.is_classifier(config):
        raise _no_head(folder, f"it is a {(config.architectures or [config.model_type])[0]}")
    _require_head(folder, _missing_head(AutoModelForSequenceClassification, folder, config, trust_remote_code))
    return config


def init_reward_model(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the backbone of a causal LM and add a one-label head, with random weights from torch's generator.

    A one-label classifier keeps its head. Raises RLHFError M01, M03, M07, M08, M13.
    """
    if weights.is_classifier(read_init_config(folder, trust_remote_code)):
        return load_reward_model(
            folder, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    return _load(
        AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code, num_labels=1
    )[0]


def read_init_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of the model that a reward model is trained from: a causal LM or a one-label classifier.

    Raises RLHFError M01, M07, M08, M13, and for a classifier as `read_reward_model_config` does.
    """
    config = read_config(folder, trust_remote_code)
    if weights.is_classifier(config):
        return read_reward_model_config(folder, trust_remote_code)
    _missing_head(AutoModelForSequenceClassification, folder, _one_label(config), trust_remote_code)
    return config


def _one_label(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def reward_model_from_backbone(causal_lm: Any, head: torch.nn.Linear) -> Any:
    """Return a one-label sequence classifier of a causal LM's backbone (shared, not copied) and a head."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(_one_label(causal_lm.config), dtype=causal_lm.dtype)
    setattr(model, model.base_model_prefix, causal_lm.base_model)
    model.score = head
    return model


def load_unmerged(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Load a stage's float32 model on the CPU; with adapters as a peft model, not merged into the base weights.

    Raises RLHFError as `load_causal_lm` and `load_reward_model` do, and M04 if an adapter's base is missing.
    """
    config = read_config(folder, trust_remote_code)
    base = runs.find_base(Path(folder))
    if base is None:
        load_model = load_reward_model if weights.is_classifier(config) else load_causal_lm
        return load_model(folder, trust_remote_code=trust_remote_code)
    auto_class = AutoModelForSequenceClassification if weights.is_classifier(config) else AutoModelForCausalLM
    model, missing = _load_base(auto_class, base, config, "auto", None, trust_remote_code)
    lora.grow_embeddings(model, config.get_text_config().vocab_size)
    peft_model = lora.load_adapter(model, Path(folder), config, base)
    _require_head(folder, set(missing) - lora.head_weights(Path(folder)))
    return peft_model


def _no_head(folder: Path | str, reason: str) -> RLHFError:
    return RLHFError(
        "M02",
        f"{shown(folder)} has no trained reward head: {reason}",
        hint="name the folder of a finished `rlhf reward`, or a sequence classifier with one label",
    )


def read_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """Return the config of a folder's model; for an adapter, the config of the merged model.

    Raises RLHFError M01, M07, M08, S03.
    """
    refuse_code(folder, trust_remote_code)
    _refuse_pickles(Path(folder))
    path = config_folder(Path(folder))
    _refuse_oversized(path / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise ValueError("text_config is no config")
        if not all(isinstance(name, str) for name in config.architectures or []):
            raise ValueError("architectures is no list of names")
        return config
    except Exception as error:  # each model family validates its config with different exceptions
        if "trust_remote_code" in str(error):
            raise remote_code_error(folder) from error
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)}: no config.json of a model: {reason}") from error


def config_folder(folder: Path) -> Path:
    """Return the folder of the config.json of the model in `folder`; an adapter's merged config has a subfolder."""
    return folder / runs.MERGED if read_adapter(folder) else folder


def _refuse_oversized(path: Path) -> None:
    """Raise RLHFError M01 if a config.json, or a section of it, has more than MAX_LAYERS layers or experts."""
    settings = read_json_object(path) or {}
    for section in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        for name, value in section.items():
            is_count = name.removesuffix("s").endswith(("layer", "expert")) and isinstance(value, int)
            if is_count and value > MAX_LAYERS:
                text = f"{name} is {value}, and no model has more than {MAX_LAYERS}"
                raise RLHFError("M01", text, where=shown(path), hint="copy or download config.json again")


def _missing_head(auto_class: Any, folder: Path | str, config: Any, trust_remote_code: bool) -> tuple[str, ...]:
    """Return the weights of a classifier's head that the files lack. Raises RLHFError M13 if weights do not fit.

    For an adapter this checks its base and returns nothing, because the adapter has its own head.
    """
    base = runs.find_base(Path(folder))
    if base is not None:
        base_config = _copy_num_labels(read_config(base, trust_remote_code), config)
        _missing_head(auto_class, base, base_config, trust_remote_code)
        return ()
    with _translate_load_errors(folder):
        return weights.check_headers(auto_class, Path(folder), config)


def _copy_num_labels(base_config: Any, config: Any) -> Any:
    """Give the config of an adapter's base as many labels as `config`, the config of the merged model, has."""
    if weights.is_classifier(config):
        base_config.num_labels = config.num_labels
    return base_config


def _load(
    auto_class: Any,
    folder: Path | str,
    dtype: str,
    attn_implementation: str | None,
    trust_remote_code: bool,
    **options: Any,
) -> tuple[Any, tuple[str, ...]]:
    """Return the model, with adapters merged, and the newly initialised weights of a classifier's head.

    Raises RLHFError M01, M07, M08, M13, and M04 if an adapter's base is missing.
    """
    config = read_config(folder, trust_remote_code)
    base = runs.find_base(Path(folder))
    if base is not None:
        model, missing = _load_base(auto_class, base, config, dtype, attn_implementation, trust_remote_code, **options)
        lora.merge_adapter(model, Path(folder), config)
        stored = lora.head_weights(Path(folder))
        return model, tuple(name for name in missing if name not in stored)
    with _translate_load_errors(folder):
        model, report = auto_class.from_pretrained(
            folder,
            dtype=devices.resolve_dtype(dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    missing = weights.find_mismatches(model, report, auto_class, config).require_fit(folder)
    weights.check_tied_embeddings(folder, model)
    devices.set_num_threads(model.num_parameters())
    return model, missing


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
        reason = str(error).partition("\n")[0][:MAX_REASON_CHARS] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)} cannot be loaded: {reason}") from error


def _load_base(auto_class: Any, base: Path, config: Any, *args: Any, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Call `_load` for an adapter's base, with a classifier's head if `config`, of the merged model, has one."""
    options = {"num_labels": config.num_labels} if weights.is_classifier(config) else options
    return _load(auto_class, base, *args, **options)


def _refuse_pickles(folder: Path) -> None:
    """Raise RLHFError M07 if weights exist only as a pickle, and what `weights.shard_files` raises."""
    shards = weights.shard_files(folder)
    pickles = {path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES} - {"training_args.bin"}
    if pickles & shards or (pickles and not any(folder.glob("*.safetensors"))):
        raise RLHFError(
            "M07",
            f"{shown(folder)} holds its weights only as a pickle ({min(pickles)}), which can run code when it is read",
            hint="where you trust it: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes safetensors",
        )
