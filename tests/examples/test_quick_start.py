"""The notebook runs from top to bottom, without a network."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from run_cli import must_succeed, rlhf

NOTEBOOK = Path(__file__).parents[2] / "examples/quick_start.ipynb"


def test_its_cells_are_python_and_commands_without_outputs() -> None:
    """tests/docs/test_blocks.py runs such commands."""
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    code = "\n".join(cell.source for cell in cells)
    compile(re.sub(r"(?m)^!.*", "", code), NOTEBOOK.name, "exec")
    for command in re.findall(r"(?m)^!rlhf (.*)", code):
        name, *words = command.split()
        options = must_succeed(rlhf(name, "--help")).output
        assert all(word in options for word in words if word.startswith("-")), command


# A process for each stage of two runs: one and a half minutes of CPU time.
@pytest.mark.slow
@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in {"PATH": commands, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("by gold: PPO wins 0." in text for text in printed)
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
    assert (tmp_path / "policy/model.safetensors").is_file()
