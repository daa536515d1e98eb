"""A tiny run whose answers can be labelled, and pairs without a model."""

from pathlib import Path

import chat_run
import ppo_folder
import pytest

from rlhf_cli.commands.label.session import LabelSession, Pair
from rlhf_cli.commands.label.store import LabelStore
from rlhf_cli.runs import locks


def pairs(count: int) -> list[Pair]:
    """Return pairs of two policies; the second answer is cut off."""
    return [
        Pair(f"{n}:0-1", f"prompt {n}", (f"one {n}", f"another {n}"), ("sft", "ppo"), (True, False))
        for n in range(count)
    ]


PAIRS = pairs(10)


@pytest.fixture(scope="session")
def label_origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with untrained SFT and reward stages; tests must not change it."""
    folder = chat_run.make(tmp_path_factory.mktemp("label"))
    ppo_folder.write(folder, "ppo", chat_run.PPO)
    ppo_folder.write(folder, "eval", {**chat_run.EVAL, "judges": {"short": "judges:short"}})
    (folder / "judges.py").write_text(
        "def short(prompts, responses):\n    return [-len(response) for response in responses]\n"
    )
    return folder


def label(*arguments: object, typed: str = "") -> ppo_folder.Result:
    """Run `rlhf label`, then release the locks that a process of its own would release at its end."""
    try:
        return ppo_folder.rlhf("label", *arguments, input=typed)
    finally:
        locks.release()


def session(folder: Path, *annotators: str, overlap: float = 0.0) -> LabelSession:
    """Open a session on PAIRS."""
    return LabelSession(PAIRS, LabelStore(folder), annotators or ["me"], overlap=overlap, seed=0)
