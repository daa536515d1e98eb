"""The workflows of docs/commands.md and .github: valid YAML, whose steps are existing commands."""

import re
import runpy
import tomllib

import yaml
from packaging.requirements import Requirement
from run_cli import ROOT

PAGE = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
OURS = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL)


def steps(workflow: str, job: str) -> list[str]:
    jobs = yaml.safe_load(workflow)
    assert jobs[True], "YAML 1.1 reads `on` as True"
    return [step["run"] for step in jobs["jobs"][job]["steps"] if "run" in step]


def test_our_workflow_runs_the_targets_of_the_script() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert steps(OURS, "test") == [f"make {target}" for target in re.findall(r"^make \S+ (\w+)", script, re.MULTILINE)]


def test_our_workflow_tests_the_newest_and_the_lowest_versions() -> None:
    """`scripts/lowest.py` prints each lower bound of pyproject.toml, extras included."""
    job = yaml.safe_load(OURS)["jobs"]["bounds"]
    assert job["strategy"]["matrix"] == {"versions": ["newest", "lowest"]}
    *_, tests = steps(OURS, "bounds")
    files = re.findall(r"tests/\w+/\w+\.py", tests)
    assert len(files) > 5 and all((ROOT / file).is_file() for file in files)
    lowest = runpy.run_path(str(ROOT / "scripts/lowest.py"))["lowest"](["torch==2.13.0"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["qlora"]]
    versions = dict(line.split("==") for line in lowest)
    assert versions.pop("torch") == "2.13.0"
    assert [text for text in texts if f">={versions.get(Requirement(text).name, '')}" not in text] == []


def test_the_example_workflow_is_the_tiny_chain_and_keeps_its_report() -> None:
    install, *rest = steps(EXAMPLE, "smoke")
    assert install.startswith("pip install ") and install.endswith(" -c rlhf-cli/constraints.txt ./rlhf-cli")
    assert rest == ["rlhf init ci smoke", "rlhf run smoke"]
    assert "smoke/eval/report.html" in EXAMPLE
