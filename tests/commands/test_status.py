"""`rlhf status` and `rlhf ls`: runs that are finished, unfinished, running, stale or damaged.

Modules: `pipeline/headline.py`, `pipeline/status.py`, `runs/progress.py`.
"""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_stage
import pytest
import run_cli
from bad_inputs import replace
from fake_config import CONFIGS, other_process
from report_run import change, metrics, write_run

from rlhf_cli import runs
from rlhf_cli.commands import status as status_table
from rlhf_cli.config.sft import SFTSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import files_sha256
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.pipeline.headline import headline
from rlhf_cli.pipeline.load import load_all
from rlhf_cli.pipeline.status import find_runs
from rlhf_cli.runs import identity, layout
from rlhf_cli.runs.locks import lock_folder, lock_path
from rlhf_cli.runs.manifest import Manifest
from rlhf_cli.runs.progress import read_stage_at_work
from rlhf_cli.runs.read import Progress, Stage

WEIGHTS = "sft/model/model.safetensors"


@pytest.fixture
def run(fake_chain: Path, here: Path) -> Path:
    """A finished run of stages that train nothing, which is the working directory's `run`."""
    return Path(shutil.copytree(fake_chain, "run"))


def rlhf(*arguments: object) -> str:
    result = run_cli.rlhf(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def status_of(run: Path, *overrides: str) -> dict[str, Any]:
    found = json.loads(rlhf("status", run, "--json", *overrides))
    found["stages"] = {stage["stage"]: stage for stage in found["stages"]}
    return found


def states(run: Path, *overrides: str) -> list[str]:
    return [stage["state"] for stage in status_of(run, *overrides)["stages"].values()]


def unfinished(run: Path, stage: str, *rows: dict[str, Any], saved: int | None = None) -> None:
    """The stage as it is on its way."""
    folder = run / stage
    for path in (folder / "manifest.json", folder / "model/model.safetensors"):
        path.unlink(missing_ok=True)
    write_jsonl(folder / "metrics.jsonl", list(rows))
    if saved is not None:
        runs.begin_state(folder / "state", f"step_{saved:06d}")


@pytest.fixture
def writer(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has locked RUN/ppo."""
    with other_process("lock_folder", run.resolve() / "ppo") as other:
        yield other


# Output


@pytest.mark.usefixtures("here")
def test_the_table_of_a_finished_run() -> None:
    write_run(Path("run"))
    for stage, seconds in (("sft", 3), ("reward", 90), ("ppo", 7200), ("eval", 100_000)):
        os.utime(f"run/{stage}/manifest.json", (time.time() - seconds,) * 2)
    lines = [line.split("  ") for line in rlhf("status", "run").splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == ["stage", "state", "headline", "time", "when", "size"]
    # No manifest of this one has SFT's loss: the log's last line does.
    assert cells[1][:5] == ["sft", "finished", "loss 2.125", "2 min 5 s", "just now"]
    assert cells[2][:4] == ["reward", "finished", "accuracy 0.750 [0.690, 0.800]", "1 min ago"]
    assert cells[3][:5] == ["ppo", "finished", "reward 1.900 in the last update, KL 3.80", "1 min 40 s", "2 h ago"]
    assert cells[4][:3] == ["eval", "finished", "1 d ago"]
    assert lines[5][0].startswith("next: rlhf run run would be refused: error[C09]: run holds none of sft.yaml, ")
    change(Path("run/sft/manifest.json"), metrics={"eval_loss": 1.5, "eval_rows": 60})
    change(Path("run/ppo/manifest.json"), metrics={"objective/scores": 0.5, "objective/kl_k1": 2.0}, stopped="KL")
    rate = {"value": 0.63, "ci95": [0.57, 0.69]}
    change(Path("run/eval/manifest.json"), metrics={"win_rate": {"ppo_vs_sft": {"reward": rate, "gold": rate}}})
    found = status_of(Path("run"))["stages"]
    assert found["sft"]["headline"] == {"eval_loss": 1.5} and found["sft"]["headline_from"] == "manifest.json"
    assert found["ppo"]["headline"] == {"objective/scores": 0.5, "objective/kl_k1": 2.0}
    assert found["eval"]["headline"] == {"judge": "gold", "win_rate": 0.63, "win_rate_ci95": [0.57, 0.69]}
    assert found["ppo"]["reasons"] == ["KL"] and found["ppo"]["state"] == "finished"
    text = rlhf("status", "run")
    assert "reward 0.500 on training prompts, KL 2.00" in text
    assert "PPO over SFT 0.630 [0.570, 0.690] by gold" in text and "held-out loss 1.500" in text
    assert "finished, step 20" in text and "ppo      KL" in text  # ended before its time


def test_json_has_all_keys_always(run: Path) -> None:
    finished = status_of(run)
    assert status_of(run / "ppo") == finished  # the folder of a stage selects its run
    assert finished["next"] == {
        "action": "nothing",
        "steps": [
            {
                "stage": stage,
                "why": f"up to date ({runs.read_manifest(run / stage)[0].model_sha256[:6]}), skipped",
                "runs": False,
                "fresh": False,
                "after": [],
            }
            for stage in ("sft", "reward", "ppo")
        ]
        + [finished["next"]["steps"][3]],
        "problems": [],
    }
    assert rlhf("status", run).endswith("next: nothing, all is up to date\n")
    keys = "stage folder state reasons step steps headline headline_from time_s left_s changed bytes process unread"
    for path in [*run.iterdir()]:
        shutil.rmtree(path) if path.is_dir() and path.name in CONFIGS else None
    new = status_of(run)
    for stage in [*finished["stages"].values(), *new["stages"].values()]:
        assert list(stage) == keys.split()
    assert list(finished) == list(new) == ["run", "changed", "bytes", "old_bytes", "bases", "stages", "next"]
    assert states(run) == ["new"] * 4 and new["stages"]["sft"]["changed"] is None
    assert rlhf("status", run).endswith("next: rlhf run run runs sft (new), then reward, ppo, eval\n")


def test_a_running_dpo_shows_its_accuracy() -> None:
    stage = Stage("dpo", Path("dpo"), "begun", progress=Progress(rows=({"step": 1, "rewards/accuracies": 0.75},)))
    assert status_table._headline_text(stage) == "accuracy 0.750 in training"


def test_a_reward_model_of_the_best_step_is_named() -> None:
    metrics = {"accuracy": 0.75, "accuracy_ci95": [0.69, 0.8]}
    for model_is, ending in (("the best step", ", the best step (8)"), ("the last step", ""), (None, "")):
        manifest = Manifest(stage="reward", metrics=metrics, model_is=model_is, step=8)
        stage = Stage("reward", Path("reward"), "finished", manifest=manifest)
        assert status_table._headline_text(stage) == f"accuracy 0.750 [0.690, 0.800]{ending}"


def change_key(run: Path) -> None:
    replace(run / "reward.yaml", "1e-5", "2e-5")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_key, ["finished", "stale", "finished", "finished"]),
        (lambda run: (run / "held-out.jsonl").write_text("{}\n{}\n"), ["finished", "finished", "finished", "stale"]),
        (lambda run: (run / "base/config.json").write_text("{ }"), ["stale", "finished", "finished", "finished"]),
        (lambda run: (run / WEIGHTS).write_text(""), ["damaged", "finished", "finished", "finished"]),
        (lambda run: unfinished(run, "ppo", saved=30), ["finished", "finished", "stopped", "stale"]),
        (lambda run: unfinished(run, "reward"), ["finished", "stopped", "stale", "stale"]),
        (lambda run: [shutil.rmtree(run / stage) for stage in CONFIGS], ["new"] * 4),
        (lambda run: shutil.rmtree(run / "eval"), ["finished", "finished", "finished", "new"]),
    ],
)
def test_next_is_what_rlhf_run_would_do(run: Path, change: Any, expected: list[str]) -> None:
    change(run)
    status = status_of(run)
    assert [stage["state"] for stage in status["stages"].values()] == expected
    lines = [f"{step['stage']:<8} {step['why']}" for step in status["next"]["steps"]]
    result = run_cli.rlhf("run", run, "--dry-run")
    if result.exit_code == 0:
        assert lines == result.stdout.splitlines() and status["next"]["action"] == "run"
    else:  # damaged sft: no later stage can start from it
        assert result.stderr.startswith(status["next"]["problems"][0]["code"], len("error["))


def test_the_reasons_of_stale_and_stopped_stages_are_below_the_table(run: Path) -> None:
    """A stopped one resumes by its own config: settings of --set are in no file of the user's."""
    change_key(run)
    lines = rlhf("status", run).splitlines()
    assert "reward   reward.learning_rate 1e-05 -> 2e-05" in lines
    why = "(stale: reward.learning_rate 1e-05 -> 2e-05)"
    assert lines[-1] == f"next: rlhf run run runs reward {why}, then ppo, eval if their inputs change"
    assert states(run, "-s", "reward.learning_rate=1e-5") == ["finished"] * 4  # the key as `rlhf run` would get it
    unfinished(run, "reward")
    (run / "reward/config.yaml").touch()
    (line,) = [line for line in rlhf("status", run).splitlines() if line.startswith("reward   reward.learning_rate")]
    assert line.endswith("; to resume it with its old config: rlhf reward --config run/reward/config.yaml")


def test_unmet_requirements_and_an_invalid_config_hide_no_stage(run: Path) -> None:
    (run / "eval.yaml").write_text(CONFIGS["eval"] + 'eval: {require: {win_rate.ppo_vs_sft.reward.value: ">= 0.6"}}\n')
    unmet = status_of(run)["next"]
    assert (unmet["action"], [problem["code"] for problem in unmet["problems"]]) == ("nothing", ["R06"])
    (run / "ppo.yaml").write_text("ppo: {kl_coeff: 1}\n")
    found = status_of(run)
    assert [stage["state"] for stage in found["stages"].values()] == ["finished"] * 4
    assert found["next"]["action"] == "refused"
    assert {problem["where"] for problem in found["next"]["problems"]} == {"run/ppo.yaml", "run/ppo.yaml:1"}
    assert rlhf("status", run).splitlines()[-1].startswith("next: rlhf run run would be refused: error[C")


# Progress


def test_a_running_stage_has_its_process_and_the_time_left(run: Path, writer: subprocess.Popen[bytes]) -> None:
    rows = metrics(8)  # 5 s each
    unfinished(run, "ppo", *rows[:4], {**rows[4], "time_s": 30.0}, {**rows[5], "time_s": 60.0}, saved=4)
    replace(run / "ppo/config.yaml", "total_episodes: 64", "total_episodes: 512")  # 64 episodes an update
    found = status_of(run)
    ppo = found["stages"]["ppo"]
    assert ppo["state"] == "running" and ppo["process"]["pid"] == writer.pid
    assert (ppo["step"], ppo["steps"]) == (6, 8)
    assert ppo["left_s"] == pytest.approx((8 - 6) * (60 - 5) / 5)
    assert ppo["headline_from"] == "metrics.jsonl" and ppo["headline"]["objective/scores"] == 0.5
    assert found["stages"]["eval"]["state"] == "stale"  # it evaluated the previous policy
    assert found["next"]["action"] == "wait"
    lines = rlhf("status", run).splitlines()
    assert any(
        line.startswith("ppo     running, step 6 of 8  reward 0.500 in the last update, KL 1.00") for line in lines
    )
    assert any(line.startswith(f"ppo      process {writer.pid}, for ") for line in lines)
    assert lines[-1] == "next: wait for ppo; rlhf run run would be refused until then"
    writer.kill()
    writer.wait()
    ppo = status_of(run)["stages"]["ppo"]
    assert (ppo["state"], ppo["step"], ppo["process"], ppo["left_s"]) == ("stopped", 4, None, None)
    assert "stopped, saved at step 4 of 8" in rlhf("status", run)


def test_a_stage_of_another_machine_is_running_and_may_have_been_killed(
    run: Path, writer: subprocess.Popen[bytes]
) -> None:
    """The lock tells the truth to who takes it, on both machines; `rlhf status` takes none."""
    unfinished(run, "ppo", *metrics(4), saved=4)
    lock = lock_path(run.resolve() / "ppo")
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "node1", "pid": 2**22 + 1}))
    os.utime(run / "ppo/metrics.jsonl", (time.time() - 7300,) * 2)
    os.utime(run / "ppo/identity.json", (time.time() - 9000,) * 2)

    says = "next: wait for ppo; rlhf run run would be refused until then, or until its process on node1 has ended, "
    for process in ("lives", "was killed"):
        found = status_of(run)
        assert (found["stages"]["ppo"]["process"]["host"], found["next"]["action"]) == ("node1", "wait"), process
        lines = rlhf("status", run).splitlines()
        (line,) = (line for line in lines if line.startswith("ppo      process 4194305 on node1, for "))
        assert ", last wrote 2 h ago" in line and lines[-1].startswith(says)
        if process == "lives":
            with pytest.raises(RLHFError, match=r"C15.*process 4194305 on node1, for "):
                lock_folder(run.resolve() / "ppo")
            writer.kill()
            writer.wait()
    lock_folder(run.resolve() / "ppo")  # the next command goes on
    runs.release()
    assert status_of(run)["stages"]["ppo"]["state"] == "stopped"


@pytest.mark.parametrize("parts", [1, 3, 4])
@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_the_steps_of_sft_by_its_log_are_those_of_its_settings(run: Path, parts: int, epochs: float) -> None:
    batches = 10
    settings = SFTSettings(per_device_train_batch_size=2, gradient_accumulation_steps=parts, num_train_epochs=epochs)
    whole = settings.steps(2 * batches)
    path = run / "sft/config.yaml"
    text = path.read_text().replace("gradient_accumulation_steps: 1", f"gradient_accumulation_steps: {parts}")
    path.write_text(text.replace("num_train_epochs: 1.0", f"num_train_epochs: {epochs}"))
    each = math.ceil(batches / parts)
    for step in range(1, whole + 1):
        # As transformers counts: the share of the epoch's batches that were read.
        epoch = (step - 1) // each + min(((step - 1) % each + 1) * parts / batches, 1.0)
        unfinished(run, "sft", {"step": step, "loss": 1.0, "epoch": epoch, "time_s": 1.0 * step})
        found = read_stage_at_work("sft", run / "sft")
        assert (found.progress.steps, headline(found)[0]) == (whole, {"loss": 1.0}), step


# A run that starts from another one, inside of it


@pytest.fixture
def demo(run: Path) -> Path:
    """The run, with an SFT model to start from that is to be trained in its own folder, as the demo's is."""
    for stage in CONFIGS:
        shutil.rmtree(run / stage)
    shutil.rmtree(run / "base")
    (run / "base").mkdir()
    (run / "base/sft.yaml").write_text("model: {path: ../plain}\ndata: {train: ../sft.jsonl}\n")
    (run / "plain").mkdir()
    (run / "plain/config.json").write_text("{}")
    (run / "sft.yaml").write_text(CONFIGS["sft"].replace("./base", "base/sft"))
    return run


def test_an_untrained_base_comes_first(demo: Path) -> None:
    first, *rest = rlhf("status", demo).splitlines()[1:]
    assert first.split() == ["base/sft", "new"] and [line.split()[0] for line in rest[:4]] == [*CONFIGS]
    assert rest[-1] == "next: rlhf run run/base, which run starts from; then rlhf run run"
    assert status_of(demo)["next"]["action"] == "refused" and status_of(demo)["bases"][0]["state"] == "new"
    (demo / "ppo.yaml").write_text("ppo: {kl_coeff: 1}\n")
    assert "would be refused: error[C" in rlhf("status", demo).splitlines()[-1], "another error comes first"


def test_status_waits_for_a_base_in_training(demo: Path) -> None:
    (demo / "base/sft").mkdir()
    unfinished(demo / "base", "sft", {"step": 3, "loss": 2.5, "time_s": 1.0})
    with other_process("lock_folder", demo.resolve() / "base/sft") as other:
        lines = rlhf("status", demo).splitlines()
        assert lines[1].startswith("base/sft  running, step 3  loss 2.500")
        assert f"base/sft process {other.pid}, for " in "\n".join(lines)
        assert lines[-1] == "next: wait for base/sft; rlhf run run would be refused until then"
        (line,) = rlhf("ls").splitlines()[1:]
        assert line.split("  ")[:2] == ["run", "base/sft (running, step 3)"]


def test_a_base_is_listed_only_if_nothing_starts_from_it(demo: Path) -> None:
    assert rlhf("ls") == "never run: run\n"
    assert fake_stage.main(["sft", "--config", str(demo / "base/sft.yaml")]) == 0
    assert rlhf("ls") == "never run: run\n"
    assert status_of(demo)["bases"] == [] and rlhf("status", demo).splitlines()[1].startswith("sft  ")
    assert rlhf("ls", "run/base").splitlines()[1].startswith("run/base  sft")
    (demo / "sft.yaml").write_text(CONFIGS["sft"].replace("./base", "plain"))
    assert [line.split()[0] for line in rlhf("ls").splitlines()] == ["run", "run/base", "never"]


# Without a run on the command line


TAKES_THE_ONLY_ONE = ("status", "report", "check", "plan", "chat", "verify", "export", "serve")


@pytest.mark.parametrize("command", ["export --out model", "verify", "serve", "check", "chat", "plan"])
def test_other_commands_take_the_only_run_too(run: Path, command: str) -> None:
    alone, named = run_cli.rlhf(*command.split()), run_cli.rlhf(*command.split(" ")[:1], run, *command.split()[1:])
    first, rest = alone.stderr.split("\n", 1)
    assert first == "run is the only run here"
    assert (alone.exit_code, alone.stdout, rest) == (named.exit_code, named.stdout, named.stderr)


@pytest.mark.parametrize("command", TAKES_THE_ONLY_ONE[:2])
def test_the_only_run_here_is_the_default(run: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    alone = run_cli.rlhf(command)
    assert alone.exit_code == 0 and alone.stderr.startswith("run is the only run here\n")
    assert alone.stdout == run_cli.rlhf(command, "run").stdout
    monkeypatch.chdir(run)
    inside = run_cli.rlhf(command)
    assert inside.exit_code == 0 and inside.stderr.startswith("this folder is a run\n")


@pytest.mark.parametrize("command", [*TAKES_THE_ONLY_ONE, "run", "label"])
def test_a_command_without_a_run_lists_the_runs_here(run: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    needed = ("--out", "model") if command == "export" else ()

    def refusal(*options: str) -> tuple[str, str]:
        result = run_cli.rlhf(command, *needed, *options)
        error, hint = result.stderr.splitlines()
        assert (result.exit_code, result.stdout) == (2, "") and error.startswith(
            f"error[C11]: rlhf {command}: which run? "
        )
        return error.partition("? ")[2], hint.removesuffix(" --out model")

    shutil.copytree(run, "other run")
    os.utime(run / "eval/manifest.json", (time.time() + 5,) * 2)  # the newer one comes first
    assert refusal() == ("There are run, other run", f"hint: rlhf {command} run")
    if command == "run":  # the options that were typed stay
        assert refusal("--only", "ppo", "-s", "*.seed=3")[1] == "hint: rlhf run run --only ppo -s '*.seed=3'"
    for number in range(6):
        Path(f"runs/{number}").mkdir(parents=True)
        Path(f"runs/{number}/sft.yaml").touch()
    assert refusal()[0].endswith(" and 1 more (rlhf ls)"), "as `rlhf ls` looks for them"
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    assert refusal() == ("There is none here", "hint: rlhf init demo runs/demo makes one")
    if command not in TAKES_THE_ONLY_ONE:
        monkeypatch.chdir("../other run")
        assert refusal() == ("This folder is one", f"hint: rlhf {command} .")


# Speed and locks


def test_status_writes_nothing_and_takes_no_lock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(run, "ppo", *metrics(3), saved=2)
    monkeypatch.setattr("filelock.BaseFileLock.acquire", lambda *_, **__: pytest.fail("took a lock"))
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in run.rglob("*")}
    rlhf("status", run)
    rlhf("ls", ".")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in run.rglob("*")} == before


def test_large_files_are_compared_by_date_and_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SMALL_FILES_BYTES", 0)
    monkeypatch.setattr(identity, "files_sha256", lambda paths: pytest.fail(f"read {paths}"))
    monkeypatch.setattr(identity, "open_reference", lambda *_: pytest.fail("read a model"))
    for stage in CONFIGS:
        os.utime(run / stage / "identity.json", (time.time() + 5,) * 2)  # started after this copy was made
    assert states(run) == ["finished"] * 4
    assert [stage["unread"] for stage in status_of(run)["stages"].values()] == [[]] * 4
    for name in ("base", "held-out.jsonl"):  # as after deleting a model file and rewriting the data
        os.utime(run / name, (time.time() + 10,) * 2)
    found = status_of(run)
    assert [stage["state"] for stage in found["stages"].values()] == ["finished"] * 4
    assert [stage["unread"] for stage in found["stages"].values()] == [["model.path"], [], [], ["data.prompts"]]
    lines = rlhf("status", run).splitlines()
    assert lines[-1] == "next: nothing, as far as dates tell"
    assert lines[-3].startswith("sft      model.path: large, with a date later than this stage's start")
    monkeypatch.setattr(identity, "SMALL_FILES_BYTES", 32_000_000)
    monkeypatch.setattr(identity, "open_reference", runs.open_reference)
    monkeypatch.setattr(identity, "files_sha256", files_sha256)
    (run / "base/config.json").write_text("{ }")
    assert runs.quick_stage_status(load_all({"sft": run / "sft.yaml"}, {"sft": []})["sft"]).state == "stale"


@pytest.mark.full
def test_status_is_quick_and_imports_no_torch(run: Path) -> None:
    script = (
        "import sys, time; from rlhf_cli.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(time.process_time(), {'torch', 'numpy', 'scipy', 'huggingface_hub'} & sys.modules.keys())"
    )
    for arguments in (["status", str(run)], ["ls", "."]):
        result = run_cli.python("-c", script, *arguments)
        seconds, found = result.stdout.splitlines()[-1].split(maxsplit=1)
        assert found == "set()" and float(seconds) < 1, result.stdout + result.stderr


# Damage


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGES: dict[str, Any] = {
    "half": half,
    "empty": lambda content: b"",
    "list": lambda content: b"[]",
    "odd": lambda content: b'{"step": 1, "time_s": 1e999, "epoch": "x", "loss": NaN, "environment": 3, "parents": [1]}',
    "binary": lambda content: bytes(range(256)),
    "deep": lambda content: b'{"a":' * 3000,
    "gone": None,
}


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_status_survives_any_damaged_file(run: Path, damage: str) -> None:
    unfinished(run, "ppo", *metrics(3), saved=2)
    write_jsonl(run / "sft/metrics.jsonl", [{"step": 1, "loss": 1.0, "epoch": 0.1, "time_s": 1.0}])
    lock_path(run / "ppo").write_text("{}")
    kept = [path for path in run.rglob("*") if path.is_file()]
    assert len(kept) > 20
    for path in kept:
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(DAMAGES[damage](content))
        found = status_of(run)  # exits with 0 and says nothing but JSON
        assert found["next"]["action"] in ("run", "refused"), path
        path.write_bytes(content)
    rlhf("ls", ".")


# Folders without a run


@pytest.mark.usefixtures("here")
def test_a_folder_without_a_run_is_one_error() -> None:
    Path("empty").mkdir()
    Path("sft.yaml").touch()
    for name, says in (
        ("empty", "empty holds none of sft.yaml, reward.yaml, dpo.yaml, ppo.yaml"),
        ("emty", "no such folder: emty\nhint: did you mean empty?"),
        ("sft.yaml", "sft.yaml is a file, not the folder of a run"),
    ):
        result = run_cli.rlhf("status", name)
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.startswith(f"error[C09]: {says}")


# ls


def test_ls_lists_runs_the_newest_first(run: Path) -> None:
    write_run(Path("runs/old"))
    write_run(Path("runs/deep/a/b"))
    shutil.copytree(run, "runs/new")
    Path("runs/configs").mkdir()
    shutil.copy(run / "sft.yaml", "runs/configs")
    write_run(Path("runs/new/ppo/state/inner"))  # inside of a stage's folder
    write_run(Path("runs/.hidden"))
    write_run(Path("runs/1/2/3/4/5"))  # deeper than it looks
    unfinished(Path("runs/new"), "ppo", *metrics(3), saved=2)
    for path in Path("runs/old").rglob("*"):
        os.utime(path, (1e9, 1e9))
    for name, seconds in (("deep/a/b", 100), ("configs", 50), ("new", 0)):
        for path in Path("runs", name).rglob("*"):
            os.utime(path, (time.time() - seconds,) * 2)
    names = ["runs/new", "runs/configs", "runs/deep/a/b", "runs/old"]
    found = json.loads(rlhf("ls", "--json"))
    assert [each["run"] for each in found] == names and "next" not in found[0]
    assert found[0]["stages"][2]["state"] == "stopped" and found[0]["stages"][3]["state"] == "stale"
    lines = rlhf("ls").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["run", "runs/new", "runs/deep/a/b", "runs/old"]
    assert "sft, reward, ppo (stopped, saved at step 2 of 1), eval (stale)" in lines[1]
    assert "accuracy 0.750 [0.690, 0.800]" in lines[3] and lines[4] == "never run: runs/configs"
    assert rlhf("ls", "runs/old", "runs/deep", "runs").splitlines() == lines  # each once
    assert len(find_runs([Path("runs/1")])) == 1


def test_ls_lists_a_preset_only_once_it_ran(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "configs_folder", lambda: here / "configs")
    for name in ("configs/tldr", "configs/demo", "mine/configs"):
        (here / name).mkdir(parents=True)
        (here / name / "sft.yaml").write_text(CONFIGS["sft"])
    (here / "configs/demo/sft").mkdir()
    (here / "configs/demo/sft/identity.json").write_text("{}")
    assert [line.split()[0] for line in rlhf("ls", ".").splitlines()] == ["run", "configs/demo", "never"]
    for number in range(6):
        (here / f"mine/{number}").mkdir()
        (here / f"mine/{number}/sft.yaml").write_text(CONFIGS["sft"])
    last = rlhf("ls", "mine").splitlines()
    assert len(last) == 1 and last[0].startswith("never run: mine/") and last[0].endswith(", and 2 more")


@pytest.mark.usefixtures("here")
def test_ls_of_nothing() -> None:
    assert rlhf("ls", "--json") == "[]\n"
    result = run_cli.rlhf("ls")
    assert (result.exit_code, result.stdout) == (0, "") and result.stderr.startswith("no runs below /")
    result = run_cli.rlhf("ls", "nowhere")
    assert (result.exit_code, result.stderr) == (2, "error[C09]: no such folder: nowhere\n")
