"""Corrupt files of checkpoints and finished stages: all are found, and none is trained on.

`pytest -m damage` does every damage to every file; a few are in every run of the tests.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import run_cli
import yaml
from chaos.fingerprint import differences, fingerprint
from damages import ALL, DAMAGES, OTHER, damage
from ppo_folder import must_succeed, untimed

from rlhf_cli import runs, terminal
from rlhf_cli.files import MODEL_CARDS
from rlhf_cli.runs import checkpoints

pytestmark = pytest.mark.full

STAGES = ("sft", "reward", "ppo")
READER = {"sft": "reward", "reward": "ppo", "ppo": "eval"}
FULL = [False, pytest.param(True, marks=pytest.mark.damage)]  # a few damages, or every damage to every file


@dataclass(frozen=True)
class Chain:
    """`folder` holds the configs and the finished stages; every run of a test is a copy of one of them."""

    folder: Path

    def killed(self, stage: str, run: Path) -> tuple[Path, Path]:
        """Make a copy as if killed after the checkpoint of step 4; return that checkpoint and the one before."""
        whole = self.finished(stage, run)
        (whole / "manifest.json").unlink()
        for path in (whole / "model", whole / "value", *whole.glob("state/*6"), *whole.glob("snapshots/*6")):
            shutil.rmtree(path, ignore_errors=True)
        before, newest = sorted((whole / "state").iterdir())
        assert newest.name in ("checkpoint-4", "step_000004")
        return newest, before

    def finished(self, stage: str, run: Path) -> Path:
        """Make a copy of a finished stage with its config; return its folder."""
        run.mkdir(parents=True)
        shutil.copy(self.folder / f"{stage}.yaml", run)
        return Path(shutil.copytree(self.folder / stage, run / stage))

    def same_end(self, stage: str, run: Path, *, logs: bool = True) -> bool:
        """Return whether a run left what the straight run did: models, snapshots, metrics and logs without times."""
        one, other = self.folder / stage, run / stage
        headlines = [json.loads((folder / "manifest.json").read_text())["metrics"] for folder in (one, other)]
        parts = ("model/", "value/", "snapshots/", *(["metrics.", "samples."] if logs else []))
        different = differences(fingerprint(one), fingerprint(other))
        return headlines[0] == headlines[1] and not any(name.startswith(parts) for name in different)


def rlhf(stage: str, run: Path) -> Any:
    """Run `rlhf STAGE` like in a new process."""
    terminal.reset()
    try:
        return run_cli.rlhf(stage, "--config", run / f"{stage}.yaml")
    finally:
        runs.release()


def reported(result: Any, *texts: str) -> bool:
    """Return whether a warning of damage contains the texts."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning[M05]")]
    return any(all(text in line for text in texts) for line in lines)


def refused(result: Any, *codes: str) -> bool:
    return re.findall(r"(?m)^error\[(\w+)\]", result.stderr) in [[code] for code in codes]


def write_configs(folder: Path, world: Any, **changes: Any) -> None:
    """Write the configs of a chain in `folder`; `changes` go into each."""
    shutil.copytree(world.base, base := folder / "base")
    body = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(body | {"attention_dropout": 0.1}))  # the RNG's state must matter
    parents = {"sft": str(folder / "sft"), "reward": str(folder / "reward")}
    training = {"max_length": 64, "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
    training |= {"logging_steps": 1}
    ppo = {"total_episodes": 48, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ppo |= {"response_length": 8, "num_ppo_epochs": 2, "num_sample_generations": 3, "learning_rate": 1e-3}
    output = {"save_steps": 2, "keep": 3}
    prompts = {"prompts": str(world.sft)}
    configs: dict[str, dict[str, Any]] = {
        "sft": {"model": {"path": str(base)}, "data": {"train": str(world.sft)}, "sft": training, "output": output},
        "reward": {
            "model": {"path": parents["sft"]},
            "data": {"train": str(world.pairs), "eval": str(world.pairs), "max_rows": 48},
            "reward": training | {"normalize_samples": 8},
            "output": output,
        },
        "ppo": {"models": parents, "data": prompts, "ppo": ppo, "output": output | {"snapshots": 3}},
        "eval": {"models": parents | {"ppo": str(folder / "ppo")}, "data": prompts, "eval": {"n": 4}},
    }
    for stage, config in configs.items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config | changes))


@pytest.fixture(scope="module")
def make_chain(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chain]:
    def make(**changes: Any) -> Chain:
        folder = tmp_path_factory.mktemp("chain")
        write_configs(folder, world, **changes)
        for stage in STAGES:
            must_succeed(rlhf(stage, folder))
        return Chain(folder)

    return make


@pytest.fixture(scope="module")
def chain(make_chain: Callable[..., Chain]) -> Chain:
    """A finished chain of tiny stages, three checkpoints each."""
    return make_chain()


@pytest.fixture(scope="module")
def other_chain(make_chain: Callable[..., Chain]) -> Chain:
    """The same from another seed: files of the same names, and mostly of the same sizes."""
    return make_chain(seed=1)


@pytest.fixture
def other(chain: Chain, full: bool, request: pytest.FixtureRequest) -> Chain:
    """The chain whose files a damage may take: only some of all damages do, so few runs train it."""
    return request.getfixturevalue("other_chain") if full else chain


# Checkpoints


def resumes(chain: Chain, stage: str, run: Path, newest: Path, name: str, before: Path | None) -> None:
    """Assert that a run names the damaged file, starts from the checkpoint before, and ends like the straight run."""
    result = must_succeed(rlhf(stage, run))
    start = f"resuming from {before.name}" if before else "starting from the beginning"
    assert reported(result, newest.name, name, start), result.stderr
    assert re.findall(r"resumes at step (\d+) ", result.stderr) == (["2"] if before else [])
    assert chain.same_end(stage, run)


@pytest.mark.parametrize(
    ("full", "stage", "how"),
    [
        *product((False,), ("sft", "ppo"), ALL),
        *product((False,), ("reward",), ALL[:2]),  # the trainer of sft
        *(pytest.param(*case, marks=pytest.mark.damage) for case in product((True,), STAGES, ALL)),
    ],
)
def test_a_damage_is_found_and_the_checkpoint_before_is_used(
    chain: Chain, tmp_path: Path, stage: str, how: str, full: bool
) -> None:
    state = max((chain.folder / stage / "state").iterdir())
    files = [path for path in state.rglob("*") if path.is_file() and path.name != checkpoints.OWNER]  # whose it is
    names = sorted(path.relative_to(state).as_posix() for path in files)
    assert {"state.json", "tensors.safetensors" if stage == "ppo" else "optimizer.pt"} <= set(names)
    first, found = ALL.index(how) + STAGES.index(stage), 0  # another file for each
    for name in [*names[first:], *names[:first]]:
        newest, before = chain.killed(stage, run := tmp_path / name)
        if damage(newest / name, how, before / name):
            found += 1
            resumes(chain, stage, run, newest, name, before)
            if not full:
                break
    assert found


def test_unverified_checkpoints_are_trained_on(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the verification of checkpoints no damage is reported, and each ends in other bytes."""
    monkeypatch.setattr(checkpoints, "_problem", lambda state, content=True: None)
    for name, how in (("model.safetensors", "4 bytes flipped"), ("scheduler.pt", "missing"), ("rng_state.pth", OTHER)):
        newest, before = chain.killed("sft", tmp_path / name)
        damage(newest / name, how, before / name)
        assert not reported(rlhf("sft", tmp_path / name)) and not chain.same_end("sft", tmp_path / name)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("full", FULL)
def test_if_both_checkpoints_are_damaged_the_run_starts_over(
    chain: Chain, tmp_path: Path, stage: str, full: bool
) -> None:
    name = "tensors.safetensors" if stage == "ppo" else "model.safetensors"
    for how in ALL if full else ["4 bytes flipped"]:
        newest, before = chain.killed(stage, tmp_path / how)
        other = chain.folder / stage / "state" / newest.name.replace("4", "6") / name
        damage(before / name, how, other)
        damage(newest / name, how, other)
        resumes(chain, stage, tmp_path / how, newest, name, None)


# The rest of an unfinished run

LINES = {"a line removed": lambda lines: lines[1:], "last line cut": lambda lines: [*lines[:-1], lines[-1][:-9]]}


@pytest.mark.parametrize(("stage", "name"), [*((stage, "metrics.jsonl") for stage in STAGES), ("ppo", "samples.jsonl")])
@pytest.mark.parametrize("full", FULL)
def test_a_damaged_log_is_reported_and_the_model_is_that_of_the_straight_run(
    chain: Chain, tmp_path: Path, stage: str, name: str, full: bool
) -> None:
    """The log has lines of steps after the checkpoint, too. Those from the checkpoint on are written again."""
    for how in (*LINES, *DAMAGES) if full else ["a line removed"]:
        chain.killed(stage, run := tmp_path / how)
        path = run / stage / name
        if how in LINES:
            path.write_bytes(b"".join(LINES[how](path.read_bytes().splitlines(keepends=True))))
        else:
            damage(path, how, path)
        result = must_succeed(rlhf(stage, run))
        if not chain.same_end(stage, run) or how == "a line removed":
            assert reported(result, name) and chain.same_end(stage, run, logs=False), how
            assert untimed(path)[-1] == untimed(chain.folder / stage / name)[-1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("full", FULL)
def test_a_damaged_identity_or_config_is_refused_or_written_again(
    chain: Chain, other: Chain, tmp_path: Path, stage: str, full: bool
) -> None:
    cases = [(name, how) for name in ("identity.json", "config.yaml") for how in ALL] if full else []
    for name, how in [*cases, ("identity.json", "half")]:
        shutil.rmtree(run := tmp_path / "run", ignore_errors=True)
        chain.killed(stage, run)
        if damage(run / stage / name, how, other.folder / stage / name):
            result = rlhf(stage, run)
            must_refuse = name == "identity.json" and how in ("half", OTHER)
            again = not must_refuse and result.exit_code == 0 and chain.same_end(stage, run)
            assert again or refused(result, "C15"), (name, how, result.stderr)


# Finished stages


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("full", FULL)
def test_a_damaged_model_is_not_loaded_and_its_stage_is_not_called_finished(
    chain: Chain, other: Chain, tmp_path: Path, stage: str, full: bool
) -> None:
    """The next stage refuses it (M10). The stage itself refuses (M05), or writes the same bytes again."""
    whole = chain.folder / stage
    names = [path.relative_to(whole).as_posix() for part in ("model", "value") for path in (whole / part).rglob("*")]
    names = [name for name in names if (not name.endswith(MODEL_CARDS) if full else name.endswith(".safetensors"))]
    for name in [*names, "manifest.json"]:
        for how in ALL if full else ["4 bytes flipped"]:
            shutil.rmtree(run := tmp_path / "run", ignore_errors=True)
            folder, reader = chain.finished(stage, run), READER[stage]
            if not damage(folder / name, how, other.folder / stage / name):
                continue
            text = (chain.folder / f"{reader}.yaml").read_text()
            (run / f"{reader}.yaml").write_text(text.replace(f"{whole}\n", f"{folder}\n"))
            assert name.startswith("value/") or refused(rlhf(reader, run), "M10"), (name, how)
            result = rlhf(stage, run)
            again = (name, how) == ("manifest.json", "missing")
            ended = "finished already" not in result.stderr and result.exit_code == 0 and chain.same_end(stage, run)
            assert ended if again else refused(result, "M05") or ended, (name, how, result.stderr)
