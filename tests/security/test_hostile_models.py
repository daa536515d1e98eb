"""Malicious or damaged model folders: each ends in an error code, quickly, and prints no control characters."""

import gzip
import json
import logging
import os
import re
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import check, foreign_scorer, rlhf
from run_cli import python
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers
from transformers.utils import logging as transformers_logging

from rlhf_cli import errors, jsonl, system
from rlhf_cli.data import tokens
from rlhf_cli.models import tokenizers

LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


def refused_everywhere(code: str, *says: str, stage: str = "sft") -> None:
    """Assert that `rlhf check`, its --deep form and the stage refuse the model before anything trains."""
    for result in (check(f"{stage}.yaml"), check(f"{stage}.yaml", "--deep"), rlhf(stage)):
        first = next((line for line in result.stderr.splitlines() if line.startswith("error[")), "")
        assert first.startswith(
            tuple(f"error[{code}]: {at}" for at in (f"{stage}.yaml:1: ", "model/", "rows.jsonl:1: "))
        )
        assert result.exit_code == 2 and all(text in result.stderr for text in says), result.stderr
        assert "Traceback" not in result.output and "R00" not in result.output
    assert not (Path(stage) / "model").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_act": "os.system"}, "os.system"),
        ({"rms_norm_eps": "abc"}, "rms_norm_eps"),
        ({"num_attention_heads": 0}, "zero"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
        ({"text_config": {"num_experts": 10**9}}, "num_experts is 1000000000"),
    ],
)
def test_m01_fields_of_a_config(folder: Path, fields: dict[str, Any], says: str) -> None:
    path = folder / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    refused_everywhere("M01", says)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"a":' * 100_000, '"llama"', ""])
def test_m01_json_that_is_no_object(folder: Path, name: str, text: str) -> None:
    (folder / "model" / name).write_text(text)
    refused_everywhere("M01", "model")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "merges.txt"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_m01_a_file_that_is_a_pipe_or_a_device(folder: Path, name: str, make: Any) -> None:
    (folder / "model" / name).unlink(missing_ok=True)
    make(folder / "model" / name)
    refused_everywhere("M01", f"model/{name}: not a regular file")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "more.safetensors", "config.json", "tokenizer.json", "vocab.txt"]
)
def test_m01_a_file_that_cannot_be_so_large(folder: Path, name: str) -> None:
    """A sparse file of a terabyte, also with the header of smaller weights, is not read."""
    path = folder / "model" / name
    path.touch()
    os.truncate(path, 2**40)
    refused_everywhere("M01", f"model/{name}: has 1099.5 GB, which is not the size of a file of a model")


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
TOO_LONG = "the chat template takes more than 0.3 s for one conversation"
TOO_LARGE = "the chat template needs more than 1.0 GB for one conversation"


@pytest.mark.full
@pytest.mark.parametrize(("bomb", "says"), [(LOOPS, TOO_LONG), ("{{ messages[0].content * 10**10 }}", TOO_LARGE)])
def test_m01_a_chat_template_that_does_not_end_on_one_row(
    chat: Any, monkeypatch: pytest.MonkeyPatch, bomb: str, says: str
) -> None:
    """What it does depends on the text, so that no trial sees it; the limits are off again afterwards."""
    monkeypatch.setattr(tokens, "RENDER_TIMEOUT", 0.3)
    chat.chat_template = f"{{% if 'Hi' in messages[0].content %}}{bomb}{{% endif %}}{tokenizers.CHATML}"
    limits = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    with pytest.raises(errors.RLHFError, match=f"M01.*{says}"):
        tokens.render(chat, TURNS, generation_prompt=False)
    assert "Hello" in tokens.render(chat, [{"role": "user", "content": "Hello"}], generation_prompt=False)
    assert limits == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_a_cpu_time_limit_ends_the_work_and_is_removed() -> None:
    with pytest.raises(system.CPUTimeExceeded), system.cpu_time_limit(0.05):
        with suppress(system.CPUTimeExceeded):  # as Jinja does where it computes constants
            while True:
                pass
        while True:
            pass
    with system.cpu_time_limit(0.05):
        pass
    assert sum(range(3_000_000)) > 0  # takes more than 0.05 s


@pytest.mark.full
def test_a_limit_that_python_never_gets_to_raise_ends_the_process() -> None:
    program = (
        "from rlhf_cli.system import cpu_time_limit\n"
        "x, y = [1], [1]\n"
        "for _ in range(60): x, y = [x, x], [y, y]\n"
        "with cpu_time_limit(0.05): x == y\n"
    )
    assert python("-c", program).returncode == -signal.SIGVTALRM


@pytest.mark.full
def test_m01_a_tokenizer_whose_rule_never_matches(folder: Path) -> None:
    """The library panics, which is no Exception."""
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    split = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, tokenizer.backend_tokenizer.pre_tokenizer]
    )
    tokenizer.save_pretrained(folder / "model")
    jsonl.write_jsonl(folder / "rows.jsonl", [{"text": "a" * 60 + "b"}] * 8)
    refused_everywhere("M01", "the tokenizer fails on a text")


def test_d03_a_small_file_that_decompresses_to_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2**16)
    for name, content, says in (("lines", b"\n" * 200_000, "100,000 empty"), ("one", b"\0" * 2**17, "65,536 bytes")):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wb") as file:
            file.write(content)
        with pytest.raises(errors.RLHFError, match=re.escape(says)) as caught:
            list(jsonl.read_jsonl(tmp_path / f"{name}.jsonl.gz"))
        assert caught.value.problems[0].code == "D03"


def test_names_of_tensors_move_no_cursor(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """S01: in transformers' own report, and in our error."""
    foreign_scorer(folder)
    path = folder / "model/model.safetensors"
    save_file({**load_file(path), "\x1b]0;PWNED\x07": torch.zeros(1)}, path, metadata={"format": "pt"})
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    handler = logging.StreamHandler()  # transformers' own handler has the stderr from before capfd
    transformers_logging.add_handler(handler)
    try:
        result = check("sft.yaml", "--deep")
    finally:
        transformers_logging.set_verbosity(before)
        transformers_logging.remove_handler(handler)
    printed = capfd.readouterr().err
    assert "LOAD REPORT" in printed and "PWNED" in printed and "\x1b" not in printed + result.output
    assert "error[M13]" in result.stderr and "]0;PWNED" in result.stderr
