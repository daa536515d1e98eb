"""Files and folders that cannot be read now: every command ends with a code, and none takes them for damaged (E08)."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_config import FakeConfig, make_stage
from permissions import taken_away
from report_run import write_run
from run_cli import rlhf

from rlhf_cli import runs, terminal
from rlhf_cli.config.loading import load
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import locate_files
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import HASH_DIFFERS
from rlhf_cli.pipeline import children
from rlhf_cli.pipeline.decide import compute_status


@pytest.fixture
def run(fake_chain: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of stages that train nothing; a stage that is started all the same fails the test."""

    def child(command: list[str]) -> int:
        assert command[4] == "check", f"started: {command}"
        result = rlhf(*command[4:])
        terminal.say(result.stderr.rstrip())
        return result.exit_code

    monkeypatch.setattr(children, "run_child", child)
    return Path(shutil.copytree(fake_chain, "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
@pytest.mark.parametrize("name", ["manifest.json", "identity.json", ".", "model"])
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_e08_what_cannot_be_read_is_not_trained_again(stage: str, name: str, run: Path) -> None:
    """Hours of training stand behind it, and nothing says that it is damaged."""
    before = contents(run)
    with taken_away(run / stage / name):
        result = rlhf("run", run)
        assert result.exit_code == 1 and result.stderr.startswith("error[E08]: "), result.output
        assert "damaged" not in (status := rlhf("status", run)).stdout and status.exit_code == 0
    assert contents(run) == before and not (run / ".old").exists()
    assert compute_status(load(stage, run / f"{stage}.yaml")).state == "finished"


def test_weights_that_cannot_be_read_when_a_stage_begins(tmp_path: Path) -> None:
    """Its own: E08 and not M05. A parent's: E08 and not M10."""
    folder, config = make_stage(tmp_path, "sft"), FakeConfig(tmp_path)
    identity, weights = runs.compute_identity(config, {}, {}), folder / "model/model.safetensors"
    parent = runs.open_parent(str(folder), expect=("sft",), key="model.path", where="w")
    with taken_away(weights):
        with pytest.raises(RLHFError, match="E08"):
            runs.start_stage(config, identity, {}, fresh=False)
        with pytest.raises(RLHFError, match="E08"):
            runs.start_stage(FakeConfig(tmp_path, "reward"), identity, {"model.path": parent}, fresh=False)
        (tmp_path / "reward").mkdir(exist_ok=True)
        (tmp_path / "reward/notes").touch()
        with pytest.raises(RLHFError, match="E08"):
            runs.start_stage(FakeConfig(tmp_path, "reward"), identity, {"model.path": parent}, fresh=True)
        assert (tmp_path / "reward/notes").exists(), "nothing is moved before the inputs are read"
    weights.write_bytes(b"WEIGHTS")
    with pytest.raises(RLHFError, match=rf"M05.*{HASH_DIFFERS[:20]}"):
        runs.start_stage(config, identity, {}, fresh=False)


def test_an_unreadable_checkpoint_is_not_skipped(tmp_path: Path) -> None:
    """Going on from an older one, or from the beginning, would throw away what lies there whole."""
    folder = tmp_path / "state"
    for step in (1, 2, 3):
        runs.commit_state(folder, f"step_{step:06}", lambda path: (path / "w").write_text("weights"), keep=None)
    for taken in (folder / "step_000003/state.json", folder / "step_000003/w", folder / "step_000003", folder):
        with taken_away(taken), pytest.raises(RLHFError, match="E08"):
            runs.latest_state(folder)
    with taken_away(folder / "step_000002/state.json"):  # and ends no training that drops old ones
        runs.commit_state(folder, "step_000004", lambda path: (path / "w").touch(), keep=1)
    assert runs.state_steps(folder) == [2, 4]


def test_ls_status_and_report_mark_that_run_and_continue(here: Path) -> None:
    for name in ("one", "two"):
        write_run(here / name)
    for taken in ("one/ppo", "one/ppo/manifest.json", "one/ppo/metrics.jsonl", "one/ppo/model"):
        (here / "one/ppo/model").mkdir(exist_ok=True)
        with taken_away(here / taken):
            listed, shown, page = rlhf("ls"), rlhf("status", "one"), rlhf("report", "one", "two", "--out", "page.html")
        assert str(here) not in Path("page.html").read_text()
        for result in (listed, shown, page):
            assert result.exit_code == 0, (taken, result.output)
        if taken != "one/ppo/model":  # of which nothing is read here
            assert "ppo (unreadable)" in listed.stdout and "two" in listed.stdout, (taken, listed.stdout)
            assert "cannot be read now: Permission denied" in shown.stdout, (taken, shown.stdout)
    with taken_away(here / "one/ppo"):
        stages = {stage["stage"]: stage for stage in json.loads(rlhf("status", "one", "--json").stdout)["stages"]}
        assert stages["ppo"]["state"] == "unreadable" and stages["sft"]["state"] == "finished"


def test_a_part_of_the_data_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """Fewer rows would be another identity: the stage would be stale, and trained again."""
    for name in ("a/train-1.jsonl", "b/train-2.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert len(locate_files(DataSource(str(tmp_path)))) == 2
    with taken_away(tmp_path / "b"), pytest.raises(RLHFError, match=r"E08.*b cannot be read now"):
        locate_files(DataSource(str(tmp_path)))


COMMANDS = [
    ("run", "RUN"),
    ("run", "RUN", "--dry-run"),
    ("check", "RUN"),
    ("plan", "RUN", "--flops", "1e9"),
    ("status", "RUN"),
    ("ls", "."),
    ("report", "RUN"),
    ("export", "RUN", "--out", "out"),
    ("export", "RUN", "--out", "out", "--stage", "reward"),
    ("chat", "RUN"),
    ("serve", "RUN"),
    ("verify", "RUN"),
    ("sft", "--config", "RUN/sft.yaml"),
    ("init", "hh", "RUN"),
]
PLACES = [
    ".", "sft", "reward", "ppo", "eval", "sft/model", "ppo/model", "sft/manifest.json", "ppo/manifest.json",
    "ppo/identity.json", "ppo/config.yaml", "eval/report.json", "eval/manifest.json", "sft/model/model.safetensors",
    "sft.yaml", "ppo.yaml", "sft.jsonl", "prompts.jsonl", "base", "base/config.json",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_ends_with_a_code(command: tuple[str, ...], run: Path) -> None:
    """Whatever may not be read, or may be listed and not searched: one line of error at most, and nothing is moved."""
    before = contents(run)
    for place in PLACES:
        for mode in (0o000, 0o400) if (run / place).is_dir() else (0o000,):
            with taken_away(run / place, mode=mode):
                result = rlhf(*(word.replace("RUN", str(run)) for word in command))
            context = (command, place, oct(mode), result.output)
            assert "R00" not in result.output and "Traceback" not in result.output, context
            assert result.exit_code in (0, 1, 2), context
            assert (result.exit_code != 0) == any(line.startswith("error[") for line in result.stderr.splitlines()), (
                context
            )
            shutil.rmtree("out", ignore_errors=True)
            (run / "eval/report.html").unlink(missing_ok=True)
            assert contents(run) == before and not (run / ".old").exists(), context


# What is not a file, or cannot be one


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail a test that hangs."""

    def hangs(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sparse(path: Path) -> None:
    """Write a file of a terabyte that takes no space."""
    path.touch()
    os.truncate(path, 2**40)


ODD_FILES = [
    "sft/manifest.json", "ppo/manifest.json", "ppo/identity.json", "ppo/config.yaml", "ppo/metrics.jsonl",
    "ppo/samples.jsonl", "ppo/watchdog.jsonl", "eval/report.json", "eval/samples.jsonl", "eval/manifest.json",
    "sft/model/model.safetensors", "base/model.safetensors", "base/config.json", "base/adapter_config.json",
    ".ppo.lock", "eval/report.html",
]  # fmt: skip


MAKERS = [os.mkfifo, sparse, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_waits_for_a_pipe_or_reads_a_device(command: tuple[str, ...], run: Path) -> None:
    """Each file is of each kind for a third of the commands."""
    for number, name in enumerate(ODD_FILES, start=COMMANDS.index(command)):
        make = MAKERS[number % 3]
        if (command, name) == (("run", "RUN"), "eval/report.json"):
            continue  # as a damaged one, it is made again
        whole = Path(shutil.copytree(run, "whole"))
        (run / name).unlink(missing_ok=True)
        make(run / name)
        with within(20):
            result = rlhf(*(word.replace("RUN", str(run)) for word in command))
        context = (command, name, make, result.output)
        assert not isinstance(result.exception, AssertionError), context
        assert "R00" not in result.output and "Traceback" not in result.output, context
        assert (result.exit_code != 0) == any(line.startswith("error[") for line in result.stderr.splitlines()), context
        assert not (run / ".old").exists(), context
        shutil.rmtree("out", ignore_errors=True)
        shutil.rmtree(run)
        whole.rename(run)


def test_ls_status_and_report_go_on_beside_a_run_with_odd_files(here: Path) -> None:
    for name in ("one", "two"):
        write_run(here / name)
    (here / "one/ppo/manifest.json").unlink()
    os.mkfifo(here / "one/ppo/manifest.json")
    sparse(here / "one/ppo/samples.jsonl")
    with within(20):
        listed, shown, page = rlhf("ls"), rlhf("status", "one"), rlhf("report", "one", "two", "--out", "page.html")
    for result in (listed, shown, page):
        assert result.exit_code == 0, result.output
    assert "ppo (unreadable)" in listed.stdout and "two" in listed.stdout
    assert "manifest.json cannot be read now: it is a named pipe, not a file" in shown.stdout


def test_a_config_that_expands_without_end_is_named(here: Path) -> None:
    folder = write_run(here / "one")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (folder / "ppo/config.yaml").write_text("\n".join(lines))
    with within(20):
        for command in (("status", "one"), ("ls",), ("report", "one", "--out", "page.html")):
            assert rlhf(*command).exit_code == 0
    assert (
        "config.yaml is missing or not readable: the aliases expand to too many values" in Path("page.html").read_text()
    )
