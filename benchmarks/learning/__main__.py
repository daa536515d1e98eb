"""Learning curves of our PPO and TRL 1.12's on the reference workload, compared at equal KL.

    python -m benchmarks.learning --shared ../shared --recipe default --out runs/bench-learning

Updates of 64 episodes with the 5.3 M-parameter models of the developers' shared folder, learning rate 1e-4 (constant),
temperature 1, up to 64 tokens, 4 epochs; all other keys are those of the recipe, our defaults, or set by --set. About
11 CPU minutes per seed and 3840 episodes, less on a GPU; an interrupted run resumes. Policies between SFT and the
trained ones, and beyond them, are evaluated on held-out prompts: OUT/heldout.jsonl has a line for each, of all recipes.
TRL's curves are read from a file. To record another one, in a separate environment (see the head of trl_ppo.py):

    python ../shared/bench/trl_ppo.py --lr 1e-4 --updates 60 --seed S --save > line.json

and add `"seed": S` to the line. Writes OUT/learning.svg, and learning.json and learning.md (the tables) to OUT/RECIPE.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import yaml
from pydantic import ValidationError
from transformers.utils import logging

from benchmarks.learning import curves, heldout, report, train
from rlhf_cli.config.ppo import PPOSettings

REQUIRED = ("models/reviews-sft", "models/reviews-rm", "data/rt-polarity/pos.txt")
BEST_OF = [1, 2, 4, 8, 16, 32, 64]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the developers' shared folder")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-learning"))
    parser.add_argument("--recipe", choices=train.RECIPES, default="default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of `ppo:`; repeatable")
    parser.add_argument("--trl", type=Path, help="TRL's curves (default: SHARED/bench/trl_curves.jsonl)")
    parser.add_argument("--samples", type=int, default=64, help="SFT responses per prompt for best of n")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def ppo_settings(recipe: str, sets: list[str]) -> PPOSettings:
    values = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in sets)}
    return PPOSettings(**train.WORKLOAD | train.RECIPES[recipe] | values)


def fail(text: str) -> int:
    print(f"bench-learning: {text}", file=sys.stderr)
    return 2


def progress(text: str) -> None:
    """Print a line on stderr; on a terminal it replaces the previous one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    args = arguments()
    trl_curves = args.trl or args.shared / "bench/trl_curves.jsonl"
    for path in (*(args.shared / name for name in REQUIRED), trl_curves):
        if not path.exists():
            return fail(f"{path} is missing: pass --shared FOLDER, the developers' shared folder")
    try:
        settings, trl = ppo_settings(args.recipe, args.set), curves.recorded(trl_curves)
    except (ValidationError, ValueError) as error:
        return fail(str(error))
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out = args.out / args.recipe
    out.mkdir(parents=True, exist_ok=True)
    file, dumped = out / "settings.json", settings.model_dump(mode="json")
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != dumped:
        return fail(f"{out} contains a run with other settings: pass another --out")
    file.write_text(json.dumps(dumped, indent=1), encoding="utf-8")

    folders = {seed: out / f"seed-{seed}" for seed in args.seeds}
    for seed, folder in folders.items():
        train.run(args.shared, folder, settings, seed, progress)
    ns = [n for n in BEST_OF if n <= args.samples]
    best_of = train.best_of_n(args.shared, args.out / "best_of_n.json", ns, args.samples, progress)
    ours = {seed: curves.ours(curves.read_lines(folder / "curve.jsonl")) for seed, folder in folders.items()}
    result = report.compare(ours, trl, best_of) | {"settings": dumped}
    held_out = heldout.evaluate_runs(args.shared, args.out, args.recipe, folders, progress)
    text = report.markdown(result) + "\n" + "\n".join(heldout.table(held_out)) + "\n"
    (out / "learning.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (out / "learning.md").write_text(text, encoding="utf-8")
    report.draw(held_out, trl, best_of, args.out / "learning.svg")
    progress("")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
