"""Write the data of the `reviews` preset from two files of sentences, one of good and one of bad reviews.

rlhf init reviews runs/reviews
python scripts/prepare_reviews.py pos.txt neg.txt runs/reviews        (UTF-8, one sentence per line)

The sentences are split into four parts without overlap:

train      for SFT, without labels
reward     for the reward model, as pairs (good, bad); also for SFT, without labels
judge      only for the judge; no model is trained on them
held-out   only for evaluation: SFT's loss, the reward model's accuracy, the prompts of eval
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.jsonl import write_jsonl

SHARES = {"train": 0.2, "reward": 0.45, "judge": 0.25, "held-out": 0.1}
PAIRINGS = 3  # number of pairs with each good sentence of the reward part
WORDS = (3, 8)  # bounds of the number of words in a prompt
START = "review:"  # of every prompt
Labelled = tuple[str, bool]  # a sentence, and True for a good review


def read(path: Path) -> list[str]:
    return list(dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()))


def split(good: list[str], bad: list[str], seed: int) -> dict[str, list[Labelled]]:
    """Return {part: shuffled sentences}, good and bad in the same shares. A sentence in both files is dropped."""
    both = set(good) & set(bad)
    parts: dict[str, list[Labelled]] = {part: [] for part in SHARES}
    for label, sentences in ((True, good), (False, bad)):
        labelled = [(sentence, label) for sentence in sentences if sentence not in both]
        random.Random(f"{seed} {label}").shuffle(labelled)
        start, total = 0.0, len(labelled)
        for part, share in SHARES.items():
            parts[part] += labelled[round(start * total) : round((start + share) * total)]
            start += share
    for part, rows in parts.items():
        random.Random(f"{seed} {part}").shuffle(rows)
    return parts


def pairs(rows: list[Labelled], pairings: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Pair each good sentence with `pairings` bad ones. The prompt has no content, so the full text is scored."""
    good, bad = ([text for text, label in rows if label is good_label] for good_label in (True, False))
    for _ in range(pairings):
        rng.shuffle(bad)
        for one, other in zip(good, bad, strict=False):
            yield {"prompt": START, "chosen": f" {one}", "rejected": f" {other}"}


def prompts(rows: list[Labelled], rng: random.Random) -> list[str]:
    """Return the first words of each sentence that is longer."""
    beginnings = []
    for text, _ in rows:
        words = text.split()
        count = rng.randint(*WORDS)
        if len(words) > count:
            beginnings.append(f"{START} {' '.join(words[:count])}")
    return beginnings


def texts(rows: list[Labelled]) -> Iterator[dict[str, str]]:
    return ({"prompt": START, "completion": f" {text}"} for text, _ in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", type=Path, help="good reviews, one per line")
    parser.add_argument("bad", type=Path, help="bad reviews, one per line")
    parser.add_argument("folder", type=Path, help="the run folder; data/ is written into it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = split(read(args.good), read(args.bad), args.seed)
    data = args.folder / "data"
    for part in parts:
        (data / part).mkdir(parents=True)
    seen = parts["train"] + parts["reward"]
    write_jsonl(data / "train/texts.jsonl", texts(seen))
    train_prompts = prompts(seen, random.Random(f"{args.seed} prompts"))
    held_out = [
        text for text in prompts(parts["held-out"], random.Random(f"{args.seed} held-out")) if text not in train_prompts
    ]
    write_jsonl(data / "train/prompts.jsonl", ({"prompt": text} for text in train_prompts))
    write_jsonl(data / "held-out/prompts.jsonl", ({"prompt": text} for text in held_out))
    write_jsonl(data / "reward/pairs.jsonl", pairs(parts["reward"], PAIRINGS, random.Random(f"{args.seed} pairs")))
    write_jsonl(data / "judge/labelled.jsonl", ({"text": text, "good": label} for text, label in parts["judge"]))
    write_jsonl(data / "held-out/labelled.jsonl", ({"text": text, "good": label} for text, label in parts["held-out"]))
    write_jsonl(data / "held-out/texts.jsonl", texts(parts["held-out"]))
    write_jsonl(data / "held-out/pairs.jsonl", pairs(parts["held-out"], 1, random.Random(f"{args.seed} pairs")))
    for part, rows in parts.items():
        print(f"{part:<9} {len(rows)} sentences")


if __name__ == "__main__":
    main()
