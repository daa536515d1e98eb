"""A run whose answers are labelled."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run(label_origin: Path, here: Path) -> Path:
    """A copy of the run in the working directory."""
    return Path(shutil.copytree(label_origin, "run"))
