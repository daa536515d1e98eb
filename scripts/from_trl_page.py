"""Generate docs/results/trl-options.md: the keys that `rlhf convert` maps TRL's options to, and an example.

`python scripts/from_trl_page.py` writes each table below its `<!-- ... -->` comment, from rlhf_cli/config/aliases.py
and rlhf_cli/commands/convert/versions.py, and the output of the example.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.commands.convert.options import target_key
from rlhf_cli.commands.convert.rules import BATCH_KEYS, BATCH_OPTIONS
from rlhf_cli.commands.convert.versions import FIXED_BEHAVIOR, OPTIONS, Option
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.yaml_io import to_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/trl-options.md"
PLACE = re.compile(r"<!-- (options|habits) of TRL ([\d.]+) -->\n(?:\|.*\n)*|<!-- (no place) -->\n(?:\|.*\n)*")
EXAMPLE = re.compile(
    r"```python\n(?P<script>.*?)```.*?says:\n\n```\n(?P<said>.*?)```.*?```yaml\n(?P<written>.*?)```", re.DOTALL
)


def page(text: str) -> str:
    """The page with its tables and its example made anew."""
    text = PLACE.sub(lambda found: f"{found[0].partition(chr(10))[0]}\n" + "\n".join(_table(found)) + "\n", text)
    return EXAMPLE.sub(_example, text, count=1)


def _example(found: re.Match[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(found["script"], encoding="utf-8")
        command = [sys.executable, "-m", "rlhf_cli", "convert", "train.py", "runs/mine"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
        written_ = Path(folder, "runs/mine/ppo.yaml").read_text(encoding="utf-8")
    whole, start = found[0], found.start()
    for name, new in (("written", written_), ("said", said)):  # from the end, so that places stay what they are
        whole = whole[: found.start(name) - start] + new + whole[found.end(name) - start :]
    return whole


def _table(found: re.Match[str]) -> Iterator[str]:
    what, version = found[1] or found[3], found[2]
    if what == "options":
        yield from ("| option | default there | here | remark |", "|---|---|---|---|")
        yield from (_option(name, option, version) for name, option in OPTIONS[version].items())
    elif what == "habits":
        yield from ("| here | value | what TRL did |", "|---|---|---|")
        for key, (value, why) in FIXED_BEHAVIOR[version].items():
            yield f"| `{_short(key)}` | {to_yaml(value)} | {why} |"
    else:
        reasons: dict[str, list[str]] = {}
        for name, alias in ALIASES.items():
            if alias.key is None:
                reasons.setdefault(alias.note, []).append(f"`{name}`")
        yield from ("| option | why it has no place |", "|---|---|")
        yield from (f"| {', '.join(names)} | {why} |" for why, names in reasons.items())


def _option(name: str, option: Option, version: str) -> str:
    key, foreign = target_key(name), ALIASES.get(name)
    if name in BATCH_OPTIONS[version]:
        key, foreign = BATCH_KEYS[BATCH_OPTIONS[version].index(name)], None
    words = ", ".join(f"{old} is {new}" for old, new in foreign.values.items() if old != new) if foreign else ""
    remarks = ["computed by TRL itself"] if option.computed else [foreign.note if foreign else "", words, option.remark]
    here = f"`{_short(key)}`" if key and not option.computed else "-"
    return f"| `{name}` | {to_yaml(option.default)} | {here} | {'; '.join(filter(None, remarks))} |"


def _short(key: str) -> str:
    return key.removeprefix("ppo.")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
