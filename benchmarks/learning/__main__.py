"""Learning, side by side: our PPO and TRL 1.12's on the reference workload, compared at equal KL.

    python -m benchmarks.learning --shared ../shared --out runs/bench-learning

60 updates of 64 episodes on the 5.3 M-parameter models of the developers' shared folder, learning rate 1e-4 (constant),
temperature 1, up to 64 tokens, 4 epochs; all else is our default, or what --set says. About 11 CPU minutes a seed; an
interrupted run goes on where it stopped. TRL's curves are read from a file; to record one more, in an environment of
its own (the head of trl_ppo.py says how to make it):

    python ../shared/bench/trl_ppo.py --lr 1e-4 --updates 60 --seed S --save > line.json

and add `"seed": S` to the line. Writes OUT/learning.json, learning.md (the tables) and learning.svg.
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

from benchmarks.learning import curves, figure, judged, tables, train
from rlhf_cli.config.ppo_options import PPOSettings

NEEDED = ("models/reviews-sft", "models/reviews-rm", "data/rt-polarity/pos.txt", "bench/judge.py")
BEST_OF = [1, 2, 4, 8, 16, 32, 64]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the developers' shared folder")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of `ppo:`, any number")
    parser.add_argument("--trl", type=Path, help="TRL's curves (default: SHARED/bench/trl_curves.jsonl)")
    parser.add_argument("--samples", type=int, default=64, help="SFT responses a prompt for best of n")
    parser.add_argument("--no-judge", action="store_true", help="leave the judge out")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def settings(asked: list[str]) -> PPOSettings:
    given = dict(text.split("=", 1) for text in asked)
    return PPOSettings(**train.WORKLOAD | {key: yaml.safe_load(value) for key, value in given.items()})


def refuse(text: str) -> int:
    print(f"bench-learning: {text}", file=sys.stderr)
    return 2


def tell(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        print(file=sys.stderr)


def main() -> int:
    args = arguments()
    recorded = args.trl or args.shared / "bench/trl_curves.jsonl"
    for path in (*(args.shared / name for name in NEEDED), recorded):
        if not path.exists():
            return refuse(f"{path} is missing: say --shared FOLDER, the developers' shared folder")
    try:
        chosen, trl = settings(args.set), curves.recorded(recorded)
    except (ValidationError, ValueError) as error:
        return refuse(str(error))
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    kept, now = args.out / "settings.json", chosen.model_dump(mode="json")
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != now:
        return refuse(f"{args.out} is a run with other settings: give another --out")
    kept.write_text(json.dumps(now, indent=1), encoding="utf-8")

    for seed in args.seeds:
        train.run(args.shared, args.out / f"seed-{seed}", chosen, seed, tell)
    ns = [n for n in BEST_OF if n <= args.samples]
    best_of = train.best_of_n(args.shared, args.out / "best_of_n.json", ns, args.samples, tell)
    folders = {seed: args.out / f"seed-{seed}" for seed in args.seeds}
    ours = {seed: curves.ours(curves.read_lines(folder / "curve.jsonl")) for seed, folder in folders.items()}
    points = {}
    if not args.no_judge:
        for seed, folder in folders.items():
            tell(f"judge: seed {seed}")
            points[seed] = judged.judge(args.shared, folder, ours[seed], tables.LIMIT)
    found = tables.compare(ours, trl)
    found |= {"settings": now, "best_of": best_of, "judged": tables.of_judge(points)}
    text = tables.markdown(found)
    (args.out / "learning.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (args.out / "learning.md").write_text(text, encoding="utf-8")
    figure.draw(ours, trl, best_of, points, args.out / "learning.svg")
    tell("")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
