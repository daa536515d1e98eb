"""`rlhf eval`: have the policies answer held-out prompts, score the answers, report."""

import json
import math
import operator
import re
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints, data, rows, terminal, verdict
from rlhf_cli.config import EvalConfig, Options
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.models import tokenizers
from rlhf_cli.stages.eval import answers, report
from rlhf_cli.stages.eval.answers import Sampling

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


def run(config: EvalConfig, options: Options) -> None:
    """Leave RUN/eval with report.json and samples.jsonl, print the verdict, and hold it against `eval.require` (R06)."""
    parents = checkpoints.open_parents(config)
    identity = checkpoints.identity(config, parents, config.data_files())
    if checkpoints.begin(config, identity, fresh=options.fresh) == "finished":
        terminal.say(f"eval     finished already: {checkpoints.shown(config.folder)}")
        found = json.loads((config.folder / "report.json").read_text(encoding="utf-8"))
    else:
        found = _evaluate(config, options, parents)
        fields = {"metrics": {"win_rate": found["win_rate"], "models": found["models"]}}
        checkpoints.finish(config, identity, parents=parents, fields=fields)
    verdict.print_verdict(config.folder)
    check_requirements(config, found)


def _evaluate(config: EvalConfig, options: Options, parents: dict[str, checkpoints.Parent]) -> dict[str, Any]:
    """Write samples.jsonl and report.json; returns the report."""
    tokenizer = tokenizers.load_tokenizer(parents["models.sft"].model, trust_remote_code=options.trust_remote_code)
    prompts = data.prompt_rows(
        Path(config.data.prompts), tokenizer, columns=config.data.columns, max_length=None, where=config.where("data.prompts")
    )[: config.eval.n]
    if len(prompts) < config.eval.n:
        terminal.say(f"eval     {len(prompts)} held-out prompts (eval.n asks for {config.eval.n})")
    sampling = answers.sampling(config, parents["models.ppo"], tokenizer)
    judged = answers.collect(config, options, parents, tokenizer, prompts, sampling)
    found = report.build(config, judged, len(prompts), sampling, parents.get("models.reward"))
    rows.write_jsonl(config.folder / "samples.jsonl", report.sample_rows(judged))
    checkpoints.write_json(config.folder / "report.json", found)
    return found


def check_requirements(config: EvalConfig, found: dict[str, Any]) -> None:
    """Raise R06, a problem for each line of `eval.require` that the report does not meet."""
    problems = []
    for key, condition in config.eval.require.items():
        where, value = config.where("eval.require"), _lookup(found, key)
        match = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(\S+)\s*", condition)
        if match is None or not _is_number(match[2]):
            problems.append(Problem("C05", f"eval.require: {key}: {condition!r} is no condition", where, 'write e.g. ">= 0.6"'))
        elif value is None:
            known = ", ".join(found) if isinstance(found, dict) else ""
            problems.append(Problem("R06", f"{key} is no number of the report", where, f"report.json holds {known}"))
        elif not COMPARISONS[match[1]](value, float(match[2])):
            problems.append(Problem("R06", f"{key} is {value:.4g}, required {condition.strip()}", where))
    if problems:
        raise RLHFError.of(problems)


def _lookup(found: Any, key: str) -> float | None:
    """The number at a dotted key of the report, or None."""
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
