"""A tiny run to chat with, and a pseudo-terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import ppo_folder
import pytest
import tiny
from ppo_folder import PROMPTS, as_stage, must_succeed, rlhf, write

from rlhf_cli import jsonl
from rlhf_cli.cli import app
from rlhf_cli.models import save, tokenizers

PROMPT = "\x1b[?2004h> "  # behind what lets a paste of several lines come as one

CONTEXT = 4096  # a reply that may take seconds, for Ctrl-C
PPO = {
    "models": {"adapters": {"kind": "lora", "r": 4}},
    "data": {"prompts": "prompts.jsonl"},
    "output": {"save_steps": 2, "snapshots": 2},
    "ppo": {**ppo_folder.PPO["ppo"], "num_ppo_epochs": 4, "response_length": 12, "learning_rate": 3e-2},
}
EVAL = {"data": {"prompts": "heldout.jsonl"}, "eval": {"n": 6, "best_of": [], "frontier": False, "interpolate": []}}


def make(folder: Path, *, template: str | None = None) -> Path:
    """Write the untrained SFT and reward stages of a run; with a template its data are conversations."""
    asked = [[{"role": "user", "content": prompt}] if template else prompt for prompt in PROMPTS]
    answers = [[{"role": "assistant", "content": "ok"}] if template else " ok" for _ in PROMPTS]
    pairs = zip(asked, answers, strict=True)
    jsonl.write_jsonl(folder / "sft.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    jsonl.write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in asked])
    jsonl.write_jsonl(folder / "heldout.jsonl", [{"prompt": f"what is a {thing}?"} for thing in "abcdef"])
    jsonl.write_jsonl(folder / "texts.jsonl", [{"text": prompt} for prompt in PROMPTS])
    tokenizer = tokenizers.train_tokenizer(folder / "texts.jsonl", 280)
    if template:
        tokenizers.set_chat_template(tokenizer, template)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for stage, kind, data in (("sft", tiny.causal, "sft.jsonl"), ("reward", tiny.scorer, "prompts.jsonl")):
        model, name = kind(**size, **special), f"{stage}_model"
        if stage == "sft":
            model.lm_head.weight.data[1] = 0  # never the most likely: at temperature 0 a reply does not end
        save.set_special_token_ids(model, tokenizer, 1)
        save.save_model(model, tokenizer, folder / name, "A tiny model.")
        as_stage(folder, stage, folder / name, {"model": {"path": name}, "data": {"train": data}})
    return folder


@pytest.fixture(scope="module")
def chat_origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with PPO and evaluation; tests must not change it."""
    folder = make(tmp_path_factory.mktemp("chat"))
    write(folder, "ppo", PPO)
    write(folder, "eval", EVAL)
    for stage in ("ppo", "eval"):
        must_succeed(rlhf(stage, "-c", folder / f"{stage}.yaml"))
    return folder


class Terminal:
    """`rlhf chat` at a pseudo-terminal, in a fork of this process, which has all imported."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.process, self.master = pty.fork()
        if self.process == 0:
            _chat_here(arguments, cwd)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.seen = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.master)

    def until(self, text: str, seconds: float = 60) -> str:
        """Return the output since the last call, up to and with a text."""
        expected, limit = text.encode(), time.monotonic() + seconds
        while expected not in self.seen:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([self.master], [], [], left)[0]:
                raise AssertionError(f"{text!r} did not come: {self.seen.decode(errors='replace')}")
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:  # the other side is closed
                raise AssertionError(f"it ended before {text!r}: {self.seen.decode(errors='replace')}") from None
        end = self.seen.index(expected) + len(expected)
        found, self.seen = self.seen[:end], self.seen[end:]
        return found.decode(errors="replace")

    def type(self, text: str, until: str = PROMPT) -> str:
        """Type; return the output up to a text, by default the next prompt."""
        self._press(text)
        return self.until(until)

    def ends(self, text: str) -> int:
        """Type, wait for the end, and return the exit code."""
        self._press(text)
        with suppress(OSError):  # once the other side is closed
            while True:
                self.seen += os.read(self.master, 65536)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def _press(self, text: str) -> None:
        if text == "\x03":  # which Python's readline notices while it waits for a key, not while it reads one
            time.sleep(0.2)
        os.write(self.master, text.encode())


def _chat_here(arguments: Iterable[object], folder: Path) -> None:
    """Run `rlhf chat` on the streams of this fork, and end it."""
    code: object = 1
    try:
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.environ["TERM"] = "xterm"
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background start with it ignored
        os.chdir(folder)
        app(["chat", *map(str, arguments)], prog_name="rlhf")
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        os._exit(int(code or 0))
