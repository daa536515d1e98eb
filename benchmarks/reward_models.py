"""Better reward models for PPO, on the demo: `python -m benchmarks.reward_models --out runs/reward_models`.

Reward models learn from the first 2000 pairs of the demo's data, and PPO maximises them. Each seed has a folder, and in
it a run for each reward model and each arm:

member-0 to -2   reward models that differ by their seed: the initial head and the order of the pairs
shared-0 to -2   the same from one initial head, in different orders
average          the mean of the weights of shared-0 to -2, normalised again (WARM, arXiv 2401.12187)
one              PPO on member-0
mean, min, entropic   PPO on member-0 to -2, combined
average          PPO on the averaged model

The answers of PPO in `one` to 500 prompts are the policy's own pairs, of which gold decides. Gold scores each update's
answers, and PPO does not learn from it. A run that was cut off continues. Prints the tables of
docs/results/reward-model.md, and writes OUT/reward_models.json.
"""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file, save_file

from benchmarks.arms import Row, World, difference, interval, read, rlhf, spread, value_at
from rlhf_cli import data
from rlhf_cli.demo.gold import gold
from rlhf_cli.evaluation.reward_model import ScoredPair, length_correlation
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import load, tokenizers
from rlhf_cli.rewards.model import COMBINE
from rlhf_cli.stages.reward import raw_scores

PAIRS = 2000  # of the 12,000 of the demo: few enough for PPO to over-optimise
MEMBERS = 3
OWN = 500  # prompts whose own pairs measure the reward models
UPDATES, BATCH = 20, 64
KL_COEF = 0.02
KLS = (2.0, 4.0)  # nats, at which policies are compared
WINDOW = 5  # updates, over which gold and KL are averaged
ENTROPIC_SCALE = 0.5

MODELS = [f"member-{number}" for number in range(MEMBERS)]
SHARED = [f"shared-{number}" for number in range(MEMBERS)]
# Arm of PPO -> its reward models, and how they are combined.
ARMS: dict[str, tuple[list[str], str]] = {
    "one": (MODELS[:1], "mean"),
    "mean": (MODELS, "mean"),
    "min": (MODELS, "min"),
    "entropic": (MODELS, "entropic"),
    "average": (["average"], "mean"),
}
# Row of the table of reward models -> the same; not all of them train a policy.
SCORERS = {**ARMS, "mean, one head": (SHARED, "mean")}
FROZEN: Row = {"learning_rate": 0, "max_steps": 1}  # a training that changes nothing, and normalises


class RewardWorld(World):
    """The folder of a seed, with reward models and the policies that maximise them."""

    def train_reward_models(self) -> None:
        """Train the members, and average those of one head; the head is that of an untrained reward model."""
        self.reward("head", reward={**FROZEN, "normalize": "none"})
        for number in range(MEMBERS):
            self.reward(f"member-{number}", number)
            self.reward(f"shared-{number}", number, model={"start": "../head/reward"})
        self.average("average", SHARED)

    def reward(self, name: str, number: int = 0, **changes: Row) -> None:
        """Train a reward model on the pairs, with the seed of a member."""
        run = self.folder / name
        if not run.exists():
            run.mkdir()
            write_jsonl(run / "pairs.jsonl", read(self.folder / "demo/data/pairs.jsonl")[:PAIRS])
            model = {"path": "../demo/sft", **changes.pop("model", {})}
            self.write(run, "reward", model=model, data={"train": "pairs.jsonl", "eval": None}, **changes)
        rlhf("reward", run, "-s", f"seed={self.seed + 100 * number}")

    def average(self, name: str, members: Sequence[str]) -> None:
        """Write a reward model whose weights are the mean of those of the members, normalised like them."""
        plain = self.folder / f"{name}-weights"
        if not plain.exists():
            shutil.copytree(self.folder / members[0] / "reward/model", plain)
            weights = [load_file(self.folder / member / "reward/model/model.safetensors") for member in members]
            mean = {key: torch.stack([each[key] for each in weights]).mean(0) for key in weights[0]}
            save_file(mean, plain / "model.safetensors", metadata={"format": "pt"})
        self.reward(name, model={"start": f"../{plain.name}"}, reward=FROZEN)

    def train_policy(self, arm: str) -> None:
        """Train PPO on the reward of an arm, from the SFT model; gold watches."""
        members, combine = ARMS[arm]
        folders = {member: f"../{member}/reward" for member in members}
        source: Row = {"model": folders[members[0]]}
        if len(members) > 1:
            source = {"models": folders, "combine": combine}
            if combine == "entropic":
                source["entropic_scale"] = ENTROPIC_SCALE
        run = self.folder / f"ppo-{arm}"
        if not run.exists():
            run.mkdir()
            self.write(
                run,
                "ppo",
                models={"sft": "../demo/sft", "value": folders[members[0]]},
                rewards={"reward": source, "gold": {"function": "rlhf_cli.demo.gold:gold", "weight": 0}},
                ppo={"total_episodes": UPDATES * BATCH, "kl_coef": KL_COEF, "num_sample_generations": 0},
            )
        rlhf("ppo", run)

    def own_pairs(self) -> list[Row]:
        """Return pairs of answers of the policy of `one` as rows {prompt, chosen, rejected}, as gold orders them."""
        tasks = self.folder / "own.json"
        if not tasks.exists():
            options = ["--name", "own", "--n", OWN, "--prompts", self.folder / "demo/data/prompts.jsonl"]
            rlhf("label", self.folder / "ppo-one", *options, "--format", "labelstudio", "--export", tasks)
        pairs = []
        for task in json.loads(tasks.read_text()):
            texts = task["data"]
            answers = [texts["first"], texts["second"]]
            scores = gold([texts["prompt"]] * 2, answers)
            if scores[0] != scores[1]:
                better = int(scores[1] > scores[0])
                pairs.append({"prompt": texts["prompt"], "chosen": answers[better], "rejected": answers[1 - better]})
        return pairs

    def measure_reward_models(self) -> dict[str, Row]:
        """Return accuracy and length correlation of each scorer on held-out pairs and the policy's own pairs."""
        held_out = read(self.folder / "demo/data/pairs_eval.jsonl")
        own = self.own_pairs()
        scores = {name: self.scores(name, held_out + own) for members, _ in SCORERS.values() for name in members}
        figures = {}
        for scorer, (members, combine) in SCORERS.items():
            pairs = combined_pairs([scores[name] for name in members], combine)
            known, policy = pairs[: len(held_out)], pairs[len(held_out) :]
            figures[scorer] = {
                "held_out": fmean(pair.right for pair in known),
                "own": fmean(pair.right for pair in policy),
                "own_pairs": len(policy),
                "length": length_correlation(known)[0],
                "own_length": length_correlation(policy)[0],
            }
        return figures

    def scores(self, name: str, rows: Sequence[Row]) -> list[ScoredPair]:
        """Return the pairs with their scores by a reward model, normalised as PPO sees them."""
        folder = self.folder / name / "reward/model"
        tokenizer = tokenizers.load_tokenizer(folder)
        model = load.load_reward_model(folder).eval()
        answers = [row[key] for row in rows for key in ("chosen", "rejected")]
        encoded = data.encode_many(tokenizer, [row["prompt"] for row in rows for _ in range(2)], answers)
        raw = raw_scores(model, [prompt + answer for prompt, answer in encoded], 64)
        scaled = [(score - model.config.reward_mean) / model.config.reward_std for score in raw]
        lengths = [len(answer) for _, answer in encoded]
        return [
            ScoredPair(scaled[place], scaled[place + 1], lengths[place], lengths[place + 1])
            for place in range(0, len(answers), 2)
        ]

    def measure_policy(self, arm: str) -> Row:
        """Return gold at each of KLS and the means of the last updates: between means of WINDOW updates."""
        points = [
            (fmean(row["objective/kl_k1"] for row in rows), fmean(row["objective/score/gold"] for row in rows))
            for rows in windows(read(self.folder / f"ppo-{arm}/ppo/metrics.jsonl"))
        ]
        last_kl, last_gold = points[-1]
        at_kl = {f"gold_at_{kl:g}": value_at(points, kl) for kl in KLS}
        return {**at_kl, "best": max(value for _, value in points), "kl": last_kl, "gold": last_gold}


def windows(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Return all runs of WINDOW rows."""
    return [rows[first : first + WINDOW] for first in range(len(rows) - WINDOW + 1)]


def combined_pairs(members: Sequence[Sequence[ScoredPair]], combine: str) -> list[ScoredPair]:
    """Return pairs with the combined scores of an ensemble."""
    chosen = COMBINE[combine](torch.tensor([[pair.chosen for pair in each] for each in members]), ENTROPIC_SCALE)
    rejected = COMBINE[combine](torch.tensor([[pair.rejected for pair in each] for each in members]), ENTROPIC_SCALE)
    return [
        ScoredPair(float(better), float(worse), pair.chosen_length, pair.rejected_length)
        for better, worse, pair in zip(chosen, rejected, members[0], strict=True)
    ]


def write_tables(results: Mapping[int, Mapping[str, Mapping[str, Row]]]) -> str:
    """Return the tables of the reward models and the policies, and the differences from `one`, over the seeds."""
    tables = [
        table("reward model", [result["scorers"] for result in results.values()]),
        table("PPO", [result["policies"] for result in results.values()]),
        table_of_differences([result["policies"] for result in results.values()]),
    ]
    return "\n\n".join(tables)


def table(name: str, results: Sequence[Mapping[str, Row]]) -> str:
    """Return a table with a row for each arm and a column for each figure."""
    columns = list(next(iter(results[0].values())))
    lines = [f"| {name} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for arm in results[0]:
        cells = [spread([result[arm][key] for result in results]) for key in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_differences(results: Sequence[Mapping[str, Row]]) -> str:
    """Return a table of each arm's gold less that of `one`."""
    columns = [*(f"gold_at_{kl:g}" for kl in KLS), "best", "gold"]
    lines = [f"| difference | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for arm in results[0]:
        if arm != "one":
            cells = [interval([difference(row[arm][key], row["one"][key]) for row in results]) for key in columns]
            lines.append(f"| {arm} - one | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds one after the other, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reward_models"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    results = {}
    for seed in args.seeds:
        world = RewardWorld(args.out.resolve() / f"seed-{seed}", seed)
        world.prepare()
        world.train_reward_models()
        for arm in ARMS:
            world.train_policy(arm)
        results[seed] = {
            "scorers": world.measure_reward_models(),
            "policies": {arm: world.measure_policy(arm) for arm in ARMS},
        }
        (args.out / "reward_models.json").write_text(json.dumps(results, indent=2))
        print(write_tables(results), flush=True)


if __name__ == "__main__":
    main()
