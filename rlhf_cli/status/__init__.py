"""`rlhf status RUN` and `rlhf ls`: how far runs are and what comes next. Reads files alone, quickly, takes no lock."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.errors import shown as shown_path
from rlhf_cli.run_folders import is_run
from rlhf_cli.status import runs, shown

MOST = 500  # folders that are looked at where a run was forgotten


def show(folder: Path, overrides: Sequence[str] = (), *, as_json: bool = False) -> None:
    """Print a run stage by stage, and what `rlhf run` with these overrides would do. Raises RLHFError C09, C11."""
    with terminal.muted_warnings():  # who runs a stage is warned
        found = runs.read_run(folder, overrides)
    if as_json:
        terminal.out(json.dumps(shown.as_json(found), indent=2, ensure_ascii=False))
        return
    terminal.table(shown.STAGE_COLUMNS, shown.stage_rows(found))
    for line in shown.notes(found):
        terminal.out(line)
    terminal.out(shown.next_line(found))


def list_runs(folders: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the runs below folders; without any, below `runs` where that is there, else here. Raises RLHFError C09."""
    places = list(folders) or usual_places()
    with terminal.muted_warnings():
        found = runs.find_runs(places)
    if as_json:
        terminal.out(json.dumps([shown.as_json(run) for run in found], indent=2, ensure_ascii=False))
    elif found:
        terminal.table(shown.RUN_COLUMNS, [shown.run_row(run) for run in found])
    else:
        terminal.say(f"no runs below {', '.join(map(shown_path, places))}; rlhf init demo runs/demo makes one")


def runs_here() -> list[str]:
    """The runs that `rlhf ls` would list, by its names and in its order, and "." alone where this folder is one.

    Looks at few folders: whoever asks forgot to name one.
    """
    if is_run(Path(".")):
        return ["."]
    with terminal.muted_warnings():
        return [shown_path(run.folder) for run in runs.find_runs(usual_places(), MOST)]


def usual_places() -> list[Path]:
    """Where runs are looked for when nobody says where."""
    usual = Path("runs")
    return [usual if usual.is_dir() else Path(".")]
