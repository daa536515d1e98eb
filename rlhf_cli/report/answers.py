"""The answers of an evaluation on the page: the first ones as elements, all of them compressed for the script."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.evaluation.report_text import model_label
from rlhf_cli.evaluation.sample_pairs import ResponsePair, Sample, deciding_judge_of, response_pairs
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import count, visible

SHOWN = 25  # pairs at each end, without the script
MAX_VALUES = 30  # of a column by which answers can be filtered
MODES = {"sampled": "", "greedy": ", near-greedy"}
Policy = tuple[str, str]  # model and mode


@dataclass(frozen=True)
class Answers:
    """All rows of samples.jsonl, by prompt."""

    rows: Sequence[Sample]
    pairs: Sequence[ResponsePair]  # of SFT and PPO, the largest gain first
    judge: str | None  # that decides
    judges: Sequence[str]
    policies: Sequence[Policy]  # in the order of training: SFT, snapshots, PPO, others
    names: Sequence[str]  # of the policies
    right: int  # place of the policy that is shown beside the first one
    open: int = 5  # pairs of a group; the others are folded

    @property
    def groups(self) -> list[tuple[str, str, Sequence[ResponsePair]]]:
        """Return (order, title, pairs) of those that need no script; each pair once."""
        if len(self.pairs) <= 2 * SHOWN:
            gained = [pair for pair in self.pairs if pair.gain > 0]
            others = self.pairs[len(gained) :]
        else:
            gained = list(self.pairs[:SHOWN])
            others = self.pairs[-SHOWN:]
        name = self.names[self.right] if self.names else ""
        lowest = f"Largest losses of {name}" if others and others[-1].gain < 0 else f"Smallest gains of {name}"
        groups: list[tuple[str, str, Sequence[ResponsePair]]] = [
            ("gain", f"Largest gains of {name}", gained),
            ("loss", lowest, others[::-1]),
        ]
        return [group for group in groups if group[2]]

    @property
    def about(self) -> str:
        """Return how many there are."""
        prompts = {row["index"] for row in self.rows}
        return f"{count(len(prompts), 'prompt')}, {count(len(self.rows), 'answer')}"

    @property
    def has_tokens(self) -> bool:
        return any(row.get("tokens") for row in self.rows)

    @property
    def columns(self) -> dict[str, list[str]]:
        """Return the values of each column that has few, as text."""
        by_name: dict[str, dict[str, None]] = {}  # each value once, in order
        for row in self.rows:
            for name, value in row.get("columns", {}).items():
                values = by_name.setdefault(name, {})
                values[text_of(value)] = None
        return {name: list(values) for name, values in by_name.items() if len(values) <= MAX_VALUES}

    def contents(self) -> dict[str, Any]:
        """Return what the script shows: texts without secrets and invisible characters."""
        prompts: dict[int, dict[str, Any]] = {}
        places = {policy: place for place, policy in enumerate(self.policies)}
        for row in self.rows:
            prompt = prompts.get(row["index"])
            if prompt is None:
                columns = {visible(name): visible(text_of(value)) for name, value in row.get("columns", {}).items()}
                prompt = {"index": row["index"], "prompt": visible(row["prompt"]), "columns": columns}
                prompt["answers"] = [None] * len(places)
                prompts[row["index"]] = prompt
            prompt["answers"][places[row["model"], row["mode"]]] = self._answer(row)

        return {
            "judges": [visible(judge) for judge in self.judges],
            "policies": [visible(name) for name in self.names],
            "prompts": [prompts[index] for index in sorted(prompts)],
        }

    def _answer(self, row: Sample) -> dict[str, Any]:
        """Return an answer as the script reads it; numbers as the page shows them."""
        kl = row.get("kl")
        answer = {
            "text": visible(row["response"]),
            "ended": row["ended"],
            "length": row["length"],
            "kl": round(kl, 4) if is_number(kl) else None,
            "scores": [_rounded(row["scores"].get(judge)) for judge in self.judges],
        }
        tokens = row.get("tokens")
        if tokens:
            texts = [visible(token) for token in tokens["text"]]
            answer["tokens"] = {"text": texts, "kl": [_rounded(value) for value in tokens["kl"]]}
        return answer


def read_answers(rows: Sequence[Sample]) -> Answers:
    """Return the answers of samples.jsonl."""
    judges: dict[str, None] = {}
    policies: dict[Policy, None] = {}
    for row in rows:
        judges.update(dict.fromkeys(row["scores"]))
        policies[row["model"], row["mode"]] = None

    judge = deciding_judge_of(rows)
    pairs = sorted(response_pairs(rows), key=lambda pair: (-pair.gain, pair.index))
    ordered = sorted(policies, key=_order)
    models = [model for model, _ in ordered]
    return Answers(
        rows=rows,
        pairs=pairs,
        judge=judge,
        judges=sorted(judges, key=lambda name: name != judge),
        policies=ordered,
        names=[policy_name(model, mode) for model, mode in ordered],
        right=models.index("ppo") if "ppo" in models else len(models) - 1,
    )


def _order(policy: Policy) -> tuple[bool, int, str]:
    """Return the place of a policy: SFT, snapshots by step, PPO, then the others by name; near-greedy ones last."""
    model, mode = policy
    places = {"sft": 0, "ppo": 2}
    place = 1 if model.startswith("ppo_step_") else places.get(model, 3)
    return mode == "greedy", place, model


def policy_name(model: str, mode: str) -> str:
    """Return the display name of a row of samples.jsonl: `PPO, update 10`."""
    if model.startswith("ppo_step_"):
        name = f"PPO, update {int(model.removeprefix('ppo_step_'))}"
    elif model.startswith("best_of_"):
        name = f"SFT, best of {model.removeprefix('best_of_')}"
    else:
        name = model_label(model)
    return name + MODES.get(mode, f", {mode}")


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rounded(value: Any) -> float | None:
    """Return a number in few digits, enough that different scores stay different."""
    return float(f"{value:.7g}") if is_number(value) else None


def packed(contents: Mapping[str, Any]) -> str:
    """Return a JSON object compressed, as text that needs no escaping; equal contents give equal text."""
    data = json.dumps(contents, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()
