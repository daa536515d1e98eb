"""manifest.json: read as it was written, without values of other types than today's."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.files import write_checked_json, write_json
from rlhf_cli.runs.manifest import Manifest, read_manifest, write_manifest

PARENT = {"path": "../sft", "stage": "sft", "sha256": "ab"}
ENTRIES: dict[str, Any] = {
    "schema": 2,
    "stage": "ppo",
    "parents": {"models.sft": PARENT},
    "files": {"model/config.json": {"sha256": "cd", "bytes": 2}},
    "later": {"key": [1, 2.0]},  # of a newer version
    "step": 4,
    "metrics": {"objective/scores": 1, "accuracy": 0.5},
    "template_sha256": None,
}


def test_a_manifest_is_written_in_the_order_given_and_read_as_an_object(tmp_path: Path) -> None:
    write_manifest(tmp_path, ENTRIES)
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert list(written) == [*ENTRIES, "sha256"] and {**written, "sha256": 0} == {**ENTRIES, "sha256": 0}
    assert '"objective/scores": 1,' in (tmp_path / "manifest.json").read_text()  # an integer stays one
    manifest, problem = read_manifest(tmp_path)
    assert problem is None
    assert (manifest.stage, manifest.step, manifest.parents["models.sft"].path) == ("ppo", 4, "../sft")
    assert manifest.records("template_sha256") and not manifest.records("tokenizer_sha256")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("step", "4", "step: input should be a valid integer"),
        ("metrics", {"accuracy": "0.5"}, "metrics.accuracy: input should be a valid number"),
        ("parents", {"a": {**PARENT, "path": 3}}, "parents.a.path: input should be a valid string"),
        ("card", {}, "card.n: field required"),
        ("probes", [{"prompt_ids": [1], "response_ids": [2], "score": float("nan")}], "probes.0.score"),
    ],
)
def test_a_value_of_another_type_is_no_damage_and_is_left_out(
    tmp_path: Path, key: str, value: object, problem: str
) -> None:
    """Damage would move the stage aside and train it again."""
    write_checked_json(tmp_path / "manifest.json", {**ENTRIES, key: value})
    manifest, damage = read_manifest(tmp_path)
    assert damage is None
    assert manifest.odd is not None and manifest.odd.startswith(f"manifest.json: {problem}")
    rest = {name: entry for name, entry in ENTRIES.items() if name != key}
    assert manifest.model_dump() == Manifest.model_validate(rest).model_dump()


def test_only_schema_1_has_no_checksum(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {**ENTRIES, "schema": 1})
    assert read_manifest(tmp_path)[1] is None
    write_json(tmp_path / "manifest.json", ENTRIES)
    manifest, problem = read_manifest(tmp_path)
    assert problem == "manifest.json: its content is not what was written (sha256 differs)" and manifest.step == 4
    write_json(tmp_path / "manifest.json", {"schema": 1, "files": []})
    assert read_manifest(tmp_path) == (Manifest(), "manifest.json names no files")
