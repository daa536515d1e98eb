"""Models in and out of folders: safetensors only, float32 unless asked otherwise, one-label heads for scores."""

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_cli import checkpoints, processes, room, terminal
from rlhf_cli.checkpoints.adapters import read_adapter
from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.models import adapters, zero3
from rlhf_cli.models.tokenizers import needs_code, refuse_code

HEADS = ("ForSequenceClassification",)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SMALL = 5_000_000  # parameters
ALL_THREADS = torch.get_num_threads()
transformers.utils.logging.disable_progress_bar()  # ours is the only one


def how(section: Any, trust_remote_code: bool) -> dict[str, Any]:
    """How a config's section (`model:` or `models:`) wants models loaded: the keywords of the functions below."""
    return {
        "dtype": section.dtype,
        "attn_implementation": section.attn_implementation,
        "trust_remote_code": trust_remote_code,
    }


def fit_threads(parameters: int) -> None:
    """One CPU thread for a model of few parameters, unless OMP_NUM_THREADS says otherwise.

    Its matrices are too small to share out: on two busy cores the demo's base model (0.6 M parameters) made 1.2 steps a
    second with two threads and 10.9 with one.
    """
    small = parameters < SMALL and device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ
    torch.set_num_threads(1 if small else ALL_THREADS)


def device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What `device` is called: the GPU's name, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def can_use(name: str) -> bool:
    """Whether `device` computes in the number format "float16", "bfloat16" or "float32"."""
    if device().type == "cpu":
        return name != "float16"
    return name != "bfloat16" or torch.cuda.is_bf16_supported()


def computes_in_bf16(wish: bool | None) -> bool:
    """Whether training computes in bfloat16: as wished where `device` can, and unasked on a GPU."""
    return can_use("bfloat16") and (device().type == "cuda" if wish is None else wish)


def memory() -> int:
    """The bytes of the memory of `device`."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else room.memory()


def context_of(config: Any) -> int | None:
    """Positions of a model with this config; None without a limit."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context if context and context > 0 else None


def prompt_room(config: Any, response_length: int, where: str) -> int | None:
    """Tokens that a response leaves to its prompt in the context of a model with this config; None without a limit.

    Raises RLHFError C13 where it leaves none; `where` names the key of the response's length.
    """
    context = context_of(config)
    if context is None or response_length < context:
        return context and context - response_length
    text = f"response_length {response_length} leaves no room for a prompt in the model's context of {context} tokens"
    raise RLHFError("C13", text, where=where, hint=f"lower it by at least {response_length - context + 1}")


def load_causal(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The causal language model of a folder, on the CPU. Raises RLHFError M01, M07, M08, M10 for another kind."""
    causal_config(folder, trust_remote_code)
    return _load(AutoModelForCausalLM, folder, dtype, attn_implementation, trust_remote_code)[0]


def causal_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a language model's folder. Raises RLHFError M01, M08, M10 for what is no decoder-only one."""
    config = read_config(folder, trust_remote_code)
    if is_classifier(config):
        text = f"{shown(folder)} holds a sequence classifier, not a language model"
        raise RLHFError("M10", text, hint="name the folder of an SFT or PPO stage, or another language model")
    if getattr(config, "is_encoder_decoder", False):
        text = f"{shown(folder)} is an encoder-decoder model ({config.model_type}), which no stage can train yet"
        raise RLHFError("M10", text, hint="start from a decoder-only language model, such as Llama, Qwen or GPT-2")
    return config


def load_scorer(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The trained reward model of a folder: a sequence classifier with one label, on the CPU.

    Raises RLHFError M02 where there is no trained head, M03 for several labels, M01, M07, M08.
    """
    scorer_config(folder, trust_remote_code)
    model, missing = _load(AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code)
    if missing:
        raise _no_head(folder, f"the weights of {', '.join(missing[:3])} are missing")
    return model


def scorer_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a reward model's folder. Raises RLHFError M02 where it has no head, M03 for several labels."""
    config = classifier_config(folder, trust_remote_code)
    if config.num_labels != 1:
        raise RLHFError(
            "M03",
            f"{shown(folder)} has a head of {config.num_labels} labels, a reward model needs one",
            hint="train a reward model with `rlhf reward`, or name one with num_labels 1",
        )
    return config


def load_classifier(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """The trained sequence classifier of a folder, of any labels, on the CPU. Raises RLHFError M01, M02, M07, M08."""
    classifier_config(folder, trust_remote_code)
    model, missing = _load(AutoModelForSequenceClassification, folder, "auto", None, trust_remote_code)
    if missing:
        raise _no_head(folder, f"the weights of {', '.join(missing[:3])} are missing")
    return model


def classifier_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a sequence classifier's folder. Raises RLHFError M02 where it has no head, M01, M07, M08."""
    config = read_config(folder, trust_remote_code)
    if not is_classifier(config):
        raise _no_head(folder, f"it is a {(config.architectures or [config.model_type])[0]}")
    return config


def scorer_from_causal(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """A sequence classifier with one label on the body of a causal model, its head drawn from torch's generator.

    A folder that holds a one-label classifier already keeps its head. Raises RLHFError M01, M03, M07, M08.
    """
    if is_classifier(read_config(folder, trust_remote_code)):
        return load_scorer(
            folder, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    return _load(
        AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code, num_labels=1
    )[0]


def scorer_around(causal: Any, head: torch.nn.Linear) -> Any:
    """A sequence classifier with one label, of the body of a causal model (shared, not copied) and a trained head."""
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, dtype=causal.dtype)
    setattr(model, model.base_model_prefix, causal.base_model)
    model.score = head
    return model


def load_apart(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """The model of a stage's folder as it was trained, float32, on the CPU: adapters stay beside their base's weights.

    A language model or a scorer, or peft's model of one. Raises RLHFError as `load_causal` and `load_scorer` do, and
    M04 where an adapter's base is not there.
    """
    config = read_config(folder, trust_remote_code)
    base = checkpoints.base_of(Path(folder))
    if base is None:
        load = load_scorer if is_classifier(config) else load_causal
        return load(folder, trust_remote_code=trust_remote_code)
    kind = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
    model, _ = _load_base(kind, base, config, "auto", None, trust_remote_code)
    adapters.grow(model, config.get_text_config().vocab_size)
    return adapters.beside(model, Path(folder), config, base)


def new_causal(fields: Mapping[str, Any], tokenizer: Any, *, attn_implementation: str | None = None) -> Any:
    """A causal model with fresh float32 weights: `fields` of its config, vocabulary and special ids of the tokenizer.

    Raises what `new_config` raises, and C17 for numbers that make no model.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = new_config(fields, vocab_size=len(tokenizer), **special)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    except Exception as error:  # each family checks its numbers in a way of its own
        raise _odd_fields(error) from error
    fit_threads(model.num_parameters())
    return model


def new_config(fields: Mapping[str, Any], **decided: int | None) -> Any:
    """The config of a causal model: `fields` as written, and what the tokenizer has `decided`.

    Raises RLHFError C07 for an unknown model_type, C01 for an unknown field, C17 for what the tokenizer decides.
    """
    kind = fields.get("model_type", "llama")
    if kind not in CONFIG_MAPPING:
        near = nearest(kind, CONFIG_MAPPING.keys())
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"model.new.model_type: unknown model type {kind!r}", hint=hint)
    known = AutoConfig.for_model(kind).to_dict().keys() | {"tie_word_embeddings"}
    for name in fields:
        if name in decided:
            raise RLHFError("C17", f"model.new.{name} follows from the tokenizer", hint="take the line out")
        if name not in known:
            near = nearest(name, known)
            text = f"model.new.{name}: a {kind} config has no such field"
            raise RLHFError("C01", text, hint=near and f"did you mean {near}?")
    settings = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(kind, **settings, **decided)
    except Exception as error:  # each family checks its numbers in a way of its own
        raise _odd_fields(error) from error


def _odd_fields(error: Exception) -> RLHFError:
    text = f"model.new: transformers refuses these fields: {' '.join(str(error).split())}"
    return RLHFError("C17", text, hint="hidden_size must be a multiple of num_attention_heads, for one")


def check_vocabulary(model: Any, tokenizer: Any, where: str | None = None) -> None:
    """Raises RLHFError M06 where the tokenizer knows ids that the model has no embedding for."""
    check_ids(model.get_input_embeddings().weight.shape[0], tokenizer, where)


def check_ids(rows: int, tokenizer: Any, where: str | None) -> None:
    """`check_vocabulary` for a model of so many embeddings."""
    if (largest := max(tokenizer.get_vocab().values())) >= rows:
        raise RLHFError(
            "M06",
            f"the tokenizer has ids up to {largest}, the model {rows} embeddings",
            where=where,
            hint="use the tokenizer that belongs to the model",
        )


def fit_embeddings(model: Any, tokenizer: Any) -> None:
    """Grow the embeddings to tokens that were added; a new row starts near the average one: no logit stands out."""
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))


def save_model(model: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """Write a plain Hugging Face folder: safetensors, tokenizer, chat template, and `card` as its README.

    Of a model with adapters these alone, as peft writes them. Of several processes the first one writes; all of them
    must ask for it, since each may have a part of the weights.
    """
    state = _gathered(model)
    if not processes.is_first():
        return
    if folder.exists():
        shutil.rmtree(folder)
    model.save_pretrained(folder, **({"state_dict": state} if state else {}))
    if adapters.are_on(model):
        save_config(model.get_base_model(), folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(terminal.clean(card).rstrip() + "\n", encoding="utf-8")


def _gathered(model: Any) -> dict[str, Any] | None:
    """All weights of a model that is cut up; None of one that is whole."""
    if zero3.is_sharded(model):  # in a single process too
        return zero3.whole_state(model)
    if processes.count() == 1:
        return None
    from rlhf_cli.models import sharding  # it takes over half a second to import

    return sharding.whole_state(model)


def set_special_ids(model: Any, tokenizer: Any, stop_token_id: int) -> None:
    """Write down which id pads, and in the generation config of a model that writes, which one ends a response."""
    model = adapters.inside(model)
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=stop_token_id, pad_token_id=tokenizer.pad_token_id
        )


def save_config(model: Any, folder: Path) -> None:
    """Write the config of a model whose weights, or an adapter of them, are in `folder` already."""
    model.config.architectures = [type(model).__name__]  # an adapter's is made from that of its base
    model.config.save_pretrained(config_folder(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(config_folder(folder))


def is_classifier(config: Any) -> bool:
    """Whether a config is that of a trained sequence classifier."""
    return any(name.endswith(HEADS) for name in config.architectures or [])


def _no_head(folder: Path | str, reason: str) -> RLHFError:
    return RLHFError(
        "M02",
        f"{shown(folder)} has no trained reward head: {reason}",
        hint="name the folder of a finished `rlhf reward`, or a sequence classifier with one label",
    )


def read_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a folder's model; of an adapter that of it and its base together.

    Raises RLHFError M01, M07, M08, S03.
    """
    refuse_code(folder, trust_remote_code)
    _refuse_pickles(Path(folder))
    place = config_folder(Path(folder))
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise needs_code(folder) from error
        raise RLHFError("M01", f"{shown(folder)}: {str(error).partition(chr(10))[0]}") from error


def config_folder(folder: Path) -> Path:
    """Where the config.json of a model in `folder` stands."""
    return folder / checkpoints.MERGED if read_adapter(folder) else folder


def _load(
    kind: Any, folder: Path | str, dtype: str, attn_implementation: str | None, trust_remote_code: bool, **changes: Any
) -> tuple[Any, list[str]]:
    """The model, and the weights that its files do not hold (drawn afresh). Adapters are added into their base's.

    Raises RLHFError M01, M07, M08, and M04 where an adapter's base is not there.
    """
    config = read_config(folder, trust_remote_code)
    base = checkpoints.base_of(Path(folder))
    if base is not None:
        model, missing = _load_base(kind, base, config, dtype, attn_implementation, trust_remote_code, **changes)
        held = adapters.merge(model, Path(folder), config)
        return model, [name for name in missing if name not in held]
    try:
        model, report = kind.from_pretrained(
            folder,
            dtype=number_format(dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **changes,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise RLHFError("M01", f"{shown(folder)} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    fit_threads(model.num_parameters())
    return model, sorted(report["missing_keys"])


def _load_base(kind: Any, base: Path, config: Any, *how: Any, **changes: Any) -> tuple[Any, list[str]]:
    """`_load` of the base of an adapter, with a head where `config`, that of the two together, has one."""
    changes = {"num_labels": config.num_labels} if is_classifier(config) else changes
    return _load(kind, base, *how, **changes)


def parts(folder: Path) -> set[str]:
    """The files that the index of weights in several parts names; none without an index.

    Raises RLHFError M01 for an index that names no parts, S03 for parts outside of their folder.
    """
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    named = (read_object(path) or {}).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(part, str) for part in named.values()):
        text = '"weight_map" must give the file of each weight'
        hint = "fetch the file again, or take it out where model.safetensors holds them all"
        raise RLHFError("M01", text, where=shown(path), hint=hint)
    if outside := sorted(part for part in named.values() if part != Path(part).name):
        raise RLHFError("S03", f'the part "{outside[0]}" leads out of its folder', where=shown(path))
    return set(named.values())


def _refuse_pickles(folder: Path) -> None:
    """Raises RLHFError M07 for weights that are only there as a pickle, and what `parts` raises."""
    named = parts(folder)
    pickles = {path.name for path in folder.glob("*") if path.suffix in PICKLES} - {"training_args.bin"}
    if pickles & named or (pickles and not any(folder.glob("*.safetensors"))):
        raise RLHFError(
            "M07",
            f"{shown(folder)} holds its weights only as a pickle ({min(pickles)}), which can run code when it is read",
            hint="where you trust it: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes safetensors",
        )


def number_format(name: str) -> torch.dtype:
    """float32 for `auto`: what is trained keeps full-precision weights, and bf16 enters as autocast.

    float32 too in place of a format that this device lacks, which E01 tells.
    """
    return getattr(torch, name) if name != "auto" and can_use(name) else torch.float32
