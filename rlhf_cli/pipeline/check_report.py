"""What `rlhf check` finds: the errors of all stages, what was checked, and what could not be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.runs.identity import StageStatus
from rlhf_cli.runs.parents import Parent

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class CheckReport:
    """Results of a check, printed at its end. Warnings are printed by the terminal as they occur."""

    checked: list[dict[str, Any]] = field(default_factory=list)  # stage, what, found; some have numbers, or sources
    errors: dict[Problem, None] = field(default_factory=dict)  # an ordered set
    not_checked: list[str] = field(default_factory=list)  # what could not be checked, and why

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add an RLHFError raised in the block to the report, and leave the block."""
        try:
            yield
        except RLHFError as error:
            self.errors |= dict.fromkeys(error.problems)

    def attempt(self, check: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
        """Return the result of a check, or None after adding its RLHFError to the report."""
        with self.collecting():
            return check(*arguments, **options)
        return None

    def add(self, stage: str, label: str, result: str, **further: Any) -> None:
        """Add a row to the table of checked items; `sources` is printed as a separate table."""
        self.checked.append({"stage": stage, "what": label, "found": result, **further})

    def show(self, *, as_json: bool) -> int:
        """Print the report; return the exit code."""
        order = list(CONFIGS)
        self.checked.sort(key=lambda item: order.index(item["stage"]))
        if as_json:
            terminal.print_json(self._as_json())
            return self.exit_code

        if self.checked:
            columns = ["stage", "what", "found"]
            terminal.table(columns, [[item[name] for name in columns] for item in self.checked])
        for item in self.checked:
            if "sources" in item:
                _print_sources(f"{item['stage']} {item['what']}", item["sources"])
        for text in self.not_checked:
            terminal.out(f"not checked: {text}")
        if not self.errors:
            terminal.out(self._summary())
        return self.show_errors()

    def _as_json(self) -> dict[str, Any]:
        errors = [{**asdict(problem), "level": "error"} for problem in self.errors]
        warnings = [{**asdict(problem), "level": "warning"} for problem in terminal.emitted_problems()]
        return {
            "ok": not self.errors,
            "problems": errors + warnings,
            "checked": self.checked,
            "not_checked": self.not_checked,
        }

    def _summary(self) -> str:
        """Return the last line of a check without errors."""
        summary = f"ok, but for {len(self.not_checked)} that could not be checked" if self.not_checked else "ok"
        dropped = []
        for item in self.checked:
            count = item.get("left_out")
            if count:
                share = count / item["asked"]
                dropped.append(f"{item['stage']} {item['what']} {count} of {item['asked']} ({share:.1%})")
        return f"{summary}; rows dropped: {', '.join(dropped)}" if dropped else summary

    @property
    def exit_code(self) -> int:
        return 2 if self.errors else 0

    def show_errors(self) -> int:
        """Print the errors only; return the exit code."""
        for problem in self.errors:
            terminal.error(str(problem))
        return self.exit_code


def _print_sources(name: str, sources: Sequence[Mapping[str, Any]]) -> None:
    """Print how often the rows of each source in a list are used."""
    total = sum(each["used"] for each in sources)
    rows = []
    for each in sources:
        rows.append(
            [
                each["source"],
                each["form"],
                str(each["rows"]),
                f"{each['weight']:g}",
                f"{each['used'] / total:.1%}",
                str(each["used"]),
            ]
        )
    terminal.table(["source", "form", "rows", "weight", "share", "used"], rows, title=f"sources of {name}")


@dataclass
class StageCheck:
    """State of the check of one stage."""

    config: Config
    valid: bool = True  # if False, invalid values were replaced by defaults, and only the files are checked
    parents: dict[str, Parent] = field(default_factory=dict)  # those that exist
    pending: dict[str, Path] = field(default_factory=dict)  # key -> folder that an earlier stage has yet to write
    data: set[str] = field(default_factory=set)  # keys whose files exist
    status: StageStatus | None = None  # of its output; None if unknown or rejected

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.state == "finished"
