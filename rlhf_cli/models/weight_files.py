"""The files of a folder that hold its model's weights: transformers must load no others, since parents are hashed.

All functions raise RLHFError: M01 (no readable index), S03 (files outside), and what they say.
"""

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_cli.errors import RLHFError, first_names, shown
from rlhf_cli.files import read_json_object
from rlhf_cli.runs.layout import ADAPTER_CONFIG
from rlhf_cli.runs.model_files import is_model_file, read_adapter
from rlhf_cli.runs.parents import Parent

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# of transformers' is_sharded_checkpoint(): shards that it reads instead of model.safetensors
DISTRIBUTED_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# Attention masks and rotary angles that GPT-2, GPT-NeoX and old Llamas stored with their weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
HEADS = ("lm_head.", "score.")  # prefixes of parameters; a reward model has no lm_head
FLOAT_FORMATS = {"F64", "F32", "F16", "BF16"}


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: a single one, or those in the index."""
    single = folder / SINGLE
    if single.exists():
        return [single]
    return [folder / name for name in sorted(_shard_names(folder))]


def stored_weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each weight that a folder stores, and what its file's header says of it: shape and dtype."""
    return chain.from_iterable(map(_stored_in, weight_files(folder)))


def _stored_in(path: Path) -> Iterator[tuple[str, Any]]:
    with safe_open(path, "pt") as file:
        for name in list(file.keys()):
            yield name, file.get_slice(name)


def _shard_names(folder: Path) -> set[str]:
    """Return the file names in the index of sharded weights, if any."""
    path = folder / INDEX
    if not path.exists():
        return set()
    weight_map = (read_json_object(path) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        text = '"weight_map" must give the file of each weight'
        hint = "download the file again, or remove it if model.safetensors has all weights"
        raise RLHFError("M01", text, where=shown(path), hint=hint)
    names = set(weight_map.values())
    for name in sorted(names):
        if name != Path(name).name:
            raise RLHFError("S03", f'the part "{name}" points outside its folder', where=shown(path))
    return names


def refuse_pickles(folder: Path) -> None:
    """Raise RLHFError M07 if a folder has its weights only as pickles."""
    pickles = {path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES} - {"training_args.bin"}
    in_index = not pickles.isdisjoint(_shard_names(folder))
    if in_index or (pickles and not any(folder.glob("*.safetensors"))):
        name = min(pickles)
        text = f"{shown(folder)} has its weights only as a pickle ({name}), which can run code when it is read"
        hint = "if you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        raise RLHFError("M07", text, hint=hint)


def refuse_other_weights(folder: Path, config: Any) -> None:
    """Raise RLHFError M15 if transformers would load other weights than `weight_files`, or quantized ones.

    `config` is the folder's own. The weights of an adapter's folder belong to its base.
    """
    if read_adapter(folder) is not None:
        return
    place = shown(folder)
    if (folder / ADAPTER_CONFIG).exists():
        text = f"{place} holds an adapter ({ADAPTER_CONFIG}) beside full weights, and transformers would add it to them"
        hint = "move the adapter's files out of the folder; or merge the two into a new folder"
        raise RLHFError("M15", text, hint=hint)
    for path in folder.iterdir():
        if DISTRIBUTED_SHARD.fullmatch(path.name):
            text = f"{place} holds {path.name} of a distributed checkpoint, which transformers reads before all others"
            hint = "move these files away; or AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            raise RLHFError("M15", text, hint=hint)

    usual = SINGLE if (folder / SINGLE).exists() else INDEX
    for each in (config, config.get_text_config()):
        _refuse_other_file(place, each, usual)
        _refuse_quantized(place, each)

    for path in weight_files(folder):
        if path.suffix != ".safetensors" or not is_model_file(path.name):
            text = f'{shown(folder / INDEX)} names "{path.name}", which is not a file NAME.safetensors'
            raise RLHFError("M15", text, hint="name it so, in the index too; or download the folder again")


def _refuse_other_file(place: str, config: Any, usual: str) -> None:
    """Raise RLHFError M15 if a config names another file of weights than the usual one."""
    named = getattr(config, "transformers_weights", None)
    if named not in (None, usual):
        text = f'config.json has transformers_weights "{named}", a file that transformers loads instead of {usual}'
        hint = f"remove the key; to train on that file, rename it to {SINGLE}, too"
        raise RLHFError("M15", f"{place}: {text}", hint=hint)


def _refuse_quantized(place: str, config: Any) -> None:
    """Raise RLHFError M15 if a config has settings of quantized weights."""
    method = getattr(config, "quantization_config", None)
    if not method:
        return
    if isinstance(method, dict):
        method = method.get("quant_method", "quantization_config")
    text = f"{place} holds quantized weights ({method} in config.json), which cannot be trained or merged"
    hint = "name the same model without quantization; adapters: {kind: qlora} stores it in 4 bits"
    raise RLHFError("M15", text, hint=hint)


def require_float_formats(folder: Path, model: Any) -> None:
    """Raise RLHFError M15 if a weight of `model` is not stored as a plain floating-point number.

    transformers converts any format without a word: 8 bits without their scales, and True to 1. Stored masks and
    positions are no weights.
    """
    kinds = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    formats: dict[str, str] = {}
    for name, stored in stored_weights(folder):
        kind = name.rpartition(".")[2]
        dtype = stored.get_dtype()
        if kind in kinds and not name.endswith(BUFFERS) and dtype not in FLOAT_FORMATS:
            formats[name] = dtype

    if formats:
        found = f"{' and '.join(sorted(set(formats.values())))} in {first_names(sorted(formats))}"
        text = f"{shown(folder)} holds weights that are not floating-point numbers of 16 to 64 bits: {found}"
        raise RLHFError("M15", text, hint="name the same model in BF16, F16 or F32")


def count_parameters(parent: Parent, *, heads: bool = False) -> int:
    """Return the number of parameters in the headers of a model's safetensors files; of an adapter, its base's."""
    if parent.base:
        return count_parameters(parent.base, heads=heads)
    uncounted = () if heads else HEADS
    return sum(_count_in_file(path, uncounted) for path in weight_files(parent.model))


def _count_in_file(path: Path, uncounted: tuple[str, ...]) -> int:
    count = 0
    try:
        for name, stored in _stored_in(path):
            if not name.startswith(uncounted) and not name.endswith(BUFFERS):
                count += math.prod(stored.get_shape())
    except (OSError, SafetensorError):
        return 0  # corrupt: loading it reports the error
    return count
