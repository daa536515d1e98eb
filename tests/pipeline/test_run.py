"""`rlhf run`: what runs, what is skipped, and why. Only the stages are fakes, which train nothing.

Modules: `pipeline/decide.py`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_stage
import pytest
from bad_inputs import replace
from fake_config import CONFIGS, write_configs

from rlhf_cli import config
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.pipeline import children
from rlhf_cli.pipeline import run as pipeline_run
from rlhf_cli.pipeline.run import run_folder

FAKE = Path(fake_stage.__file__)


def run_here(command: list[str]) -> int:
    """Run a stage in this process, which is faster than a child."""
    assert command[:4] == [sys.executable, "-P", "-m", "rlhf_cli"]
    if command[4] == "check":
        return 0  # the fakes' data would not pass
    try:
        return fake_stage.main(command[4:])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with all four configs, their data and a base model; stages are replaced by fakes."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parent.parent))
    monkeypatch.setattr(children, "run_child", run_here)
    return write_configs(here)


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Runs the pipeline and returns its line about each stage; asserts on the exit code."""

    def call(*overrides: str, code: int = 0, dry_run: bool = False, **selection: object) -> dict[str, str]:
        capfd.readouterr()
        options = Options(dry_run=dry_run)
        assert run_folder(Path("."), overrides, options, **selection).code == code  # type: ignore[arg-type]
        lines = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines() if line.strip()]
        # The fakes print "sft new", too; a line of the pipeline has the stage's name in a column of 8.
        return {line[0]: line[1] for line in reversed(lines) if line[0] in CONFIGS}

    return call


def refused(run: Callable, *overrides: str, **selection: object) -> RLHFError:
    with pytest.raises(RLHFError) as caught:
        run(*overrides, **selection)
    return caught.value


def edit_json(name: str, edit: Callable[[dict], object]) -> None:
    content = json.loads(Path(name).read_text())
    edit(content)
    Path(name).write_text(json.dumps(content))


def ran(lines: dict[str, str]) -> dict[str, str]:
    """Return the lines of the stages that ran, in order."""
    up_to_date = re.compile(r"up to date \(\w+\), skipped")
    return {stage: line for stage, line in reversed(lines.items()) if not up_to_date.fullmatch(line)}


def test_a_first_run_runs_all_stages_and_a_second_one_none(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == dict.fromkeys(CONFIGS, "new")
    monkeypatch.setattr(children, "run_child", lambda command: pytest.fail(f"ran {command}"))
    assert (lines := run()).keys() == CONFIGS.keys() and ran(lines) == {}


def test_all_stages_are_checked_once_before_the_first_of_several_runs(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def child(command: list[str]) -> int:
        calls.append(command[4])
        return 2 if command[4] == "check" and (folder / "wrong").exists() else run_here(command)

    monkeypatch.setattr(children, "run_child", child)
    (folder / "wrong").touch()
    assert run(code=2) == {} and calls == ["check"]
    (folder / "wrong").unlink()
    run()
    assert calls == ["check", "check", *CONFIGS]
    run()  # nothing to do
    (folder / "held-out.jsonl").write_text("{} \n")
    run()  # the last stage checks itself
    assert calls == ["check", "check", *CONFIGS, "eval"]
    command = children.check_command(Path("a"), ["ppo.kl_coef=1"], Options(trust_remote_code=True))
    assert command[4:] == ["check", "a", "--before-run", "--set", "ppo.kl_coef=1", "--trust-remote-code"]


def other_dates() -> None:
    for path in Path().rglob("*"):
        os.utime(path, (1, 1))


def newer_version() -> None:
    old = {"schema": 1, "versions": {"rlhf": "9.9", "torch": "9.9"}}  # schema 1 has no hash of itself
    edit_json("sft/manifest.json", lambda manifest: manifest.update(old))


def no_such_keys() -> None:
    """An older version, which did not have these keys, wrote the stages."""
    for stage, key in (("sft", "packing"), ("ppo", "gamma"), ("eval", "modes")):
        edit_json(f"{stage}/identity.json", lambda identity, stage=stage, key=key: identity["config"][stage].pop(key))


def moved() -> None:
    os.chdir(Path.cwd().rename(Path.cwd().with_name("moved")))


def unfinished() -> None:
    Path("reward/manifest.json").unlink()
    shutil.rmtree("reward/model")


JUDGED = {"eval": "stale: models.ppo: other weights"}
KL_COEF = {"ppo": "stale: ppo.kl_coef 0.05 -> 0.1", **JUDGED}
PROMPTS = {"ppo": "stale: data.prompts: other content", **JUDGED}
RATE = {
    "sft": "stale: sft.learning_rate 1e-05 -> 2e-05",
    "reward": "stale: model.path: other weights",
    "ppo": "stale: models.sft: other weights",
    "eval": "stale: models.sft: other weights",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (lambda: replace("ppo.yaml", "kl_coef: 0.05", "kl_coef: 0.1"), KL_COEF),
        (lambda: replace("sft.yaml", "learning_rate: 1e-5", "learning_rate: 2e-5"), RATE),
        # the same bytes again make nothing else stale
        (lambda: replace("sft.yaml", "decay: 0.0", "decay: 0.1"), {"sft": "stale: sft.weight_decay 0.0 -> 0.1"}),
        (lambda: Path("prompts.jsonl").write_text("{} \n"), PROMPTS),
        (lambda: replace("sft.yaml", "sft: {", "output: {keep: 5}\nsft: {logging_steps: 3, "), {}),
        (other_dates, {}),
        (newer_version, {}),
        (no_such_keys, {}),
        (moved, {}),
        (unfinished, {"reward": "starts again (no step was saved)"}),
        (lambda: Path("sft/model/model.safetensors").write_text(""), {"sft": "damaged: model/model.safetensors has 0"}),
    ],
)
def test_a_change_runs_the_stages_that_it_makes_stale(
    run: Callable, happens: Callable, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their old output is moved to .old/."""
    run()
    monkeypatch.chdir(".")  # and back
    happens()
    lines = ran(run())
    assert lines.keys() == expected.keys()
    assert all(line.startswith(expected[stage]) for stage, line in lines.items()), lines
    replaced = {stage for stage, line in expected.items() if not line.startswith("starts")}
    assert {path.name for path in Path().glob(".old/*")} == {f"{stage}-1" for stage in replaced}
    assert ran(run()) == {}


def test_a_key_of_a_newer_version_that_is_not_at_its_default_makes_a_stage_stale(run: Callable) -> None:
    run()
    no_such_keys()
    assert run("ppo.gamma=0.9")["ppo"] == "stale: ppo.gamma: new key 0.9"


@pytest.mark.parametrize(("stage", "rest"), [("sft", "; what comes after it was not run"), ("eval", "")])
def test_a_failed_stage_ends_the_run_with_its_exit_code(
    run: Callable, stage: str, rest: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAILS", stage)
    assert run_folder(Path("."), (), Options()).code == 7
    assert f"{stage:<8} ended with exit code 7{rest}\n" in capfd.readouterr().err


def test_a_failed_stage_is_resumed(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILS", "reward")
    assert run(code=7) == {"sft": "new", "reward": "new"}
    monkeypatch.delenv("FAKE_FAILS")
    assert ran(run()) == {"reward": "resumes at step 120", "ppo": "new", "eval": "new"}


# Selections


def test_only_from_and_force(run: Callable) -> None:
    run()
    assert ran(run(force=("reward",))).keys() == {"reward"}
    assert run(force=("sft",), only=("sft",)) == {"sft": "forced to run again"}
    replace("ppo.yaml", "0.05", "0.1")
    assert run(only=("reward",)).keys() == {"reward"}
    assert run(start="ppo").keys() == {"ppo", "eval"}
    assert len(list(Path(".old").iterdir())) == 4


@pytest.mark.parametrize(
    ("overrides", "selection", "code", "text"),
    [
        ((), {"only": ("rewards",)}, "C07", "did you mean reward?"),
        ((), {"start": "eval", "only": ("sft",)}, "C17", "--only and --from"),
        ((), {"start": "ppo", "force": ("sft",)}, "C17", "--force sft"),
        (("seed=3",), {}, "C11", "-s '*.seed=3' sets it in all of them"),
        (("data.columns.prompt=q",), {}, "C11", "-s '*.data.columns.prompt=q' sets it in all"),
        (("pppo.kl_coef=1",), {}, "C11", "did you mean ppo?"),
        (("pppo:seed=1",), {}, "C11", "pppo: not one of the stages that run here"),
        (("pppo:seed=1",), {}, "C11", "did you mean ppo?"),
        (("model.dtype=float32",), {}, "C11", "-s 'sft:model.dtype=float32' in one"),
        (("rubbish",), {}, "C11", "--set rubbish: expected KEY=VALUE\nhint: e.g. --set ppo.kl_coef=0.1"),
        (("=",), {}, "C11", "--set =: expected KEY=VALUE"),
    ],
)
def test_contradictory_selections_and_ambiguous_or_unknown_sections_are_refused(
    run: Callable, overrides: tuple[str, ...], selection: dict, code: str, text: str
) -> None:
    error = refused(run, *overrides, **selection)
    assert error.problems[0].code == code and text in str(error) and error.exit_code == 2


MISSING = ("pairs.jsonl", "held-out.jsonl", "base/config.json")


@pytest.mark.parametrize(
    ("missing", "selection", "codes"),
    [
        ((), {"only": ("ppo",)}, ["M01", "M01"]),  # a selected stage needs its parents
        (("eval.yaml",), {"only": ("eval",)}, ["C09"]),
        (MISSING, {}, ["M01", "D01", "D01"]),
    ],
)
def test_all_that_is_missing_is_reported_before_anything_runs(
    run: Callable, missing: tuple[str, ...], selection: dict, codes: list[str]
) -> None:
    for name in missing:
        Path(name).unlink()
    error = refused(run, **selection)
    assert [problem.code for problem in error.problems] == codes
    assert "only" not in selection or missing or "rlhf sft --config sft.yaml" in str(error)
    assert not Path("sft").exists()


def test_a_stage_without_a_config_is_not_run(run: Callable) -> None:
    Path("eval.yaml").unlink()
    assert run().keys() == {"sft", "reward", "ppo"}


def test_all_config_errors_of_all_files_are_reported_at_once(run: Callable) -> None:
    replace("sft.yaml", "weight_decay", "weight_decai")
    replace("ppo.yaml", "kl_coef", "kl_coeff")
    assert [problem.where for problem in refused(run).problems] == ["sft.yaml:3", "ppo.yaml:2"]


# Overrides


def test_a_key_goes_to_the_stages_that_have_its_section(run: Callable) -> None:
    run()
    assert run("ppo.kl_coef=0.2")["ppo"] == "stale: ppo.kl_coef 0.05 -> 0.2"
    assert run("ppo.kl_coef=0.2", "reward.learning_rate=3e-5")["reward"] == "stale: reward.learning_rate 1e-05 -> 3e-05"
    assert [line.split(";")[0] for line in run("*.seed=3").values()][:1] == ["stale: seed 0 -> 3"]


def test_an_override_that_no_config_has_is_reported_if_the_next_run_would_undo_it(
    run: Callable, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def unsaved(*overrides: str) -> list[str]:
        capfd.readouterr()
        assert run_folder(Path("."), overrides, Options()).code == 0
        return [line for line in capfd.readouterr().out.splitlines() if " used -s " in line]

    run()
    (line,) = unsaved("ppo.kl_coef=0.2", "sft.logging_steps=7")
    assert line == f"ppo used -s ppo.kl_coef=0.2: add it to ppo.yaml, or a plain `rlhf run {folder}` runs ppo again"
    assert [line.split()[0] for line in unsaved("ppo.kl_coef=0.05", "*.seed=3")] == list(CONFIGS)
    run()
    assert unsaved("sft.logging_steps=7", "ppo.kl_coef=0.05") == []


# Dry runs


def test_a_dry_run_prints_the_decisions_and_runs_nothing(run: Callable, folder: Path) -> None:
    assert run(dry_run=True) == {
        "sft": "new",
        "reward": "after sft: new",
        "ppo": "after sft and reward: new",
        "eval": "after sft and ppo and reward: new",
    }
    assert not (folder / "sft").exists()
    run()
    replace("ppo.yaml", "0.05", "0.1")
    again = "after ppo: runs again if that changes what it starts from"
    assert ran(run(dry_run=True)) == {"ppo": "stale: ppo.kl_coef 0.05 -> 0.1", "eval": again}
    assert not (folder / ".old").exists()


# Requirements of an evaluation

REQUIRE = 'eval: {require: {win_rate.ppo_vs_sft.reward.value: ">= 0.6"}}\ndata:'


def test_a_finished_evaluation_is_checked_against_its_requirements(
    run: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends: list[bool] = []
    monkeypatch.setattr(pipeline_run, "show_summary", lambda *_, met=True: ends.append(met))

    def failing(stage: str) -> Callable[[list[str]], int]:
        return lambda command: run_here(command) or int(command[4] == stage)

    monkeypatch.setattr(children, "run_child", failing("ppo"))
    run(code=1)
    assert ends == []  # no evaluation
    monkeypatch.setattr(children, "run_child", failing("eval"))
    run(code=1)
    run()
    assert ends == [False, True]
    replace("eval.yaml", "data:", REQUIRE)
    assert run_folder(Path("."), (), Options()).unmet and ends == [False, True, False]
    assert "error[R06]: eval.yaml:1: win_rate.ppo_vs_sft.reward.value is 0.5, required >= 0.6" in capfd.readouterr().err


# Children


def start_and_wait(folder: Path) -> subprocess.Popen[str]:
    """Start `rlhf run .` in another process, with a stage that waits for a signal."""
    script = f"""
import sys; from rlhf_cli import cli; from rlhf_cli.pipeline import children
real = children.child_command
children.child_command = lambda *a, **k: [sys.executable, {str(FAKE)!r}, *real(*a, **k)[4:]]
children.check_command = lambda *a: [sys.executable, "-c", ""]
cli.app(["run", "."])
"""
    environment = {**os.environ, "FAKE_WAITS": "sft"}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    until((folder / "sft/waiting").exists, "the child did not start")
    assert parent.poll() is None
    return parent


def until(there: Callable[[], bool], else_: str) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline, else_
        time.sleep(0.02)


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_child_and_its_exit_code_comes_back(folder: Path, number: int, code: int) -> None:
    parent = start_and_wait(folder)
    parent.send_signal(number)
    _, stderr = parent.communicate(timeout=30)
    assert parent.returncode == code
    assert f"sft      ended with exit code {code}" in stderr and "Traceback" not in stderr
    assert not (folder / "reward").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is not signalled when its parent is killed")
def test_a_child_whose_parent_is_killed_stops(folder: Path) -> None:
    parent = start_and_wait(folder)
    parent.kill()
    parent.communicate(timeout=30)
    until((folder / "sft/stopped").exists, "the child continues")


def test_a_child_gets_the_options_of_the_command_line(folder: Path) -> None:
    loaded = config.load("sft", folder / "sft.yaml")
    options = Options(trust_remote_code=True, debug=True)
    command = children.child_command(loaded, ["seed=3", "*.output.keep=4"], options, fresh=True)
    assert command[4:] == [
        *("sft", "--config", str(folder / "sft.yaml"), "--fresh"),
        *("--set", "seed=3", "--set", "*.output.keep=4", "--trust-remote-code", "--debug"),
    ]
    assert children.child_command(loaded, [], Options(), fresh=False)[4:] == command[4:7]
