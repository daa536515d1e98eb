"""`torchrun group_loading.py FOLDER` runs PPO there, and writes what each process loads to FOLDER/loads.RANK."""

import sys
from pathlib import Path
from typing import Any

from rlhf_cli import distributed
from rlhf_cli.cli import app
from rlhf_cli.models import load

if __name__ == "__main__":
    folder, changes = Path(sys.argv[1]), sys.argv[2:]
    report, plain = folder / f"loads.{distributed.rank()}", load._load

    def noted(auto_class: Any, path: Any, options: Any, **more: Any) -> Any:
        with report.open("a") as file:
            file.write(f"{Path(path).name} {'empty' if options.get('empty') else 'full'}\n")
        return plain(auto_class, path, options, **more)

    load._load = noted
    app(["ppo", "-c", str(folder / "ppo.yaml"), *changes])
