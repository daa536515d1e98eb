"""Which stage a file is for: what its `stage:` says, else its name, else its sections."""

from pathlib import Path
from typing import Any

from rlhf_cli.config import yaml_source
from rlhf_cli.config.base import Origin
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.config.values import shown_value
from rlhf_cli.errors import RLHFError, quoted


def stage_of(path: Path) -> str:
    """The stage of a file. Raises RLHFError C08, C09, S02 where it cannot be read, C07 where nothing tells."""
    tree = yaml_source.read(path).tree
    said = tree.get("stage")
    if isinstance(said, str) and said in CONFIGS:
        return said
    if path.stem in CONFIGS:
        return path.stem
    best = max(CONFIGS, key=lambda stage: (stage in tree, _known(stage, tree)))
    if best not in tree and sum(_known(stage, tree) == _known(best, tree) for stage in CONFIGS) > 1:
        hint = f"add stage: {' or '.join(CONFIGS)}"
        raise RLHFError("C07", "cannot tell which stage this config is for", where=str(path), hint=hint)
    return best


def refuse_other_stage(stage: str, tree: dict[str, Any], origin: Origin) -> None:
    """A file of another stage is told as that one thing, not as a list of its unknown keys."""
    said = tree.get("stage")
    if said is None:
        said, place = _meant(stage, tree), origin.name
    else:
        place = origin.where("stage")
    if said == stage:
        return
    if isinstance(said, str) and said in CONFIGS:
        text = f"this config is for {said}, not for {stage}"
        raise RLHFError("C07", text, where=place, hint=f"run it with: rlhf {said} --config {quoted(origin.file)}")
    raise RLHFError("C07", f"stage: {shown_value(said)} is not one of {', '.join(CONFIGS)}", where=place)


def _meant(stage: str, tree: dict[str, Any]) -> str:
    """Another stage where the file has no section of `stage`, and more of its sections are the other one's."""
    best = max(CONFIGS, key=lambda other: (_known(other, tree), other == stage))
    return stage if stage in tree else best


def _known(stage: str, tree: dict[str, Any]) -> int:
    return len(CONFIGS[stage].model_fields.keys() & tree.keys())
