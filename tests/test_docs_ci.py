"""docs/ci.md and .github: the workflows are YAML, and their steps are commands that there are."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
OURS = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
(THEIRS,) = re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL)


def steps(workflow: str) -> list[str]:
    found = yaml.safe_load(workflow)
    assert found[True], "what `on` is to YAML 1.1"
    return [step["run"] for job in found["jobs"].values() for step in job["steps"] if "run" in step]


def test_our_workflow_does_what_the_script_does() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert steps(OURS) == [f"make {target}" for target in re.findall(r"^make \S+ (\w+)", script, re.MULTILINE)]


def test_their_workflow_is_the_tiny_chain_and_keeps_its_page() -> None:
    assert steps(THEIRS) == ["pip install rlhf-cli", "rlhf init ci smoke", "rlhf run smoke"]
    assert "smoke/eval/report.html" in THEIRS


@pytest.mark.parametrize("workflow", [OURS, THEIRS])
def test_every_job_ends_by_itself(workflow: str) -> None:
    assert all("timeout-minutes" in job for job in yaml.safe_load(workflow)["jobs"].values())
