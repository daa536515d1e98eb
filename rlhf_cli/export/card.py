"""The README of an exported folder: what the model is, what it came from, what is known of it, and what is not."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_cli import __version__
from rlhf_cli.checkpoints import FOREIGN, Chosen, read_manifest
from rlhf_cli.checkpoints.adapters import is_hub_id, read_adapter
from rlhf_cli.models import cards
from rlhf_cli.statistics import with_interval

LIBRARIES = ("rlhf", "torch", "transformers", "trl", "peft", "bitsandbytes", "tokenizers", "safetensors")
Manifest = Mapping[str, Any]
Made = tuple[Path, Manifest]  # a stage's folder, and its manifest


def write(chosen: Chosen, model: Any, dtype: str) -> str:
    """The card of a model that is about to be written in a number format."""
    chain = list(_chain(chosen.model.path, chosen.model.manifest))
    blocks = [_head(chosen, model, chain), *_about(chosen, dtype), _use(model)]
    blocks += ["## How it was made", *(_stage(manifest, chosen) for _, manifest in chain), _versions(chain[0][1])]
    blocks += [*_measured(chosen), *_evaluated(chosen), "## Limits", "\n".join(f"- {line}" for line in _limits(chosen))]
    return "\n\n".join(blocks) + "\n"


def _head(chosen: Chosen, model: Any, chain: list[Made]) -> str:
    """What the hub reads, and the title."""
    task = "text-generation" if model.can_generate() else "text-classification"
    roots = [told["path"] for _, manifest in chain for told in _parents(manifest).values() if told["stage"] == FOREIGN]
    base = [f"base_model: {root}" for root in roots if is_hub_id(root)][:1]
    lines = ["library_name: transformers", f"pipeline_tag: {task}", *base, f"tags: [rlhf-cli, {chosen.model.stage}]"]
    titles = {"ppo": "A policy, trained by PPO", "sft": "A fine-tuned language model", "reward": "A reward model"}
    return "---\n" + "\n".join(lines) + f"\n---\n\n# {titles[chosen.model.stage]}"


def _about(chosen: Chosen, dtype: str) -> list[str]:
    """What its stage says of it, and what the export did."""
    told = read_adapter(chosen.model.model)
    text = f"Exported by rlhf-cli {__version__}; its weights are {dtype}."
    if told:
        what = "adapters" if not told.get("use_dora") else "adapters (DoRA)"
        text += f" It was trained as {what} of rank {told['r']}, which are added into the weights of their base here."
    return [*cards.told_in(chosen.model.model), text]


def _use(model: Any) -> str:
    kind = "CausalLM" if model.can_generate() else "SequenceClassification"
    lines = [
        f"from transformers import AutoModelFor{kind}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = AutoModelFor{kind}.from_pretrained("FOLDER")',
    ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _chain(folder: Path, manifest: Manifest) -> Iterator[Made]:
    """The stages that a model came from, itself first, as far as they are still what they were then."""
    seen: set[str] = set()
    waiting: list[Made] = [(folder, manifest)]
    while waiting:
        folder, manifest = waiting.pop(0)
        if manifest["model_sha256"] in seen:
            continue
        seen.add(manifest["model_sha256"])
        yield folder, manifest
        for told in _parents(manifest).values():
            above, problem = read_manifest(folder / told["path"]) if told["stage"] != FOREIGN else ({}, "not ours")
            if not problem and above.get("model_sha256") == told["sha256"]:
                waiting.append((folder / told["path"], above))


def _parents(manifest: Manifest) -> dict[str, Any]:
    return dict(manifest.get("parents", {}))


def _stage(manifest: Manifest, chosen: Chosen) -> str:
    """A stage with the hashes of all that went into it. A file's or a folder's place is of no use to a reader."""
    lines = [f"**{manifest['stage']}**, seed {manifest['seed']}"]
    on_the_way = manifest is chosen.model.manifest and not chosen.last
    model = f"model at its end, update {manifest['step']}" if on_the_way else "model"
    hashes = {model: manifest["model_sha256"], "config": manifest["config_sha256"]}
    for key, told in _parents(manifest).items():
        hashes[f"{key}, {_name(told)}"] = told["sha256"]
    hashes |= manifest["data"]
    lines += [f"- {name}: sha256 `{sha256}`" for name, sha256 in hashes.items()]
    lines += [f"- code: git `{manifest['git']}`"] if "git" in manifest else []
    return "\n".join(lines[:1]) + "\n\n" + "\n".join(lines[1:])


def _name(told: Mapping[str, Any]) -> str:
    if told["stage"] != FOREIGN:
        return f"the {told['stage']} stage"
    path = told["path"]
    name = path if is_hub_id(path) else PurePosixPath(path).name
    return f"{name} at {told['revision']}" if "revision" in told else name


def _versions(manifest: Manifest) -> str:
    found = manifest["versions"]
    return "Trained with " + ", ".join(f"{name} {found[name]}" for name in LIBRARIES if name in found) + "."


def _measured(chosen: Chosen) -> list[str]:
    """The headline numbers of the stage. They are of what it left at its end, and of no policy on the way."""
    metrics = chosen.model.manifest.get("metrics", {})
    rows = [
        (name, str(value) if isinstance(value, int) else with_interval(value, metrics.get(f"{name}_ci95")))
        for name, value in metrics.items()
        if chosen.last and isinstance(value, int | float)
    ]
    return ["## Measured at the end of its training", _table(("", "value"), rows)] if rows else []


def _evaluated(chosen: Chosen) -> list[str]:
    """What the run's evaluation says of it; nothing where it was not in it."""
    report = chosen.report or {}
    told, wins = _section(chosen)
    if not told:
        return []
    rows = [(f"{name}, mean score", with_interval(each["mean"], each["ci95"])) for name, each in told["judges"].items()]
    if "kl" in told:
        rows.append(("KL from the SFT model, nats an answer", with_interval(told["kl"], told["kl_ci95"])))
    rows.append(("length of an answer, tokens", f"{told['response_length_mean']:.1f}"))
    rows.append(("answers that end by themselves", f"{told['eos_fraction']:.0%}"))
    for other, by_judge in wins.items():
        for judge, win in by_judge.items():
            rows.append((f"win rate over {other}, by {judge}", with_interval(win["value"], win["ci95"])))
            rows.append((f"the same at equal length, by {judge}", with_interval(win["length_controlled"], None)))
    how = f"sampled at temperature {report['temperature']:g}, 95 % intervals in brackets"
    blocks = ["## Evaluated", f"{report['n']} held-out prompts, {how}.", _table(("", "value"), rows)]
    if chosen.step is not None and chosen.step == report.get("selected_step"):
        blocks.append(_picked(report["selected"]))
    return blocks


def _picked(told: Mapping[str, Any]) -> str:
    """That a policy was selected, and what that is worth."""
    text = f"It was picked on these prompts, by {told['rule']}: its mean flatters it by some {told['optimism']:.3f}."
    noise = ", ".join(map(str, told["within_noise"]))
    return text + (f" The policies after updates {noise} could not be told apart from it." if noise else "")


def _section(chosen: Chosen) -> tuple[dict[str, Any], dict[str, Any]]:
    """(numbers, win rates by the other model) of the exported model in the report."""
    report, stage = chosen.report or {}, chosen.model.stage
    if not chosen.last:
        point: dict[str, Any] = next((each for each in report.get("frontier", []) if each["step"] == chosen.step), {})
        return point, {"SFT": point["win_rate"]} if point else {}
    wins = {pair: rates for pair, rates in report.get("win_rate", {}).items() if pair.startswith(f"{stage}_vs_")}
    return report.get("models", {}).get(stage, {}), {_called(pair): rates for pair, rates in wins.items()}


def _called(pair: str) -> str:
    other = pair.partition("_vs_")[2]
    return {"sft": "SFT", "base": "the base model"}.get(other, other)


def _limits(chosen: Chosen) -> Iterator[str]:
    manifest, stage = chosen.model.manifest, chosen.model.stage
    if stage == "reward":
        yield "Scores compare answers to one prompt; between prompts, or far from its data, they mean little."
        for flag in manifest.get("card", {}).get("flags", []):
            yield f"{flag['code']}: {flag['text']}"
    elif not _section(chosen)[0]:
        yield "No evaluation of this very model was found beside it: nothing is known of the quality of its answers."
    else:
        yield "The numbers above are of those prompts and those judges; other prompts may fare otherwise."
    if stage != "reward":
        yield "No work was done on safety. It may say what is wrong or harmful."
    if stage == "ppo":
        yield "PPO raises what its reward likes, which is not the same as what is good: read answers of it before use."
        if "stopped" in manifest:
            yield f"The training was stopped: {manifest['stopped']}. This is its policy of step {chosen.step}."
    yield "The licences of its base model and of its data hold for it too; this card does not know them."


def _table(columns: tuple[str, ...], rows: list[tuple[str, str]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
