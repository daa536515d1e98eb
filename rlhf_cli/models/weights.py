"""Whether the weights of a folder are those that its config asks for: each name and each shape, and none left over.

transformers fills what is missing with random numbers, drops what is left over, and goes on. Its own loader answers
here: first with the names and shapes alone, on torch's meta device, which takes no memory; then as the weights load.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import shapes, zero3

# Masks and angles that GPT-2, GPT-NeoX and old Llamas stored beside their weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
VALUE_HEAD = "v_head."  # which TRL's AutoModelForCausalLMWithValueHead stored beside a language model
NAMED = 3  # tensors, in a message

# Kind, labels, folder and its files as they are -> the missing head. Several keys and stages name one model.
_known: dict[tuple[Any, ...], tuple[str, ...]] = {}


@dataclass(frozen=True)
class Fit:
    """What a loader found: names that the files lack, names that the model has no place for, names with two shapes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    head: tuple[str, ...]  # those that make a classifier's head and are missing, too
    fresh: bool  # whether that head is meant to be missing: the folder holds a language model

    def require(self, folder: Path | str) -> tuple[str, ...]:
        """The names of a classifier's missing head. Raises RLHFError M13 where anything else does not fit."""
        if not (self.missing or self.unexpected or self.reshaped):
            return self.head
        missing = self.missing if self.fresh else (*self.head, *self.missing)
        parts = {"missing": missing, "not in the model": self.unexpected, "of another shape": self.reshaped}
        said = "; ".join(f"{len(names)} {what} ({_listed(names)})" for what, names in parts.items() if names)
        text = f"{shown(folder)}: the weights do not fit config.json: {said}"
        hint = "copy or download the folder again: weights and config.json must be of one model"
        raise RLHFError("M13", text, hint=hint)


def by_headers(kind: Any, folder: Path, config: Any) -> tuple[str, ...]:
    """The names of a missing head, were the folder's weights loaded as a model of `kind` with this config.

    Nothing but the headers of the files is read. Weights in a quantized form, which only their loader understands, and
    models with code of their own are left to `of_load`. Raises RLHFError M13 for weights that do not fit, M01 for
    a config that makes no model.
    """
    if getattr(config, "quantization_config", None) or getattr(config, "auto_map", None):
        return ()
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors") and path.is_file())
    states = [(path.name, path.stat()) for path in files]
    as_they_are = tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
    key = (kind, config.num_labels, folder, as_they_are)
    if key not in _known:
        _known[key] = of_load(*_dry_load(kind, folder, config), kind, folder, config).require(folder)
    return _known[key]


def _dry_load(kind: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model without numbers, and transformers' report on the tensors of the files."""
    found: dict[str, torch.Tensor] = {}
    files = files_of(folder)
    if not files:
        raise RLHFError("M01", f"{shown(folder)} holds no weights: there is no model.safetensors")
    for path in files:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                found[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    made = shapes.of_kind(kind, config)
    with zero3.not_cutting():
        return type(made).from_pretrained(
            None, config=made.config, state_dict=found, device_map={"": "meta"}, dtype=torch.float32,
            ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=True,
        )  # fmt: skip


def of_load(model: Any, report: dict[str, Any], kind: Any, folder: Path, config: Any) -> Fit:
    """What transformers' report on a load says, without what is meant to be so.

    A classifier has no use for the head of another task, a text model none for the towers of the composite model
    whose part it is, and nothing for masks and angles. Tied weights, and what a class ignores by itself, are in no
    report. `config` is the folder's own: of the composite model where there is one.
    """
    missing, unexpected = sorted(report["missing_keys"]), set(report["unexpected_keys"])
    scores = kind is AutoModelForSequenceClassification
    head = tuple(name for name in missing if scores and _outside(model, name))
    if unexpected:
        towers = _towers(model, config)
        whole = not missing if is_classifier(config) else missing == list(head)
        aside = _other_heads(model, unexpected) if scores and whole else set()
        unexpected = {
            name for name in unexpected - aside
            if not (name.startswith(VALUE_HEAD) or name.endswith(BUFFERS) or towers & set(name.split(".")))
        }  # fmt: skip
    reshaped = [
        f"{name} {list(there)}, not {list(wanted)}" for name, there, wanted in sorted(report["mismatched_keys"])
    ]
    body = tuple(name for name in missing if name not in head)
    return Fit(body, tuple(sorted(unexpected)), tuple(reshaped), head, fresh=not is_classifier(config))


def require_tied(folder: Path | str, model: Any) -> None:
    """Raises RLHFError M13 where one matrix is meant to be embeddings and head, and the files hold two unlike ones.

    transformers keeps both at first, and makes one of them as soon as the embeddings grow.
    """
    head = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        text = (
            f"{shown(folder)}: config.json has tie_word_embeddings, and the head is another matrix than the embeddings"
        )
        raise RLHFError("M13", text, hint="set tie_word_embeddings to false in config.json")


def is_classifier(config: Any) -> bool:
    """Whether a config is that of a trained sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _outside(model: Any, name: str) -> bool:
    """Whether a weight belongs to what stands on a model's body."""
    return not name.startswith(f"{model.base_model_prefix}.")


def _other_heads(model: Any, unexpected: set[str]) -> set[str]:
    """What stands on a body that is whole: heads of other tasks, whatever files call them, and a pooler."""
    own = {model.base_model_prefix, *(name for name, _ in model.base_model.named_children())}
    return {name for name in unexpected if name.split(".")[0] not in own or "pooler" in name.split(".")}


def _towers(model: Any, config: Any) -> set[str]:
    """Names of the parts that a composite model has beside its text model, where `model` is that text model alone."""
    if type(model.config) is type(config):
        return set()
    composite = shapes.backbone(config)
    words = composite.get_input_embeddings()
    return {name for name, part in composite.named_children() if all(module is not words for module in part.modules())}


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(list(names)[:NAMED])}{more}"


def files_of(folder: Path) -> list[Path]:
    """The safetensors files that are loaded of a folder: one, else those of the index. Raises RLHFError M01, S03."""
    whole = folder / "model.safetensors"
    found = [whole] if whole.exists() else [folder / part for part in sorted(parts(folder))]
    for path in found:
        if path.exists() and not path.is_file():
            raise RLHFError("M01", "this is no regular file, and may never end", where=shown(path))
    return found


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
