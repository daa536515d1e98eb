"""The schedulers that `rlhf launch` knows: a template each, and the values that it alone uses.

To add one, write its template in templates/ and add it to ENGINES.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_cli import __version__
from rlhf_cli.errors import RLHFError, shell_word
from rlhf_cli.terminal import duration

if TYPE_CHECKING:
    from rlhf_cli.commands.launch.job import Job

LIMIT_FACTOR = 2  # of the time limit, over the planned time
SKYPILOT_GPUS = {
    "h100-pcie": "H100", "a100-40": "A100", "a100-80": "A100-80GB",
    "5090": "RTX5090", "4090": "RTX4090", "3090": "RTX3090",
}  # fmt: skip
VLLM_IMAGE = "vllm/vllm-openai:v0.33.0"


@dataclass(frozen=True)
class Engine:
    """How the file of a scheduler is made. `options`: those of --image, --partition and --servers that it can use."""

    template: str
    options: Collection[str] = ()
    values: Callable[["Job"], dict[str, Any]] = lambda job: {}


def _slurm(job: "Job") -> dict[str, Any]:
    hours = math.ceil(LIMIT_FACTOR * job.planned_seconds / 3600)
    return {"time_limit": f"{hours}:00:00"}


def _container(job: "Job") -> dict[str, Any]:
    """Return the place of the run and the size of /dev/shm in a container, and the image of a server."""
    return {"mounted": f"/runs/{job.run.name}", "shm_gib": job.processes, "vllm_image": VLLM_IMAGE}


def _skypilot(job: "Job") -> dict[str, Any]:
    if job.gpus and job.gpu is None:
        raise RLHFError("C11", "SkyPilot chooses machines by the name of their GPU", hint="for example --gpu h100")
    name = SKYPILOT_GPUS.get(job.gpu, job.gpu.upper()) if job.gpu else ""
    return {**_container(job), "accelerators": f"{name}:{job.gpus}"}


ENGINES = {
    "slurm": Engine("slurm.sbatch.j2", {"--partition", "--servers"}, _slurm),
    "skypilot": Engine("skypilot.yaml.j2", {"--image", "--servers"}, _skypilot),
    "jobset": Engine("jobset.yaml.j2", {"--image", "--servers"}, _container),
    "trainjob": Engine("trainjob.yaml.j2", {"--image"}, _container),
}


def render(engine: Engine, job: "Job") -> str:
    """Return the file of a scheduler for a job."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from rlhf_cli.config.machinery.yaml_io import to_yaml

    environment = Environment(
        loader=PackageLoader("rlhf_cli.commands.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shell": lambda value: shell_word(str(value)), "yaml": to_yaml, "duration": duration}
    values = engine.values(job)
    return environment.get_template(engine.template).render(job=job, version=__version__, **values)
