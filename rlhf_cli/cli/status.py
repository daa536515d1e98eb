"""`rlhf status` and `rlhf ls`: show runs."""

from pathlib import Path
from typing import Annotated

from rlhf_cli.cli import completion
from rlhf_cli.cli.options import ONLY_RUN, AsJson, Debug, Set, Trailing, argument, path_and_overrides

SEARCHED_TEXT = "Folders to search. Default: ./runs if it exists, else the working directory."


def ls(
    folders: Annotated[list[Path] | None, argument("DIR...", SEARCHED_TEXT)] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs below a folder with stages, results and sizes."""
    from rlhf_cli.commands import status

    status.list_runs(folders or [], as_json=as_json)


def status(
    folder: Annotated[str | None, argument("RUN", f"Run folder. {ONLY_RUN}", completion.runs)] = None,
    assignments: Trailing = None,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the progress and results of each stage, and what comes next."""
    from rlhf_cli.commands import status

    place, overrides = path_and_overrides(folder, set_, assignments)
    status.show(place, overrides, as_json=as_json)
