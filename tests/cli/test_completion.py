"""What TAB offers, by the protocol of the shells' scripts.

Modules: `runs/layout.py`.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from run_cli import python, rlhf

from rlhf_cli import config
from rlhf_cli.cli import completion
from rlhf_cli.commands.init import presets
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.runs import layout

MORE_MODEL_KEYS = ["models.revision=", "models.dtype=", "models.attn_implementation="]
DTYPES = ("auto", "float32", "bfloat16", "float16")
YAML = {"sft": "model: {path: base}", "ppo": "data: {prompts: p}", "eval": "eval: {n: 4}"}
YAML |= dict.fromkeys(("reward", "dpo"), "data: {train: p}")


@pytest.fixture
def here(here: Path) -> Path:
    """A working directory with a run that has snapshots, one of an evaluation alone, and what is no run."""
    for name, stages in (("runs/demo", CONFIGS), ("runs/deep/er", ["eval"])):
        (here / name).mkdir(parents=True)
        for stage in stages:
            (here / name / f"{stage}.yaml").write_text(YAML[stage])
    for step in (2, 30):
        (here / f"runs/demo/ppo/snapshots/step_{step:06d}").mkdir(parents=True)
    (here / "runs/demo/ppo/identity.json").write_text("{}")
    (here / "runs/demo/ppo/sft.yaml").touch()  # the inside of a stage is no run
    (here / "runs/.old").mkdir()
    (here / "runs/.old/sft.yaml").touch()
    (here / "readme").mkdir()
    return here


def tab(line: str, shell: str = "bash") -> list[str]:
    """What is offered for the end of a line. bash cuts words at `=` and `:` as well."""
    if shell == "bash":
        words = [part for word in line.split() for part in re.split("([=:])", word) if part]
        words += [""] if line.endswith(" ") else []
        environment = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    else:
        environment = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = rlhf(prog_name="rlhf", env={"_RLHF_COMPLETE": f"complete_{shell}", **environment})
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rlhf pp", ["ppo"]),
        ("rlhf run ", ["runs/demo", "runs/deep/er"]),
        ("rlhf run runs/de", ["runs/demo", "runs/deep/er"]),
        ("rlhf status ./runs/dem", ["./runs/demo"]),
        ("rlhf report runs/demo runs/dee", ["runs/deep/er"]),
        ("rlhf ppo --config ", ["runs/demo/ppo.yaml"]),
        ("rlhf eval -c runs/deep/er/", ["runs/deep/er/eval.yaml"]),
        ("rlhf check runs/demo/", [f"runs/demo/{stage}.yaml" for stage in CONFIGS]),
        ("rlhf chat runs/demo --step ", ["last", "recommended", "2", "30"]),
        ("rlhf export --step 3 runs/demo --step ", ["last", "recommended", "2", "30"]),
        ("rlhf report runs/demo/ppo --step 3", ["30"]),
        ("rlhf export runs/deep/er --step ", ["last", "recommended"]),
        ("rlhf chat runs/demo --compare ", ["sft,ppo", "ppo,sft"]),
        ("rlhf chat runs/demo --stage ", ["ppo", "sft", "dpo"]),
        ("rlhf run runs/demo --only ", [*CONFIGS]),
        ("rlhf init re", ["reviews"]),
        ("rlhf init ", [*presets.PRESETS]),
        ("rlhf explain D01", ["D01"]),
        ("rlhf explain ppo.kl_est", ["ppo.kl_estimator"]),
        (
            "rlhf ppo mod",
            [
                "models.sft=",
                "models.policy=",
                "models.reward=",
                "models.value=",
                *MORE_MODEL_KEYS,
                "models.adapters.",
                "models.engine.",
                "models.compile=",
            ],
        ),
        ("rlhf ppo --set ppo.kl_coe", ["ppo.kl_coef=", "ppo.kl_coef=0.05"]),
        ("rlhf ppo --set ppo.kl_estimator=k", ["k1", "k2", "k3"]),
        ("rlhf ppo seed=1 ppo.kl_estimator=f", ["full"]),
        ("rlhf sft sft.packing=", ["true", "false"]),
        ("rlhf sft trainer.optim=adamw_torch_f", ["adamw_torch_fused"]),
        ("rlhf sft trainer.save_", []),  # the pipeline's own
        ("rlhf ppo models.value=", ["reward", "policy_head", "none"]),
        ("rlhf run runs/deep/er eval.per", ["eval.per_device_batch_size=", "eval.per_device_batch_size=64"]),
        ("rlhf run runs/deep/er ppo.", []),  # it has no such stage
        ("rlhf check runs/demo/ppo.yaml eval.", []),
        ("rlhf run runs/demo --set eval.sel", [f"eval.select.{key}=" for key in ("judge", "kl_max")]),
        ("rlhf run runs/demo sft:sft.packing=", ["true", "false"]),
        ("rlhf plan runs/demo -s sft:model.dt", ["model.dtype=", *(f"model.dtype={name}" for name in DTYPES)]),
        ("rlhf run runs/deep/er sft:model.dt", []),  # it has no such stage
        ("rlhf ppo nothing.of.this", []),
        ("rlhf run nowhere/at/all/", []),
    ],
)
def test_what_is_offered_in_bash(here: Path, line: str, offered: list[str]) -> None:
    assert tab(line) == offered


@pytest.mark.parametrize("command", ["run", "chat", "report", "status", "export", "serve", "verify"])
def test_presets_are_no_runs_and_can_be_checked(here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    shutil.copytree(layout.configs_folder() / "ci", here / "configs/ci")
    monkeypatch.setattr(layout, "configs_folder", lambda: here / "configs")
    assert tab(f"rlhf {command} ") == ["runs/demo", "runs/deep/er"] and tab(f"rlhf {command} configs/") == []
    assert "configs/ci" in tab("rlhf check ") and "configs/ci" in tab("rlhf plan configs/")


def test_shells_that_keep_words_whole_are_offered_the_key_with_its_values(here: Path) -> None:
    assert tab("rlhf ppo ppo.kl_estimator=k", "fish") == [f"ppo.kl_estimator=k{n}" for n in (1, 2, 3)]
    assert tab("rlhf run runs/demo sft:sft.pack", "fish") == [
        f"sft:sft.packing={each}" for each in ("", "true", "false")
    ]
    assert '"ppo.kl_estimator=k2"' in "".join(tab("rlhf ppo ppo.kl_estimator=k", "zsh"))


def test_every_key_that_is_offered_is_a_key(here: Path) -> None:
    for stage in CONFIGS:
        for key in completion.values_by_key([stage]):
            assert config.accepts_key(stage, key), key
        assert len(completion.values_by_key([stage])) > 10


def test_invalid_files_and_most_of_a_large_tree_are_skipped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "runs/demo/ppo.yaml").write_text("{")
    assert tab("rlhf check runs/demo/ppo.yaml ppo.") == []
    assert (steps := completion.ignore_errors(completion.steps)) and steps(ctx=None, incomplete="") == []
    monkeypatch.setattr(completion, "MAX_FOLDERS", 3)  # here, readme, runs
    assert tab("rlhf run ") == []
    assert tab("rlhf run runs/") == ["runs/demo"]


def test_it_is_quick_and_needs_no_torch(here: Path) -> None:
    script = (
        "import atexit, sys, time\n"
        "atexit.register(lambda: print(time.process_time(), {'torch', 'rich', 'numpy'} & sys.modules.keys()))\n"
        "from rlhf_cli.cli import app; app([], prog_name='rlhf')"
    )
    words = {"_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": "rlhf\nppo\nppo.kl_c", "COMP_CWORD": "2"}
    result = python("-c", script, env=os.environ | words)
    *offered, cost = result.stdout.splitlines()
    assert offered == ["ppo.kl_coef=", "ppo.kl_coef=0.05"]
    seconds, heavy = cost.split(maxsplit=1)
    assert heavy == "set()" and float(seconds) < 0.6  # 0.25 on a quiet machine
