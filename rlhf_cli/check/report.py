"""What a check found: what was looked at, what is wrong, and what could not be looked at."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config import CONFIGS
from rlhf_cli.errors import Problem, RLHFError


@dataclass
class Report:
    """Filled while the check goes on, shown at its end. Warnings are the terminal's: it shows them as they come."""

    checked: list[dict[str, Any]] = field(default_factory=list)  # stage, what, found, and maybe numbers
    errors: dict[Problem, None] = field(default_factory=dict)  # an ordered set
    not_checked: dict[str, None] = field(default_factory=dict)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, an error ends the block and goes into the report."""
        try:
            yield
        except RLHFError as error:
            self.errors |= dict.fromkeys(error.problems)

    def add(self, stage: str, what: str, found: str, **numbers: float) -> None:
        """A line of what was looked at."""
        self.checked.append({"stage": stage, "what": what, "found": found, **numbers})

    def skip(self, what: str) -> None:
        """A thing that could not be looked at, and why."""
        self.not_checked[what] = None

    def show(self, *, as_json: bool) -> int:
        """Print it; returns the exit code."""
        order = list(CONFIGS)
        self.checked.sort(key=lambda one: order.index(one["stage"]))
        if as_json:
            terminal.out(json.dumps(self._as_json(), indent=2))
            return 2 if self.errors else 0
        if self.checked:
            columns = ["stage", "what", "found"]
            terminal.table(columns, [[one[name] for name in columns] for one in self.checked])
        for what in self.not_checked:
            terminal.out(f"not checked: {what}")
        if not self.errors:
            count = len(self.not_checked)
            verdict = f"ok, but for {count} that could not be checked" if count else "ok"
            terminal.out("; ".join([verdict, *self._left_out()]))
        return self.show_errors()

    def _left_out(self) -> Iterator[str]:
        """The rows that stages would leave out, if any: how many of how many, and their share."""
        told = [
            f"{one['stage']} {one['what']} {one['left_out']} of {one['asked']} ({one['left_out'] / one['asked']:.1%})"
            for one in self.checked
            if one.get("left_out")
        ]
        if told:
            yield f"rows left out: {', '.join(told)}"

    def show_errors(self) -> int:
        """Print what is wrong alone; returns the exit code."""
        for problem in self.errors:
            terminal.say(str(problem))
        return 2 if self.errors else 0

    def _as_json(self) -> dict[str, Any]:
        levels = [("error", problem) for problem in self.errors]
        levels += [("warning", problem) for problem in terminal.problems_warned_of()]
        problems = [
            {"code": each.code, "text": each.text, "where": each.where, "hint": each.hint, "level": level}
            for level, each in levels
        ]
        not_checked = list(self.not_checked)
        return {"ok": not self.errors, "problems": problems, "checked": self.checked, "not_checked": not_checked}
