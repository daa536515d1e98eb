"""What a user is told when something is wrong: problems with a stable code, a place and a fix."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlhf_cli.codes import CODES

OVERRIDE = "--set "  # and a key: the place of what a command line said


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
    def of(cls, problems: Sequence[Problem]) -> "RLHFError":
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


def all_of(*checks: Callable[[], object]) -> None:
    """Make each of the checks. Raises one RLHFError with the problems of all that failed."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except RLHFError as error:
            problems += error.problems
    if problems:
        raise RLHFError.of(list(dict.fromkeys(problems)))


@contextmanager
def placed(where: str | None) -> Iterator[None]:
    """Within, an error that tells no place of its own gets this one: the key that named what is wrong."""
    try:
        yield
    except RLHFError as error:
        problems = [replace(problem, where=problem.where or where) for problem in error.problems]
        raise RLHFError.of(problems) from error


def shown(path: str | Path) -> str:
    """The path as messages name it: relative to the working directory where it lies below it."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here.rstrip("/") + "/") else absolute


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or one that it begins; None where none is near. Case does not count."""
    by_folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), by_folded, n=1, cutoff=max(cutoff, 0.8))
    if not found and len(name) >= 3:
        found = [other for other in by_folded if other.startswith(name.casefold())]
    found = found or get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[found[0]] if found else None


def nearest_folder(path: str | Path) -> str | None:
    """The folder beside the missing `path` whose name is most like it, as messages name it."""
    return nearest_file(path, is_meant=os.path.isdir)


def nearest_file(path: str | Path, *, is_meant: Callable[[Path], bool] = os.path.exists) -> str | None:
    """The file or folder beside the missing `path` whose name is most like it, as messages name it."""
    missing = Path(path)
    if not os.path.isdir(missing.parent):  # Path.is_dir raises for a name that is too long
        folder = nearest_folder(missing.parent) if missing.parent != missing else None
        candidate = Path(folder) / missing.name if folder else None
        return shown(candidate) if candidate and is_meant(candidate) else None
    names = sorted(name for name in os.listdir(missing.parent) if is_meant(missing.parent / name))
    # The ending, which all of them share, must not make every name look near.
    stems = {Path(name).stem: name for name in names if Path(name).suffix == missing.suffix}
    stem = nearest(missing.stem, stems)
    name = stems[stem] if stem else nearest(missing.name, names, cutoff=0.8)
    return shown(missing.parent / name) if name else None
