"""Printed result of an evaluation, from the files of its folder. Torch-free: `rlhf run` prints it too."""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import terminal
from rlhf_cli.config.eval import COMPARISON
from rlhf_cli.errors import Problem, RLHFError, shown
from rlhf_cli.evaluation.reward_model_table import print_card
from rlhf_cli.files import read_json_object
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.runs.shapes import schema_error
from rlhf_cli.runs.stage_folder import REPORT
from rlhf_cli.statistics import with_interval

QUANTILES = (0.25, 0.5, 0.75)
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
MODEL_LABELS = {"sft": "SFT", "ppo": "PPO"}
# Responses that a reward is the mean of.
LAST_UPDATE = "in the last update"  # sampled
TRAINING = "on training prompts"  # new ones of the final policy
HELD_OUT = "held-out prompts"
UNPENALISED = "before the KL penalty"
OWN_REWARD = "the reward itself, which proves little"  # the judge PPO was trained on
HALF = 0.5
Significance = Literal["better", "undecided", "worse"]
RESULTS = {
    "better": "PPO beats SFT: it wins",
    "undecided": "undecided: PPO wins",
    "worse": "PPO is worse than SFT: it wins",
}
Row = Mapping[str, Any]


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report.json of an eval folder. Raises RLHFError M05 if it is missing or corrupt, E08 if unreadable."""
    report = read_json_object(folder / "report.json")
    problem = "is missing or not readable" if report is None else schema_error("report.json", report)
    if report is None or problem:
        text = f"{shown(folder / 'report.json')} {problem if report is None else f'is damaged: {problem}'}"
        raise RLHFError("M05", text, hint="make it again: rlhf eval --fresh --config FILE")
    return report


def check_requirements(report: Row, require: Mapping[str, str], *, where: Callable[[str], str]) -> None:
    """Compare a report with `eval.require`: {dotted key: comparison, such as ">= 0.6"}.

    `where` gives the location of a config key. Raises R06 with a problem per requirement that fails or has no number in
    the report, and if `eval.select` found no policy within its bound.
    """
    problems = []
    if "selected" in report and "selected_step" not in report:
        nearest = min(point["kl"] for point in report["frontier"])
        text = f"eval.select finds nothing: {report['selected']['rule']}, the nearest has {nearest:.4g} nats"
        hint = "raise kl_max, keep more snapshots (output.snapshots in ppo.yaml), or raise ppo.kl_coef"
        problems.append(Problem("R06", text, where("eval.select"), hint))
    location = where("eval.require")
    for key, condition in require.items():
        match = COMPARISON.fullmatch(condition.strip())
        assert match, "the config checks the form of a requirement"
        value: Any = report
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            hint = f"report.json holds {', '.join(report)}"
            problems.append(Problem("R06", f"{key} is no number of the report", location, hint))
        elif not OPERATORS[match[1]](value, float(match[2])):
            problems.append(Problem("R06", f"{key} is {value:.4g}, required {condition.strip()}", location))
    if problems:
        raise RLHFError.from_problems(problems)


def print_report(eval_folder: Path) -> None:
    """Print an eval folder: policies, win rates, frontier, sample responses, reward model, warnings and a summary."""
    report = read_report(eval_folder)
    _print_models(report)
    _print_win_rates(report)
    _print_frontier(report)
    if (eval_folder / "samples.jsonl").is_file():
        _print_samples([row for _, row in read_jsonl(eval_folder / "samples.jsonl")])
    if "reward_model" in report:
        terminal.out()
        print_card(report["reward_model"])
    elif "no_reward_card" in report:
        terminal.out(f"reward model: no report card: {report['no_reward_card']}")
    _print_warnings(report.get("warnings", []))
    terminal.out(f"report: {shown(eval_folder / 'report.json')}")
    if (eval_folder / REPORT).is_file():
        terminal.out(f"page: {shown(eval_folder / REPORT)} (open it in a browser)")
    if summary := summary_sentence(report):
        terminal.out(f"verdict: {summary}")


def _print_warnings(warnings: Sequence[str]) -> None:
    """Print the report's warnings; those already printed by this command are listed by code only."""
    repeated = []
    for warning in warnings:
        if terminal.is_first_time(warning):
            terminal.out(f"noted: {warning}")
        else:
            repeated.append(warning.partition("]")[0].removeprefix("warning["))
    if repeated:
        counts = [f"{code} ({count} times)" if count > 1 else code for code, count in Counter(repeated).items()]
        terminal.out(f"noted: of the warnings above report.json has {', '.join(counts)}")


# Policies


def format_reward(metrics: Row, responses: str) -> str:
    """Return PPO's reward, before the KL penalty, as text: `reward 1.757 on training prompts`."""
    return f"reward {metrics['objective/scores']:.3f} {responses}"


def model_label(model: str) -> str:
    """Return the display name of a policy in the report."""
    return MODEL_LABELS.get(model, model)


def _print_models(report: Row) -> None:
    """Print a row for each policy and for each best of n of the SFT policy."""
    rows = dict(report["models"])
    near_greedy = report.get("greedy", {}).get("models", {})
    judges = [name for name in next(iter(rows.values()))["judges"] if name != "reward"]
    cells = [_model_cells(model_label(name), row, judges) for name, row in rows.items()]
    cells += [_model_cells(f"{model_label(name)}, near-greedy", row, judges) for name, row in near_greedy.items()]
    cells += [
        _model_cells(f"SFT, best of {row['n']}", {**row, "kl": row.get("kl_bound")}, judges, kl_format="<= {:.2f}")
        for row in report.get("best_of", [])
    ]
    columns = ["model", "reward", "KL", "length", "ended", *judges]
    title = f"{report['n']} {HELD_OUT}, 95 % intervals in brackets; the reward is {UNPENALISED}"
    terminal.table(columns, cells, title=title)


def _model_cells(name: str, row: Row, judges: Sequence[str], kl_format: str = "{:.2f}") -> list[str]:
    kl = kl_format.format(row["kl"]) if row.get("kl") is not None else "-"
    means = [with_interval(row["judges"][judge]["mean"], row["judges"][judge].get("ci95")) for judge in judges]
    reward = with_interval(row["reward_mean"], row.get("reward_ci95")) if "reward_mean" in row else "-"
    return [name, reward, kl, f"{row['response_length_mean']:.1f}", f"{row['eos_fraction']:.0%}", *means]


# Win rates


def significance(rate: Row) -> Significance:
    """Return the result of a win rate; `undecided` if its interval contains one half."""
    low, high = rate.get("ci95") or (0.0, 1.0)
    return "better" if low > HALF else "worse" if high < HALF else "undecided"


def pair_label(pair: str) -> str:
    """Return the display name of a comparison: `PPO over SFT` for `ppo_vs_sft`."""
    policy, _, baseline = pair.partition("_vs_")
    return f"{model_label(policy)} over {model_label(baseline)}"


def format_length_controlled(rate: Row) -> str:
    """Return the length-controlled win rate as text."""
    return f"{rate['length_controlled']:.3f}" if "length_controlled" in rate else "-"


def win_rate_rows(report: Row) -> list[tuple[str, str, str, Row]]:
    """Return (pair, `, near-greedy` or "", judge, win rate) of every win rate, sampled ones first."""
    rows: list[tuple[str, str, str, Row]] = []
    for mode, section in (("", report), (", near-greedy", report.get("greedy") or {})):
        for pair, judges in (section.get("win_rate") or {}).items():
            rows += [(pair_label(pair), mode, *item) for item in judges.items()]
    for row in report.get("best_of", []):
        pair = f"PPO over SFT's best of {row['n']}"
        rows += [(pair, "", *item) for item in (row.get("ppo_win_rate") or {}).items()]
    return rows


def _print_win_rates(report: Row) -> None:
    rows = [
        [
            pair + mode,
            judge,
            with_interval(rate["value"], rate.get("ci95"))
            + (", undecided" if significance(rate) == "undecided" else ""),
            format_length_controlled(rate),
            f"{rate['ties']}",
        ]
        for pair, mode, judge, rate in win_rate_rows(report)
    ]
    if rows:
        terminal.out()
        terminal.table(["win rate", "judge", "value", "at equal length", "ties"], rows)


# Frontier


def deciding_judge(judges: Iterable[str]) -> str:
    """Return `gold` if present, else a judge that PPO was not trained on, else the reward model."""
    return min(judges, key=lambda name: (name != "gold", name == "reward"))


def _print_frontier(report: Row) -> None:
    """Print the frontier, SFT's best of n and the selected step; or the reason why there is no frontier."""
    if reason := report.get("no_frontier"):
        terminal.out(f"no frontier: {reason}")
    if not report.get("frontier"):
        return
    names = list(report["frontier"][0]["judges"])
    judge = report["selected"]["judge"] if "selected" in report else deciding_judge(names)
    others, selected = [name for name in names if name != judge], report.get("selected_step")
    cells = []
    for row in report["frontier"]:
        mark = "*" if row["step"] == selected else ""
        cells.append([*_frontier_cells(f"{row['step']}", row, f"{row['kl']:z.2f}", judge, others, "win_rate"), mark])
    for row in report.get("best_of", []):
        kl = f"<= {row['kl_bound']:.2f}"
        cells.append([*_frontier_cells(f"best of {row['n']}", row, kl, judge, others, "win_rate_vs_sft"), ""])
    terminal.out()
    columns = ["update", "KL", *others, judge, f"win rate, {judge}", "at equal length", ""]
    legend = "" if selected is None else " (*: selected)"
    best_of_n = ", and SFT's best of n" if report.get("best_of") else ""
    terminal.table(columns, cells, title=f"The frontier: PPO's policies along the way{legend}{best_of_n}")
    for line in selection_lines(report):
        terminal.out(line)


def _frontier_cells(name: str, row: Row, kl: str, judge: str, others: list[str], win_rate_key: str) -> list[str]:
    means, decisive = [f"{row['judges'][other]['mean']:.3f}" for other in others], row["judges"][judge]
    rate = row[win_rate_key][judge]
    rates = [with_interval(rate["value"], rate["ci95"]), f"{rate['length_controlled']:.3f}"]
    return [name, kl, *means, with_interval(decisive["mean"], decisive["ci95"]), *rates]


def selection_lines(report: Row) -> Iterator[str]:
    """Yield the selected step, the rule, the steps tied with it and its selection bias, as text."""
    selected = report.get("selected")
    if selected is None:
        return
    step = report.get("selected_step")
    yield f"selected: {'none' if step is None else f'update {step}'}, by {selected['rule']}"
    if step is None:
        return
    tied = ", ".join(map(str, selected["within_noise"]))
    yield f"          within noise of it: {f'update {tied}' if tied else 'no other'} (paired, 95 % for all together)"
    yield f"          picked on these prompts, its mean is too high by about {selected['optimism']:.3f}"


# Sample responses


@dataclass(frozen=True)
class ResponsePair:
    """Rows of samples.jsonl of both policies for one prompt. `gain`: PPO's score minus SFT's by the deciding judge."""

    index: int
    prompt: str
    sft: Row
    ppo: Row
    gain: float

    @property
    def change(self) -> tuple[float, float]:
        """KL of PPO's response in nats, and the difference of the lengths in tokens."""
        kl = self.ppo.get("kl")
        nats = float(kl) if isinstance(kl, int | float) and not isinstance(kl, bool) else 0.0
        return (nats, abs(self.ppo["length"] - self.sft["length"]))


def deciding_judge_of(samples: Sequence[Row]) -> str | None:
    """Return the deciding judge of samples.jsonl, None if no judge scored it."""
    names = [name for row in samples[:1] for name in row.get("scores", {})]
    return deciding_judge(names) if names else None


def response_pairs(samples: Sequence[Row]) -> list[ResponsePair]:
    """Pair the SFT and PPO responses by prompt index; sampled ones if there are any, else near-greedy ones."""
    judge = deciding_judge_of(samples)
    mode = "sampled" if any(row.get("mode") == "sampled" for row in samples) else "greedy"
    sft_rows, ppo_rows = (
        {row["index"]: row for row in samples if (row["model"], row["mode"]) == (name, mode)} for name in ("sft", "ppo")
    )
    pairs = []
    for index in sorted(sft_rows.keys() & ppo_rows.keys()):
        sft, ppo = sft_rows[index], ppo_rows[index]
        pairs.append(ResponsePair(index, sft["prompt"], sft, ppo, ppo["scores"][judge] - sft["scores"][judge]))
    return pairs


def quartile_examples(gains: Mapping[int, float]) -> list[int]:
    """Return the distinct rows whose gain is nearest to each quartile; the lower index wins a tie."""
    ordered = sorted(gains.values())
    selected: list[int] = []
    for quantile in QUANTILES:
        target = ordered[round(quantile * (len(ordered) - 1))]
        remaining = [index for index in gains if index not in selected]
        if remaining:
            selected.append(min(remaining, key=lambda index: (abs(gains[index] - target), index)))
    return selected


def _print_samples(samples: Sequence[Row]) -> None:
    """Print both policies' responses to three prompts, at the quartiles of the gain."""
    pairs = {pair.index: pair for pair in response_pairs(samples)}
    if not pairs:
        return
    rows = []
    for index in quartile_examples({index: pair.gain for index, pair in pairs.items()}):
        rows.append(["prompt", "", str(pairs[index].prompt)])
        for name, row in (("sft", pairs[index].sft), ("ppo", pairs[index].ppo)):
            scores = ", ".join(f"{key} {value:.2f}" for key, value in row["scores"].items())
            rows.append([model_label(name), scores, str(row["response"])])
    terminal.out()
    title = f"Before and after, at the quartiles of PPO's gain by {deciding_judge_of(samples)}"
    terminal.table(["", "scores", "text"], rows, title=title)


# Summary


def summary_sentence(report: Row) -> str | None:
    """Summarise PPO against SFT by the deciding judge and the reward model; None without a comparison."""
    rates = report.get("win_rate", {}).get("ppo_vs_sft")
    if not rates:
        return None
    judge = deciding_judge(rates)
    rate, kl = rates[judge], report["models"]["ppo"].get("kl")
    at_kl = "" if kl is None else f", at a KL of {kl:z.2f}"
    value = with_interval(rate["value"], rate.get("ci95"))
    result = f"{RESULTS[significance(rate)]} {value} of {rate['n']} {HELD_OUT}, judged by {judge}{at_kl}"
    advice = " (more prompts, eval.n, would tell more)" if significance(rate) == "undecided" else ""
    return result + advice + _length_clause(rate) + _reward_clause(rates, judge)


def _length_clause(rate: Row) -> str:
    """Return the caveat for a win that response length may explain."""
    low, _ = rate.get("length_controlled_ci95") or (1.0, 1.0)
    if significance(rate) != "better" or low > HALF:
        return ""
    return f"; at equal length {with_interval(rate['length_controlled'], rate['length_controlled_ci95'])}, undecided"


def _reward_clause(rates: Row, judge: str) -> str:
    if judge == "reward":
        return f": {OWN_REWARD}; name another judge in eval.yaml"
    if "reward" not in rates:
        return ""
    own = rates["reward"]
    clause = f"; by the reward itself it wins {with_interval(own['value'], own.get('ci95'))}"
    if significance(own) == "better" and significance(rates[judge]) == "worse":
        return f"{clause}: PPO found what the reward gets wrong (docs/rewards.md)"
    if significance(own) == "better" and significance(rates[judge]) == "undecided":
        return f"{clause}, and {judge} does not confirm it"
    return clause
