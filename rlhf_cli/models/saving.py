"""Models into folders, as anybody loads them: safetensors, tokenizer, template, config, a card."""

import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from rlhf_cli import processes, terminal
from rlhf_cli.models import adapters, zero3
from rlhf_cli.models.loading import config_folder


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
