"""Sources of the defaults: how they are written, that they exist, and that they state the same values."""

import re
import runpy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from run_cli import ROOT

from rlhf_cli import config
from rlhf_cli.config.machinery import trl_fields
from rlhf_cli.config.machinery.fields import DefaultSource, parse_source, split_description, texts_by_class
from rlhf_cli.config.ppo import RECIPES, PPOSettings
from rlhf_cli.config.stages import CONFIGS

KEYS = [(stage, key) for stage in CONFIGS for key in config.keys(stage).values() if not key.is_section]
SOURCES = {(stage, key.path): source for stage, key in KEYS if key.source and (source := parse_source(key.source))}
IN_RECIPES = [(recipe, name, text) for recipe, keys in RECIPES.items() for name, (_, text) in keys.items()]
EVERY_SOURCE = [*SOURCES.values(), *(source for *_, text in IN_RECIPES if (source := parse_source(text)))]
DATACLASSES = {
    "trl/trainer/sft_config.py": "SFTConfig",
    "trl/trainer/reward_config.py": "RewardConfig",
    "trl/trainer/base_config.py": "_BaseConfig",
    "src/transformers/training_args.py": "TrainingArguments",
}


@pytest.mark.parametrize(
    "text",
    [
        "ours", "", "TRL 1.16", "InstructGPT, N+ details", "`ls tests`", "Ouyang et al. 2022, arXiv 2203.02155",
        "Ouyang et al. 2022, arXiv 2203, section 3", "`make demo`", "Huang et al., arXiv 2403.17031, detail 23",
        "TRL, trl/trainer/sft_config.py", "TRL 1.16, SFTConfig", "Ouyang et al. 2022, arXiv 2203.02155, page 3",
        "docs/config.md, Defaults", "`python benchmarks/ppo.py`", "docs/results/demo.txt", "`docs/ppo.md`",
    ],
)  # fmt: skip
def test_anything_else_is_no_source(text: str) -> None:
    assert parse_source(text) is None


def test_the_bracket_at_the_end_is_the_source_and_no_other() -> None:
    meaning = "Picks a split, [SPLIT], of it."
    assert split_description(f"{meaning} [docs/ppo.md]") == (meaning, "docs/ppo.md")
    assert split_description("Ends in a [SPLIT]") == ("Ends in a [SPLIT]", None)


def test_every_default_and_every_value_of_a_recipe_has_a_source_and_no_required_key_has_one() -> None:
    assert [key.path for stage, key in KEYS if key.field.is_required() == ((stage, key.path) in SOURCES)] == []
    assert [(recipe, name) for recipe, name, text in IN_RECIPES if not parse_source(text)] == []
    assert {name for _, name, _ in IN_RECIPES} <= PPOSettings.model_fields.keys()


def test_every_text_belongs_to_a_key() -> None:
    keys = [key for stage in CONFIGS for key in config.keys(stage).values() if key.owner]
    known = {(name, key.name) for key in keys for name in ("shared", *(cls.__name__ for cls in key.owner.__mro__))}
    texts = {(table, name) for table, names in texts_by_class().items() for name in names if table != "sources"}
    assert texts <= known


def test_every_page_that_is_named_exists() -> None:
    pages = {(source.parts["page"], source.parts.get("section")) for source in EVERY_SOURCE if source.kind == "page"}
    assert len(pages) > 3
    for page, section in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not section or f"\n## {section}\n" in text, (page, section)


def test_the_projects_own_defaults_give_a_reason_for_each() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    reasons = text.partition("## Project defaults\n")[2].partition("\n## ")[0]
    keys = {key for (_, key), source in SOURCES.items() if source.parts.get("section") == "Project defaults"}
    assert len(keys) > 20 and [key for key in sorted(keys) if f"`{key}`" not in reasons] == []


@pytest.fixture
def _pinned() -> None:
    """Skip if other versions than those of constraints.txt are installed."""
    pins, here = trl_fields.made_from(), {name: version(name) for name in trl_fields.made_from()}
    if here != pins:
        pytest.skip(f"the sources are of {pins}, installed are {here}")


def installed(source: DefaultSource) -> Path | None:
    """The file of a system's source here, if that system is installed in that version."""
    package = source.parts.get("name", "").lower()
    spec = find_spec(package) if re.fullmatch(r"\w+", package) else None
    if spec is None:
        return None
    if not f"{version(package)}.".startswith(f"{source.parts['version']}."):
        return None
    assert spec.origin
    return Path(spec.origin).parents[1] / source.parts["file"].removeprefix("src/")


@pytest.mark.usefixtures("_pinned")
def test_every_file_of_an_installed_system_exists() -> None:
    files = {file for source in EVERY_SOURCE if (file := installed(source))}
    assert files and [str(file) for file in files if not file.is_file()] == []


def defaults_of(file: str) -> dict[str, object]:
    """Field -> default of each field that a config class itself declares."""
    import transformers
    from trl.trainer import base_config, reward_config, sft_config

    modules = (sft_config, reward_config, base_config, transformers)
    kind = next(getattr(module, DATACLASSES[file]) for module in modules if hasattr(module, DATACLASSES[file]))
    describe = runpy.run_path(str(ROOT / "scripts" / "trl_fields.py"))["_fields"]
    return {name: field["default"] for name, field in describe(kind).items() if name in vars(kind)["__annotations__"]}


@pytest.mark.usefixtures("_pinned")
def test_defaults_are_those_of_the_config_class_that_is_their_source() -> None:
    read = {file: defaults_of(file) for file in DATACLASSES}
    differ, checked = [], 0
    for stage, key in KEYS:
        source = SOURCES.get((stage, key.path))
        # A remark says in what the two differ, or under what name it is there.
        if not source or source.remark or not installed(source) or source.parts["file"] not in read:
            continue
        theirs, ours = read[source.parts["file"]].get(key.name, "no such field"), key.field.get_default()
        checked += 1
        if theirs != ours or isinstance(theirs, bool) != isinstance(ours, bool):
            differ.append(f"{stage}: {key.path} is {ours}, in {source.parts['file']} it is {theirs}")
    assert differ == [] and checked > 20
