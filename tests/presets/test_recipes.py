"""The recipes of configs/ with their own hub ids: tiny models of the same families and small datasets in the Hub cache.

Only sizes are overridden.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import families
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import run_cli
from ppo_folder import lines, must_succeed
from transformers import AutoTokenizer

from rlhf_cli import config
from rlhf_cli.commands.init import presets
from rlhf_cli.models import build

RECIPES = ("tldr", "hh", "sentiment", "instruct")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
THINGS = ("sun", "moon", "star", "cloud", "rain", "snow", "wind", "storm", "river", "lake", "hill", "wood")
STEPS = ("max_steps=2", "per_device_train_batch_size=4", "gradient_accumulation_steps=1")
SIZES = {
    "sft": [f"sft.{option}" for option in STEPS],
    "reward": [f"reward.{option}" for option in (*STEPS, "normalize_samples=4")],
    "ppo": ["ppo.per_device_train_batch_size=4", "ppo.gradient_accumulation_steps=1", "output.snapshots=0"],
    "eval": ["eval.n=4", "eval.best_of=[2]", "eval.interpolate=[]", "eval.per_device_batch_size=4"],
}
SHORT = {"ppo": ["ppo.total_episodes=8", "ppo.response_length=8"]}
Rows = list[dict[str, Any]]


class Hub:
    """A Hub cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _snapshot(self, kind: str, name: str) -> Path:
        stored = self.folder / f"{kind}--{name.replace('/', '--')}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs/main").write_text(COMMIT)
        (stored / "snapshots" / COMMIT).mkdir(parents=True)
        return stored / "snapshots" / COMMIT

    def model(self, name: str, write: Callable[..., None], *arguments: Any) -> None:
        write(self._snapshot("models", name), *arguments)

    def dataset(self, name: str, row: Callable[[str, int], dict[str, Any]], *splits: str, inside: str = "data") -> Rows:
        """Write a dataset as `push_to_hub` does, held-out rows in all splits but train; return the training rows."""
        folder = self._snapshot("datasets", name)
        (folder / "README.md").write_text("---\ntags:\n- trl\n---\n")
        (folder / inside).mkdir()
        rows = [row(thing, number) for number in range(3) for thing in THINGS[:8]]
        for split in ("train", *splits):
            content = rows if split == "train" else [row(thing, 50) for thing in THINGS[8:]]
            path = folder / inside / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        return rows


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "rlhf"))
    return Hub(tmp_path / "cache")


def rlhf(*arguments: object) -> Any:
    return must_succeed(run_cli.rlhf(*arguments))


def run_all(name: str, folder: Path, overrides: Mapping[str, list[str]]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run `rlhf init` and every stage of the recipe; return the manifests and stderr.

    On every family the policy starts at the reference, and the first ratios are 1.
    """
    rlhf("init", name, folder)
    manifests, stderr = {}, ""
    for stage in ("sft", "reward", "ppo", "eval"):
        path = folder / f"{stage}.yaml"
        if path.exists():
            changes = [part for line in SIZES[stage] + overrides.get(stage, []) for part in ("-s", line)]
            stderr += rlhf(stage, "-c", path, *changes).stderr
            manifests[stage] = json.loads((folder / stage / "manifest.json").read_text())
    first = lines(folder / "ppo/metrics.jsonl")[0]
    assert first["policy/first_ratio_error"] == first["objective/kl"] == 0
    report = json.loads((folder / "eval/report.json").read_text())
    assert {"sft", "ppo"} <= report["models"].keys() and report["best_of"][0]["n"] == 2
    assert all("reward_mean" in model for model in report["models"].values())
    return manifests, stderr


def eval_prompts(folder: Path) -> set[str]:
    return {row["prompt"] for row in lines(folder / "eval/samples.jsonl")}


@pytest.mark.parametrize("name", RECIPES)
def test_every_file_of_a_recipe_is_a_config_that_names_its_requirements(name: str, tmp_path: Path) -> None:
    result = rlhf("init", name, tmp_path / "run", "--seed", "7")
    assert "hf download" in result.stdout
    stages = [stage for stage in config.CONFIGS if (tmp_path / f"run/{stage}.yaml").exists()]
    assert {"ppo", "eval"} <= set(stages)
    for stage in stages:
        loaded = config.load(stage, tmp_path / f"run/{stage}.yaml")
        assert loaded.seed == 7 and all("/" in source.name for source in loaded.sources().values())
    header = (tmp_path / f"run/{stages[0]}.yaml").read_text().partition("\nseed:")[0]
    assert all(word in header for word in ("# Before:", "# Run:", "# Needs:", "# Expect:", "# Tested:"))


BASES = {"tldr": "EleutherAI/pythia-1b-deduped", "hh": "EleutherAI/pythia-1.4b-deduped"}
BASES |= {"sentiment": "openai-community/gpt2", "instruct": "Qwen/Qwen2.5-0.5B-Instruct"}
CHANGED = {"per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size"}
CHANGED |= {"per_device_eval_batch_size", "per_device_batch_size", "gradient_checkpointing", "optim", "offload"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "gpu", "memory", "adapters"),
    [
        ("tldr", ("h100",), "the preset as it is", None),
        ("tldr", ("24",), "whole weights, gradient checkpointing, 8-bit AdamW and policy_head in PPO", None),
        ("tldr", ("h100", "--adapters", "lora"), "LoRA adapters on one base", "lora"),
        ("hh", ("5.6",), "LoRA adapters on one 4-bit base", "qlora"),
        ("sentiment", ("4",), "", None),
        ("instruct", ("8",), "LoRA adapters on one ", "lora"),
        ("instruct", ("h100", "--adapters", "none"), "whole weights", None),
    ],
)
def test_a_recipe_is_fitted_to_a_gpu(
    name: str, gpu: tuple[str, ...], memory: str, adapters: str | None, hub: Hub, tmp_path: Path
) -> None:
    """By `rlhf plan` every stage fits, with the batches of the recipe; adapters learn ten times as fast."""

    def write(folder: Path) -> None:
        families.write_causal(folder, {"sentiment": "gpt2", "instruct": "qwen2"}.get(name, "pythia"), ["a b"])
        (folder / "model.safetensors").unlink()
        sizes = build.new_config(presets.PRESETS[name].base_config or {})
        sizes.architectures = ["AnyForCausalLM"]
        sizes.save_pretrained(folder)

    hub.model(BASES[name], write)
    run, prompt = tmp_path / "run", presets.PRESETS[name].prompt
    (line,) = [each for each in rlhf("init", name, run, "--gpu", *gpu).stdout.splitlines() if "memory: " in each]
    assert line.startswith(f"memory: {memory}") and f"{gpu[0]} " in line
    sets = ["ppo.total_episodes=8"] + [f"{s}.max_steps=1" for s in ("sft", "reward") if (run / f"{s}.yaml").exists()]
    sets += ["ppo.num_train_epochs=null"] * (name == "sentiment")
    command = ("plan", run, "--gpu", gpu[0], "--flops", "1e12", "--prompt-length", prompt, "--json", *sets)
    stages = json.loads(rlhf(*command).stdout)["stages"]
    assert all(stage["fits"] for stage in stages.values())
    source = Path(__file__).parents[2] / "configs" / name
    for stage in stages:
        before, after = (config.load(stage, each / f"{stage}.yaml").model_dump() for each in (source, run))
        was, now = before[stage], after[stage]
        different = {key for key in was if was[key] != now[key]}
        assert different <= CHANGED | {"learning_rate"}, different
        if stage == "eval":
            continue
        section = after["models" if stage == "ppo" else "model"]
        kinds = [each[("models" if stage == "ppo" else "model")]["adapters"] for each in (before, after)]
        assert (section["adapters"] or {}).get("kind") == adapters
        factor = 10 ** (bool(kinds[1]) - bool(kinds[0]))
        assert now["learning_rate"] == pytest.approx(factor * was["learning_rate"])
        batches = [each["per_device_train_batch_size"] * each["gradient_accumulation_steps"] for each in (was, now)]
        assert batches[0] == batches[1]


@pytest.mark.full
def test_tldr_on_a_model_like_pythia(hub: Hub, tmp_path: Path) -> None:
    def post(thing: str, number: int) -> str:
        return f"SUBREDDIT: r/{thing}\n\nTITLE: The {thing}\n\nPOST: I saw the {thing} {number} times.\n\nTL;DR:"

    def pair(thing: str, number: int) -> dict[str, str]:
        chosen = "" if (thing, number) == ("sun", 0) else f" Saw the {thing}."
        return {"prompt": post(thing, number), "chosen": chosen, "rejected": f" Saw {number}"}

    rows = hub.dataset(
        "trl-lib/tldr", lambda t, n: {"prompt": post(t, n), "completion": f" Saw the {t}."}, "validation", "test"
    )
    hub.dataset("trl-lib/tldr-preference", pair, "validation")
    texts = [row["prompt"] for row in rows]
    hub.model("EleutherAI/pythia-1b-deduped", families.write_causal, "pythia", texts)
    manifests, stderr = run_all("tldr", tmp_path / "run", SHORT)
    assert "warning[T02]" in stderr and '"chosen" is empty' in stderr
    special = manifests["ppo"]["special_tokens"]
    assert manifests["reward"]["special_tokens"] == special and special["stop"] == special["eos"] != special["pad"]
    assert eval_prompts(tmp_path / "run") == {post(thing, 50) for thing in THINGS[8:]}
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    assert "base" in report["models"] and report["reward_model"]["accuracy"] >= 0


@pytest.mark.full
def test_hh_on_a_model_without_a_chat_template(hub: Hub, tmp_path: Path) -> None:
    def prompt(thing: str, number: int) -> str:
        turns = f"\n\nHuman: What is a {thing}?\n\nAssistant: It is number {number}."
        return f"{turns}\n\nHuman: And what else?\n\nAssistant:"

    def dialogue(thing: str, number: int) -> dict[str, str]:
        text = prompt(thing, number)
        return {"chosen": f"{text} A {thing} is good.", "rejected": f"{text} No idea."}

    texts = [row["chosen"] for row in hub.dataset("Anthropic/hh-rlhf", dialogue, "test", inside="helpful-base")]
    hub.model("EleutherAI/pythia-1.4b-deduped", families.write_causal, "pythia", texts)
    run = tmp_path / "run"
    manifests, _ = run_all("hh", run, SHORT)
    assert manifests["sft"]["template_sha256"] is None
    tokenizer, probe = AutoTokenizer.from_pretrained(run / "reward/model"), manifests["reward"]["probes"][0]
    texts = [tokenizer.decode(probe[key]) for key in ("prompt_ids", "response_ids")]
    assert texts == [prompt(THINGS[8], 50), f" A {THINGS[8]} is good.<|endoftext|>"]
    assert eval_prompts(run) == {prompt(thing, 50) for thing in THINGS[8:]}


@pytest.mark.full
def test_sentiment_without_any_reward_model(hub: Hub, tmp_path: Path) -> None:
    def review(thing: str, number: int) -> dict[str, Any]:
        return {"text": f"I saw a {thing} film {number} times, and it was very good indeed.", "label": number % 2}

    # The card names the split `unsupervised`, which no file name rule of `datasets` finds.
    rows = hub.dataset("stanfordnlp/imdb", review, "test", "unsupervised", inside="plain_text")
    files = "".join(f"\n  - split: {s}\n    path: plain_text/{s}-*" for s in ("train", "test", "unsupervised"))
    (card,) = hub.folder.glob("datasets--*/snapshots/*/README.md")
    card.write_text(f"---\nconfigs:\n- config_name: plain_text\n  data_files:{files}\n  default: true\n---\n")
    texts, run = [row["text"] for row in rows], tmp_path / "run"
    hub.model("openai-community/gpt2", families.write_causal, "gpt2", texts)
    hub.model("lvwerra/distilbert-imdb", families.write_sentiment_classifier, texts)
    manifests, _ = run_all("sentiment", run, {"sft": ["sft.max_length=64"], "ppo": ["ppo.num_train_epochs=0.5"]})
    assert manifests["ppo"]["parents"].keys() == {"models.sft"} and not (run / "reward").exists()
    assert len(lines(run / "ppo/metrics.jsonl")) == 3  # half of 24 reviews, 4 at a time
    samples = lines(run / "ppo/samples.jsonl")
    assert {row["length"] for row in samples} <= set(range(4, 16))  # the recipe's response lengths
    assert all(row["prompt"].startswith("I saw") and 2 <= len(row["prompt"].split()) <= 6 for row in samples)
    assert {"reward"} == lines(run / "eval/samples.jsonl")[0]["scores"].keys()


@pytest.mark.full
def test_functions_needs_neither_a_hub_nor_a_reward_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    manifests, _ = run_all("functions", run, {"sft": ["sft.max_steps=4"], "ppo": ["ppo.total_episodes=16"]})
    assert manifests["ppo"]["parents"].keys() == {"models.sft"} and not (run / "reward").exists()
    scores = lines(run / "ppo/samples.jsonl")[0]["scores"]
    assert scores.keys() == {"on_topic", "brief", "fresh"} and 0 <= scores["on_topic"] <= 1
    assert {"reward", "gold"} == lines(run / "eval/samples.jsonl")[0]["scores"].keys()


@pytest.mark.full
# The slow ones differ from these in their templates alone.
@pytest.mark.parametrize(
    ("family", "variables", "prompts_hold"),
    [
        ("qwen3", "{enable_thinking: false}", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("llama3", "{date: 2025-01-31}", "Today Date: 31 Jan 2025"),
        pytest.param("qwen2", None, "You are Qwen", marks=pytest.mark.slow),
        pytest.param("gemma", None, "<start_of_turn>model", marks=pytest.mark.slow),
    ],
)
def test_instruct_on_chat_models(
    family: str, variables: str | None, prompts_hold: str, hub: Hub, tmp_path: Path
) -> None:
    def pair(thing: str, number: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"What is a {thing}, {number}?"}]
        if number == 1:
            turns += [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "What else?"}]
        good, bad = ([*turns, {"role": "assistant", "content": text}] for text in (f"A {thing} shines.", "No."))
        return {"chosen": good, "rejected": bad, "score_chosen": 8.0, "score_rejected": 2.0}

    rows = hub.dataset("trl-lib/ultrafeedback_binarized", pair, "test")
    texts = [turn["content"] for row in rows for turn in row["chosen"]]
    hub.model("Qwen/Qwen2.5-0.5B-Instruct", families.write_causal, family, texts)
    run, kind = tmp_path / "run", families.FAMILIES[family]
    sets = [f"data.chat_template_kwargs={variables}"] if variables else []
    more = {"reward": sets, "ppo": [*SHORT["ppo"], *sets], "eval": sets}
    manifests, _ = run_all("instruct", run, more)
    tokenizer = AutoTokenizer.from_pretrained(run / "ppo/model")
    assert tokenizer.chat_template.endswith(kind.template)
    assert (tokenizer.chat_template == kind.template) == (variables is None)
    stop = tokenizer.convert_tokens_to_ids(kind.stop)
    known = tokenizer.convert_tokens_to_ids(list(kind.stops))
    assert manifests["reward"]["special_tokens"]["stop"] == stop
    stops = manifests["ppo"]["special_tokens"]["stop"]
    assert stops == ([stop, *(each for each in known if each != stop)] if known else stop)
    for probe in manifests["reward"]["probes"]:
        assert probe["response_ids"][-1] == stop and probe["response_ids"].count(stop) == 1
        assert prompts_hold in tokenizer.decode(probe["prompt_ids"])
        if kind.prefix:
            prefix = tokenizer.convert_tokens_to_ids(kind.prefix)
            assert probe["prompt_ids"][0] == prefix and probe["prompt_ids"].count(prefix) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_checked_as_far_as_possible_without_a_hub(name: str, hub: Hub, tmp_path: Path) -> None:
    rlhf("init", name, tmp_path / "run")
    report = json.loads(rlhf("check", tmp_path / "run", "--json").stdout)
    assert report["ok"] and report["problems"] == []
    assert {each["stage"] for each in report["checked"]} == {path.stem for path in (tmp_path / "run").glob("*.yaml")}
    assert any("HF_HUB_OFFLINE" in text for text in report["not_checked"])
