"""Errors for users: problems with a stable code, a location and a hint; closest names; redaction of secrets."""

import errno
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

# errors for a missing file or an impossible name; any other system error says nothing about the file
NOT_FOUND = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")
OVERRIDE = "--set "  # followed by a key: the location of a command-line override
TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # https://LOGIN@host
SECRET_VARIABLE = re.compile(r".*(TOKEN|(API|ACCESS|PRIVATE)_?KEY|SECRET|PASSWORD)", re.IGNORECASE)
MIN_SECRET_LENGTH = 8  # shorter values may be ordinary words
_registered: set[str] = set()


@dataclass(frozen=True)
class Code:
    """Error or warning code. `exit` is the exit status of its error; 0 means that it is only ever a warning.

    `warns` says when a code that can be an error is only a warning.
    """

    title: str
    exit: int
    meaning: str
    fix: str
    warns: str = ""


CODES = {
    name: Code(**fields)
    for name, fields in tomllib.loads(Path(__file__).with_name("error_codes.toml").read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True)
class Problem:
    """One problem. `where` is FILE:LINE or another location, `hint` the fix; each is one line."""

    code: str
    text: str
    where: str | None = None
    hint: str | None = None

    def __post_init__(self) -> None:
        assert self.code in CODES, f"unknown code {self.code}"

    def line(self, kind: str = "error") -> str:
        """Return the printed message, starting with `error[CODE]` or `warning[CODE]`."""
        location = f"{self.where}: " if self.where else ""
        text = self.text
        if location.startswith(OVERRIDE):  # most texts begin with the same key
            text = text.removeprefix(location.removeprefix(OVERRIDE))
        hint = "\nhint: " + " ".join(self.hint.splitlines()) if self.hint else ""
        # keys and values of the user may hold line breaks
        return " ".join(f"{kind}[{self.code}]: {location}{text}".splitlines()) + hint

    def __str__(self) -> str:
        return self.line()


class RLHFError(Exception):
    """An error for users. It may carry several problems, which are printed together, and pickled with it."""

    problems: tuple[Problem, ...]

    def __init__(self, code: str, text: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(code, text)
        self.problems = (Problem(code, text, where, hint),)

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> "RLHFError":
        """Return one error for all of `problems` (at least one)."""
        assert problems, "an error needs a problem"
        error = cls(problems[0].code, problems[0].text)
        error.problems = tuple(problems)
        return error

    @property
    def exit_code(self) -> int:
        """2 for problems that `rlhf check` finds, else 1."""
        return 2 if any(CODES[problem.code].exit == 2 for problem in self.problems) else 1

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def collect_errors(*checks: Callable[[], object]) -> None:
    """Run all checks, then raise one RLHFError with the problems of those that failed."""
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
    """Set `where` on errors raised inside the context that have no location."""
    try:
        yield
    except RLHFError as error:
        problems = [replace(problem, where=problem.where or where) for problem in error.problems]
        raise RLHFError.from_problems(problems) from error


@contextmanager
def translate_read_errors(path: str | Path) -> Iterator[None]:
    """Turn system errors while reading `path` into E08: the file may be intact, so it is not reported as damaged.

    An OSError for a missing file (NOT_FOUND) propagates unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in NOT_FOUND:
            raise
        raise read_error(error, path) from error


def read_error(error: OSError, path: str | Path) -> RLHFError:
    """Return E08 for a system error, with the file that it names, or else `path`."""
    name = error.filename if isinstance(error.filename, str | Path) else path
    text = f"{shown(name)} cannot be read now: {error.strerror or error}"
    hint = "make it readable, or wait for its disk, then run the same command again; nothing was changed"
    return RLHFError("E08", text, hint=hint)


def shell_path(path: str | Path) -> str:
    """Return the path as `shown`, quoted for a printed command."""
    text = shown(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


def shell_word(text: str) -> str:
    """Return a text quoted as one shell word, on one line of printable characters."""
    if not UNPRINTABLE.search(text):
        return shlex.quote(text)
    raw = os.fsencode(text)
    return "$'" + "".join(chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in raw) + "'"


@contextmanager
def translate_rust_panics(text: str) -> Iterator[None]:
    """Turn the panic of a tokenizer, which is Rust's and no Exception, into RLHFError M01."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RLHFError("M01", f"{text}: {short_reason(error)}") from error


def shown(path: str | Path) -> str:
    """Return the path for messages: relative if it is below the working directory."""
    absolute = os.path.abspath(path)
    cwd = os.getcwd()
    return os.path.relpath(absolute, cwd) if absolute.startswith(cwd.rstrip("/") + "/") else absolute


def short_reason(error: BaseException) -> str:
    """Return the first 200 characters of a library's error message as one line, or its type if it is empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def first_names(names: Sequence[object]) -> str:
    """Join the first three names for a message, and count the others."""
    return ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def install_hint(extra: str) -> str:
    """Return how to install an extra of pyproject.toml: the project is not on a package index."""
    return f"pip install -e '.[{extra}]' in the clone of rlhf-cli"


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or one that starts with it, ignoring case; else None."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = get_close_matches(name.casefold(), by_folded, n=1, cutoff=max(cutoff, 0.8))
    if not matches and len(name) >= 3:
        matches = [folded for folded in by_folded if folded.startswith(name.casefold())]
    matches = matches or get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the hint that names the closest known name, if there is one."""
    near = closest_match(name, known)
    return f"did you mean {near}?" if near else None


def closest_path(path: str | Path, *, is_candidate: Callable[[Path], bool] = os.path.exists) -> str | None:
    """Return the file or folder with the name most similar to that of the missing `path`, in its parent folder."""
    missing = Path(path)
    if not os.path.isdir(missing.parent):  # Path.is_dir raises for a name that is too long
        folder = closest_path(missing.parent, is_candidate=os.path.isdir) if missing.parent != missing else None
        if folder and is_candidate(Path(folder, missing.name)):
            return shown(Path(folder, missing.name))
        return None

    names = sorted(name for name in os.listdir(missing.parent) if is_candidate(missing.parent / name))
    # compare without the suffix, which would make all names similar
    stems = {Path(name).stem: name for name in names if Path(name).suffix == missing.suffix}
    stem = closest_match(missing.stem, stems)
    name = stems[stem] if stem else closest_match(missing.name, names, cutoff=0.8)
    return shown(missing.parent / name) if name else None


def register_secrets(*values: str) -> None:
    """Make `redact` remove these values and each of their words: for "Bearer KEY", KEY as well."""
    for value in values:
        _registered.update(part for part in (value, *value.split()) if len(part) >= MIN_SECRET_LENGTH)


def redact(text: str) -> str:
    """Replace tokens, logins in URLs, values of secret environment variables and registered secrets by `[secret]`."""
    for value in sorted(_registered, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_LENGTH and value in text and SECRET_VARIABLE.fullmatch(name):
            text = text.replace(value, "[secret]")
    return LOGIN.sub("[secret]", TOKEN.sub("[secret]", text))
