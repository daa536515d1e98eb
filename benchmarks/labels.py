"""What labels of the policy's own answers are worth on the demo: `python -m benchmarks.labels --out runs/labels`.

The annotator is the demo's gold judge, who errs in one of five; labels go through `rlhf label --export` and `--import`,
as those of people in another tool do. Each seed has a folder, and in it a run for each arm:

start            reward model on 2000 pairs of the demo's data, PPO on it; answers of its policy are the own pairs
data-N           the 2000 pairs and N more of the demo's data
own-N            the 2000 pairs and N own pairs in random order
uncertain-N      the 2000 pairs and N own pairs, those first on which start's reward model is least certain
one-round        `rlhf init next` on 1000 own pairs: 20 updates from start's policy
two-rounds       `rlhf init next` twice: 500 own pairs and 10 updates, then 500 pairs of that policy and 10 updates

N labels are N pairs that were shown; a tie among them trains nothing. Each reward model is measured on own pairs of 500
other prompts, where gold does not err, and each policy on 256 held-out prompts. A run that was cut off continues.
Prints the tables of docs/results/labels.md, and writes OUT/labels.json.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.arms import Row, World, difference, interval, read, rlhf, spread, value_at
from rlhf_cli.demo.gold import gold
from rlhf_cli.jsonl import write_jsonl

ERRORS = 0.2  # share of the pairs with a better answer that the annotator gets wrong
START = 2000  # pairs of the demo's data that every reward model learns from
SIZES = (250, 500, 1000)
UNCERTAIN_SIZES = (250, 500)  # four times as many pairs are drawn, and there are 1576 prompts
CHECKED = 500  # prompts whose own pairs measure the reward models
UPDATES, BATCH = 20, 64
KL = 4.0  # nats, at which policies are compared: between PPO's snapshots, in the rounds between SFT and the policy
SHARES = [0.4, 0.6, 0.8]  # of the way from SFT to the policy of a round
COMPARISONS = [
    *((f"own-{size}", f"data-{size}") for size in SIZES),
    *((f"uncertain-{size}", f"own-{size}") for size in UNCERTAIN_SIZES),
    ("own-1000", "start"),
    ("two-rounds", "one-round"),
]
EVALUATION: Row = {"best_of": [], "modes": ["sampled"], "select": None, "require": {}}


@dataclass(frozen=True)
class Annotator:
    """Compares two answers by gold, and errs in a share of the pairs, each time in the same ones."""

    errors: float
    seed: int

    def choice(self, prompt: str, first: str, second: str) -> str:
        """Return 1, 2 or tie."""
        scores = gold([prompt, prompt], [first, second])
        if scores[0] == scores[1]:
            return "tie"
        answers = sorted((first.strip(), second.strip()))
        errs = random.Random(f"{self.seed} {prompt} {answers}").random() < self.errors
        return "1" if (scores[0] > scores[1]) != errs else "2"

    def label_pairs(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows {prompt, chosen, rejected} as this annotator orders them, without ties."""
        labelled = []
        for row in rows:
            choice = self.choice(row["prompt"], row["chosen"], row["rejected"])
            if choice == "1":
                labelled.append(row)
            elif choice == "2":
                labelled.append({**row, "chosen": row["rejected"], "rejected": row["chosen"]})
        return labelled

    def label_task(self, task: Row) -> Row:
        """Return a task of Label Studio as it is exported once it is labelled."""
        texts = task["data"]
        choice = self.choice(texts["prompt"], texts["first"], texts["second"])
        result = {"from_name": "choice", "to_name": "prompt", "type": "choices", "value": {"choices": [choice]}}
        return {**task, "annotations": [{"completed_by": 1, "lead_time": 5.0, "result": [result]}]}


class LabelWorld(World):
    """The folder of a seed, with an annotator."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.annotator = Annotator(ERRORS, seed)

    def prepare(self) -> None:
        """Create the demo, its SFT model, and the prompts of the own pairs."""
        super().prepare()
        prompts = read(self.folder / "demo/data/prompts.jsonl")
        write_jsonl(self.folder / "checked.jsonl", prompts[:CHECKED])
        write_jsonl(self.folder / "labelled.jsonl", prompts[CHECKED:])

    def data_pairs(self, num_pairs: int) -> list[Row]:
        """Return the first pairs of the demo's data as the annotator orders them."""
        return self.annotator.label_pairs(read(self.folder / "demo/data/pairs.jsonl")[:num_pairs])

    def label(self, run: str, name: str, num_pairs: int, *options: str) -> list[Row]:
        """Label own pairs of a run's policy, as another tool would, and return them in the order in which they came."""
        given = ["label", self.folder / run, "--name", name, "--n", num_pairs, *options]
        given += ["--prompts", self.folder / "labelled.jsonl", "--format", "labelstudio"]
        tasks, done = (self.folder / f"{run}.{name}.{state}.json" for state in ("tasks", "done"))
        if not tasks.exists():
            rlhf(*given, "--export", tasks)
        if not done.exists():
            done.write_text(json.dumps([self.annotator.label_task(task) for task in json.loads(tasks.read_text())]))
            rlhf(*given, "--import", done)
        return json.loads(done.read_text())

    def train(self, arm: str, pairs: Sequence[Row]) -> None:
        """Train a reward model on the pairs, PPO on it from the SFT model, and evaluate the policy."""
        run = self.folder / arm
        if not run.exists():
            run.mkdir()
            write_jsonl(run / "pairs.jsonl", pairs)
            self.write(run, "reward", model={"path": "../demo/sft"}, data={"train": "pairs.jsonl"})
            self.write(run, "ppo", models={"sft": "../demo/sft"}, ppo={"total_episodes": UPDATES * BATCH})
            self.write(run, "eval", models={"sft": "../demo/sft"}, eval=EVALUATION)
        rlhf("run", run)

    def run_arms(self) -> list[str]:
        """Run every arm, and return their names."""
        start = self.data_pairs(START)
        self.train("start", start)
        pairs = {"start": start}
        own = self.label("start", "own", max(SIZES))
        for size in SIZES:
            pairs[f"data-{size}"] = self.data_pairs(START + size)
            pairs[f"own-{size}"] = start + preferences(own[:size])
        for size in UNCERTAIN_SIZES:
            uncertain = self.label("start", f"uncertain-{size}", size, "--order", "uncertain")
            pairs[f"uncertain-{size}"] = start + preferences(uncertain)
        for arm, rows in pairs.items():
            self.train(arm, rows)

        self.next_round("start", "one-round", labels="own", updates=UPDATES)
        self.label("start", "own-500", 500)
        self.next_round("start", "two-rounds-1", labels="own-500", updates=UPDATES // 2)
        self.label("two-rounds-1", "own-500", 500)
        self.next_round("two-rounds-1", "two-rounds", labels="own-500", updates=UPDATES // 2)
        return [*pairs, "one-round", "two-rounds"]

    def next_round(self, before: str, arm: str, *, labels: str, updates: int) -> None:
        """Run the round of a run that learns from labels of its policy."""
        run = self.folder / arm
        if not run.exists():
            rlhf("init", "next", self.folder / before, run, "--labels", labels)
        options = [f"ppo.total_episodes={updates * BATCH}", f"eval.interpolate={SHARES}"]
        rlhf("run", run, *(text for option in options for text in ("-s", option)))

    def accuracy(self, arm: str) -> tuple[float, int]:
        """Return in how many of the checked own pairs a reward model prefers the better answer, and their number."""
        labels = self.folder / arm / "labels/checked/labels.jsonl"
        if not labels.exists():
            policy = self.folder / "start/ppo"
            options = ["--prompts", self.folder / "checked.jsonl", "--name", "checked", "--n", CHECKED]
            rlhf("label", self.folder / arm, "--from", policy, "--by", "reward", *options)
        right = []
        for label in read(labels):
            scores = gold([label["prompt"]] * 2, label["answers"])
            if scores[0] != scores[1]:
                better = "first" if scores[0] > scores[1] else "second"
                right.append(label["choice"] == better)
        return fmean(right), len(right)

    def measure(self, arm: str) -> Row:
        """Return the figures of an arm."""
        report = json.loads((self.folder / arm / "eval/report.json").read_text())
        policy = report["models"]["ppo"]
        points = [(0.0, report["models"]["sft"]["judges"]["gold"]["mean"])]
        later = [*report["interpolated"], policy] if "interpolated" in report else report["frontier"]
        points += [(point["kl"], point["judges"]["gold"]["mean"]) for point in later]
        accuracy, num_checked = self.accuracy(arm)
        (pairs,) = (self.folder / arm).glob("**/pairs.jsonl")
        return {
            "pairs": len(read(pairs)),
            "accuracy": accuracy,
            "checked": num_checked,
            "gold_at_kl": value_at(points, KL),
            "kl": policy["kl"],
            "gold": policy["judges"]["gold"]["mean"],
        }


def preferences(tasks: Sequence[Row]) -> list[Row]:
    """Return labelled tasks as rows {prompt, chosen, rejected}, without ties."""
    rows = []
    for task in tasks:
        texts = task["data"]
        (choice,) = task["annotations"][0]["result"][0]["value"]["choices"]
        if choice == "tie":
            continue
        better, worse = ("first", "second") if choice == "1" else ("second", "first")
        rows.append({"prompt": texts["prompt"], "chosen": texts[better], "rejected": texts[worse]})
    return rows


def write_tables(results: Mapping[int, Mapping[str, Row]]) -> str:
    """Return the table of the arms and that of their differences, over the seeds."""
    arms = list(next(iter(results.values())))
    lines = [f"| arm | pairs | accuracy | gold at {KL:g} nats | last KL | last gold |", "|---|---|---|---|---|---|"]
    for arm in arms:
        rows = [result[arm] for result in results.values()]
        pairs = round(fmean(row["pairs"] for row in rows))
        cells = [spread([row[key] for row in rows]) for key in ("accuracy", "gold_at_kl", "kl", "gold")]
        lines.append(f"| {arm} | {pairs} | {' | '.join(cells)} |")
    lines += ["", f"| difference | accuracy | gold at {KL:g} nats |", "|---|---|---|"]
    for better, worse in COMPARISONS:
        if better in arms and worse in arms:
            differences = [
                interval([difference(result[better][key], result[worse][key]) for result in results.values()])
                for key in ("accuracy", "gold_at_kl")
            ]
            lines.append(f"| {better} - {worse} | {' | '.join(differences)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/labels"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    results = {}
    for seed in args.seeds:
        world = LabelWorld(args.out.resolve() / f"seed-{seed}", seed)
        world.prepare()
        arms = world.run_arms()
        results[seed] = {arm: world.measure(arm) for arm in arms}
        (args.out / "labels.json").write_text(json.dumps(results, indent=2))
    print(write_tables(results))


if __name__ == "__main__":
    main()
