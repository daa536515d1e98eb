"""CPU seconds and peak memory of PPO updates on the reference workload; prints one JSON line.

    python benchmarks/ppo_update.py --shared ../shared --updates 5 --set micro_batch_tokens=1024

It measures our side as `make bench` does, to compare values of a key of `ppo:`. 64 prompts per update (the first 3 to
12 words of a review), up to 64 new tokens, 4 epochs of one optimizer step, temperature 1, with the 5.3 M-parameter
models of the developers' shared folder. With `--dense` there is no stop token: every response has 64 tokens.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import yaml

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.speed import ours
from benchmarks.speed.workload import Job, Reference, write_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of `ppo:`; repeatable")
    parser.add_argument("--dense", action="store_true")
    args = parser.parse_args()
    ours.silence_libraries()
    torch.set_num_threads(args.threads)
    reference = Reference.shared(args.shared)
    settings = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        write_prompts(reference, prompts)
        models = str(reference.sft), str(reference.reward)
        rows = args.micro_batch
        job = Job(*models, str(prompts), dense=args.dense, updates=args.updates, rows=rows, settings=settings)
        print(json.dumps(ours.measure(job)))


if __name__ == "__main__":
    main()
