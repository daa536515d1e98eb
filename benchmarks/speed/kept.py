"""Results in files, one a measurement, so that what was measured once is not measured again."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.speed.children import ROOT
from rlhf_cli import terminal


def refuse(text: str) -> int:
    """Say why a benchmark does not begin; the exit code."""
    print(f"bench: {text}", file=sys.stderr)
    return 2


def code_sha256() -> str:
    """What is measured: the product's own source."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "rlhf_cli").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


class Kept:
    """Results in files, one a process; those of other code are used, and told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code, self.stale = folder, code_sha256(), set[str]()

    def drop(self, part: str) -> None:
        """Forget a part, so that it is measured again."""
        (self.folder / f"{part}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / part, ignore_errors=True)

    def has(self, names: Iterable[str]) -> bool:
        """Whether all of these were measured."""
        return all((self.folder / f"{name}.json").exists() for name in names)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was found, now or before."""
        path = self.folder / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["code"] != self.code and "peer" not in name:
                self.stale.add(name)
            return kept["found"]
        terminal.say(f"bench    {name}")
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"code": self.code, "found": found}, indent=1), encoding="utf-8")
        temporary.replace(path)
        return found

    def tell_stale(self) -> None:
        """Say which results are of other code."""
        if self.stale:
            terminal.out(f"measured with other code: {', '.join(sorted(self.stale))}; --fresh measures again")
