"""Configs and data files with faults, and what a config says, for tests/fuzzing/test_configs_and_rows.py."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from yaml.nodes import MappingNode, Node, SequenceNode

from rlhf_cli.config.loading import keys
from rlhf_cli.config.stages import CONFIGS

SUITE = 300
CASES = int(os.environ.get("RLHF_FUZZ_CASES", SUITE))
KEYS = sorted({part for stage in CONFIGS for key in keys(stage) for part in key.split(".")} | {"kl_coeff", "lr", "<<"})
ODD = [
    "0", "1", "-1", "8", "3.5", "1e-5", "1E400", "1e", ".nan", ".inf", "-.inf", "NaN", "9" * 30, "0.0", "-0", "+1",
    "true", "false", "True", "yes", "off", "null", "~", "Null", "012", "0x10", "0b1", "0o7", "1_000", "1:30",
    "2001-01-01", '"8"', "'true'", '""', "''", "[]", "{}", "[1, x]", "{a: {b: c}}", "[[], {}]", "{new: 1}", "x" * 300,
    "é", "日本", "\u2028", "\x85", "a b", "model", "./model", "RUN/sft", "../..", "/", "~/x", "none", "auto",
    "a/b", "x:y",
    "&a 1", "*a", "&a {b: *a}", "!!int 3", "!!python/name:os.system ''", "!x y", "- 1", "? a",
    "|\n    text", ">-\n    text",
    "{{ messages }}", "hf_" + "a" * 30, "a:", "rows.jsonl", "rows.jsonl[train]", "os:getcwd", '"\\0"', '"\\ud800"', "%",
]  # fmt: skip
MARKS = [": ", ":", "\n", "\n  ", "\n    ", "- ", "{", "}", "[", "]", ", ", "'", '"', "# ", "\t", "&a ", "*a", "\x00",
         "\ufeff", "---\n", "...\n", "%YAML 1.1\n", "\r", "\r\n", "| ", "? "]  # fmt: skip
TOKEN = r"\n *|[\w./-]+|\W"
PLAIN = ["1", "2", "4", "32", "0.5", "1e-5", "1.0", "true", "null", '"model"']


def cases(count: int) -> Any:
    """So many of 2000 cases, and as large a share of another number: of SUITE in the default suite."""
    return settings(
        max_examples=max(1, count * CASES // 2000),
        derandomize=CASES == SUITE,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )


_at = st.integers(0, 400)
_yaml_step = st.one_of(
    st.tuples(st.just("value"), _at, st.sampled_from(PLAIN)),
    st.tuples(st.just("value"), _at, st.sampled_from(ODD)),
    st.tuples(st.just("line"), _at, st.tuples(st.sampled_from(KEYS), st.sampled_from(ODD)).map(": ".join)),
    st.tuples(st.just("line"), _at, st.sampled_from(["", "# a: comment", "seed: 5", "run: .", "output: {keep: 3}"])),
    st.tuples(st.just("key"), _at, st.sampled_from(KEYS)),
    st.tuples(st.just("insert"), _at, st.sampled_from(MARKS + ODD)),
    st.tuples(st.sampled_from(["delete", "duplicate", "without", "cut"]), _at, st.just("")),
    st.tuples(st.just("bytes"), _at, st.binary(min_size=1, max_size=3)),
)
yaml_steps = st.one_of(st.lists(_yaml_step, min_size=1, max_size=1), st.lists(_yaml_step, min_size=1, max_size=4))


# Parts of a text that a step replaces: (where the parts are, what stands in place of one).
_PLACES = {
    "value": r"(?<=: )[^\n{}\[\],#]+", "key": r"[\w.]+(?=:)", "line": r"(?m)^( *).*$", "duplicate": r"(?m)^( *).*$",
    "without": r".*\n", "insert": TOKEN, "delete": TOKEN,
}  # fmt: skip
_REPLACED = {
    "value": "{piece}", "key": "{piece}", "line": "{part}\n{indent}{piece}", "duplicate": "{part}\n{part}",
    "without": "", "insert": "{piece}{part}", "delete": "", "cut": "",
}  # fmt: skip


def mutated(text: str, steps: Sequence[tuple[str, int, Any]]) -> bytes:
    """The text after each of the steps, (what, where, with what)."""
    raw = text.encode()
    for what, at, piece in steps:
        if what == "bytes":
            at %= len(raw) + 1
            raw = raw[:at] + piece + raw[at:]
            continue
        text = raw.decode("utf-8", "surrogateescape")
        places = list(re.finditer(TOKEN if what == "cut" else _PLACES[what], text))
        if places:
            place = places[at % len(places)]
            end = len(text) if what == "cut" else place.end()
            values = {"piece": piece, "part": place[0], "indent": place[1] if place.groups() else ""}
            text = text[: place.start()] + _REPLACED[what].format(**values) + text[end:]
        raw = text.encode("utf-8", "surrogateescape")
    return raw


def leaves(path: Path) -> Iterator[tuple[tuple[str | int, ...], str | None]]:
    """(key path, scalar as written) of all that a YAML file says; None for an empty list or mapping.

    Read from PyYAML's nodes: scalars are texts, and a duplicate key comes twice.
    """
    yield from _leaves(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), ())


def _leaves(node: Node | None, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str | None]]:
    if isinstance(node, MappingNode):
        pairs: list[tuple[str | int, Node]] = [(key.value, value) for key, value in node.value]
    elif isinstance(node, SequenceNode):
        pairs = list(enumerate(node.value))
    else:
        quoted = node is not None and node.style is not None
        yield path, None if node is None else f'"{node.value}' if quoted else node.value
        return
    if not pairs:
        yield path, None
    for key, value in pairs:
        yield from _leaves(value, (*path, key))


def is_kept(resolved: Any, path: Sequence[str | int], written: str | None, folder: Path) -> bool:
    """Whether a resolved config (`Config.dump`) holds what was written at a key path, as it was written."""
    value = resolved
    for part in path:
        if not (part in value if isinstance(value, dict) else isinstance(value, list) and part < len(value)):
            return False
        value = value[part]
    if written is None:
        return value in ({}, []) or value is None or isinstance(value, dict)
    if isinstance(value, str):
        text = written.removeprefix('"')
        run = resolved["run"]
        paths = [os.path.join(folder, os.path.expanduser(text)), os.path.join(run, text[4:])]
        return value in (text, *map(os.path.normpath, paths))
    if isinstance(value, bool):
        return written == str(value).lower()
    if value is None or isinstance(value, dict | list):
        return written in ("", "~", "null", "Null", "NULL")  # a section with nothing in it has its defaults
    return float(written) == value


# Data.

_texts = st.sampled_from(
    ["Tell me", " Yes.", "", " ", "\n", "é日本🙂", "\u2028", "\x00", "\ud800", "\x1b[31m", "x" * 3000, "{{ x }}",
     "<eos>", "<pad>", "\n\nHuman: Hi\n\nAssistant: Yes?", "\n\nAssistant: Yes?", "\ufeff", "[link=x]"]
)  # fmt: skip
CHARACTERS = st.characters(exclude_categories=["Cs"])  # hypothesis's default, which it takes seconds to count itself
_scalars = st.one_of(_texts, st.text(CHARACTERS, max_size=8), st.none(), st.booleans(), st.integers(), st.floats())
_roles = st.sampled_from(["user", "assistant", "system", "", "tool"])
_message = st.fixed_dictionaries({"role": _roles, "content": _texts})
_odd_message = st.dictionaries(st.sampled_from(["role", "content", "x"]), _scalars, max_size=2)
_messages = st.lists(st.one_of(_message, _scalars, _odd_message), max_size=4)
_values = st.one_of(_texts, _scalars, _messages, st.dictionaries(st.text(CHARACTERS, max_size=3), _scalars, max_size=2))
COLUMNS = [
    "prompt", "completion", "chosen", "rejected", "messages", "text", "margin", "odd", "responses", "scores",
    "completions", "better_response_id", "label",
]  # fmt: skip
LINES = [
    b"", b"  ", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 5000, b'{"a":' * 2000, b"NaN", b'{"prompt": 1e999}',
    b'{"prompt": "\\ud800"}', b"\xef\xbb\xbf{}", b"\r", b"\x00", b"1" * 5000, b'{"prompt": "a", "prompt": "b"}',
]  # fmt: skip
_data_step = st.one_of(
    st.tuples(st.just("set"), _at, st.tuples(st.sampled_from(COLUMNS), _values)),
    st.tuples(st.just("drop"), _at, st.sampled_from(COLUMNS)),
    st.tuples(st.just("rename"), _at, st.tuples(st.sampled_from(COLUMNS), st.sampled_from(COLUMNS))),
    st.tuples(st.just("row"), _at, st.one_of(_values, st.dictionaries(st.sampled_from(COLUMNS), _values, max_size=3))),
    st.tuples(st.just("line"), _at, st.sampled_from(LINES)),
    st.tuples(st.just("bytes"), _at, st.binary(min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["cut", "twice"]), _at, st.just(b"")),
    st.tuples(st.just("many"), _at, st.integers(0, 40)),
)
data_steps = st.one_of(st.lists(_data_step, min_size=1, max_size=1), st.lists(_data_step, min_size=1, max_size=4))


def broken(rows: Sequence[dict[str, Any]], steps: Sequence[tuple[str, int, Any]]) -> bytes:
    """The rows as JSON lines, after each of the steps (what, where, with what)."""
    lines = [_json(row) for row in rows]
    for what, at, piece in steps:
        if what in ("bytes", "cut"):
            raw = b"\n".join(lines)
            at = at * 7 % (len(raw) + 1)
            lines = (raw[:at] + piece + (raw[at:] if what == "bytes" else b"")).split(b"\n")
            continue
        at %= len(lines)
        if what in ("set", "drop", "rename"):
            lines[at] = _json(_changed(lines[at], what, piece))
        elif what == "twice":  # the row's first key once more
            lines[at] = lines[at].replace(b"{", b"{" + lines[at].partition(b":")[0].lstrip(b"{") + b": 1, ", 1)
        elif what == "many":
            lines += [lines[at]] * piece
        else:
            lines.insert(at, piece if what == "line" else _json(piece))
    return b"\n".join(lines)


def _changed(line: bytes, what: str, piece: Any) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return row
    if what == "set":
        return {**row, piece[0]: piece[1]}
    name, other = piece if what == "rename" else (piece, None)
    return {other or key: value for key, value in row.items() if key != name or other}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def repeats_a_key(line: bytes) -> bool:
    """Whether an object of a JSON text has a key twice, of which a reader would see one."""
    twice: list[bool] = []
    json.loads(line, object_pairs_hook=lambda pairs: twice.append(len(dict(pairs)) < len(pairs)))
    return any(twice)
