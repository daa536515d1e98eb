"""Generate docs/results/trl-options.md: the keys that `rlhf convert` maps TRL's options to, and an example.

`python scripts/from_trl_page.py` writes each table below its `<!-- ... -->` comment, from config/machinery/aliases.toml
and commands/convert/ of the package, and the output of the example.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.commands.convert.mapping import BATCH_KEYS, VERSIONS, target_key
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.machinery.yaml_io import to_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/trl-options.md"
TABLE = re.compile(r"<!-- (options|defaults|unsupported)(?: of TRL ([\d.]+))? -->\n(?:\|.*\n)*")
EXAMPLE = re.compile(
    r"```python\n(?P<script>.*?)```.*?prints:\n\n```\n(?P<output>.*?)```.*?```yaml\n(?P<yaml>.*?)```", re.DOTALL
)


def page(text: str) -> str:
    """Return the page with new tables and a new example."""
    text = TABLE.sub(lambda match: f"{match[0].partition(chr(10))[0]}\n" + "\n".join(_table(match)) + "\n", text)
    return EXAMPLE.sub(_example, text, count=1)


def _example(match: re.Match[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(match["script"], encoding="utf-8")
        command = [sys.executable, "-m", "rlhf_cli", "convert", "train.py", "runs/mine"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
        written = Path(folder, "runs/mine/ppo.yaml").read_text(encoding="utf-8")
    return match[0].replace(match["yaml"], written).replace(match["output"], output)


def _table(match: re.Match[str]) -> Iterator[str]:
    kind, version = match[1], match[2]
    if kind == "options":
        yield from ("| option | key | remark |", "|---|---|---|")
        for name in VERSIONS[version]["options"]:
            yield _option(name, version)
    elif kind == "defaults":
        yield from ("| key | value | remark |", "|---|---|---|")
        for key, size in zip(BATCH_KEYS, VERSIONS[version]["batch"].items(), strict=True):
            yield f"| `{key}` | {size[1]} | `{size[0]}` is {size[1]} |"
        for key, (value, option, note) in VERSIONS[version]["defaults"].items():
            remark = note or f"the default of `{option}`"
            yield f"| `{key.removeprefix('ppo.')}` | {to_yaml(value)} | {remark} |"
    else:
        reasons: dict[str, list[str]] = {}
        for name, alias in ALIASES.items():
            if alias.key is None:
                reasons.setdefault(alias.note, []).append(f"`{name}`")
        yield from ("| option | reason |", "|---|---|")
        yield from (f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items())


def _option(name: str, version: str) -> str:
    alias, key = ALIASES.get(name), (target_key(name) or "-").removeprefix("ppo.")
    if name in VERSIONS[version]["computed"]:
        return f"| `{name}` | - | TRL computed it |"
    if name in VERSIONS[version]["batch"]:
        return f"| `{name}` | `{BATCH_KEYS[[*VERSIONS[version]['batch']].index(name)]}` | see batch sizes |"
    words = [f"{old} is {new}" for old, new in alias.values.items() if old != new] if alias else []
    remarks = [alias.note if alias else "", *words, "TRL ignored it" if name in VERSIONS[version]["ignored"] else ""]
    return f"| `{name}` | {key if key == '-' else f'`{key}`'} | {'; '.join(filter(None, remarks))} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
