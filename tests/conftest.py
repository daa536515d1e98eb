"""A tiny world for tests that train: a few templates of text, a tokenizer and a base model made from them."""

import functools
import gc
import importlib.metadata
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on a busy machine are slower than one
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub but one that it started

from adapter_folder import adapters_copy, adapters_run  # noqa: F401  (fixtures of the tests of adapters)
from browser import chromium  # noqa: F401  (a fixture of the tests in a browser)
from chat_run import chat_origin  # noqa: F401  (a fixture of the tests of chat)
from fake_config import fake_chain  # noqa: F401  (a fixture of the tests of commands)
from label_run import label_origin  # noqa: F401  (a fixture of the tests of labels)
from plans import no_progress_lines, three  # noqa: F401  (fixtures of the tests of plan)
from ppo_folder import (  # noqa: F401  (fixtures of the stage tests)
    no_page,
    origin,
    ppo_run,
    run_folder,
    trained_folder,
    trained_once,
)
from report_run import empty_figures, figures  # noqa: F401  (fixtures of the tests of pages)

from rlhf_cli import jsonl, runs, terminal

gc.disable()  # until all tests are imported: nothing of them is garbage
typer.testing._get_command = cache(typer.testing._get_command)  # the options of all commands are read once, not a call

HEAVY = {"full", "slow", "damage", "distributed", "browser", "vllm", "slurm"}  # markers of what `make check` leaves out
MAX_LIGHT_SECONDS = 10.0  # on a slow machine, and with the imports of a library
spent_seconds: Counter[str] = Counter()  # test -> CPU time of its cases
SHARED = Path(__file__).parents[2] / "shared"
THINGS = ["sun", "moon", "star", "cloud", "rain", "snow", "wind", "storm", "river", "lake", "hill", "wood"]
WORDS = {"good": ["bright", "kind", "calm"], "bad": ["dull", "cold", "grim"]}
SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "tie_word_embeddings": True, "max_position_embeddings": 128,
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """Files of the tiny world. `base` is a plain Hugging Face folder with fresh weights, `sft` ... are JSON lines."""

    folder: Path
    base: Path
    text: Path
    sft: Path
    messages: Path
    pairs: Path

    def tokenizer(self) -> Any:
        from rlhf_cli.models import tokenizers

        return tokenizers.load_tokenizer(self.base)

    def config(self, folder: Path, name: str, **sections: Any) -> Path:
        """Write folder/name.yaml of the given sections and return its path."""
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return path


@pytest.fixture
def tokenizer(world: World) -> Any:
    return world.tokenizer()


@pytest.fixture
def chat(world: World) -> Any:
    """A tokenizer with a chat template."""
    from rlhf_cli.models import tokenizers

    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")
    return tokenizer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of a test, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


PPO = "models: {sft: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\nppo:\n  total_episodes: 64\n"
SFT = "model: {path: model}\ndata: {train: rows.jsonl}\nsft: {max_steps: 1}\n"
REWARD = "model: {path: model}\ndata: {train: pairs.jsonl}\nreward: {max_steps: 1}\n"


@pytest.fixture
def folder(world: World, here: Path) -> Path:
    """Valid configs, data and a base model, in the working directory."""
    shutil.copytree(world.base, here / "model")
    for name, path in (("rows", world.sft), ("pairs", world.pairs), ("prompts", world.sft)):
        shutil.copy(path, here / f"{name}.jsonl")
    for stage, text in (("sft", SFT), ("reward", REWARD), ("ppo", PPO)):
        (here / f"{stage}.yaml").write_text(text)
    return here


@pytest.fixture(autouse=True, scope="session")
def _caches_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keep tests and their child processes out of the user's cache; read the versions of packages once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setattr("importlib.metadata.version", functools.cache(importlib.metadata.version))
        yield


@pytest.fixture(autouse=True)
def _a_new_command() -> Any:
    """Each test starts like a new process: no warning was printed, no output is locked."""
    terminal.reset()
    yield
    runs.release()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    draw = random.Random(0)

    def answer(thing: str, mood: str) -> str:
        return f" The {thing} is {draw.choice(WORDS[mood])} and {draw.choice(WORDS[mood])}."

    picked = [draw.choice(THINGS) for _ in range(96)]
    prompts = [f"Tell me about the {thing}." for thing in picked]
    good, bad = [answer(thing, "good") for thing in picked], [answer(thing, "bad") for thing in picked]
    files = World(folder, folder / "base", *(folder / f"{name}.jsonl" for name in ("text", "sft", "messages", "pairs")))
    texts = [prompt + reply for prompt, reply in zip(prompts + prompts, good + bad, strict=True)]
    jsonl.write_jsonl(files.text, [{"text": text} for text in texts])
    both = list(zip(prompts, good, bad, strict=True))
    jsonl.write_jsonl(files.sft, [{"prompt": p, "completion": draw.choice([g, b])} for p, g, b in both])
    jsonl.write_jsonl(files.messages, [{"messages": turns(p, g, "And?", "That is all.")} for p, g, _ in both])
    jsonl.write_jsonl(files.pairs, [{"prompt": p, "chosen": g, "rejected": b} for p, g, b in both])
    _make_base(files)
    return files


@pytest.fixture(scope="session")
def sft_stage(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished SFT stage. Read only."""
    import trl_stage

    folder = tmp_path_factory.mktemp("parent")
    trl_stage.run(trl_stage.config_of(world, "sft", folder, world.base, world.sft, sft={"max_steps": 40}))
    return folder / "sft"


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _make_base(world: World) -> None:
    import torch

    from rlhf_cli.models import build, save, tokenizers

    tokenizer = tokenizers.train_tokenizer(world.text, 340)
    torch.manual_seed(0)
    model = build.new_causal_lm(SIZES, tokenizer)
    save.set_special_token_ids(model, tokenizer, tokenizer.eos_token_id)
    save.save_model(model, tokenizer, world.base, "A tiny base model.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with many long tests first: whichever process got one at the end would work alone."""
    long = Counter(item.path for item in items if item.get_closest_marker("full"))
    items.sort(key=lambda item: -long[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test of `make check` whose cases take long together."""
    before = sum(os.times()[:4])
    result = yield
    test = item.nodeid.partition("[")[0]
    spent_seconds[test] += sum(os.times()[:4]) - before
    if HEAVY.isdisjoint(mark.name for mark in item.iter_markers()):
        text = "its cases took {:.1f} s of CPU time: mark it `full`, which stands for more than half a second"
        assert spent_seconds[test] < MAX_LIGHT_SECONDS, text.format(spent_seconds[test])
    return result


def pytest_collection_finish() -> None:
    """Exclude imported modules from the garbage collections of trainings; only a loss of power needs flushed files."""
    gc.freeze()
    gc.enable()
    os.fsync = lambda descriptor: None
