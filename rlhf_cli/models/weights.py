"""Check that a folder's weights fit its config: every name and shape, and no tensor that the model does not use.

transformers fills missing weights with random values, drops unused ones, and continues. This module uses its loader's
report: first with names and shapes only, on torch's meta device, which needs no memory; then for the actual load.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.models import build, sharding

# Attention masks and rotary angles that GPT-2, GPT-NeoX and old Llamas stored with their weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
VALUE_HEAD = "v_head."  # stored by TRL's AutoModelForCausalLMWithValueHead with a language model
MAX_NAMES = 3  # tensors named in a message

# Auto class, labels, folder and its files' stats -> the missing head. Several config keys and stages name one model.
_checked: dict[tuple[Any, ...], tuple[str, ...]] = {}


@dataclass(frozen=True)
class Mismatches:
    """Differences between a folder's tensors and the model of its config."""

    missing: tuple[str, ...]  # not in the files
    unexpected: tuple[str, ...]  # not in the model
    reshaped: tuple[str, ...]
    missing_head: tuple[str, ...]  # missing weights of a classifier's head
    head_is_new: bool  # the folder contains a causal LM, so the head is expected to be missing

    def require_fit(self, folder: Path | str) -> tuple[str, ...]:
        """Return the names of a classifier's missing head. Raises RLHFError M13 for any other mismatch."""
        if not (self.missing or self.unexpected or self.reshaped):
            return self.missing_head
        missing = self.missing if self.head_is_new else (*self.missing_head, *self.missing)
        groups = {"missing": missing, "not in the model": self.unexpected, "of another shape": self.reshaped}
        listed = "; ".join(f"{len(names)} {group} ({_listed(names)})" for group, names in groups.items() if names)
        text = f"{shown(folder)}: the weights do not fit config.json: {listed}"
        hint = "copy or download the folder again: weights and config.json must be of one model"
        raise RLHFError("M13", text, hint=hint)


def check_headers(auto_class: Any, folder: Path, config: Any) -> tuple[str, ...]:
    """Return the weights of a classifier's head that the folder lacks, reading only the headers of its files.

    Quantized weights and models with custom code are not checked here but by `find_mismatches`, after loading.
    Raises RLHFError M13 for weights that do not fit, M01 for a config that no model can be built from.
    """
    if getattr(config, "quantization_config", None) or getattr(config, "auto_map", None):
        return ()
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors") and path.is_file())
    stats = [(path.name, path.stat()) for path in files]
    versions = tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    key = (auto_class, config.num_labels, folder, versions)
    if key not in _checked:
        mismatches = find_mismatches(*_load_on_meta(auto_class, folder, config), auto_class, config)
        _checked[key] = mismatches.require_fit(folder)
    return _checked[key]


def _load_on_meta(auto_class: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model on the meta device, and transformers' loading report."""
    state: dict[str, torch.Tensor] = {}
    files = weight_files(folder)
    if not files:
        raise RLHFError("M01", f"{shown(folder)} holds no weights: there is no model.safetensors")
    for path in files:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                state[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    model = build.meta_model(auto_class, config)
    with sharding.zero3_disabled():
        return type(model).from_pretrained(
            None, config=model.config, state_dict=state, device_map={"": "meta"}, dtype=torch.float32,
            ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=True,
        )  # fmt: skip


def find_mismatches(model: Any, report: dict[str, Any], auto_class: Any, config: Any) -> Mismatches:
    """Return the mismatches in transformers' loading report, without those that are intended.

    Intended are: heads of other tasks in a classifier's folder, the other towers of a composite model of which
    `model` is the text model, and stored masks and angles. The report itself leaves out tied weights and the names
    that a model class ignores. `config` is the folder's own, possibly of a composite model.
    """
    missing, unexpected = sorted(report["missing_keys"]), set(report["unexpected_keys"])
    classifies = auto_class is AutoModelForSequenceClassification
    missing_head = tuple(name for name in missing if classifies and _in_head(model, name))
    if unexpected:
        towers = _other_towers(model, config)
        backbone_complete = not missing if is_classifier(config) else missing == list(missing_head)
        other_heads = _other_heads(model, unexpected) if classifies and backbone_complete else set()
        unexpected = {
            name for name in unexpected - other_heads
            if not (name.startswith(VALUE_HEAD) or name.endswith(BUFFERS) or towers & set(name.split(".")))
        }  # fmt: skip
    reshaped = [
        f"{name} {list(stored)}, not {list(expected)}" for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    missing_backbone = tuple(name for name in missing if name not in missing_head)
    head_is_new = not is_classifier(config)
    return Mismatches(missing_backbone, tuple(sorted(unexpected)), tuple(reshaped), missing_head, head_is_new)


def check_tied_embeddings(folder: Path | str, model: Any) -> None:
    """Raise RLHFError M13 if the config ties embeddings and head, but the files have two different matrices.

    transformers keeps both until the embeddings are resized, and then replaces one by the other.
    """
    head = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        text = (
            f"{shown(folder)}: config.json has tie_word_embeddings, and the head is another matrix than the embeddings"
        )
        raise RLHFError("M13", text, hint="set tie_word_embeddings to false in config.json")


def is_classifier(config: Any) -> bool:
    """Return True if a config belongs to a trained sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _in_head(model: Any, name: str) -> bool:
    """Return True if a weight is not part of a model's backbone."""
    return not name.startswith(f"{model.base_model_prefix}.")


def _other_heads(model: Any, unexpected: set[str]) -> set[str]:
    """Return the names of other tasks' heads, under any name, and of a pooler; the backbone must be complete."""
    backbone = {model.base_model_prefix, *(name for name, _ in model.base_model.named_children())}
    return {name for name in unexpected if name.split(".")[0] not in backbone or "pooler" in name.split(".")}


def _other_towers(model: Any, config: Any) -> set[str]:
    """Return the names of a composite model's modules other than its text model; empty if `model` is composite."""
    if type(model.config) is type(config):
        return set()
    composite = build.backbone_from_config(config)
    embeddings = composite.get_input_embeddings()
    children = composite.named_children()
    return {name for name, child in children if all(module is not embeddings for module in child.modules())}


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(list(names)[:MAX_NAMES])}{more}"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: a single one, or those in the index. Raises RLHFError M01, S03."""
    single = folder / "model.safetensors"
    paths = [single] if single.exists() else [folder / name for name in sorted(shard_files(folder))]
    for path in paths:
        if path.exists() and not path.is_file():
            raise RLHFError("M01", "this is no regular file, and may never end", where=shown(path))
    return paths


def shard_files(folder: Path) -> set[str]:
    """Return the file names in the index of sharded weights; an empty set without an index.

    Raises RLHFError M01 for an index without file names, S03 for files outside of the folder.
    """
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    weight_map = (read_json_object(path) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        text = '"weight_map" must give the file of each weight'
        hint = "fetch the file again, or take it out where model.safetensors holds them all"
        raise RLHFError("M01", text, where=shown(path), hint=hint)
    if outside := sorted(name for name in weight_map.values() if name != Path(name).name):
        raise RLHFError("S03", f'the part "{outside[0]}" points outside its folder', where=shown(path))
    return set(weight_map.values())
