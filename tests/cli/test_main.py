"""The command line: help, streams, exit codes, and errors that fit a line.

Modules: `pipeline/preview.py`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cost import cost
from run_cli import ROOT, child, is_one_error, must_succeed, python, rlhf
from typer.main import get_command

import rlhf_cli
from rlhf_cli import config, runs
from rlhf_cli.cli import app
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.aliases import COMMANDS

# Help


@pytest.mark.full
def test_help_is_light() -> None:
    result = child("--help")
    assert result.returncode == 0
    assert cost(lambda: child("--help")) <= 1.6  # 1.1 on a quiet machine
    assert result.stdout.count("completion") == 4  # two options, a line or two each


def test_help_shows_each_command_in_its_group_with_a_whole_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = child("--help").stdout
    groups = {part.split(":")[0]: part for part in text.split("\n\n") if part[:1].isupper()}
    shown = {title: re.findall(r"^  (\w+) ", groups[title], re.M) for title in ("Train", "Inspect", "Ship")}
    assert shown == {
        "Train": ["init", "convert", "check", "plan", "run", "launch", "sft", "reward", "dpo", "ppo", "eval"],
        "Inspect": ["status", "ls", "report", "chat", "label", "verify", "explain", "schema", "env"],
        "Ship": ["export", "serve"],
    }
    commands = get_command(app).commands  # type: ignore[attr-defined]
    public = {name for name, command in commands.items() if not command.hidden}
    assert public == {name for names in shown.values() for name in names}
    for line in "\n".join(groups[title] for title in shown).splitlines():
        assert len(line) <= 80 and (not line.startswith("  ") or line.endswith(".")), line


LIGHT = ["--help", "ppo -h", "run -h", "chat -h", "schema ppo", "explain kl_coef", "--version"]


IMPORTS = """
import sys
from rlhf_cli.cli import app
for line in sys.argv[1:]:
    try:
        app(line.split())
    except SystemExit as end:
        assert not end.code, line
    assert "torch" not in sys.modules, line
"""


@pytest.mark.full
def test_light_commands_import_no_torch(folder: Path) -> None:
    done = must_succeed(python("-c", IMPORTS, *LIGHT, "sft -c sft.yaml --dry-run"))
    assert done.stderr == ""


def test_the_version_is_the_packages() -> None:
    assert rlhf("--version").stdout == f"rlhf {rlhf_cli.__version__}\n"


# Usage


@pytest.mark.parametrize(
    ("line", "code", "text", "hint"),
    [
        ("zzz", "C11", "zzz", "rlhf --help"),
        ("ppo --config", "C11", "--config", "rlhf ppo --help"),
        ("ppo -c x.yaml --frsh", "C11", "--frsh", "rlhf ppo --help"),
        ("--nope", "C11", "--nope", "rlhf --help"),
        ("run runs/x --only", "C11", "--only", "rlhf run --help"),
        ("stauts runs/x", "C11", "stauts", "did you mean rlhf status?"),
        ("sft", "C11", "no FILE or RUN is given", "rlhf sft RUN, or rlhf sft --config FILE"),
        ("sft seed=1", "C11", "no FILE or RUN is given", "rlhf sft RUN"),
        ("sft base", "C09", "base has no sft.yaml", "name a run folder, or its file: rlhf sft FILE"),
        ("sft nope", "C09", "nope", ""),
        (
            "sft -c sft.yaml base",
            "C11",
            "--config sft.yaml and base name a config each",
            "omit one of them: rlhf sft base",
        ),
        ("sft -c .", "C09", "is a folder", "--config sft.yaml; for all stages: rlhf run "),
        ("sft -c base", "C09", "base is a folder", "give the stage's YAML file"),
        ("ppo -c ppo.yaml --dry-run models.sft=./bse", "M01", "bse", ""),
        ("schema pppo", "C07", "pppo", "did you mean ppo?"),
        ("init ci", "C11", "DIR is missing", "rlhf init ci runs/ci"),
        ("init ci rows.jsonl/x", "E03", "rows.jsonl is a file", "name a folder elsewhere"),
        ("convert sft.yaml", "C11", "Missing argument 'DIR'", "rlhf convert --help"),
        ("report nope", "M01", "no such folder nope", "name the folder of a run"),
        ("report .", "M01", "holds no output of", "run it first: rlhf run /"),
        ("chat .", "M01", "holds neither ppo/ nor sft/", "run it first: rlhf run /"),
        ("init dmo x", "C07", "dmo", "did you mean demo?"),
    ],
)
def test_a_wrong_command_line_is_one_error_with_the_fix(
    folder: Path, line: str, code: str, text: str, hint: str
) -> None:
    assert is_one_error(rlhf(*line.split()), code, text, f"\nhint: {hint}")


def test_a_command_of_another_system_has_a_hint_with_commands_and_options_that_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert not COMMANDS.keys() & commands.keys()
    for command, answer in COMMANDS.items():
        result = rlhf(command, "runs/x", "--lr", "3")
        assert is_one_error(result, "C11")
        assert result.stderr == f"error[C11]: there is no command {command}\nhint: {answer}\n"
        for name, words in re.findall(r"\brlhf ([a-z]+)([^,;]*)", answer):
            assert name in commands, answer
            assert set(re.findall("--[a-z]+", words)) <= {text for each in commands[name].params for text in each.opts}


def test_no_command_shows_the_help_and_is_an_error_of_usage() -> None:
    result = rlhf()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "\n  ppo " in result.stderr


# The arguments of a stage


def test_run_hands_on_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_cli.pipeline import run as pipeline_run

    calls: list[Any] = []
    monkeypatch.setattr(
        pipeline_run,
        "run_folder",
        lambda *given, **options: calls.append((given, options)) or pipeline_run.RunOutcome(5),
    )
    selected = ["--only", "ppo", "--force", "ppo", "--from", "sft"]
    assert rlhf("run", "x", "-s", "*.seed=3", "ppo.kl_coef=1", *selected, "--dry-run").exit_code == 5
    assert calls == [
        (
            (Path("x"), ["*.seed=3", "ppo.kl_coef=1"], Options(dry_run=True)),
            {"only": ["ppo"], "start": "sft", "force": ["ppo"]},
        )
    ]


# Dry runs


def test_a_dry_run_prints_a_config_that_loads_and_writes_nothing(folder: Path, tmp_path_factory: Any) -> None:
    before = sorted(folder.rglob("*"))
    result = child("sft", "-c", "sft.yaml", "--dry-run", "sft.max_length=9", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(folder.rglob("*")) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "printed.yaml"
    elsewhere.write_text(result.stdout)
    loaded = config.load("sft", folder / "sft.yaml", ["sft.max_length=9"])
    assert config.load("sft", elsewhere).dump() == yaml.safe_load(result.stdout) == loaded.dump()
    assert result.stdout.splitlines()[-3:] == [
        f"# reads   model.path: base (foreign, {runs.open_parents(loaded)['model.path'].sha256[:6]})",
        "# reads   data.train: rows.jsonl",
        "# writes  sft: new",
    ]


def test_a_dry_run_lists_missing_inputs_and_refuses_those_that_no_stage_writes(folder: Path) -> None:
    result = rlhf("ppo", "-c", "ppo.yaml", "--dry-run")
    assert result.exit_code == 0
    assert "# reads   models.reward: not ready: " in result.stdout
    assert result.stdout.endswith("# writes  ppo: once what it reads is ready\n")
    (folder / "rows.jsonl").unlink()
    assert is_one_error(rlhf("ppo", "-c", "ppo.yaml", "--dry-run"), "D01")


def test_a_dry_run_prints_what_happens_to_the_output(folder: Path) -> None:
    loaded = config.load("sft", folder / "sft.yaml")
    parents = runs.open_parents(loaded)
    identity = runs.compute_identity(loaded, parents, loaded.sources())
    runs.start_stage(loaded, identity, {}, fresh=False)
    runs.commit_state(loaded.folder / "state", "checkpoint-7", lambda path: None, keep=2)

    def outcome(*more: str) -> str:
        return rlhf("sft", "-c", "sft.yaml", "--dry-run", *more).stdout.splitlines()[-1]

    assert outcome() == "# writes  sft: resumes at step 7"
    assert outcome("sft.max_length=9") == "# writes  sft: stale: sft.max_length 1024 -> 9; needs --fresh"
    assert outcome("sft.max_length=9", "--fresh") == "# writes  sft: new; the old folder moves to .old/"
    runs.complete_stage(loaded, identity, parents=parents, fields={})
    assert outcome() == "# writes  sft: it is finished, nothing to do"


# Failures


def test_a_reader_that_closes_early_is_no_error() -> None:
    command = [sys.executable, "-m", "rlhf_cli", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# The small commands


def test_schema_prints_one_stage_or_all_and_env_the_versions() -> None:
    every, one = (json.loads(rlhf(*arguments).stdout) for arguments in (["schema"], ["schema", "ppo"]))
    assert len(every["anyOf"]) == 5 and "ppo" in one["properties"] and one["additionalProperties"] is False
    facts = json.loads(rlhf("env", "--json").stdout)
    assert facts["rlhf"] == rlhf_cli.__version__
    assert {"python", "torch", "transformers", "trl", "platform", "cpus", "gpus"} <= facts.keys()
    assert f"torch_threads  {facts['torch_threads']}" in rlhf("env").stdout
