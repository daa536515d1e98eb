"""report.json and samples.jsonl out of judged answers: means and win rates with 95 % intervals."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_cli import statistics, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import EvalConfig
from rlhf_cli.inputs.eval import Sampling
from rlhf_cli.stages.eval import reward_cards
from rlhf_cli.stages.eval.answers import Answers

PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))


def build(
    config: EvalConfig, judged: list[Answers], n: int, how: Sampling, parents: Mapping[str, Parent]
) -> dict[str, Any]:
    """The report as docs describe it; a key without a value is absent. Warns R10-R12 as the reward's card does."""
    by_mode = {
        mode: {a.model: a for a in judged if a.mode == mode and not a.model.startswith("best_of")}
        for mode in config.eval.modes
    }
    draws = [answers for answers in judged if answers.model.startswith("best_of")]
    found: dict[str, Any] = {"n": n, "temperature": how.temperature, "response_length": how.response_length}
    found |= _section(by_mode["sampled"], config.seed)
    if "greedy" in by_mode:
        found["greedy"] = _section(by_mode["greedy"], config.seed)
    if draws:
        found["best_of"] = [_best_of(answers, by_mode["sampled"], config.seed) for answers in draws]
    found |= reward_cards.section(parents)
    return found | {"warnings": terminal.warnings_said()}


def _section(answers: dict[str, Answers], seed: int) -> dict[str, Any]:
    pairs = [(one, other) for one, other in PAIRS if one in answers and other in answers]
    return {
        "models": {name: describe(found, seed) for name, found in answers.items()},
        "win_rate": {f"{one}_vs_{other}": win_rates(answers[one], answers[other]) for one, other in pairs},
    }


def describe(answers: Answers, seed: int) -> dict[str, Any]:
    """One model's means over prompts."""
    rows, judges = len(answers.responses), {}
    for judge, scores in answers.scores.items():
        judges[judge] = {"mean": _mean(scores), "ci95": list(statistics.bootstrap_mean(scores, seed=seed))}
    found: dict[str, Any] = {}
    if "reward" in judges:
        found |= {"reward_mean": judges["reward"]["mean"], "reward_ci95": judges["reward"]["ci95"]}
    if answers.kl is not None:
        found |= {"kl": _mean(answers.kl), "kl_ci95": list(statistics.bootstrap_mean(answers.kl, seed=seed))}
    return found | {
        "response_length_mean": _mean(answers.lengths),
        "eos_fraction": sum(answers.ended) / rows,
        "distinct_fraction": len(set(answers.responses)) / rows,
        "judges": judges,
    }


def win_rates(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """Per judge, how often our response to a prompt scores above theirs to the same one; a tie counts half."""
    return {judge: statistics.win_rate(ours.scores[judge], theirs.scores[judge]) for judge in ours.scores}


def _best_of(answers: Answers, sampled: dict[str, Answers], seed: int) -> dict[str, Any]:
    n = int(answers.model.removeprefix("best_of_"))
    found = {"n": n, "kl_bound": statistics.best_of_n_kl(n), **describe(answers, seed)}
    if "sft" in sampled:
        found["win_rate_vs_sft"] = win_rates(answers, sampled["sft"])
    if "ppo" in sampled:
        found["ppo_win_rate"] = win_rates(sampled["ppo"], answers)
    return found


def sample_rows(judged: list[Answers]) -> Iterator[dict[str, Any]]:
    """Every response, a row each."""
    for answers in judged:
        for row, response in enumerate(answers.responses):
            kl = {"kl": answers.kl[row]} if answers.kl is not None else {}
            yield {
                "index": row,
                "prompt": answers.prompts[row],
                "model": answers.model,
                "mode": answers.mode,
                "response": response,
                "ended": answers.ended[row],
                "length": answers.lengths[row],
                **kl,
                "scores": {judge: scores[row] for judge, scores in answers.scores.items()},
            }


def _mean(values: list) -> float:
    return sum(values) / len(values)
