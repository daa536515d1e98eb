"""`rlhf run DIR --seeds 0,1,2`: one run for each seed in DIR/seeds/N, and their results with mean and spread.

The seed is that of every stage that trains: SFT and reward model vary with the seed, too, and a spread over PPO alone
would be too small. The evaluation keeps the seed of its file, so all policies answer the same prompts with the same
random numbers. Data and base model are those of DIR; nothing is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.pipeline.run import RunOutcome, run_folder
from rlhf_cli.report import show
from rlhf_cli.runs.layout import REPORT, REPORT_PAGE, SEEDS_FOLDER, seed_folder
from rlhf_cli.runs.report import Interval, Report, read_report
from rlhf_cli.statistics import student_interval, with_interval

OWN_KEYS = ("run", "seed", "*.run", "*.seed")


@dataclass(frozen=True)
class Quantity:
    """A result of the seeds: its name, its values, and the 95 % interval of each seed if it has one."""

    key: str  # in --json
    title: str
    values: Sequence[float]
    intervals: Sequence[Interval]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over the seeds (n - 1)."""
        return stdev(self.values) if len(self.values) > 1 else None

    def cells(self) -> list[str]:
        """Return the value of each seed as text, and mean and spread if there are several."""
        texts = []
        for value, interval in zip(self.values, self.intervals, strict=True):
            texts.append(with_interval(value, interval))
        if self.spread is not None:
            texts.append(with_interval(self.mean, student_interval(self.values)))
            texts.append(f"{self.spread:.3f}")
        return texts

    def as_json(self) -> dict[str, Any]:
        interval = student_interval(self.values)
        return {"title": self.title, "mean": self.mean, "spread": self.spread, "ci95": interval, "n": len(self.values)}


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of `--seeds 0,1,2`. Raises RLHFError C07."""
    seeds = []
    for word in text.split(","):
        seed = int(word) if word.strip().isdecimal() else None
        if seed is None or seed >= 2**32 or seed in seeds:
            raise RLHFError("C07", f"--seeds {text}: not a list of different seeds", hint="e.g. --seeds 0,1,2")
        seeds.append(seed)
    return seeds


def run_seeds(folder: Path, seeds: Sequence[int], overrides: Sequence[str], options: Options, **selection: Any) -> int:
    """Bring the run of each seed up to date, and print and compare their results; return the exit code.

    A failure ends the command, and the same command resumes. An unmet requirement of an evaluation does not: the other
    seeds run, and the exit code is 1. Raises RLHFError C17 for overrides of the seed, and as `run_folder` does.
    """
    _refuse_own_keys(overrides)
    outcomes: dict[int, RunOutcome] = {}
    for seed in seeds:
        terminal.out(f"seed {seed:<3} {shown(seed_folder(folder, seed))}")
        is_checked = any(outcome.ran for outcome in outcomes.values())
        outcomes[seed] = run_folder(folder, overrides, options, seed=seed, checked=is_checked, **selection)
        if outcomes[seed].code and not outcomes[seed].unmet:
            left = [str(each) for each in seeds if each not in outcomes]
            not_run = f"; not run: {', '.join(left)}" if left else ""
            text = f"seed {seed:<3} ended with exit code {outcomes[seed].code}"
            terminal.error(f"{text}{not_run}; the same command resumes")
            break

    code = next((outcome.code for outcome in outcomes.values() if outcome.code), 0)
    if not options.dry_run:
        _conclude(folder, outcomes, code)
    elif terminal.has_mode("json"):
        runs = [outcome.planned_json(seed_folder(folder, seed)) for seed, outcome in outcomes.items()]
        terminal.print_json({"run": shown(folder), "seeds": runs})
    return code


def _refuse_own_keys(overrides: Sequence[str]) -> None:
    """Raise RLHFError C17 for overrides of what --seeds sets."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key.rpartition(":")[2] in OWN_KEYS:
            raise RLHFError("C17", f"--seeds and --set {text} contradict each other", hint="omit one of them")


def _conclude(folder: Path, outcomes: Mapping[int, RunOutcome], code: int) -> None:
    """Print the results of the seeds and write the page that compares them."""
    reports = {}
    for seed in outcomes:
        evaluation = seed_folder(folder, seed) / "eval"
        if (evaluation / REPORT).is_file():
            reports[seed] = read_report(evaluation)
    found = quantities(list(reports.values()))
    if found:
        _print_table(list(reports), found)

    page = None
    if len(reports) > 1:
        page = folder / SEEDS_FOLDER / REPORT_PAGE
        show.write_page([seed_folder(folder, seed) for seed in reports], page)
    values = {
        "run": shown(folder),
        "exit_code": code,
        "seeds": [_seed_json(folder, seed, outcome) for seed, outcome in outcomes.items()],
        "results": {each.key: each.as_json() for each in found},
        "page": shown(page) if page else None,
    }
    is_complete = all(outcome.unmet or not outcome.code for outcome in outcomes.values())
    if is_complete or terminal.has_mode("json"):
        terminal.conclude(shown(page or folder / SEEDS_FOLDER), values)


def _seed_json(folder: Path, seed: int, outcome: RunOutcome) -> dict[str, Any]:
    return {"seed": seed, "run": shown(seed_folder(folder, seed)), "exit_code": outcome.code, "ran": outcome.ran}


def quantities(reports: Sequence[Report]) -> list[Quantity]:
    """Return the results that all reports have: win rate over SFT and score by the deciding judge, and KL."""
    judges = set.intersection(*(set(report.ppo_over_sft) for report in reports)) if reports else set()
    policies = [report.models["ppo"] for report in reports if "ppo" in report.models]
    if not judges or len(policies) < len(reports):
        return []
    judge = deciding_judge(sorted(judges))

    rates = [report.ppo_over_sft[judge] for report in reports]
    win_rates = [(rate.value, rate.ci95) for rate in rates]
    kls = [(policy.kl, policy.kl_ci95) for policy in policies if policy.kl is not None]
    means = [policy.judges[judge] for policy in policies if judge in policy.judges]
    scores = [(mean.mean, mean.ci95) for mean in means]
    candidates = [
        _quantity("win_rate", f"PPO over SFT, {judge}", win_rates),
        _quantity("kl", "KL", kls),
        _quantity("score", f"score, {judge}", scores),
    ]
    return [each for each in candidates if len(each.values) == len(reports)]


def _quantity(key: str, title: str, found: Sequence[tuple[float, Interval]]) -> Quantity:
    return Quantity(key, title, [value for value, _ in found], [interval for _, interval in found])


def _print_table(seeds: Sequence[int], found: Sequence[Quantity]) -> None:
    """Print the results, with a row for each seed."""
    rows = [[str(seed)] for seed in seeds]
    if len(seeds) > 1:
        rows += [["mean"], ["spread"]]
    for each in found:
        for row, cell in zip(rows, each.cells(), strict=True):
            row.append(cell)

    title = f"{len(seeds)} seeds; mean with Student's 95 % interval over seeds, spread: standard deviation over seeds"
    terminal.out()
    terminal.table(["seed", *(each.title for each in found)], rows, title=title)
