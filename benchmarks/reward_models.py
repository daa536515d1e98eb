"""Better reward models for PPO, on the demo: `python -m benchmarks.reward_models --out runs/reward_models`.

Reward models learn from the first 2000 pairs of the demo's data, and PPO maximises them. Each seed has a folder, and in
it a run for each reward model and each arm:

member-0 to -2   reward models that differ by their seed: the initial head and the order of the pairs
shared-1, -2     with the initial head of member-0, but other orders
average          the mean of the weights of member-0, shared-1 and -2, normalised again (WARM, arXiv 2401.12187)
debiased-0 to -2 the members with `reward.length_debias`
overfit          8 epochs on 500 of the pairs, with a quarter of the labels exchanged, also in the evaluations
overfit-STEP     its last evaluated step, the one that `reward.keep: best` takes, and that of the highest accuracy
ppo-one          PPO on member-0
ppo-mean, -min   PPO on member-0 to -2, combined
ppo-...          PPO on the averaged model, on debiased-0, on the mean of debiased-0 to -2, and on the overfit ones

The answers of PPO in `one` to 300 prompts are the policy's own pairs, of which gold decides. Gold scores each update's
answers, and PPO does not learn from it. A run that was cut off continues. Prints the tables of
docs/results/reward-model.md, and writes OUT/reward_models.json.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from statistics import fmean
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.arms import Row, World, difference, interval, read, rlhf, spread, value_at
from benchmarks.checkpoints import HELD_OUT_PAIRS, score_checkpoints
from rlhf_cli import data
from rlhf_cli.config import loading
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.demo import world as demo
from rlhf_cli.demo.gold import gold
from rlhf_cli.evaluation.kept_step import best_of
from rlhf_cli.evaluation.reward_model import ScoredPair, length_correlation
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import forward, load, tokenizers
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.runs.manifest import read_manifest

PAIRS = 2000  # of the 12,000 of the demo: few enough for PPO to over-optimise
MEMBERS = 3
OVERFIT_PAIRS, EXCHANGED = 500, 0.25  # as many pairs choose the step
OVERFIT: dict[str, Row] = {"reward": {"num_train_epochs": 8}, "output": {"save_steps": 16, "keep": 8}}  # 16: an epoch
OWN = 300  # prompts whose own pairs measure the reward models
UPDATES, BATCH = 20, 64
KL_COEF = 0.02
KLS = (2.0, 4.0)  # nats, at which policies are compared
WINDOW = 5  # updates, over which gold and KL are averaged
PROMPTS, ANSWERS = 400, 16  # of SFT's answers, of which the scores choose the best
BEST_OF = (4, 16)

MODELS = [f"member-{number}" for number in range(MEMBERS)]
SHARED = ["member-0", *(f"shared-{number}" for number in range(1, MEMBERS))]
DEBIASED = [f"debiased-{number}" for number in range(MEMBERS)]
STEPS = [f"overfit-{step}" for step in ("last", "best", "highest")]
# Arm of PPO -> its reward models, and how they are combined.
ARMS: dict[str, tuple[list[str], str]] = {
    "one": (MODELS[:1], "mean"),
    "mean": (MODELS, "mean"),
    "min": (MODELS, "min"),
    "average": (["average"], "mean"),
    "debiased": (DEBIASED[:1], "mean"),
    "debiased-mean": (DEBIASED, "mean"),
    **{name: ([name], "mean") for name in STEPS},
}
# Row of the table of reward models -> the same. ALONE are the means of the figures of these models.
SCORERS: dict[str, tuple[list[str], str]] = {
    **ARMS,
    "entropic": (MODELS, "entropic"),
    "mean, one head": (SHARED, "mean"),
}
ALONE = {"one": MODELS, "debiased": DEBIASED}
# Row -> the row that it is compared with, of others `one`.
BASELINES = {"debiased-mean": "mean", "overfit-best": "overfit-last", "overfit-highest": "overfit-last"}
# How the table of reward models combines scores (members, rows); PPO has no `entropic` (arXiv 2606.09073).
COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda scores: scores.mean(0),
    "min": lambda scores: scores.amin(0),
    "entropic": lambda scores: -0.5 * torch.log(torch.exp(-scores / 0.5).mean(0)),
}
FROZEN: Row = {"learning_rate": 0, "max_steps": 1}  # a training that changes nothing, and normalises


class RewardWorld(World):
    """The folder of a seed, with reward models and the policies that maximise them."""

    def train_reward_models(self) -> None:
        """Train the members, and average those of one head; the head is that of an untrained reward model."""
        pairs = read(self.folder / "demo/data/pairs.jsonl")[:PAIRS]
        self.reward("head", pairs, reward={**FROZEN, "normalize": "none"})
        for number, name in enumerate(MODELS):
            self.reward(name, pairs, number)
        for number, name in enumerate(SHARED[1:], start=1):
            self.reward(name, pairs, number, model={"start": "../head/reward"})
        self.normalize("average", pairs, [f"{name}/reward/model" for name in SHARED])

        debias = {**FROZEN, "length_debias": True}
        for number, name in enumerate(DEBIASED):
            self.reward(name, pairs, number, model={"start": f"../{MODELS[number]}/reward"}, reward=debias)
        self.overfit(pairs[:OVERFIT_PAIRS])

    def reward(self, name: str, pairs: list[Row], number: int = 0, **changes: Row) -> None:
        """Train a reward model on the pairs, with the seed of a member."""
        run = self.folder / name
        if not run.exists():
            run.mkdir()
            write_jsonl(run / "pairs.jsonl", pairs)
            model = {"path": "../demo/sft", **changes.pop("model", {})}
            files = {"train": "pairs.jsonl", "eval": None, **changes.pop("data", {})}
            self.write(run, "reward", model=model, data=files, **changes)
        rlhf("reward", run, "-s", f"seed={self.seed + 100 * number}")

    def normalize(self, name: str, pairs: list[Row], models: Sequence[str]) -> None:
        """Write a reward model whose weights are the mean of those of some folders, normalised like the members."""
        plain = self.folder / f"{name}-weights"
        if not plain.exists():
            shutil.copytree(self.folder / "member-0/reward/model", plain)
            weights = [load_file(self.folder / model / "model.safetensors") for model in models]
            mean = {key: torch.stack([each[key] for each in weights]).mean(0) for key in weights[0]}
            save_file(mean, plain / "model.safetensors", metadata={"format": "pt"})
        self.reward(name, pairs, model={"start": f"../{plain.name}"}, reward=FROZEN)

    def overfit(self, pairs: list[Row]) -> None:
        """Train on few pairs with wrong labels, and take the three steps; other pairs with wrong labels choose them."""
        draw = random.Random(f"{self.seed} overfit")
        held_out = list(demo.pairs(demo.split(self.seed)[1], OVERFIT_PAIRS, draw))
        write_jsonl(self.folder / "choose.jsonl", exchange(held_out, draw))
        self.reward("overfit", exchange(pairs, draw), data={"eval": "../choose.jsonl"}, **OVERFIT)

        card = read_manifest(self.folder / "overfit/reward")[0].card
        assert card and card.kept_step
        kept = card.kept_step
        steps = [kept.evaluated[-1].step, kept.step, best_of(kept).step]
        for name, step in zip(STEPS, steps, strict=True):
            self.normalize(name, pairs, [f"overfit/reward/state/checkpoint-{step}"])

    def train_policy(self, arm: str) -> None:
        """Train PPO on the reward of an arm, from the SFT model; gold watches."""
        members, combine = ARMS[arm]
        folders = {member: f"../{member}/reward" for member in members}
        source: Row = {"model": folders[members[0]]}
        if len(members) > 1:
            source = {"models": folders, "combine": combine}
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

    def sft_answers(self) -> list[Row]:
        """Return rows {prompt, answers}: answers of the SFT model to the first held-out prompts."""
        path = self.folder / "answers.jsonl"
        if not path.exists():
            prompts = [row["prompt"] for row in read(self.folder / "demo/data/heldout.jsonl")[:PROMPTS]]
            write_jsonl(path, sample(self.folder / "demo/sft/model", prompts, self.seed))
        return read(path)

    def measure_reward_models(self) -> dict[str, Row]:
        """Return the figures of reward models: on pairs of the raters and of the policy, and as judges of best-of-n."""
        known = read(self.folder / "demo/data/pairs_eval.jsonl")
        policy = self.own_pairs()
        samples = self.sft_answers()
        prompts, answers = [], []
        for row in known + policy:
            prompts += [row["prompt"]] * 2
            answers += [row["chosen"], row["rejected"]]
        for row in samples:
            prompts += [row["prompt"]] * ANSWERS
            answers += row["answers"]

        tokenizer = tokenizers.load_tokenizer(self.folder / "demo/sft/model")
        encoded = data.encode_many(tokenizer, prompts, answers)
        lengths = [len(answer) for _, answer in encoded]
        rollout = Rollout.from_lists(*map(list, zip(*encoded, strict=True)))
        sampled = slice(2 * len(known + policy), None)
        golds = torch.tensor(gold(prompts[sampled], answers[sampled])).reshape(PROMPTS, ANSWERS)

        def figures(scores: torch.Tensor) -> Row:
            pairs = as_pairs(scores[: sampled.start].tolist(), lengths)
            return {
                "held_out": fmean(pair.right for pair in pairs[: len(known)]),
                "own": fmean(pair.right for pair in pairs[len(known) :]),
                "length": length_correlation(pairs[: len(known)])[0],
                "own_length": length_correlation(pairs[len(known) :])[0],
                **best_of_n(scores[sampled].reshape(PROMPTS, ANSWERS), golds),
            }

        scores = {name: self.scores(name, rollout) for name in {*MODELS, *SHARED, *DEBIASED, *STEPS, "average"}}
        found = {}
        for scorer, (members, combine) in SCORERS.items():
            if scorer in ALONE:
                alone = [figures(scores[name]) for name in ALONE[scorer]]
                found[scorer] = {key: fmean(row[key] for row in alone) for key in alone[0]}
            else:
                found[scorer] = figures(COMBINE[combine](torch.stack([scores[name] for name in members])))
        return found

    def scores(self, name: str, rollout: Rollout) -> torch.Tensor:
        """Return the scores of answers by a reward model, as PPO sees them."""
        model = load.load_reward_model(self.folder / name / "reward/model").eval().requires_grad_(False)
        return forward.rollout_scores(model, rollout, max_rows=64)

    def measure_choice(self) -> Row:
        """Return what each rule of choice gains over the last step, on pairs without wrong labels."""
        pairs = self.folder / "held_out.jsonl"
        with mock.patch.object(demo, "FLIPS", 0):
            draw = random.Random(f"{self.seed} held out")
            write_jsonl(pairs, demo.pairs(demo.split(self.seed)[1], HELD_OUT_PAIRS, draw))
        return score_checkpoints(loading.load("reward", self.folder / "overfit/reward.yaml"), pairs, EXCHANGED)

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


def sample(folder: Path, prompts: Sequence[str], seed: int) -> list[Row]:
    """Return rows {prompt, answers} with ANSWERS answers of a language model to each prompt."""
    tokenizer = tokenizers.load_tokenizer(folder)
    stop = data.stop_token_id(tokenizer)
    engine = HFEngine(load.load_causal_lm(folder).eval(), stop, tokenizer.pad_token_id, batch_size=256)
    encoded = data.encode_many(tokenizer, list(prompts), [None] * len(prompts))
    repeated = np.repeat(np.arange(len(encoded)), ANSWERS)
    batch = Prompts.from_lists([encoded[number][0] for number in repeated], tokenizer.pad_token_id)
    seeds = tuple(derive_seed(seed, "best of n", number) for number in range(len(batch)))
    texts = engine.generate(replace(batch, seeds=seeds, response_length=64)).texts(tokenizer)[1]
    return [{"prompt": prompt, "answers": texts[n * ANSWERS : (n + 1) * ANSWERS]} for n, prompt in enumerate(prompts)]


def exchange(pairs: Sequence[Row], draw: random.Random) -> list[Row]:
    """Return the pairs with wrong labels: a share EXCHANGED has its answers exchanged."""
    labelled = []
    for row in pairs:
        errs = draw.random() < EXCHANGED
        labelled.append({**row, "chosen": row["rejected"], "rejected": row["chosen"]} if errs else row)
    return labelled


def as_pairs(scores: Sequence[float], lengths: Sequence[int]) -> list[ScoredPair]:
    """Return the pairs whose chosen and rejected answers alternate."""
    places = range(0, len(scores), 2)
    return [ScoredPair(scores[n], scores[n + 1], lengths[n], lengths[n + 1]) for n in places]


def best_of_n(scores: torch.Tensor, golds: torch.Tensor) -> Row:
    """Return the mean gold of the best of n by the scores (prompts, answers), over all subsets of n answers."""
    size = scores.shape[1]
    ordered = golds.double().gather(1, scores.argsort(1))
    figures = {}
    for n in BEST_OF:
        weights = torch.tensor([comb(place, n - 1) / comb(size, n) for place in range(size)], dtype=torch.float64)
        figures[f"best_of_{n}"] = float((ordered @ weights).mean())
    return figures


def write_tables(results: Mapping[int, Mapping[str, Mapping[str, Row]]]) -> str:
    """Return the tables of the reward models and the policies, and their differences, over the seeds."""
    tables = []
    for name in ("reward models", "policies"):
        rows = [result[name] for result in results.values()]
        tables += [table(name, rows), table_of_differences(rows)]
    tables += [f"choice, seed {seed}: {result['choice']}" for seed, result in results.items()]
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
    """Return a table of each arm's figures less those of its baseline."""
    columns = list(results[0]["one"])
    lines = [f"| difference | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for arm in results[0]:
        if arm != "one":
            base = BASELINES.get(arm, "one")
            cells = [interval([difference(row[arm][key], row[base][key]) for row in results]) for key in columns]
            lines.append(f"| {arm} - {base} | {' | '.join(cells)} |")
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
            "reward models": world.measure_reward_models(),
            "policies": {arm: world.measure_policy(arm) for arm in ARMS},
            "choice": world.measure_choice(),
        }
        (args.out / "reward_models.json").write_text(json.dumps(results, indent=2))
        print(write_tables(results), flush=True)


if __name__ == "__main__":
    main()
