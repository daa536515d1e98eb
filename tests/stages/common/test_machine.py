"""E01, E03, E04, E10, E11 through the real CLI: what this machine cannot do is said before a training, or ends it."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_cli
import torch
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned
from run_cli import child
from typer.testing import Result

from rlhf_cli import distributed, runs, system
from rlhf_cli.commands import verify
from rlhf_cli.config.loading import load as config_of
from rlhf_cli.models import devices, load, save
from rlhf_cli.planning import duration, fits
from rlhf_cli.planning.target import Target
from rlhf_cli.tracking import logs

SMALL = "per_device_train_batch_size: 4\n  gradient_accumulation_steps: 1\n  response_length: 8\n  num_ppo_epochs: 1"
STAGES = ("sft", "reward", "ppo")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine computes on a GPU")


@pytest.fixture
def three(folder: Path) -> Path:
    """Four steps of each stage, with a state after each."""
    foreign_scorer(folder)
    for stage in ("sft", "reward"):
        replace(f"{stage}.yaml", "max_steps: 1", "max_steps: 4")
    replace("ppo.yaml", "total_episodes: 64", f"total_episodes: 16\n  {SMALL}")
    for stage in STAGES:
        replace(f"{stage}.yaml", f"{stage}:", f"output: {{save_steps: 1}}\n{stage}:")
    return folder


# E01: number formats.


@on_a_cpu
@pytest.mark.parametrize(("stage", "place"), [("sft", "sft.yaml:1: "), ("reward", "reward.yaml:1: ")])
def test_e01_float16_on_the_cpu(folder: Path, stage: str, place: str) -> None:
    replace(f"{stage}.yaml", "path: model", "path: model, dtype: float16")
    says = ("float16 does not work on the CPU, float32 is used", "hint: leave model.dtype out")
    assert warned(check(f"{stage}.yaml"), "E01", place, *says)


@on_a_cpu
@pytest.mark.full
def test_e01_the_stages_say_it_too_and_train_in_float32(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 where there is none: as a GPU without it answers."""
    monkeypatch.setattr(devices, "supports_dtype", lambda name: name == "float32")
    replace("ppo.yaml", "ppo:", "ppo:\n  bf16: true")
    adapters = ("-s", "models.adapters={kind: lora, r: 2}")
    result = rlhf("ppo", "-s", "models.dtype=bfloat16", *adapters)
    assert warned(result, "E01", "--set models.dtype: ", "bfloat16 does not work on the CPU, float32 is used")
    assert warned(result, "E01", "ppo.yaml:5: ", "hint: leave ppo.bf16 out")
    assert load.load_causal_lm(three / "ppo/model").dtype == torch.float32
    result = rlhf("sft", "-s", "sft.bf16=true")
    assert warned(result, "E01", "--set sft.bf16: ", "float32 is used")


# E03 before a training.


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_e03_a_disk_too_small_for_the_states(three: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(keep + 1) states of what is trained, weight and two averages: needed, free, where; the same from check."""
    model, scorer = load.load_causal_lm(three / "model"), load.load_reward_model(three / "scorer")
    trained = {"sft": [model], "reward": [model.base_model, scorer.score], "ppo": [model, scorer]}[stage]
    needed = 12 * 3 * sum(weight.numel() for part in trained for weight in part.parameters())
    usage = shutil.disk_usage(three)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    size, total = system.format_bytes(needed / 3), system.format_bytes(needed)
    says = (f"3 checkpoints of {size} need {total}", "are free", "hint: free disk space")
    assert refused(rlhf(stage), "E03", f"{stage}: ", *says)
    assert "error[E03]" in check(f"{stage}.yaml").stderr
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert "E03" not in check(f"{stage}.yaml").stderr


@pytest.mark.full
def test_e03_counts_the_checkpoint_of_the_best_step(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several evaluations on held-out pairs a reward stage keeps one more."""
    usage = shutil.disk_usage(three)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    held_out = ("-s", "data.eval_fraction=0.2", "-s", "reward.per_device_train_batch_size=1")
    several = (*held_out, "-s", "reward.eval_steps=2")
    for options, count in (((), 3), (held_out, 3), (several, 4), ((*several, "-s", "reward.keep=last"), 3)):
        assert refused(rlhf("reward", *options), "E03", "reward: ", f"{count} checkpoints of ")


@on_a_cpu
def test_e03_a_memory_too_small(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = 16 * load.load_causal_lm(three / "model").num_parameters()
    monkeypatch.setattr(system, "total_memory", lambda: numbers - 1)
    says = (
        "weights, gradients and optimizer need ",
        "the CPU has",
        "hint: `rlhf plan` lists settings that save memory",
    )
    assert refused(rlhf("sft"), "E03", "sft.yaml:1: ", *says)
    # Where it is looked at is not always where it runs.
    assert warned(check("sft.yaml"), "E03", "sft.yaml:1: ", *says)
    assert warned(check("ppo.yaml"), "E03", "ppo.yaml:1: ")
    assert refused(
        check("ppo.yaml", "--before-run"), "E03", "ppo.yaml:1: "
    )  # as `rlhf run` asks, before its first stage
    monkeypatch.setattr(system, "total_memory", lambda: numbers + 1000)  # buffers
    assert "E03" not in check("sft.yaml").stderr


@on_a_cpu
def test_e03_counts_shards_and_shared_layers(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes with ppo.fsdp, or with ZeRO-3; a process of its own memory each."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "local_world_size", lambda: 1)

    def needed(stage: str, *settings: str) -> int:
        monkeypatch.setattr(system, "total_memory", lambda: 1)
        config = config_of(stage, three / f"{stage}.yaml", settings)
        target = Target.of(None, 2, sharing=1)
        return fits._fixed_memory(config, runs.open_parents(config), target).total

    full, zero = needed("sft"), needed("sft", "trainer.deepspeed={zero_optimization: {stage: 3}}")
    assert zero == pytest.approx(full / 2, rel=0.01)
    assert needed("sft", "trainer.deepspeed={zero_optimization: {stage: 1}}") == pytest.approx(0.75 * full, rel=0.01)
    assert needed("ppo", "ppo.fsdp=true") < 0.9 * needed("ppo")  # tiny models are mostly embeddings
    assert needed("ppo", "ppo.fsdp=hybrid") >= needed("ppo")  # each machine has one of the processes
    assert needed("ppo", "ppo.num_shared_layers=1") < needed("ppo")

    body = json.loads((three / "model/config.json").read_text())
    (three / "model/config.json").write_text(json.dumps({**body, "num_hidden_layers": 99, "layer_types": None}))
    rloo = ("ppo.fsdp=true", "ppo.advantage=rloo", "ppo.num_samples_per_prompt=4")  # no value model
    by_server = needed("ppo", *rloo, "models.engine={vllm: {url: 'http://h'}}")
    assert by_server < 0.9 * needed("ppo", *rloo)  # no process has the whole policy in a rollout


@pytest.mark.full
def test_e03_a_finished_stage_needs_no_room(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rlhf("sft").exit_code == 0
    shutil.rmtree("sft/state")
    usage = shutil.disk_usage(three)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(system, "total_memory", lambda: 0)
    assert check("sft.yaml").exit_code == 0 and "E03" not in check("sft.yaml").stderr
    assert "finished already" in rlhf("sft").stderr
    assert "error[E03]: other/sft: " in check("sft.yaml", "run=other").stderr


def test_a_file_system_that_does_not_tell_its_size_is_not_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)._replace(total=0, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert check("sft.yaml").exit_code == 0


def test_e03_an_output_that_cannot_be_written(folder: Path) -> None:
    (folder / "file").write_text("")
    for result in (check("sft.yaml", "run=file"), rlhf("sft", "-s", "run=file")):
        assert "error[E03]: --set run: " in result.stderr and "hint:" in result.stderr, result.stderr
        assert "cannot be written" in result.stderr and "Traceback" not in result.stderr and result.exit_code == 2


# E03 on the way.


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [
        ("sft", "model.adapters", "{kind: qlora}"),
        ("reward", "model.adapters", "{kind: qlora}"),
        ("ppo", "ppo.optim", "adamw_8bit"),
        ("sft", "trainer.optim", "paged_adamw_8bit"),
    ],
)
def test_e09_what_bits_need_is_an_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, key: str, value: str
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    if stage == "ppo":
        foreign_scorer(folder)
    name, hint = value.strip("{kind: }"), "hint: pip install -e '.[qlora]' in the clone of rlhf-cli"
    for result in (check(f"{stage}.yaml", f"{key}={value}"), rlhf(stage, "-s", f"{key}={value}")):
        assert result.exit_code == 2 and "error[E09]: " in result.stderr and hint in result.stderr, result.output
        assert f"{name} needs bitsandbytes, which is not installed" in result.stderr
    assert check(f"{stage}.yaml").exit_code == 0  # nothing else needs it


@pytest.mark.full
def test_e03_a_disk_that_is_full_on_the_way(three: Path) -> None:
    """After the first state no file may grow beyond the limit, whoever writes it: the state before it is still good.

    The reward stage is written by the same trainer, and full disks of PPO are in tests/helpers/chaos.
    """
    log, limit = logs.MetricsLog.log, 40_000

    def limited(self: Any, step: int, *rest: Any) -> None:
        log(self, step, *rest)
        if step == 2:  # one state is written by then
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def limit_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        logs.MetricsLog.log = limited  # type: ignore[method-assign]

    command = ("sft", "-c", "sft.yaml", "-s", "sft.logging_steps=1")
    done = run_cli.forked(*command, before=limit_files)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error[E03]: sft: could not write to disk"), done.stderr
    assert " are free there" in errors[0] and "hint: free some disk space and run the same command again" in done.stderr
    run_cli.must_succeed(run_cli.rlhf(*command), "resumes at step 1 of 4")


DISK = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.EROFS, "Read-only file system"),
    RuntimeError("[enforce fail at inline_container.cc:678] . unexpected pos 64 vs 0"),
    RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
    ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
]
MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes."),
    RuntimeError("can't start new thread"),
    RuntimeError("unable to mmap 4000 bytes from file <x>: Cannot allocate memory (12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        *(("E03", error, "sft: could not write to disk: ") for error in DISK),
        *(("E03", error, "sft: out of memory") for error in MEMORY),
        ("R00", OSError(errno.ENOENT, "No such file or directory"), ""),
    ],
)
def test_e03_in_the_words_of_each_library(
    folder: Path, code: str, error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise ValueError("while saving") from error

    monkeypatch.setattr(save, "save_model", full)
    if error in MEMORY or code == "R00":
        monkeypatch.setattr(load, "load_causal_lm", lambda *args, **kwargs: (_ for _ in ()).throw(error))
    assert f"error[{code}]: {says}" in (result := rlhf("sft")).stderr
    assert result.exit_code == 1 and result.stderr.count("error[") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["check", "sft.yaml", "--deep"], ["replay", "made"]])
def test_e03_memory_that_runs_out_in_check_and_replay(
    folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(load, "load_causal_lm", full)
    monkeypatch.setattr(verify, "open_run", full)
    assert refused(run_cli.rlhf(*command), "E03", f"{command[1]}: out of memory", exit_code=1)


# E04: processes.


@pytest.mark.full
@pytest.mark.parametrize("command", [["sft", "-c", "sft.yaml"], ["run", "."], ["check", "."]])
@pytest.mark.parametrize(
    ("variables", "place", "says"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE: ", "2 processes were requested, but 1 started"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR: ", "a launcher was asked for several processes, but 1 started"),
        ({"MASTER_ADDR": "::1", "WORLD_SIZE": ""}, "MASTER_ADDR: ", "MASTER_ADDR is set without WORLD_SIZE"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS: ", "4 proc"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: ", "two processes were requested"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_SIZE: ", "3 processes were requested"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE: ", "2 processes were requested"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE: ", "2 processes were requested"),
        ({"RANK": "1"}, "RANK: ", "RANK is 1, without WORLD_SIZE"),
        ({"RANK": "0"}, "RANK: ", "RANK is 0, without WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK: ", "RANK is 1 in a group of one process"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK: ", "without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK: ", "without MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_e04_several_processes(
    folder: Path, command: list[str], variables: dict[str, str], place: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run_cli.rlhf(*command)
    assert f"error[E04]: {place}" in result.stderr and says in result.stderr
    assert result.exit_code == 2 and "hint: use --nproc N, or torchrun" in result.stderr
    assert f"unset {place.removesuffix(': ')}\n" in result.stderr
    assert not (folder / "sft").exists()


GROUP = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# that another launcher, or a shell below one, may leave
LEFT_OVER = [
    {"RANK": "1"}, {"LOCAL_RANK": "1"}, {"PMI_SIZE": "2"}, {"PMI_RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "1"}, GROUP,
]  # fmt: skip
TRAIN_NOTHING = [
    ["status", "."], ["ls", "."], ["explain", "R00"], ["report", "."], ["plan", "sft.yaml"], ["schema", "sft"],
    ["sft", "-c", "sft.yaml", "--dry-run"],
]  # fmt: skip


@pytest.mark.parametrize("command", TRAIN_NOTHING, ids=lambda command: command[0])
def test_what_trains_nothing_prints_the_same_whatever_the_rank(
    folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed() -> tuple[int, str, list[str]]:
        result = run_cli.rlhf(*command)
        lines = result.stderr.splitlines()
        return result.exit_code, result.stdout, [line for line in lines if not line.startswith("plan  ")]

    monkeypatch.setattr(duration, "measure_flops", lambda *_: 1e9)
    expected = printed()
    assert expected[1] or expected[2]
    for variables in LEFT_OVER:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert printed() == expected, variables


@pytest.mark.full
def test_a_report_is_written_whatever_the_rank(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    result = run_cli.rlhf("report", trained_folder, "--out", trained_folder / "page.html")
    assert result.exit_code == 0 and "page.html" in result.output and (trained_folder / "page.html").is_file()


# E10: variables of accelerate.

CHANGE_A_TRAINING = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true",
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
}  # fmt: skip
PLAIN_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False", "ACCELERATE_USE_CPU": "False", "ACCELERATE_LOG_LEVEL": "info",
}  # fmt: skip


@pytest.mark.full
def test_e10_variables_of_accelerate_change_no_byte(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers of the other stages are made by the same function."""

    def train(variables: dict[str, str]) -> tuple[bytes, Result]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        result = rlhf("sft", "--fresh")
        assert result.exit_code == 0, result.stderr
        return (three / "sft/model/model.safetensors").read_bytes(), result

    plain, _ = train({})
    model, result = train(CHANGE_A_TRAINING)
    assert model == plain and not CHANGE_A_TRAINING.keys() & os.environ.keys()
    assert warned(result, "E10", "", "ACCELERATE_DEEPSPEED_ZERO_STAGE=3, ", " and 10 more in the environment: ")
    model, result = train(PLAIN_LAUNCH)
    assert model == plain and "E10" not in result.stderr


def test_e10_check_says_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    says = ("the config decides what is computed", "set precision", "or unset ACCELERATE_MIXED_PRECISION")
    assert warned(check("sft.yaml"), "E10", "ACCELERATE_MIXED_PRECISION=fp16 in the environment", *says)


@on_a_cpu
@pytest.mark.full
@pytest.mark.slow  # test_one_process_of_a_launcher starts the same command
def test_e10_accelerate_launch_trains_what_the_config_says(three: Path, tmp_path: Path) -> None:
    """Its config file and its options set variables of the same names."""
    variables = {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "bf16")
    models = []
    for launched in (
        lambda *words: run_cli.forked(*words, **variables),
        lambda *words: run_cli.python(*launcher, "-m", "rlhf_cli", *words, env=os.environ | variables),
    ):
        result = run_cli.must_succeed(launched("sft", "-c", "sft.yaml", "--fresh"))
        models.append((three / "sft/model/model.safetensors").read_bytes())
    assert "warning[E10]: ACCELERATE_MIXED_PRECISION=bf16" in result.stderr and models[0] == models[1]


@pytest.mark.distributed
def test_one_process_of_a_launcher_computes_what_a_plain_one_does(three: Path) -> None:
    """accelerate opens a group on the CPU, and would take all cores for it, which changes the rounding.

    A process of its own shows what the libraries print, too: nothing.
    """
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def train(*launcher: str) -> tuple[bytes, subprocess.CompletedProcess[str]]:
        command = (*launcher, "-m", "rlhf_cli", "sft", "-c", "sft.yaml", "--fresh")
        result = run_cli.must_succeed(run_cli.python(*command, cwd=three, env=variables))
        return (three / "sft/model/model.safetensors").read_bytes(), result

    plain, result = train()
    assert result.stdout == "" and "4/4 step" in result.stderr
    assert [line for line in result.stderr.splitlines() if not line.startswith("sft ")] == []
    launched, _ = train("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    assert launched == plain


# E11: Python without docstrings.


@pytest.mark.full
@pytest.mark.parametrize("command", [["sft", "-c", "sft.yaml"], ["status", "."]])
def test_e11_python_without_docstrings(folder: Path, command: list[str]) -> None:
    result = child(*command, cwd=folder, env={**os.environ, "PYTHONOPTIMIZE": "2"})
    if command[0] == "status":
        run_cli.must_succeed(result)
    else:
        run_cli.fails(result, "E11", "error[E11]: PYTHONOPTIMIZE: ", "hint: unset PYTHONOPTIMIZE")
