"""Read YAML as plain values with the line of every key, and write values as YAML.

YAML 1.1 reads `off` as false, `012` as 10, `1:30` as 90 and `1e-5` as text. Here only true and false are booleans,
only plain decimal numbers are numbers (also 1e-5), and everything else stays text. Tags, recursive aliases and very
large files are rejected.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from rlhf_cli.errors import Problem, RLHFError, closest_path, shown
from rlhf_cli.trees import Tree

MAX_BYTES = 250_000  # any file of this size is read in less than a second
MAX_NODES = 10_000
MAX_DEPTH = 40
SUFFIXES = (".yaml", ".yml")
NEWLINE = b"\n"
# At most 18 digits: longer ones are ids, so they stay text.
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,4})?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)

# Values that YAML 1.1 converts and that stay text here: booleans, octal, binary, hex, 1_000, 1:30, dates.
YAML_1_1 = re.compile(
    r"yes|Yes|YES|no|No|NO|y|Y|n|N|True|TRUE|False|FALSE|on|On|ON|off|Off|OFF"
    r"|[-+]?(0[0-9_]+|0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])*(\.[0-9_]*)?)"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader of the structure, bounded in size and depth, without tags; `_scalar` parses the scalars."""

    nodes = 0
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.nodes += 1
        self.depth += 1
        event = self.peek_event()
        where = f"{self.name}:{event.start_mark.line + 1}"
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            raise RLHFError("S02", "the config is too large or too deeply nested", where=where)
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise RLHFError("S02", f"the tag {tag} is not allowed", where=where, hint="use plain keys and values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass
class YamlFile:
    """Parsed file: values, line of each key path ("data.train" -> 7), and problems such as duplicate keys."""

    name: str
    tree: Tree = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    size: int = 0  # number of values

    def value(self, node: Node, path: str, depth: int = 0) -> Any:
        """Return the value of a node, and record the line of each key path in it."""
        # An alias repeats its subtree, so this bounds the expansion of nested aliases and ends loops.
        self.size += 1
        if self.size > MAX_NODES or depth > MAX_DEPTH:
            raise RLHFError("S02", "the aliases expand to too many values", where=self._at(node))
        if isinstance(node, MappingNode):
            return self._items(node, path, depth)
        if isinstance(node, SequenceNode):
            return self._entries(node, path, depth)
        assert isinstance(node, ScalarNode)
        return _scalar(node, self._at(node))

    def _entries(self, node: SequenceNode, path: str, depth: int) -> list[Any]:
        entries = []
        for index, entry in enumerate(node.value):
            key = f"{path}.{index}"
            self.lines[key] = _line(entry)
            entries.append(self.value(entry, key, depth + 1))
        return entries

    def _items(self, node: MappingNode, path: str, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise RLHFError("C08", "a key must be a single word", where=self._at(key_node))
            name = key_node.value
            key = f"{path}.{name}" if path else name
            if name in items:
                text = f"duplicate key {key}, first set on line {self.lines[key]}"
                self.problems.append(Problem("C03", text, self._at(key_node), "keep one of the two lines"))
                continue
            self.lines[key] = _line(key_node)
            items[name] = self.value(value_node, key, depth + 1)
        return items

    def _at(self, node: Node) -> str:
        return f"{self.name}:{_line(node)}"


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def read(path: str | Path) -> YamlFile:
    """Read a config file. Raises RLHFError C08 (syntax), C09 (missing file, not a mapping), S02 (unsafe)."""
    return parse(read_text(path), str(path))


def parse(text: str, name: str) -> YamlFile:
    """Return the config in the text of the file `name`. Raises RLHFError C08, C09, S02 as `read`."""
    node = _compose(text, name)
    if node is None:
        raise RLHFError("C09", "the config is empty", where=name, hint="`rlhf init` writes example configs")
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else "a single value"
        raise RLHFError("C09", f"the config is {kind}, not keys and values", where=name)
    file = YamlFile(name)
    file.tree = file.value(node, "")
    return file


def parse_value(text: str) -> Any:
    """Parse the value of an override as YAML. Raises RLHFError."""
    node = _compose(text, "")
    file = YamlFile("")
    value = file.value(node, "") if node else None
    if file.problems:
        raise RLHFError.from_problems(file.problems)
    return value


def is_yaml_1_1(value: Any) -> bool:
    """Return True if YAML 1.1 would convert this text to a number, a boolean or a date."""
    return isinstance(value, str) and YAML_1_1.fullmatch(value) is not None


def _scalar(node: ScalarNode, where: str) -> Any:
    text: str = node.value
    if "\0" in text:  # not valid in paths
        raise RLHFError("C08", "the character U+0000 is not allowed", where=where)
    if node.style is not None:
        return text
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _compose(text: str, name: str) -> Node | None:
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{ord(text[error.position]):04X} is not allowed"
        raise RLHFError("C08", problem, where=f"{name}:{line}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None
        where = f"{name}:{mark.line + 1}:{mark.column + 1}"
        problem = error.problem or error.context or "cannot be read"
        if "\\t" in problem:
            tabs = "tabs cannot be used for indentation or before a value"
            raise RLHFError("C08", tabs, where=where, hint="use spaces") from error
        failing = text.splitlines()[mark.line : mark.line + 1]  # none at the end of the file
        needs_quotes = failing and re.search(r":\s+[>|*&!%@`{}\[\]]", failing[0])
        hint = "put a value that starts with a special character in quotes" if needs_quotes else None
        raise RLHFError("C08", f"not valid YAML: {problem}", where=where, hint=hint) from error


def read_text(file: str | Path) -> str:
    """Return the text of a file. Raises RLHFError C09 if it cannot be read, S02 if it is too large for a config."""
    path = Path(file)
    name = str(file)
    if os.path.isdir(path):
        raise RLHFError("C09", "is a folder, not a config file", where=name, hint=_configs_in(path))
    if not os.path.isfile(path):
        if os.path.exists(path):
            raise RLHFError("C09", "is a pipe or a device, not a config file", where=name)
        near = closest_path(path)
        hint = None
        if near and near.endswith(SUFFIXES) and os.path.isfile(near):
            hint = f"did you mean {near}?"
        elif os.path.isdir(path.parent):
            hint = _configs_in(path.parent)
        raise RLHFError("C09", "no such file", where=name, hint=hint)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RLHFError("C09", f"the config cannot be read: {error.strerror}", where=name) from error
    if len(raw) > MAX_BYTES:
        raise RLHFError("S02", "the config is larger than 250 kB", where=name, hint="pass a config, not a data file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{name}:{raw.count(NEWLINE, 0, error.start) + 1}"
        hint = f"convert it: iconv -f cp1252 -t utf8 {name}"
        raise RLHFError("C09", f"byte 0x{raw[error.start]:02X} is not UTF-8", where=where, hint=hint) from error


def _configs_in(folder: Path) -> str | None:
    names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIXES))
    if not names:
        return None
    listed = [shown(folder / name) for name in names[:6]]
    return f"configs in this folder: {', '.join(listed)}"


COMMENT_COLUMN = 34
PLAIN_TEXT = re.compile(r"(?!\.\.\.$)[A-Za-z./~][\w./~-]*")  # `...` ends a document


def to_yaml(value: Any) -> str:
    """Format a value as one line of YAML that reads back as the same value."""
    if isinstance(value, str):
        is_plain = PLAIN_TEXT.fullmatch(value) and parse_value(value) == value
        return value if is_plain else json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, float):
        short = f"{value:g}"
        is_exact = "e" in short and float(short) == value
        return re.sub(r"e([+-])0", r"e\1", short if is_exact else str(value))
    if isinstance(value, dict):
        items = [f"{to_yaml(key)}: {to_yaml(inner)}" for key, inner in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_yaml, value))}]"
    return json.dumps(value)


def with_comment(line: str, comment: str) -> str:
    """Append a comment to a line of YAML, in the column of all comments."""
    return f"{line:<{COMMENT_COLUMN - 2}}  # {comment}" if comment else line


def with_value(text: str, key: str, value: Any, comment: str) -> str:
    """Return the text of a config with the value of a key `section.name` on a separate line, with a comment."""
    section, name = key.split(".")
    lines = text.splitlines()
    node = _compose(text, "")
    assert node
    file = YamlFile("")
    file.value(node, "")  # records the line of each key
    line = with_comment(f"  {name}: {to_yaml(value)}", comment)
    if key in file.lines:
        lines[file.lines[key] - 1] = line
    elif section in file.lines:
        lines.insert(file.lines[section], line)
    else:
        lines += ["", f"{section}:", line]
    return "\n".join(lines) + "\n"


def align_comments(text: str) -> str:
    """Return YAML text with its comments aligned in one column."""
    lines = []
    for line in text.rstrip().splitlines():
        match = re.fullmatch(r"( *[^# ].*?) {2,}# (.*)", line)
        lines.append(with_comment(match[1], match[2]) if match else line)
    return "\n".join(lines) + "\n"
