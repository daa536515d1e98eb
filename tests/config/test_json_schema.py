"""The JSON Schemas that editors read: current, found from every config, and in agreement with the loader."""

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from bad_configs import HEAD
from pydantic import ValidationError

from rlhf_cli import config, errors
from rlhf_cli.cli import completion
from rlhf_cli.commands.init import presets
from rlhf_cli.config import json_schema
from rlhf_cli.config.machinery import trl_fields, yaml_io
from rlhf_cli.config.machinery.aliases import SET_BY_RLHF
from rlhf_cli.config.messages import check_trainer
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.demo.world import Sizes

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.stem in CONFIGS)
# Errors that pydantic finds without our rules between keys.
PLAIN = ("TRL", "_type", "_error", "extra_forbidden", "greater_than", "less_than", "missing", "too_short", "union_tag")


@pytest.fixture(scope="module")
def schemas() -> dict[str, jsonschema.Draft7Validator]:
    return {stage: jsonschema.Draft7Validator(config.schema(stage)) for stage in CONFIGS}


def of_file(path: Path) -> Path:
    """The schema that a config's first line names, as an editor finds it."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith(json_schema.MODELINE), path
    return path.parent / first.removeprefix(json_schema.MODELINE)


def complaints(path: Path) -> list[str]:
    """What an editor would underline in a config."""
    validator = jsonschema.Draft7Validator(json.loads(of_file(path).read_text(encoding="utf-8")))
    return [error.message for error in validator.iter_errors(yaml_io.read(path).tree)]


# Current, and found


@pytest.mark.parametrize("stage", CONFIGS)
def test_the_committed_schema_is_that_of_the_code(stage: str) -> None:
    committed = (ROOT / f"schemas/{stage}.json").read_text(encoding="utf-8")
    assert committed == json_schema.schema_text(stage), "run: make schemas"
    jsonschema.Draft7Validator.check_schema(config.schema(stage))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_committed_config_names_its_schema_and_meets_it(path: Path, schemas: Any) -> None:
    assert of_file(path).resolve() == ROOT / f"schemas/{path.stem}.json" and complaints(path) == []
    schemas[path.stem].validate(config.load(path.stem, path).dump())  # with every key written out


@pytest.mark.parametrize("preset", ["demo", "functions", "instruct"])
def test_a_new_run_brings_its_schemas_and_keeps_them_when_moved(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(presets.PRESETS[preset], world_sizes=presets.PRESETS[preset].world_sizes and Sizes(0, 50, 50, 20))
    monkeypatch.setitem(presets.PRESETS, preset, small)
    presets.init(preset, tmp_path / "run", seed=3)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    files = list((tmp_path / "elsewhere").rglob("*.yaml"))
    assert {path.name for path in (tmp_path / "elsewhere/.schema").iterdir()} == {f"{path.stem}.json" for path in files}
    for path in files:
        assert of_file(path).resolve() == (tmp_path / f"elsewhere/.schema/{path.stem}.json").resolve()
        assert complaints(path) == [] and path.read_text().count(json_schema.MODELINE) == 1
        assert config.load(path.stem, path).seed == 3
    assert (tmp_path / "elsewhere/.schema/ppo.json").read_text() == json_schema.schema_text("ppo")


def test_a_folder_with_other_schemas_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".schema").mkdir()
    (tmp_path / ".schema/ppo.json").write_text("{}")
    with pytest.raises(errors.RLHFError, match=r"already holds \.schema/ppo\.json, with another content"):
        presets.init("instruct", tmp_path)


# Agreement with the loader


WRONG = [[], [[1]], {"no such": 1}, "no such word", -7, 1.5, 10**12, True, None]


def altered(stage: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs with one key changed to each of many values, and with one key too much in each section."""
    head = yaml.safe_load(HEAD[stage])
    for key in completion.values_by_key([stage]):
        for value in WRONG:
            yield key, put(head, key.split("."), value)
    for section in {key.rpartition(".")[0] for key in completion.values_by_key([stage])}:
        yield section, put(head, [*filter(None, section.split(".")), "no_such_key"], 1)


def put(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    inner = changed
    for name, below in pairwise(path):
        if name == "NUMBER":
            inner = inner[0]  # type: ignore[index]
        elif below == "NUMBER":
            inner[name] = [{"path": "rows.jsonl"}]
            inner = inner[name]
        else:
            inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    return changed


@pytest.mark.full
@pytest.mark.parametrize("stage", CONFIGS)
def test_an_editor_underlines_what_the_loader_refuses_and_nothing_else(stage: str, schemas: Any) -> None:
    underlined = count = 0
    for key, tree in altered(stage):
        messages = [error.message for error in schemas[stage].iter_errors(tree)]
        kinds = ["a field of TRL's" for _ in check_trainer(tree.get("trainer", {}), CONFIGS[stage], str)]
        try:
            CONFIGS[stage].model_validate(tree)
        except ValidationError as error:
            kinds += [each["type"] for each in error.errors()]
        if not kinds:
            assert messages == [], (key, tree)
        elif all(any(part in kind for part in PLAIN) for kind in kinds):
            assert messages, (key, tree, kinds)
        underlined, count = underlined + bool(messages), count + 1
    assert underlined > count / 2 > 50


@pytest.mark.parametrize("stage", trl_fields.TRAINERS)
def test_trainer_takes_what_trl_takes_but_what_the_pipeline_sets(stage: str, schemas: Any) -> None:
    head = yaml.safe_load(HEAD[stage])
    for name, key in trl_fields.trainer_keys(CONFIGS[stage]).items():
        schemas[stage].validate({**head, "trainer": {name: key.default(None)}})
    for name in (*SET_BY_RLHF, "save_steps", "learning_rate", "no_such_field"):
        assert not schemas[stage].is_valid({**head, "trainer": {name: None}}), name


# What an editor shows


@pytest.mark.parametrize("stage", CONFIGS)
def test_every_key_has_its_meaning_its_default_and_its_choices(stage: str) -> None:
    tree = config.schema(stage)
    for path, key in config.keys(stage).items():
        node = at(tree, path.split("."))
        assert node["description"].startswith(key.meaning), path
        if key.section is None and not key.field.is_required():
            assert node.get("default", {}) == key.default(None), path
    assert at(tree, ["data", "format"])["enum"] == ["auto", "plain", "transcripts", "turns"]
    text = json.dumps(tree)
    assert not any(noise in text for noise in ('"$ref"', '"$defs"', '"title"', "allOf", "oneOf"))


def at(node: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The schema of a key; of a table's, that of its entries."""
    for name in path:
        if name == "NUMBER":
            node = next(each["items"] for each in node["anyOf"] if each["type"] == "array")
            continue
        below = next((each for each in node.get("anyOf", []) if each["type"] == "object"), node)
        node = below["additionalProperties"] if name == "NAME" else below["properties"][name]
    return node


@pytest.mark.parametrize(
    ("key", "end"),
    [
        ("ppo.kl_coef", " errors of the reward model. Source of the default: TRL 1.12."),
        ("ppo.missing_eos_penalty", " default: TRL 1.12; none in its PPOConfig."),
        ("ppo.kl_in", " default: Ziegler et al. 2019, arXiv 1909.08593, section 2.1."),
        ("ppo.require_reward", " Default: no requirement."),  # without the page
    ],
)
def test_an_editor_shows_the_source_of_a_default_without_pages(key: str, end: str) -> None:
    assert at(config.schema("ppo"), key.split("."))["description"].endswith(end)


def test_a_union_is_one_only_where_it_has_parts() -> None:
    ppo = config.schema("ppo")
    assert at(ppo, ["ppo", "kl_stop"])["type"] == ["number", "null"]
    assert at(ppo, ["ppo", "kl_estimator"])["enum"] == ["k1", "k2", "k3", "abs", "full"]
    assert [part["type"] for part in at(ppo, ["ppo", "response_length"])["anyOf"]] == ["integer", "object"]
    adapters = at(ppo, ["models", "adapters"])
    assert adapters["type"] == ["object", "null"] and adapters["additionalProperties"] is False
