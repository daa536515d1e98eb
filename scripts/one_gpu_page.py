"""Write docs/one-gpu.md: what `rlhf init preferences` writes for a model on a GPU, and what `rlhf plan` says of it.

`python scripts/one_gpu_page.py` writes the page; half a minute. Nothing is loaded or trained.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.placement import FLOPS, MODELS, write_inputs  # noqa: E402
from rlhf_cli.cli import app  # noqa: E402

PAGE = ROOT / "docs/one-gpu.md"
STAGES = ("sft", "reward", "ppo", "eval")


@dataclass(frozen=True)
class Example:
    """A model on a GPU."""

    gib: int
    model: str  # of benchmarks.placement
    hub: str
    why: str


EXAMPLES = [
    Example(24, "Qwen3-4B", "Qwen/Qwen3-4B", "RTX 3090 or 4090, L4, A10: adapters on one base for all four models."),
    Example(48, "Qwen3-8B", "Qwen/Qwen3-8B", "A40, L40S, RTX 6000 Ada: the same, twice the model."),
    Example(
        80, "Qwen3-1.7B", "Qwen/Qwen3-1.7B", "A100, H100: whole weights of a small model, or adapters of a large one."
    ),
]
HEAD = """# One GPU: 24, 48, 80 GB

`rlhf init preferences` takes the first placement of the four models that fits your GPU, and writes it into four
files. This page has whole examples, so that you see what to expect and what to change.

```sh
rlhf init preferences runs/mine --data pairs.jsonl --base Qwen/Qwen3-4B --gpu 24     # --gpu: only for another machine
rlhf plan runs/mine --gpu 4090                                                        # memory and time of each stage
rlhf run runs/mine
```

`python scripts/one_gpu_page.py` wrote the examples: 200 pairs with prompts of up to 160 and answers of up to 300 words,
models by their published sizes. The memory is an estimate, 0 to 15 % above
[the peaks that were measured](results/memory.md#accuracy-of-rlhf-plan). Paths of data and comments are left out; epochs
and episodes follow the number of pairs. [More models and GPUs](results/placement.md);
[what each line costs](scaling.md#what-fits-on-which-gpu).
"""
TAIL = """## If it does not fit, or is slow

| You see | Change |
|---|---|
| E03, or out of memory | `rlhf plan RUN/STAGE.yaml` names the phase, and prints two sets of keys that fit |
| the update does not fit | half `ppo.per_device_train_batch_size`, twice `ppo.gradient_accumulation_steps` |
| the rollout does not fit | `ppo.local_rollout_forward_batch_size`, or a shorter `ppo.response_length` |
| whole weights do not fit | `--adapters lora` or `qlora` of `rlhf init` |
"""


def section(example: Example) -> str:
    """Return the part of the page about an example."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, MODELS[example.model])
        run = folder / "run"
        call(
            "init",
            "preferences",
            run,
            "--data",
            folder / "pairs.jsonl",
            "--base",
            folder / "base",
            "--gpu",
            example.gib,
        )
        planned = call("plan", run, "--gpu", example.gib, "--flops", FLOPS)
        files = [settings(run / f"{stage}.yaml", folder, example) for stage in STAGES]
    return "\n".join(
        [
            f"## {example.gib} GB: {example.model}\n",
            f"{example.why} What `rlhf plan` says:\n",
            "```text",
            *memory_lines(planned),
            "```\n",
            *files,
        ]
    )


def memory_lines(planned: str) -> list[str]:
    """Return the phases of PPO, and the memory of each stage, of what `rlhf plan` prints."""
    parts = {part.partition(":")[0]: part.splitlines() for part in planned.split("\n\n")}
    head, *phases = parts["ppo"][1:]
    end = next(number for number, line in enumerate(phases) if line.startswith("total"))
    lines = [f"ppo     {head.removeprefix(' ' * 8)}", *phases[: end + 1], ""]
    for stage in STAGES:
        (total,) = [line for line in parts[stage] if line.startswith("memory")]
        lines.append(total.replace("memory ", f"{stage:<7}"))
    return lines


def settings(path: Path, folder: Path, example: Example) -> str:
    """Return a file as a block of YAML without comments and data, with the model's name on the Hub."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8").replace(str(folder / "base"), example.hub))
    kept = {key: value for key, value in loaded.items() if key not in ("seed", "data")}
    text = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=110)
    return f"```yaml\n# {path.name}\n{text}```\n"


def call(*arguments: object) -> str:
    """Return what a command prints."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *map(section, EXAMPLES), TAIL])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
