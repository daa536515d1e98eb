"""report.json and samples.jsonl out of judged answers: means and win rates with 95 % intervals."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_cli import statistics, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import EvalConfig
from rlhf_cli.inputs.eval import Sampling, Trail
from rlhf_cli.stages.eval import frontier, reward_cards
from rlhf_cli.stages.eval.answers import Answers
from rlhf_cli.stages.eval.numbers import describe, win_rates

PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))


def build(
    config: EvalConfig, judged: list[Answers], n: int, how: Sampling, parents: Mapping[str, Parent], trail: Trail
) -> dict[str, Any]:
    """The report as docs describe it; a key without a value is absent. Warns R10-R12 as the reward's card does."""
    by_mode = {
        mode: {a.model: a for a in judged if a.mode == mode and f"models.{a.model}" in parents}
        for mode in config.eval.modes
    }
    draws = [answers for answers in judged if answers.model.startswith("best_of")]
    found: dict[str, Any] = {"n": n, "temperature": how.temperature, "response_length": how.response_length}
    found |= _section(by_mode["sampled"], config.seed)
    if "greedy" in by_mode:
        found["greedy"] = _section(by_mode["greedy"], config.seed)
    if draws:
        found["best_of"] = [_best_of(answers, by_mode["sampled"], config.seed) for answers in draws]
    if trail.missing:
        found["no_frontier"] = trail.missing
    elif config.eval.frontier:
        points = [each for each in judged if each.step is not None and each.mode == "sampled"]
        found |= frontier.section(points, by_mode["sampled"]["sft"], config.eval.selection, config.seed)
    found |= reward_cards.section(parents)
    return found | {"warnings": terminal.warnings_said()}


def _section(answers: dict[str, Answers], seed: int) -> dict[str, Any]:
    pairs = [(one, other) for one, other in PAIRS if one in answers and other in answers]
    return {
        "models": {name: describe(found, seed) for name, found in answers.items()},
        "win_rate": {f"{one}_vs_{other}": win_rates(answers[one], answers[other], seed) for one, other in pairs},
    }


def _best_of(answers: Answers, sampled: dict[str, Answers], seed: int) -> dict[str, Any]:
    n = int(answers.model.removeprefix("best_of_"))
    found = {"n": n, "kl_bound": statistics.best_of_n_kl(n), **describe(answers, seed)}
    if "sft" in sampled:
        found["win_rate_vs_sft"] = win_rates(answers, sampled["sft"], seed)
    if "ppo" in sampled:
        found["ppo_win_rate"] = win_rates(sampled["ppo"], answers, seed)
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
