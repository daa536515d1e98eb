"""A folder that `rlhf ppo` and `rlhf eval` can run in: tiny Hugging Face folders that we did not train, and data."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tiny
import yaml
from run_cli import fails, must_succeed, rlhf  # noqa: F401  (for tests too)
from typer.testing import Result

from rlhf_cli import jsonl, runs
from rlhf_cli.config.loading import load
from rlhf_cli.models import save, tokenizers
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Stats
from rlhf_cli.ppo.trainer import PPOTrainer

PROMPTS = [
    f"tell me about the {thing} number {n}" for n in range(4) for thing in ("sea", "moon", "bread", "cat", "hill")
]
PPO = {
    "models": {"sft": "sft_model", "reward": "reward_model"},
    "data": {"prompts": "prompts.jsonl"},
    "output": {"save_steps": 2, "snapshots": 2},
    "ppo": {
        "total_episodes": 32, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_ppo_epochs": 2,
        "response_length": 8, "temperature": 0.7, "learning_rate": 1e-3, "num_sample_generations": 2,
    },
}  # fmt: skip
ONE = "ppo.total_episodes=8"  # one update
EVAL = {
    "models": {"sft": "sft_model", "reward": "reward_model"},
    "judges": {"short": "judges:short"},
    "data": {"prompts": "heldout.jsonl"},
    "eval": {"n": 10, "best_of": [2, 3], "interpolate": [], "per_device_batch_size": 4},
}


@pytest.fixture(scope="module")
def no_page() -> Iterator[None]:
    """An evaluation writes no report page, which takes longer than a small evaluation itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_cli.report.show.write_beside", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def origin(tmp_path_factory) -> Path:
    """sft_model, reward_model, prompts and a judge."""
    folder = tmp_path_factory.mktemp("origin")
    jsonl.write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    jsonl.write_jsonl(folder / "heldout.jsonl", [{"prompt": f"what is a {thing}?"} for thing in "abcdefghijkl"])
    (folder / "judges.py").write_text(
        "def short(prompts, responses):\n    return [-len(response) for response in responses]\n"
    )
    write_models(folder)
    return folder


@pytest.fixture
def run_folder(origin: Path, tmp_path: Path) -> Path:
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    write(tmp_path, "ppo", PPO)
    write(tmp_path, "eval", EVAL)
    return tmp_path


@pytest.fixture(scope="session")
def trained_once(origin: Path, tmp_path_factory) -> tuple[Path, Result]:
    """A folder in which `rlhf ppo` ran, and its result. Read-only."""
    folder = Path(shutil.copytree(origin, tmp_path_factory.mktemp("ppo") / "run"))
    write(folder, "ppo", PPO)
    write(folder, "eval", EVAL)
    result = must_succeed(ppo(folder))
    return folder, result


@pytest.fixture
def ppo_run(trained_once: tuple[Path, Result]) -> Path:
    """The folder of that run. Read-only."""
    return trained_once[0]


@pytest.fixture
def trained_folder(trained_once: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of that folder, for a test to change."""
    return Path(shutil.copytree(trained_once[0], tmp_path, dirs_exist_ok=True))


def write_models(folder: Path, **sizes: object) -> None:
    """sft_model and reward_model, with a tokenizer of the prompts."""
    tokenizer = tokenizers.train_tokenizer(folder / "prompts.jsonl", 280)
    for name, make in (("sft_model", tiny.causal), ("reward_model", tiny.scorer)):
        model = make(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
        save.set_special_token_ids(model, tokenizer, 1)
        save.save_model(model, tokenizer, folder / name, "A tiny model.")


def write(folder: Path, stage: str, config: dict) -> None:
    (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config))


def as_stage(
    folder: Path, stage: str, model: Path, config: dict, *, overrides: Sequence[str] = (), **fields: object
) -> None:
    """A model's folder as the finished folder of a stage with this config and these fields in its manifest."""
    write(folder, stage, config)
    loaded = load(stage, folder / f"{stage}.yaml", overrides)
    identity = runs.compute_identity(loaded, {}, loaded.sources())
    runs.start_stage(loaded, identity, {}, fresh=False)
    shutil.copytree(model, folder / stage / "model")
    runs.complete_stage(loaded, identity, parents={}, fields=fields)
    runs.release()


def as_reward_stage(folder: Path, **fields: object) -> None:
    """reward_model as the finished folder of a reward stage, with these fields in its manifest."""
    config = {"model": {"path": "sft_model"}, "data": {"train": "prompts.jsonl"}}
    as_stage(folder, "reward", folder / "reward_model", config, **fields)


def ppo(folder: Path, *arguments: object):
    return rlhf("ppo", "-c", folder / "ppo.yaml", *arguments)


def evaluate(folder: Path, *arguments: object) -> tuple[dict, Result]:
    """Return report.json of `rlhf eval`, and the command's result."""
    result = must_succeed(rlhf("eval", "-c", folder / "eval.yaml", *arguments))
    return json.loads((folder / "eval/report.json").read_text()), result


def stop_in_update(folder: Path, update: int, *arguments: object) -> None:
    """Run `rlhf ppo`, which gets SIGTERM in this update."""
    real = PPOTrainer.step

    def step(trainer: PPOTrainer, prompts: Prompts) -> Stats:
        if trainer.updates == update - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer, prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "step", step)
        stopped = ppo(folder, *arguments)
    assert stopped.exit_code == 143 and "saved; the same command resumes" in stopped.stderr, stopped.output
    assert not (folder / "ppo/manifest.json").exists()


def settings(*changes: str) -> list[str]:
    """Options `-s ppo.KEY=VALUE`; a change with a section keeps it."""
    keys = (change if "." in change.partition("=")[0] else f"ppo.{change}" for change in changes)
    return [part for key in keys for part in ("-s", key)]


def manifest(folder: Path, stage: str = "ppo") -> dict:
    return json.loads((folder / stage / "manifest.json").read_text())


def weights(folder: Path, model: str = "model") -> bytes:
    return (folder / "ppo" / model / "model.safetensors").read_bytes()


def steps(folder: Path) -> set[int]:
    """The steps of the checkpoints or snapshots in a folder."""
    return {int(path.name.removeprefix("step_")) for path in folder.glob("step_*")}


def lines(path: Path) -> list[dict]:
    return [row for _, row in jsonl.read_jsonl(path)]


def untimed(path: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "_per_s"))} for row in lines(path)]
