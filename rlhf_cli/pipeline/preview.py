"""`rlhf STAGE --dry-run`: print what a stage would read, do and write."""

from pathlib import Path

import yaml

from rlhf_cli import runs, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.data import sources
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.pipeline.decide import describe_status
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.parents import Parent


def preview_stage(config: Config, *, fresh: bool) -> None:
    """Print a stage's resolved config as YAML on stdout, with its inputs and outputs as comments.

    A missing parent is an error unless an earlier stage of the run can still make it. Raises D01, M01, M10.
    """
    files = sources.locate(config.sources())
    parents, inputs = _find_parents(config)
    outcome = _outcome(config, parents if len(parents) == len(inputs) else None, fresh=fresh)
    inputs += [f"{key}: {', '.join(map(shown, paths))}" for key, paths in files.items()]

    terminal.out(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True).rstrip())
    for line in inputs:
        terminal.out(f"# reads   {line}")
    terminal.out(f"# writes  {shown(config.folder)}: {outcome}")


def _find_parents(config: Config) -> tuple[dict[str, Parent], list[str]]:
    """Return the parents that exist, by key, and a line on each of all."""
    parents: dict[str, Parent] = {}
    lines = []
    for reference in runs.references(config):
        path = Path(reference.path)
        key = reference.key
        try:
            parent = runs.open_reference(config, reference)
        except RLHFError as error:
            earlier = [Path(config.run) / stage for stage in reference.expect]
            if path not in earlier or (path / MANIFEST).exists():
                raise
            lines.append(f"{key}: not ready: {error.problems[0].text}")
        else:
            parents[key] = parent
            lines.append(f"{key}: {shown(parent.path)} ({parent.stage}, {parent.sha256[:6]})")
    return parents, lines


def _outcome(config: Config, parents: dict[str, Parent] | None, *, fresh: bool) -> str:
    """Return what the stage would do with its folder. `parents` are None if one is not ready."""
    if parents is None:
        return "once what it reads is ready"
    if fresh and config.folder.exists():
        return "new; the old folder moves to .old/"

    status = runs.stage_status(config, runs.compute_identity(config, parents, config.sources()))
    if status.state == "finished":
        return "it is finished, nothing to do"
    needs_fresh = "; needs --fresh" if status.state in ("stale", "damaged") else ""
    return describe_status(status) + needs_fresh
