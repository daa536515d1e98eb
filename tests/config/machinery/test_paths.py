"""Paths of a config: from its folder, or ids of the Hub."""

import os
from pathlib import Path

import pytest
from bad_configs import MINIMAL, loaded


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", "{run}/base"),
        ("org/base", "org/base"),
        ("./org/base", "{run}/org/base"),
        ("~/base", os.path.expanduser("~/base")),
        ("/models/base", "/models/base"),
    ],
)
def test_paths_are_relative_to_the_file_and_models_may_be_hub_ids(name: str, expected: str, here: Path) -> None:
    (here / "run" / "base").mkdir(parents=True)
    sft = loaded(here / "run", "sft", MINIMAL["sft"].replace("base", name))
    assert (sft.model.path, sft.data.train) == (expected.format(run=here / "run"), str(here / "run" / "train.jsonl"))
