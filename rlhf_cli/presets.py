"""`rlhf init`: ready folders of configs, written with the data that they need. Torch-free."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.demo import world
from rlhf_cli.errors import RLHFError, nearest, shown

COPIED = (".yaml", ".py", ".jinja")
BASE = "base"  # the folder whose own run makes the base model


@dataclass(frozen=True)
class Preset:
    """A folder of configs/, how much of the demo's world goes with it, and what comes before the first run."""

    text: str
    sizes: world.Sizes | None = None
    first: str = ""


PRESETS = {
    "demo": Preset("a small world with a judge that knows the truth: minutes on a CPU", world.Sizes()),
    "ci": Preset("the same world, tiny: the whole chain in about a minute, for a CI", world.Sizes(0, 600, 600, 60)),
    "reviews": Preset(
        "film reviews turned friendly: real sentences, two text files of your own, an independent judge",
        first="python scripts/prepare_reviews.py pos.txt neg.txt {folder}",
    ),
}


def available() -> dict[str, str]:
    """Name -> one line, of each preset."""
    return {name: preset.text for name, preset in PRESETS.items()}


def init(name: str, folder: Path, *, seed: int = 0) -> None:
    """Write preset `name` into `folder`: configs with `seed`, data made from it, and the base model where it has one.

    Raises RLHFError C07 for an unknown preset, C15 for a folder that holds any of its files. Exits with the code of the
    base model's run where that fails.
    """
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f"did you mean {near}?" if near else "rlhf init --list"
        raise RLHFError("C07", f"no preset {name!r}; there are {', '.join(PRESETS)}", hint=hint)
    source = configs_folder() / name
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.suffix in COPIED)
    preset = PRESETS[name]
    data = [Path("data"), Path(BASE) / "data"] if preset.sizes else []
    taken = [path for path in (*files, *data) if (folder / path).exists()]
    if taken:
        text = f"{shown(folder)} already holds {', '.join(map(str, taken))}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = (source / path).read_text(encoding="utf-8")
        (folder / path).write_text(re.sub(r"^seed: 0\b", f"seed: {seed}", text, flags=re.MULTILINE), encoding="utf-8")
    if preset.sizes:
        world.write(folder, seed, preset.sizes)
    if preset.sizes and preset.sizes.texts:
        terminal.say(f"init     {shown(folder)}: training its base model, once")
        done = subprocess.run([sys.executable, "-m", "rlhf_cli", "run", str(folder / BASE)], check=False)
        if done.returncode:
            terminal.say(f"init     not finished; go on with: rlhf run {shown(folder / BASE)}")
            raise SystemExit(done.returncode)
    steps = [preset.first.format(folder=shown(folder))] if preset.first else []
    terminal.out(f"{shown(folder)} is ready; next: {'; then '.join([*steps, f'rlhf run {shown(folder)}'])}")


def configs_folder() -> Path:
    """configs/, which the wheel carries inside the package and a source checkout has beside it."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"
