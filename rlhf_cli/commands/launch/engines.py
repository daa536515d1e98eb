"""The schedulers that `rlhf launch` knows: a template each, and the values that it alone uses.

To add one, write its template in templates/ and add it to ENGINES.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rlhf_cli import __version__
from rlhf_cli.commands.launch.job import Job
from rlhf_cli.errors import shell_word
from rlhf_cli.terminal import duration

LIMIT_FACTOR = 2  # of the time limit, over the planned time


@dataclass(frozen=True)
class Engine:
    """How the file of a scheduler is made. `options`: those of --image, --partition and --servers that it can use."""

    template: str
    options: Collection[str] = ()
    values: Callable[[Job], dict[str, Any]] = lambda job: {}


def _slurm(job: Job) -> dict[str, Any]:
    hours = math.ceil(LIMIT_FACTOR * job.planned_seconds / 3600)
    return {"time_limit": f"{hours}:00:00"}


ENGINES = {
    "slurm": Engine("slurm.sbatch.j2", {"--partition", "--servers"}, _slurm),
}


def render(engine: Engine, job: Job) -> str:
    """Return the file of a scheduler for a job."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlhf_cli.commands.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shell": lambda value: shell_word(str(value)), "duration": duration}
    values = engine.values(job)
    return environment.get_template(engine.template).render(job=job, version=__version__, **values)
