"""Result of an evaluation as text: tables, pairs of responses and sentences. Torch-free: `rlhf run` prints it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_cli.evaluation.reward_model import disagreement
from rlhf_cli.jsonl import at, is_number
from rlhf_cli.statistics import with_interval

QUANTILES = (0.25, 0.5, 0.75)
MODEL_LABELS = {"sft": "SFT", "ppo": "PPO"}
# Responses that a reward is the mean of.
LAST_UPDATE = "in the last update"  # sampled
TRAINING = "on training prompts"  # new ones of the final policy
HELD_OUT = "held-out prompts"
UNPENALISED = "before the KL penalty"
OWN_REWARD = "the reward that PPO was trained on, which proves little"
HALF = 0.5
Significance = Literal["better", "undecided", "worse"]
AGAINST = {"better": ": PPO is better", "undecided": ", not distinguishable", "worse": ": PPO is worse"}
RESULTS = {
    "better": "PPO beats SFT: win rate",
    "undecided": "PPO and SFT are not distinguishable: win rate",
    "worse": "PPO loses to SFT: win rate",
}
Row = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]  # columns and rows


# Policies


def format_reward(metrics: Row, responses: str) -> str:
    """Return PPO's reward, before the KL penalty, as text: `reward 1.757 on training prompts`."""
    return f"reward {metrics['objective/scores']:.3f} {responses}"


def model_label(model: str) -> str:
    """Return the display name of a policy in the report."""
    share = model.removeprefix("interpolated_")  # no other policy has such a name
    return MODEL_LABELS.get(model, model) if share == model else f"share {share}"


def _best_of_label(row: Row) -> str:
    return f"SFT, best of {row['n']}"


def policies_table(report: Row) -> Table:
    """Return a row for each policy and for each best of n of the SFT policy, with its mean score by each judge."""
    policies = [(model_label(name), row) for name, row in report["models"].items()]
    near_greedy = (report.get("greedy") or {}).get("models") or {}
    policies += [(f"{model_label(name)}, near-greedy", row) for name, row in near_greedy.items()]
    policies += [(_best_of_label(row), row) for row in report.get("best_of", [])]
    judges = list(policies[0][1]["judges"])
    rows = [
        [
            name,
            _kl(row),
            f"{row['response_length_mean']:.1f}",
            f"{row['eos_fraction']:.0%}",
            *(mean_text(row["judges"][judge]) for judge in judges),
        ]
        for name, row in policies
    ]
    return ["model", "KL", "length", "ended", *judges], rows


def mean_text(score: Row) -> str:
    """Return a judge's mean with its interval as text; there is none if all answers have the same score."""
    return with_interval(score["mean"], score.get("ci95")) + ("" if score.get("ci95") else ", no interval")


def _kl(row: Row) -> str:
    if "kl_bound" in row:
        return f"<= {row['kl_bound']:.2f}"
    if row.get("kl") is None:
        return "-"
    low, high = row.get("kl_ci95") or (row["kl"], row["kl"])
    return f"{row['kl']:z.2f}" + (f" [{low:z.2f}, {high:z.2f}]" if low < high else "")


# Win rates


def significance(rate: Row) -> Significance:
    """Return the result of a win rate; `undecided` if its interval contains one half."""
    low, high = rate.get("ci95") or (0.0, 1.0)
    return "better" if low > HALF else "worse" if high < HALF else "undecided"


def pair_label(pair: str) -> str:
    """Return the display name of a comparison: `PPO over SFT` for `ppo_vs_sft`."""
    policy, _, baseline = pair.partition("_vs_")
    return f"{model_label(policy)} over {model_label(baseline)}"


def win_rate_rows(report: Row) -> list[tuple[str, str, Row]]:
    """Return (comparison, judge, win rate) of every win rate, sampled ones first."""
    rows: list[tuple[str, str, Row]] = []
    for mode, section in (("", report), (", near-greedy", report.get("greedy") or {})):
        for pair, judges in (section.get("win_rate") or {}).items():
            rows += [(pair_label(pair) + mode, *item) for item in judges.items()]
    for row in report.get("best_of", []):
        pair = f"PPO over SFT's best of {row['n']}"
        rows += [(pair, *item) for item in (row.get("ppo_win_rate") or {}).items()]
    return rows


def win_rate_table(report: Row) -> Table:
    """Return a row for each win rate."""
    rows = []
    for pair, judge, rate in win_rate_rows(report):
        undecided = ", undecided" if significance(rate) == "undecided" else ""
        value = with_interval(rate["value"], rate.get("ci95")) + undecided
        counts = [str(rate.get(key, "-")) for key in ("ties", "n")]
        rows.append([pair, judge, value, _length_controlled(rate), *counts])
    return ["win rate", "judge", "value", "length-controlled", "ties", "n"], rows


def worth_sentences(report: Row) -> Iterator[str]:
    """Yield what PPO was worth against each policy beside it, with the KL of both, and a `disagreement`.

    Of the judges the deciding one is taken.
    """
    if rates := report.get("win_rate", {}).get("ppo_vs_sft"):
        yield from disagreement(reward_name(report), judge := deciding_judge(rates), rates[judge])
    for name in other_policies(report):
        if rates := report["win_rate"].get(f"ppo_vs_{name}"):
            rate = rates[judge := deciding_judge(rates)]
            ours, theirs = (f"{report['models'][model]['kl']:z.2f} nats" for model in ("ppo", name))
            value = f"{with_interval(rate['value'], rate.get('ci95'))} at {ours} against {theirs}"
            yield f"PPO over {name} by judge {judge}: {value}{AGAINST[significance(rate)]}"


def other_policies(report: Row) -> list[str]:
    """Return the names of the policies that were compared beside base, SFT and PPO."""
    compared = {pair.removesuffix("_vs_sft") for pair in report.get("win_rate", {})} - {"ppo"}
    return [name for name, row in report["models"].items() if name in compared and row.get("kl") is not None]


def _length_controlled(rate: Row) -> str:
    return f"{rate['length_controlled']:.3f}" if "length_controlled" in rate else "-"


# Frontier


def deciding_judge(judges: Iterable[str]) -> str:
    """Return `gold` if present, else a judge that PPO was not trained on, else the reward model."""
    return min(judges, key=lambda name: (name != "gold", name == "reward"))


def has_frontier(report: Row) -> bool:
    """Return True if there is a limit, or a policy with another KL than SFT and PPO."""
    return any(report.get(key) for key in ("frontier", "interpolated", "limit")) or bool(other_policies(report))


def ppo_points(report: Row) -> list[tuple[str, Row]]:
    """Return (update, point) of PPO's policies by step; without snapshots the finished policy only, as `PPO`."""
    points = [(str(row["step"]), row) for row in report.get("frontier") or ()]
    ppo, rates = report["models"].get("ppo"), report.get("win_rate", {}).get("ppo_vs_sft")
    return points or ([("PPO", {**ppo, "win_rate": rates})] if ppo and rates else [])


def other_points(report: Row) -> list[tuple[str, Row]]:
    """Return (name, point) of the policies between SFT and PPO, then of those beside them."""
    points = [(f"share {row['share']:g}", row) for row in report.get("interpolated", [])]
    models, rates = report["models"], report.get("win_rate", {})
    return points + [(name, {**models[name], "win_rate": rates[f"{name}_vs_sft"]}) for name in other_policies(report)]


def frontier_table(report: Row) -> Table:
    """Return a row for each policy of the frontier and each best of n; the last columns are of the deciding judge."""
    names = list(report["models"]["sft"]["judges"])
    judge = report["selected"]["judge"] if "selected" in report else deciding_judge(names)
    others = [name for name in names if name != judge]
    policies = [(name, row, row["win_rate"]) for name, row in ppo_points(report) + other_points(report)]
    policies += [(f"best of {row['n']}", row, row["win_rate_vs_sft"]) for row in report.get("best_of", [])]
    rows = []
    for name, row, rates in policies:
        mean, rate = row["judges"][judge], rates[judge]
        rows.append(
            [
                name,
                f"<= {row['kl_bound']:.2f}" if "kl_bound" in row else f"{row['kl']:z.2f}",
                *(f"{row['judges'][other]['mean']:.3f}" for other in others),
                mean_text(mean),
                with_interval(rate["value"], rate["ci95"]),
                _length_controlled(rate),
                "*" if "step" in row and row["step"] == report.get("selected_step") else "",
            ]
        )
    return ["update", "KL", *others, judge, f"win rate, {judge}", "length-controlled", ""], rows


def selection_lines(report: Row) -> Iterator[str]:
    """Yield the selected step, the rule, the steps tied with it and its selection bias, as text."""
    if selected := report.get("selected"):
        step = report.get("selected_step")
        yield f"selected: {'none' if step is None else f'update {step}'}, by {selected['rule']}"
        if step is not None:
            tied = ", ".join(map(str, selected["within_noise"]))
            yield f"  within noise of it: {f'update {tied}' if tied else 'no other'} (paired, 95 % for all together)"
            yield f"  {without_selection_bias(selected)}"


def without_selection_bias(selected: Row) -> str:
    """Return the selected policy's mean and win rate by the judge, as far as the evaluation has them, as text."""
    text, judge = f"selection bias: its mean is about {selected['optimism']:.3f} too high", selected["judge"]
    if rate := at(selected, f"win_rate.{judge}"):
        rate_text = with_interval(rate["value"], rate["ci95"])
        text += f"; without it the mean is {mean_text(selected['judges'][judge])}, the win rate over SFT {rate_text}"
    return text


def is_own_reward(report: Row, judge: str) -> bool:
    """Return True for the reward that PPO was trained on, unless it is a verifier, which knows the right answers."""
    return judge == "reward" and report.get("judge_kinds", {}).get(judge) != "verifier"


def reward_name(report: Row) -> str:
    """Return the judge `reward` in words: it is the reward model, unless eval.yaml has a function of this name."""
    return "the reward model" if report.get("judge_kinds", {}).get("reward", "model") == "model" else "the judge reward"


# Groups of prompts


def groups_table(report: Row) -> Table:
    """Return a row for each value of `eval.by`: each policy's mean by the deciding judge, and PPO's gain over SFT."""
    groups = report["by"]["groups"]
    judge = deciding_judge(groups[0]["models"]["sft"]["judges"])
    names = [model_label(name) for name in groups[0]["models"]]
    names += map(_best_of_label, groups[0].get("best_of", []))
    rows = []
    for group in groups:
        means = [each["judges"][judge] for each in (*group["models"].values(), *group.get("best_of", []))]
        gain = group["win_rate"]["ppo_vs_sft"][judge]
        cells = [mean_text(each) for each in means]
        gained = with_interval(gain["difference"], gain.get("difference_ci95"))
        rows.append([group["value"], str(group["n"]), *cells, gained])
    return [report["by"]["column"], "n", *names, "PPO - SFT"], rows


def groups_title(report: Row) -> str:
    """Return the title of `groups_table`."""
    by = report["by"]
    return f"Mean by {deciding_judge(by['groups'][0]['models']['sft']['judges'])} for each {by['column']}"


# Limit


def limit_score(report: Row) -> str:
    """Return the score of the limit as text."""
    penalty = report["limit"].get("missing_eos_penalty")
    less = f", less {penalty:g} for an answer that does not end" if penalty else ""
    return f"score by {reward_name(report)}{less}"


def limit_table(report: Row) -> Table:
    """Return a row for each policy: the KL that it pays, the KL that the limit needs for its score, and their ratio."""
    best_of_n = {f"best_of_{row['n']}": _best_of_label(row) for row in report.get("best_of", [])}
    rows = []
    for name, row in report["limit"]["policies"].items():
        label = f"PPO, update {row['step']}" if "step" in row and name != "ppo" else model_label(name)
        paid = _kl({"kl_bound": row["kl"]} if name in best_of_n else row)
        rows.append([best_of_n.get(name, label), paid, with_interval(row["score"], row["score_ci95"]), *_overhead(row)])
    return ["policy", "KL", "score", "KL needed", "overhead"], rows


def _overhead(row: Row) -> tuple[str, str]:
    """Return the needed KL and the overhead of a policy as text."""
    if "needed_kl_at_most" in row and "overhead_at_least" in row:
        return f"at most {row['needed_kl_at_most']:.2f}", f"at least {row['overhead_at_least']:.1f}"
    overhead = f"{row['overhead']:.1f}" if "overhead" in row else f"none, {row.get('no_overhead')}"
    if "needed_kl" not in row:
        return "unknown", overhead
    low, high = row.get("needed_kl_ci95") or (None, None)
    interval = "" if low is None else f" [{low:.2f}, {'?' if high is None else f'{high:.2f}'}]"
    return f"{row['needed_kl']:.2f}{interval}", overhead


def limit_lines(report: Row) -> Iterator[str]:
    """Yield the overhead of PPO as text; of a snapshot if the report is that of `--step`."""
    policies, step = at(report, "limit.policies") or {}, at(report, "models.ppo.step")
    for name, row in policies.items():
        if (name == "ppo") if step is None else (row.get("step") == step):
            needed, overhead = _overhead(row)
            bought = f" for a score that {needed} nats could buy: overhead {overhead}"
            if overhead.startswith("none"):
                bought = f"; it has no KL overhead, since {row.get('no_overhead')}"
            yield f"PPO pays {row['kl']:z.2f} nats{bought}"


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
        return (kl if is_number(kl) else 0.0, abs(self.ppo["length"] - self.sft["length"]))


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


def quartile_examples(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Return the distinct pairs whose gain is nearest to each quartile; the lower index wins a tie."""
    gains, remaining, selected = sorted(pair.gain for pair in pairs), list(pairs), []
    for quantile in QUANTILES[: len(pairs)]:
        target = gains[round(quantile * (len(gains) - 1))]
        selected.append(min(remaining, key=lambda pair: (abs(pair.gain - target), pair.index)))
        remaining.remove(selected[-1])
    return selected


def columns_text(sample: Row) -> str:
    """Return the columns that judges read of a sample's row, such as the right answer, as text."""
    return ", ".join(f"{name}: {value}" for name, value in sample.get("columns", {}).items())


# Summary


def summary_sentence(report: Row) -> str | None:
    """Summarise PPO against SFT by the deciding judge and the reward model; None without a comparison."""
    rates = report.get("win_rate", {}).get("ppo_vs_sft")
    if not rates:
        return None
    judge = deciding_judge(rates)
    rate, result, kl = rates[judge], significance(rates[judge]), report["models"]["ppo"].get("kl")
    text = f"{RESULTS[result]} {with_interval(rate['value'], rate.get('ci95'))}"
    text += f" on {rate.get('n', report['n'])} {HELD_OUT}, judged by {judge}"
    text += "" if kl is None else f", at a KL of {kl:z.2f}"
    if result == "undecided":
        text += " (raise eval.n for narrower intervals)"
    equal = significance({"ci95": rate.get("length_controlled_ci95") or (1.0, 1.0)})
    if result == "better" and equal != "better":  # response length may explain the win
        controlled = with_interval(rate["length_controlled"], rate["length_controlled_ci95"])
        text += f"; length-controlled {controlled}, {equal}"
    if reason := rate.get("no_length_controlled"):
        text += f"; no length-controlled rate: {reason}"
    if is_own_reward(report, judge):
        return f"{text}: {OWN_REWARD}; add a judge in eval.yaml"
    if "reward" in rates and judge != "reward":
        own = rates["reward"]
        text += f"; by {reward_name(report)} {with_interval(own['value'], own.get('ci95'))}"
        if significance(own) == "better" and result == "worse":
            text += ": reward hacking (docs/rewards.md)"
        elif significance(own) == "better" and result == "undecided":
            text += f", which {judge} does not confirm"
    return text
