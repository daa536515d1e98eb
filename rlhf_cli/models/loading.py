"""Models out of folders: safetensors only, float32 unless asked otherwise, one-label heads for scores."""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from rlhf_cli import checkpoints, room
from rlhf_cli.checkpoints.adapters import read_adapter
from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import adapters, devices, weights
from rlhf_cli.models.tokenizers import needs_code, refuse_code

REASON = 200  # characters of what a library says
MANY = 10_000  # layers or experts: more than any model has, and building so many alone would take minutes
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
transformers.utils.logging.disable_progress_bar()  # ours is the only one


def how(section: Any, trust_remote_code: bool) -> dict[str, Any]:
    """How a config's section (`model:` or `models:`) wants models loaded: the keywords of the functions below."""
    return {
        "dtype": section.dtype,
        "attn_implementation": section.attn_implementation,
        "trust_remote_code": trust_remote_code,
    }


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
    """The causal language model of a folder, on the CPU. Raises RLHFError M01, M07, M08, M13, M10 for another kind."""
    causal_config(folder, trust_remote_code)
    return _load(AutoModelForCausalLM, folder, dtype, attn_implementation, trust_remote_code)[0]


def causal_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a language model's folder. Raises RLHFError M01, M08, M10 for what is no decoder-only one, and M13
    where the weights do not fit it.
    """
    config = read_config(folder, trust_remote_code)
    if weights.is_classifier(config):
        text = f"{shown(folder)} holds a sequence classifier, not a language model"
        raise RLHFError("M10", text, hint="name the folder of an SFT or PPO stage, or another language model")
    if getattr(config, "is_encoder_decoder", False):
        text = f"{shown(folder)} is an encoder-decoder model ({config.model_type}), which no stage can train yet"
        raise RLHFError("M10", text, hint="start from a decoder-only language model, such as Llama, Qwen or GPT-2")
    _headless(AutoModelForCausalLM, folder, config, trust_remote_code)
    return config


def load_scorer(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The trained reward model of a folder: a sequence classifier with one label, on the CPU.

    Raises RLHFError M02 where there is no trained head, M03 for several labels, M01, M07, M08, M13.
    """
    scorer_config(folder, trust_remote_code)
    return _with_head(folder, dtype, attn_implementation, trust_remote_code)


def scorer_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a reward model's folder. Raises RLHFError M02 where it has no head, M03 for several labels, M13."""
    config = classifier_config(folder, trust_remote_code)
    if config.num_labels != 1:
        raise RLHFError(
            "M03",
            f"{shown(folder)} has a head of {config.num_labels} labels, a reward model needs one",
            hint="train a reward model with `rlhf reward`, or name one with num_labels 1",
        )
    return config


def load_classifier(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """The trained sequence classifier of a folder, of any labels, on the CPU.

    Raises RLHFError M01, M02, M07, M08, M13.
    """
    classifier_config(folder, trust_remote_code)
    return _with_head(folder, "auto", None, trust_remote_code)


def _with_head(folder: Path | str, dtype: str, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """A classifier whose head is in its files. Raises RLHFError M02 where it is not."""
    model, head = _load(AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code)
    _require_head(folder, head)
    return model


def _require_head(folder: Path | str, missing: Collection[str]) -> None:
    if missing:
        raise _no_head(folder, f"the weights of {', '.join(sorted(missing)[:3])} are missing")


def classifier_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of a sequence classifier's folder. Raises RLHFError M02 where it has no head, M01, M07, M08, M13."""
    config = read_config(folder, trust_remote_code)
    if not weights.is_classifier(config):
        raise _no_head(folder, f"it is a {(config.architectures or [config.model_type])[0]}")
    _require_head(folder, _headless(AutoModelForSequenceClassification, folder, config, trust_remote_code))
    return config


def scorer_from_causal(
    folder: Path | str, *, dtype: str = "auto", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """A sequence classifier with one label on the body of a causal model, its head drawn from torch's generator.

    A folder that holds a one-label classifier already keeps its head. Raises RLHFError M01, M03, M07, M08, M13.
    """
    if weights.is_classifier(start_config(folder, trust_remote_code)):
        return load_scorer(
            folder, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    return _load(
        AutoModelForSequenceClassification, folder, dtype, attn_implementation, trust_remote_code, num_labels=1
    )[0]


def start_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The config of what a reward model is trained from: a language model, or a one-label classifier.

    Raises RLHFError M01, M07, M08, M13, and as `scorer_config` does for a classifier.
    """
    config = read_config(folder, trust_remote_code)
    if weights.is_classifier(config):
        return scorer_config(folder, trust_remote_code)
    _headless(AutoModelForSequenceClassification, folder, _one_label(config), trust_remote_code)
    return config


def _one_label(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def scorer_around(causal: Any, head: torch.nn.Linear) -> Any:
    """A sequence classifier with one label, of the body of a causal model (shared, not copied) and a trained head."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(_one_label(causal.config), dtype=causal.dtype)
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
        load = load_scorer if weights.is_classifier(config) else load_causal
        return load(folder, trust_remote_code=trust_remote_code)
    kind = AutoModelForSequenceClassification if weights.is_classifier(config) else AutoModelForCausalLM
    model, head = _load_base(kind, base, config, "auto", None, trust_remote_code)
    adapters.grow(model, config.get_text_config().vocab_size)
    made = adapters.beside(model, Path(folder), config, base)
    _require_head(folder, set(head) - adapters.held(Path(folder)))
    return made


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
    _refuse_many(place / "config.json")
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, local_files_only=True)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise ValueError("text_config is no config")
        if not all(isinstance(name, str) for name in config.architectures or []):
            raise ValueError("architectures is no list of names")
        return config
    except Exception as error:  # each family checks its numbers in a way of its own
        if "trust_remote_code" in str(error):
            raise needs_code(folder) from error
        reason = " ".join(str(error).split())[:REASON] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)}: no config.json of a model: {reason}") from error


def config_folder(folder: Path) -> Path:
    """Where the config.json of a model in `folder` stands."""
    return folder / checkpoints.MERGED if read_adapter(folder) else folder


def _refuse_many(path: Path) -> None:
    """Raises RLHFError M01 for a config.json of absurdly many layers or experts, in a part of it or as a whole."""
    settings = read_object(path) or {}
    for part in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        for name, value in part.items():
            counts = name.removesuffix("s").endswith(("layer", "expert")) and isinstance(value, int)
            if counts and value > MANY:
                text = f"{name} is {value}, and no model has more than {MANY}"
                raise RLHFError("M01", text, where=shown(path), hint="copy or download config.json again")


def _headless(kind: Any, folder: Path | str, config: Any, trust_remote_code: bool) -> tuple[str, ...]:
    """The weights of a classifier's head that the files lack. Raises RLHFError M13 where weights and config differ.

    Of an adapter its base is looked at: a head is the adapter's own.
    """
    base = checkpoints.base_of(Path(folder))
    if base is not None:
        _headless(kind, base, _labelled(read_config(base, trust_remote_code), config), trust_remote_code)
        return ()
    with _unreadable(folder):
        return weights.by_headers(kind, Path(folder), config)


def _labelled(base: Any, config: Any) -> Any:
    """The config of an adapter's base, with as many labels as `config`, that of the two together, has."""
    if weights.is_classifier(config):
        base.num_labels = config.num_labels
    return base


def _load(
    kind: Any, folder: Path | str, dtype: str, attn_implementation: str | None, trust_remote_code: bool, **changes: Any
) -> tuple[Any, tuple[str, ...]]:
    """The model, and the weights of a classifier's head that its files do not hold (drawn afresh).

    Adapters are added into their base's. Raises RLHFError M01, M07, M08, M13, and M04 where an adapter's base is not
    there.
    """
    config = read_config(folder, trust_remote_code)
    base = checkpoints.base_of(Path(folder))
    if base is not None:
        model, head = _load_base(kind, base, config, dtype, attn_implementation, trust_remote_code, **changes)
        adapters.merge(model, Path(folder), config)
        held = adapters.held(Path(folder))
        return model, tuple(name for name in head if name not in held)
    with _unreadable(folder):
        model, report = kind.from_pretrained(
            folder,
            dtype=devices.number_format(dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **changes,
        )
    head = weights.of_load(model, report, kind, Path(folder), config).require(folder)
    weights.require_tied(folder, model)
    devices.fit_threads(model.num_parameters())
    return model, head


@contextmanager
def _unreadable(folder: Path | str) -> Iterator[None]:
    """Within, whatever goes wrong but for lack of memory is RLHFError M01: files are missing, damaged or of others."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        if room.is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0][:REASON] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)} cannot be loaded: {reason}") from error


def _load_base(kind: Any, base: Path, config: Any, *how: Any, **changes: Any) -> tuple[Any, tuple[str, ...]]:
    """`_load` of the base of an adapter, with a head where `config`, that of the two together, has one."""
    changes = {"num_labels": config.num_labels} if weights.is_classifier(config) else changes
    return _load(kind, base, *how, **changes)


def _refuse_pickles(folder: Path) -> None:
    """Raises RLHFError M07 for weights that are only there as a pickle, and what `parts` raises."""
    named = weights.parts(folder)
    pickles = {path.name for path in folder.glob("*") if path.suffix in PICKLES} - {"training_args.bin"}
    if pickles & named or (pickles and not any(folder.glob("*.safetensors"))):
        raise RLHFError(
            "M07",
            f"{shown(folder)} holds its weights only as a pickle ({min(pickles)}), which can run code when it is read",
            hint="where you trust it: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes safetensors",
        )
