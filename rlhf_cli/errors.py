"""What a user is told when something is wrong: problems with a stable code, a place and a fix."""

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_cli.error_codes import CODES

# A file that is not there, or a name that no file can have; any other error of the system says nothing about the file.
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
NOT_PRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")
OVERRIDE = "--set "  # and a key: the place of what a command line said
TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # https://LOGIN@host
SECRET_VARIABLE = re.compile(r".*(TOKEN|(API|ACCESS|PRIVATE)_?KEY|SECRET|PASSWORD)", re.IGNORECASE)
MIN_SECRET_LENGTH = 8  # a shorter value may well be an ordinary word
_declared: set[str] = set()


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` is FILE:LINE or another place, `hint` the fix, each one line."""

    code: str
    text: str
    where: str | None = None
    hint: str | None = None

    def __post_init__(self) -> None:
        assert self.code in CODES, f"unknown code {self.code}"

    def line(self, kind: str = "error") -> str:
        """The message as printed, led by `error[CODE]` or `warning[CODE]`."""
        place, text = f"{self.where}: " if self.where else "", self.text
        if place.startswith(OVERRIDE):  # which names the key that most texts begin with
            text = text.removeprefix(place.removeprefix(OVERRIDE))
        hint = "\nhint: " + " ".join(self.hint.splitlines()) if self.hint else ""
        # A key or a value of the user's may hold a line break; a message is one line.
        first = " ".join(f"{kind}[{self.code}]: {place}{text}".splitlines())
        return first + hint

    def __str__(self) -> str:
        return self.line()


class RLHFError(Exception):
    """An error for users; it may carry several problems, which are shown together."""

    problems: tuple[Problem, ...]

    def __init__(self, code: str, text: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(code, text)
        self.problems = (Problem(code, text, where, hint),)

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> "RLHFError":
        """One error for all of `problems` (at least one)."""
        assert problems, "an error needs a problem"
        error = cls(problems[0].code, problems[0].text)
        error.problems = tuple(problems)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, hints and all: it may be raised in one process and told by another."""
        return _again, (type(self), self.args, self.__dict__)

    @property
    def exit_code(self) -> int:
        """2 where `rlhf check` could have seen it, else 1."""
        return 2 if any(CODES[problem.code].exit == 2 for problem in self.problems) else 1

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def _again(kind: type[RLHFError], args: tuple[Any, ...], state: dict[str, Any]) -> RLHFError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def collect_errors(*checks: Callable[[], object]) -> None:
    """Make each of the checks. Raises one RLHFError with the problems of all that failed."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except RLHFError as error:
            problems += error.problems
    if problems:
        raise RLHFError.from_problems(list(dict.fromkeys(problems)))


@contextmanager
def at_location(where: str | None) -> Iterator[None]:
    """Within, an error that tells no place of its own gets this one: the key that named what is wrong."""
    try:
        yield
    except RLHFError as error:
        problems = [replace(problem, where=problem.where or where) for problem in error.problems]
        raise RLHFError.from_problems(problems) from error


@contextmanager
def translate_read_errors(path: str | Path) -> Iterator[None]:
    """Within, an error of the system while `path` is read becomes E08: the file may be whole, so it is not damaged.

    An OSError that says that the file is not there (NOT_THERE) comes through as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in NOT_THERE:
            raise
        raise read_error(error, path) from error


def read_error(error: OSError, path: str | Path) -> RLHFError:
    """E08 for an error of the system, with the file that it names, or else `path`."""
    name = error.filename if isinstance(error.filename, str | Path) else path
    text = f"{shown(name)} cannot be read now: {error.strerror or error}"
    hint = "make it readable, or wait for its disk, then run the same command again; nothing was changed"
    return RLHFError("E08", text, hint=hint)


def shell_path(path: str | Path) -> str:
    """The path as `shown`, for a command that is printed."""
    text = shown(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


def shell_word(text: str) -> str:
    """A text as one word of a shell's command, on one line, of visible characters."""
    if not NOT_PRINTED.search(text):
        return shlex.quote(text)
    raw = os.fsencode(text)
    return "$'" + "".join(chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in raw) + "'"


@contextmanager
def translate_rust_panics(code: str, text: str) -> Iterator[None]:
    """Within, the panic of a library in Rust, which is no Exception, is an error with this code."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RLHFError(code, f"{text}: {' '.join(str(error).split())[:200]}") from error


def shown(path: str | Path) -> str:
    """The path as messages name it: relative to the working directory where it lies below it."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here.rstrip("/") + "/") else absolute


def install_hint(extra: str) -> str:
    """How the libraries of an extra of pyproject.toml come: the project is on no index."""
    return f"pip install -e '.[{extra}]' in the clone of rlhf-cli"


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or one that it begins; None where none is near. Case does not count."""
    by_folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=max(cutoff, 0.8))
    if not found and len(name) >= 3:
        found = [other for other in by_folded if other.startswith(name.casefold())]
    found = found or get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def closest_folder(path: str | Path) -> str | None:
    """The folder beside the missing `path` whose name is most like it, as messages name it."""
    return closest_path(path, is_meant=os.path.isdir)


def closest_path(path: str | Path, *, is_meant: Callable[[Path], bool] = os.path.exists) -> str | None:
    """The file or folder beside the missing `path` whose name is most like it, as messages name it."""
    missing = Path(path)
    if not os.path.isdir(missing.parent):  # Path.is_dir raises for a name that is too long
        folder = closest_folder(missing.parent) if missing.parent != missing else None
        candidate = Path(folder) / missing.name if folder else None
        return shown(candidate) if candidate and is_meant(candidate) else None
    names = sorted(name for name in os.listdir(missing.parent) if is_meant(missing.parent / name))
    # The ending, which all of them share, must not make every name look near.
    stems = {Path(name).stem: name for name in names if Path(name).suffix == missing.suffix}
    stem = closest_match(missing.stem, stems)
    name = stems[stem] if stem else closest_match(missing.name, names, cutoff=0.8)
    return shown(missing.parent / name) if name else None


def register_secrets(*values: str) -> None:
    """Have `redact` take out these values, and each of their words: the key of "Bearer KEY" as well."""
    _declared.update(part for value in values for part in (value, *value.split()) if len(part) >= MIN_SECRET_LENGTH)


def redact(text: str) -> str:
    """The text with `[secret]` in place of tokens, of logins in addresses, and of the values of secret variables and
    of `register_secrets`.
    """
    for value in sorted(_declared, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_LENGTH and value in text and SECRET_VARIABLE.fullmatch(name):
            text = text.replace(value, "[secret]")
    return LOGIN.sub("[secret]", TOKEN.sub("[secret]", text))
