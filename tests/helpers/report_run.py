"""A run made of files alone, as its stages would leave them: tests of the page need nothing that was trained."""

import json
import re
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from markupsafe import Markup

from rlhf_cli.files import hash_files, list_files, write_checked_json
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import charts, frontier, page, svg
from rlhf_cli.report.svg import Drawing, Values
from rlhf_cli.runs.read import read_run
from rlhf_cli.runs.report import RecommendedPolicy, Report

DRAW_SVG = charts.draw_svg
SFT_LOSSES = [3.0, 2.5, 2.25, 2.125]
UPDATES = 20
CARD = {
    "n": 200,
    "accuracy": 0.75,
    "accuracy_ci95": [0.69, 0.80],
    "margin": 0.8,
    "margin_histogram": {"edges": [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0], "counts": [0, 3, 7, 40, 60, 50, 30, 10]},
    "ece": 0.05,
    "ece_by_chance": 0.07,
    "calibration": [
        {"from": 0.5, "to": 0.55, "n": 90, "confidence": 0.53, "accuracy": 0.6},
        {"from": 0.9, "to": 0.95, "n": 110, "confidence": 0.92, "accuracy": 0.87},
    ],
    "length_correlation": 0.1,
    "length_correlation_ci95": [0.02, 0.18],
    "adversarial": {"n": 128, "probes": {"empty": {"beats": 0.5, "ci95": [0.41, 0.59], "margin": 0.1}}},
    "flags": [],
}


def metrics(updates: int = UPDATES, **given: list[float]) -> list[dict[str, Any]]:
    """A healthy PPO's log; `given` replaces series, `_` for the `/` of their names."""
    series = {
        "objective/scores": [0.1 * step for step in range(updates)],
        "objective/kl_k1": [0.2 * step for step in range(updates)],
        "objective/response_length": [20.0 + step % 2 for step in range(updates)],
        "objective/eos_fraction": [1.0] * updates,
        "policy/entropy_avg": [1.0 - 0.01 * step for step in range(updates)],
        "val/explained_variance": [-0.5 + 0.06 * step for step in range(updates)],
        "policy/approxkl_avg": [0.001 * (1 + step % 3) for step in range(updates)],
        "tokens/real": [1000.0] * updates,
        "time/rollout_s": [1.0] * updates,
        "time/judge_s": [0.5] * updates,
        "time/update_s": [2.5] * updates,
    } | {name.replace("__", "/"): values for name, values in given.items()}
    count = min(map(len, series.values()))
    return [
        {"step": step + 1, **{name: values[step] for name, values in series.items()}, "time_s": 5.0 * (step + 1)}
        for step in range(count)
    ]


def answers(n: int = 16, **texts: str) -> list[dict[str, Any]]:
    """eval/samples.jsonl: PPO's gain by gold is index - 4, its KL index % 5; `texts` replace prompt or response."""
    rows = []
    for model in ("sft", "ppo"):
        for index in range(n):
            gain = index - 4 if model == "ppo" else 0
            row = {
                "index": index,
                "prompt": f"prompt {index}",
                "model": model,
                "mode": "sampled",
                "response": f"{model} says {index}",
                "ended": True,
                "length": 10 + index if model == "ppo" else 12,
                "kl": float(index % 5) if model == "ppo" else 0.0,
                "scores": {"reward": 0.5 * gain, "gold": float(gain)},
            }
            rows.append(row | texts)
    return rows


def win(value: float, n: int = 256) -> dict[str, Any]:
    equal = {"length_controlled": value - 0.02, "length_controlled_ci95": [value - 0.08, value + 0.04]}
    return {"value": value, "ci95": [value - 0.06, value + 0.06], "n": n, "ties": 3, **equal}


def model(reward: float, gold: float, kl: float) -> dict[str, Any]:
    judges = {
        name: {"mean": mean, "ci95": [mean - 0.1, mean + 0.1]} for name, mean in (("reward", reward), ("gold", gold))
    }
    content = {"reward_mean": reward, "kl": kl, "kl_ci95": [kl, kl], "response_length_mean": 21.5, "eos_fraction": 0.97}
    return {**content, "judges": judges}


def point(reward: float, gold: float, kl: float) -> dict[str, Any]:
    """A policy on the frontier, whose mean reward has another name."""
    content = model(reward, gold, kl)
    return {"reward": content.pop("reward_mean"), **content}


def report(gold: float = 0.63, reward: float = 0.95) -> dict[str, Any]:
    """eval/report.json with a frontier whose middle is recommended, and best of 4."""
    points = [(5, 1.5, 0.4), (10, 4.25, 0.8), (20, 9.75, 0.6)]
    rates = {"reward": win(reward), "gold": win(gold)}
    policy = {"judge": "gold", "rule": "the highest mean of gold", "policy": "ppo_step_000010", "step": 10}
    prompts = {"chosen_on": 128, "reported_on": 128}
    elsewhere = {**point(1.0, 0.78, 4.3), "win_rate": {"reward": win(0.9, 128), "gold": win(0.6, 128)}}
    return {
        "n": 256,
        "temperature": 1.0,
        "response_length": 53,
        "models": {"sft": model(0.0, 0.3, 0.0), "ppo": model(1.5, 0.6, 12.3)},
        "win_rate": {"ppo_vs_sft": rates},
        "greedy": {"models": {"sft": model(0.1, 0.31, 0.0)}, "win_rate": {"ppo_vs_sft": {"gold": win(0.7)}}},
        "best_of": [
            {"n": 4, "kl_bound": 0.64, **model(0.7, 0.5, 0.0), "win_rate_vs_sft": rates, "ppo_win_rate": rates}
        ],
        "frontier": [{"step": step, "win_rate": rates, **point(step / 10, gold, kl)} for step, kl, gold in points],
        "selected_step": 10,
        "selected": {**policy, **prompts, **elsewhere, "over_last": {"reward": win(0.4, 128), "gold": win(0.55, 128)}},
        "warnings": ["warning[R11]: politeness wins"],
    }


def with_policies() -> dict[str, Any]:
    """eval/report.json with a policy `dpo` and two policies between SFT and PPO too."""
    content = report()
    rates = content["win_rate"]["ppo_vs_sft"]
    content["models"]["dpo"] = model(0.9, 0.4, 4.0)
    content["win_rate"] |= {"dpo_vs_sft": rates, "ppo_vs_dpo": rates}
    points = [(0.3, 2.0, 0.5), (0.7, 5.0, 0.6)]
    content["interpolated"] = [{"share": x, "win_rate": rates, **point(x, gold, kl)} for x, kl, gold in points]
    return content


def with_limit(content: dict[str, Any]) -> dict[str, Any]:
    """eval/report.json with a limit too, whose scores are 1 below the means by `reward`."""

    def row(point: dict[str, Any], **keys: Any) -> dict[str, Any]:
        mean = point["judges"]["reward"]["mean"] - 1
        kl = point.get("kl_bound", point["kl"])
        return {"kl": kl, "score": mean, "score_ci95": [mean - 0.1, mean + 0.1], "no_overhead": "none", **keys}

    models, points = content["models"], [row(content["models"]["sft"]), {"kl": 1.0, "score": 0.5, "score_ci95": [0, 1]}]
    policies = {name: row(models[name]) for name in models if name != "sft"}
    policies |= {f"ppo_step_{each['step']:06d}": row(each, step=each["step"]) for each in content["frontier"]}
    policies |= {f"interpolated_{each['share']}": row(each) for each in content.get("interpolated", [])}
    best_of = [row(each, n=each["n"]) for each in content["best_of"]]
    sizes = {"samples": 64, "min_effective_samples": 10.0, "missing_eos_penalty": 1.0}
    return {**content, "limit": {**sizes, "points": points, "best_of": best_of, "policies": policies}}


def configs() -> dict[str, dict[str, Any]]:
    return {
        "sft": {"stage": "sft", "run": "..", "seed": 0, "sft": {"learning_rate": 1e-3, "num_train_epochs": 1.0}},
        "reward": {"stage": "reward", "run": "..", "seed": 0, "model": {"path": "../sft"}},
        "ppo": {"stage": "ppo", "run": "..", "seed": 0, "ppo": {"kl_coef": 0.2, "response_length": 53}},
        "eval": {"stage": "eval", "run": "..", "seed": 0, "judges": {"gold": "judges:gold"}},
    }


def write_run(folder: Path, *, evaluation: Mapping[str, Any] | None = None) -> Path:
    """A finished run of all four stages; `evaluation` is its report.json."""
    for stage, config in configs().items():
        begin(folder / stage, config)
    (folder / "data.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n\n{"text": "c"}\n')
    lines = [{"step": 10 * (i + 1), "loss": loss, "time_s": 30.0 * (i + 1)} for i, loss in enumerate(SFT_LOSSES)]
    write_jsonl(folder / "sft/metrics.jsonl", [*lines, {"step": 40, "eval_loss": 2.0, "time_s": 125.0}])
    write_jsonl(
        folder / "reward/metrics.jsonl", [{"step": s, "loss": 0.7 - s / 100, "accuracy": 0.5} for s in (10, 20)]
    )
    write_jsonl(folder / "ppo/metrics.jsonl", metrics())
    write_jsonl(folder / "ppo/samples.jsonl", [{"step": 20, "episode": 80, "index": 0, "prompt": "p", "response": "r"}])
    (folder / "eval/report.json").write_text(json.dumps(evaluation or report()))
    write_jsonl(folder / "eval/samples.jsonl", answers())
    finish(folder / "sft", step=40)
    finish(folder / "reward", metrics={key: CARD[key] for key in ("accuracy", "accuracy_ci95")}, card=CARD)
    finish(folder / "ppo", step=20, model_is="the last step", parents=("sft", "reward"))
    finish(folder / "eval", parents=("sft", "reward", "ppo"))
    return folder


def write_report(run: Path, contents: Mapping[str, Any]) -> Path:
    """Replace report.json of a finished evaluation."""
    (run / "eval/report.json").write_text(json.dumps(contents))
    finish(run / "eval", parents=("sft", "reward", "ppo"))
    return run


def begin(folder: Path, config: Mapping[str, Any]) -> None:
    """What a stage leaves before anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "identity.json").write_text(json.dumps({"stage": folder.name, "environment": {"device": "the CPU"}}))
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))


def finish(folder: Path, *, parents: tuple[str, ...] = (), **fields: Any) -> None:
    """The manifest of a stage's folder as it is."""
    content = {
        f"models.{name}": {"path": f"../{name}", "stage": name, "sha256": sha_of(folder.parent / name)}
        for name in parents
    }
    manifest = {
        "schema": 2,
        "stage": folder.name,
        "parents": content,
        "seed": 0,
        "versions": {"rlhf": "0.1.0", "torch": "2.13.0"},
        "files": hash_files(folder, [name for name in list_files(folder) if name != "manifest.json"]),
        "model_sha256": f"{folder.name}-model",
    }
    write_checked_json(folder / "manifest.json", manifest | fields)


def sha_of(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["model_sha256"])


def change(path: Path, **fields: Any) -> None:
    """Change keys of a JSON file; in a manifest, its own hash as well."""
    content = json.loads(path.read_text()) | fields
    if path.name == "manifest.json":
        content.pop("sha256", None)
        write_checked_json(path, content)
    else:
        path.write_text(json.dumps(content))


def draws_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(charts, "draw_svg", lambda *_: Drawing(Markup("<svg></svg>"), Values((), ())))
    patch.setattr(frontier, "render", lambda *_, **__: "<svg></svg>")


def draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(charts, "draw_svg", DRAW_SVG)
    patch.setattr(frontier, "render", svg.render)


@pytest.fixture(autouse=True, scope="session")
def empty_figures() -> Iterator[None]:
    """Leave figures empty: drawing them takes as long as a small evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        draws_nothing(patch)
        yield


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures, for the tests that look at them."""
    draws(monkeypatch)


def words(folder: Path) -> str:
    """Return the text of a run's page."""
    return text_of(page.of_run(read_run(folder)))


def text_of(html: str) -> str:
    for markup in (r"<(template|style|script|svg)\b.*?</\1>", r"<[^>]*>"):
        html = re.sub(markup, " ", html, flags=re.S)
    return " ".join(unescape(html).split())


def recommend(
    monkeypatch: pytest.MonkeyPatch, policy: str, *, step: int | None = None, share: float | None = None
) -> str:
    """Let every evaluation recommend a policy; return the line that says so."""
    chosen = RecommendedPolicy(judge="gold", rule="planned", policy=policy, step=step, share=share)
    found = Report(n=8, selected_step=step, selected=chosen)
    monkeypatch.setattr("rlhf_cli.runs.resolve._report", lambda parent: found)
    return f"recommended: {found.recommendation}; --step last takes the last policy\n"
