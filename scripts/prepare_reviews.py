"""Turn two files of sentences, one of good reviews and one of bad ones, into the data of the `reviews` preset.

rlhf init reviews runs/reviews
python scripts/prepare_reviews.py pos.txt neg.txt runs/reviews        (UTF-8, one sentence a line)

The sentences are cut into four parts; no sentence is in two of them:

train      for SFT, as plain text without its label
reward     for the reward model, as pairs (good, bad); SFT reads these sentences too, without their label
judge      for the judge alone: no model ever sees them
held-out   for evaluation alone: SFT's loss, the reward model's accuracy, the prompts that eval answers
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.jsonl import write_jsonl

SHARES = {"train": 0.2, "reward": 0.45, "judge": 0.25, "held-out": 0.1}
PAIRINGS = 3  # how often each sentence of the reward part stands in a pair
WORDS = (3, 8)  # of a prompt: the beginning of a sentence
Labelled = tuple[str, bool]  # a sentence, and whether it is a good review


def read(path: Path) -> list[str]:
    return list(dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()))


def split(good: list[str], bad: list[str], seed: int) -> dict[str, list[Labelled]]:
    """Part -> its sentences, shuffled; good and bad ones in the same shares. A sentence in both files is left out."""
    both = set(good) & set(bad)
    parts: dict[str, list[Labelled]] = {part: [] for part in SHARES}
    for label, sentences in ((True, good), (False, bad)):
        left = [(sentence, label) for sentence in sentences if sentence not in both]
        random.Random(f"{seed} {label}").shuffle(left)
        start, total = 0.0, len(left)
        for part, share in SHARES.items():
            parts[part] += left[round(start * total) : round((start + share) * total)]
            start += share
    for part, rows in parts.items():
        random.Random(f"{seed} {part}").shuffle(rows)
    return parts


def pairs(rows: list[Labelled], pairings: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Each good sentence against `pairings` bad ones; the prompt is empty of content, so the whole text is judged."""
    good, bad = ([text for text, label in rows if label is wanted] for wanted in (True, False))
    for _ in range(pairings):
        draw.shuffle(bad)
        for one, other in zip(good, bad, strict=False):
            yield {"prompt": START, "chosen": f" {one}", "rejected": f" {other}"}


START = "review:"


def prompts(rows: list[Labelled], draw: random.Random) -> list[str]:
    """The first words of each sentence that goes on after them."""
    found = []
    for text, _ in rows:
        words = text.split()
        count = draw.randint(*WORDS)
        if len(words) > count:
            found.append(f"{START} {' '.join(words[:count])}")
    return found


def texts(rows: list[Labelled]) -> Iterator[dict[str, str]]:
    return ({"prompt": START, "completion": f" {text}"} for text, _ in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", type=Path, help="good reviews, one a line")
    parser.add_argument("bad", type=Path, help="bad reviews, one a line")
    parser.add_argument("folder", type=Path, help="the run's folder; data/ is written into it")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    parts = split(read(asked.good), read(asked.bad), asked.seed)
    data = asked.folder / "data"
    for part in parts:
        (data / part).mkdir(parents=True)
    seen = parts["train"] + parts["reward"]
    write_jsonl(data / "train/texts.jsonl", texts(seen))
    begun = prompts(seen, random.Random(f"{asked.seed} prompts"))
    held_out = [
        text for text in prompts(parts["held-out"], random.Random(f"{asked.seed} held-out")) if text not in begun
    ]
    write_jsonl(data / "train/prompts.jsonl", ({"prompt": text} for text in begun))
    write_jsonl(data / "held-out/prompts.jsonl", ({"prompt": text} for text in held_out))
    write_jsonl(data / "reward/pairs.jsonl", pairs(parts["reward"], PAIRINGS, random.Random(f"{asked.seed} pairs")))
    write_jsonl(data / "judge/labelled.jsonl", ({"text": text, "good": label} for text, label in parts["judge"]))
    write_jsonl(data / "held-out/labelled.jsonl", ({"text": text, "good": label} for text, label in parts["held-out"]))
    write_jsonl(data / "held-out/texts.jsonl", texts(parts["held-out"]))
    write_jsonl(data / "held-out/pairs.jsonl", pairs(parts["held-out"], 1, random.Random(f"{asked.seed} pairs")))
    for part, rows in parts.items():
        print(f"{part:<9} {len(rows)} sentences")


if __name__ == "__main__":
    main()
