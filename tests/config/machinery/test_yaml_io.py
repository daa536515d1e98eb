"""YAML of configs: what is refused, what is read as which value, and how comments are aligned."""

import re
import time
from pathlib import Path

import pytest
from bad_configs import HEAD, MINIMAL, loaded, only

from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery.yaml_io import align_comments

pytestmark = pytest.mark.usefixtures("here")


def test_comments_are_aligned_in_one_column() -> None:
    text = "# head\n\na:\n  b: 1  # one\n  much_longer_key: [1, 2]       # two\n  c: 3\n\n"
    assert [line.find("# ") for line in align_comments(text).splitlines()] == [0, -1, -1, 34, 34, -1]
    assert align_comments("x: " + "y" * 40 + "  # z").endswith("y  # z\n")


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "+1e-05", "0.00001"])
def test_numbers_in_scientific_notation_are_numbers(text: str, here: Path) -> None:
    assert loaded(here, "sft", f"{MINIMAL['sft']}sft: {{learning_rate: {text}}}\n").sft.learning_rate == 1e-5


@pytest.mark.parametrize("text", ["off", "012", "1:30", "2024-01-02", "yes", "0x10", "1_000", "True", "NO"])
def test_yaml_1_1_texts_stay_texts(text: str, here: Path) -> None:
    assert loaded(here, "sft", MINIMAL["sft"].replace("base", f"base, revision: {text}")).model.revision == text


CONVERT = "hint: convert it: iconv -f cp1252 -t utf8 sft.yaml"
SYSTEM = "!!python/object/apply:os.system"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "start"),
    [
        ("sft:\n\tpacking: true\n", "C08]: sft.yaml:2:1: tabs cannot be used for ... before a value\nhint: use spaces"),
        ("sft: {packing: true\nseed: 1\n", "C08]: sft.yaml:2:5: not valid YAML: "),
        ("seed: 1\n  run: x\n", "C08]: sft.yaml:2:6: not valid YAML: mapping values are not allowed here"),
        ("a: [1, 2\n", "C08]: sft.yaml:2:1: not valid YAML: "),
        ("a: &x 1\nb: *y\n", "C08]: sft.yaml:2:4: not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "C08]: sft.yaml:2:1: not valid YAML: but found another document"),
        ("a:\n  b: >= 0.6\n", "C08]: sft.yaml:2:7: ...\nhint: put a value that starts with a special ... in quotes"),
        ("a: \x07\n", "C08]: sft.yaml:1: the character U+0007 is not allowed"),
        ("? [a, b]\n: 1\n", "C08]: sft.yaml:1: a key must be a single word"),
        ("", "C09]: sft.yaml: the config is empty\nhint: `rlhf init` writes example configs"),
        ("# nothing\n", "C09]: sft.yaml: the config is empty\nhint: `rlhf init` writes example configs"),
        ("- a\n", "C09]: sft.yaml: the config is a list, not keys and values"),
        ("hello\n", "C09]: sft.yaml: the config is a single value, not keys and values"),
        (b"seed: 1\nrun: caf\xe9\n", f"C09]: sft.yaml:2: byte 0xE9 is not UTF-8\n{CONVERT}"),
        ("seed: 1".encode("utf-16"), f"C09]: sft.yaml:1: byte 0xFF is not UTF-8\n{CONVERT}"),
        (f"a: {SYSTEM} [touch pwned]\n", f"S02]: sft.yaml:1: the tag {SYSTEM} is not allowed"),
        ("seed: 1\nb: !mine 3\n", "S02]: sft.yaml:2: the tag !mine is not allowed"),
        ("a: !!int '3'\n", "S02]: sft.yaml:1: the tag !!int is not allowed"),
        (LAUGHS, "S02]: sft.yaml:"),
        ("a: &a [*a]\n", "S02]: sft.yaml:1: the aliases expand to too many values"),
        ("a: &a {b: *a}\n", "S02]: sft.yaml:1: the aliases expand"),
        ("a: " + "[" * 100_000, "S02]: sft.yaml:1: the config is too large or too deeply nested"),
        ("[1, " * 60_000, "S02]: sft.yaml:1: the config is too large"),
        ("a: [" + "1," * 120_000 + "]\n", "S02]: sft.yaml:1: the config is too large"),
        ("".join(f"k{n}: 1\n" for n in range(20_000)), "S02]: sft.yaml:5000: the config is too large"),
        ("a: 1\n" * 60_000, "S02]: sft.yaml: the config is larger than 250 kB"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_a_bad_file_is_refused_in_under_a_second(content: str | bytes, start: str, here: Path) -> None:
    seconds = []
    for _ in range(3):  # a busy machine disturbs some of them
        begin, message = time.process_time(), only("sft", content)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 1 and not (here / "pwned").exists()
    assert re.match(re.escape(f"error[{start}").replace(r"\.\.\.", ".*"), message), message


def test_a_byte_order_mark_and_windows_lines_are_fine() -> None:
    Path("sft.yaml").write_bytes(b"\xef\xbb\xbf" + HEAD["sft"].replace("\n", "\r\n").encode())
    assert load("sft", "sft.yaml").where("data.train") == "sft.yaml:2"


def test_honest_anchors_work() -> None:
    Path("sft.yaml").write_text("model: {path: ./b}\ndata: {train: &rows ./t.jsonl, eval: *rows}\n")
    data = load("sft", "sft.yaml").data
    assert data.eval == data.train
