"""The recipes of configs/, their hub ids as they stand, with stand-ins in the hub's cache: tiny models of the same
families, and data sets in the hub's layout. Only sizes are overridden."""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import families
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from report_run import draws_nothing
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rlhf_cli import config, jsonl
from rlhf_cli.cli import app

RECIPES = ("tldr", "hh", "sentiment", "instruct")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
THINGS = ("sun", "moon", "star", "cloud", "rain", "snow", "wind", "storm", "river", "lake", "hill", "wood")
SIZES = {
    "sft": ["sft.max_steps=2", "sft.per_device_train_batch_size=4", "sft.gradient_accumulation_steps=1"],
    "reward": [
        "reward.max_steps=2",
        "reward.per_device_train_batch_size=4",
        "reward.gradient_accumulation_steps=1",
        "reward.normalize_samples=4",
    ],
    "ppo": ["ppo.per_device_train_batch_size=4", "ppo.gradient_accumulation_steps=1", "output.snapshots=0"],
    "eval": ["eval.n=4", "eval.best_of=[2]", "eval.per_device_batch_size=4"],
}
SHORT = ["ppo.total_episodes=8", "ppo.response_length=8"]
Rows = list[dict[str, Any]]


class Hub:
    """A stand-in of the hub's cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _snapshot(self, kind: str, name: str) -> Path:
        stored = self.folder / f"{kind}--{name.replace('/', '--')}"
        (stored / "refs").mkdir(parents=True)
        (stored / "refs/main").write_text(COMMIT)
        (stored / "snapshots" / COMMIT).mkdir(parents=True)
        return stored / "snapshots" / COMMIT

    def model(self, name: str, write: Callable[..., None], *how: Any) -> None:
        write(self._snapshot("models", name), *how)

    def parquet(self, name: str, splits: Mapping[str, Rows], inside: str = "data", card: str = "") -> None:
        """A data set as `push_to_hub` leaves it."""
        folder = self._snapshot("datasets", name)
        (folder / "README.md").write_text(card or "---\ntags:\n- trl\n---\n")
        (folder / inside).mkdir()
        for split, content in splits.items():
            path = folder / inside / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)

    def gzipped(self, name: str, folders: Mapping[str, Mapping[str, Rows]]) -> None:
        """A data set of folders that hold gzipped JSON lines."""
        snapshot = self._snapshot("datasets", name)
        (snapshot / "README.md").write_text("---\nlicense: mit\n---\n")
        for inside, splits in folders.items():
            (snapshot / inside).mkdir()
            for split, content in splits.items():
                text = "".join(json.dumps(row) + "\n" for row in content)
                (snapshot / inside / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "ours"))
    yield Hub(cache)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib takes longer than the stages."""
    draws_nothing(monkeypatch)


def both(make: Callable[[str, int], Rows]) -> dict[str, Rows]:
    """Rows for training and other ones for evaluation, under both names that a split may have."""
    held_out = [row for thing in THINGS[8:] for row in make(thing, 50)]
    train = [row for number in range(3) for thing in THINGS[:8] for row in make(thing, number)]
    return {"train": train, "validation": held_out, "test": held_out}


def post(thing: str, number: int) -> str:
    return f"SUBREDDIT: r/{thing}\n\nTITLE: The {thing}\n\nPOST: I saw the {thing} {number} times.\n\nTL;DR:"


def put_tldr(hub: Hub) -> None:
    hub.parquet("trl-lib/tldr", both(lambda t, n: [{"prompt": post(t, n), "completion": f" Saw the {t}."}]))

    def pairs(thing: str, number: int) -> Rows:
        row = {"prompt": post(thing, number), "chosen": f" Saw the {thing}.", "rejected": f" Saw {number}"}
        return [row, {**row, "rejected": row["chosen"]}, {**row, "chosen": ""}] if number == 0 else [row]

    hub.parquet("trl-lib/tldr-preference", both(pairs))
    texts = [post(thing, 3) for thing in THINGS]
    hub.model("EleutherAI/pythia-1b-deduped", families.write_causal, "pythia", texts)


def dialogues(thing: str, number: int) -> Rows:
    opening = (
        f"\n\nHuman: What is a {thing}?\n\nAssistant: It is number {number}.\n\nHuman: And what else?\n\nAssistant:"
    )
    row = {"chosen": f"{opening} A {thing} is good.", "rejected": f"{opening} No idea."}
    if number:
        return [row]
    empty = {"chosen": opening, "rejected": f"{opening} No."}
    parted = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Ho\n\nAssistant: No"}
    return [row, {**row, "rejected": row["chosen"]}, empty, parted]


def put_hh(hub: Hub) -> None:
    splits = both(dialogues)
    del splits["validation"]
    hub.gzipped("Anthropic/hh-rlhf", {"helpful-base": splits, "harmless-base": {"train": [], "test": []}})
    texts = [row["chosen"] for row in splits["train"]]
    hub.model("EleutherAI/pythia-1.4b-deduped", families.write_causal, "pythia", texts)


def put_sentiment(hub: Hub) -> None:
    def reviews(thing: str, number: int) -> Rows:
        return [{"text": f"I saw a {thing} film {number} times, and it was very good indeed.", "label": number % 2}]

    splits = both(reviews)
    splits["unsupervised"] = splits.pop("validation")
    files = "".join(f"\n  - split: {split}\n    path: plain_text/{split}-*" for split in splits)
    card = f"---\nconfigs:\n- config_name: plain_text\n  data_files:{files}\n  default: true\n---\n"
    hub.parquet("stanfordnlp/imdb", splits, "plain_text", card)
    texts = [row["text"] for row in splits["train"]]
    hub.model("openai-community/gpt2", families.write_causal, "gpt2", texts)
    hub.model("lvwerra/distilbert-imdb", families.write_sentiment_classifier, texts)


def put_instruct(hub: Hub, family: str = "qwen2") -> None:
    def pairs(thing: str, number: int) -> Rows:
        asked = [{"role": "user", "content": f"What is a {thing}, {number}?"}]
        if number == 1:  # a turn before the one that is asked about
            asked = [*asked, {"role": "assistant", "content": "It is."}, {"role": "user", "content": "What else?"}]
        good, bad = ([*asked, {"role": "assistant", "content": text}] for text in (f"A {thing} shines.", "No."))
        same = {"chosen": good, "rejected": good, "score_chosen": 5.0, "score_rejected": 5.0}
        return [{"chosen": good, "rejected": bad, "score_chosen": 8.0, "score_rejected": 2.0}] + [same] * (number == 0)

    splits = both(pairs)
    del splits["validation"]
    files = "".join(f"\n  - split: {split}\n    path: data/{split}-*" for split in splits)
    card = f"---\nconfigs:\n- config_name: default\n  data_files:{files}\n---\n"
    hub.parquet("trl-lib/ultrafeedback_binarized", splits, card=card)
    texts = [turn["content"] for row in splits["train"] for turn in row["chosen"]]
    hub.model("Qwen/Qwen2.5-0.5B-Instruct", families.write_causal, family, texts)


PUT = {"tldr": put_tldr, "hh": put_hh, "sentiment": put_sentiment, "instruct": put_instruct}


def rlhf(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def run_all(name: str, folder: Path, overrides: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    """`rlhf init`, then every stage that the recipe has; returns their manifests, and what was said as `said`."""
    rlhf("init", name, folder)
    manifests, stderr = {}, ""
    for stage in ("sft", "reward", "ppo", "eval"):
        path = folder / f"{stage}.yaml"
        if path.exists():
            given = [part for line in SIZES[stage] + overrides.get(stage, []) for part in ("-s", line)]
            stderr += rlhf(stage, "-c", path, *given).stderr
            manifests[stage] = json.loads((folder / stage / "manifest.json").read_text())
    return {**manifests, "stderr": {"text": stderr}}


def lines(path: Path) -> Rows:
    return [row for _, row in jsonl.read_jsonl(path)]


def check_ppo(folder: Path) -> None:
    """What must hold on every family: the policy starts at the reference, and the first ratios are 1."""
    first = lines(folder / "ppo/metrics.jsonl")[0]
    assert first["policy/first_ratio_error"] == 0
    assert first["objective/kl"] == 0
    report = json.loads((folder / "eval/report.json").read_text())
    assert {"sft", "ppo"} <= report["models"].keys() and report["best_of"][0]["n"] == 2
    for model in report["models"].values():
        assert "reward_mean" in model


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
    for word in ("# Before:", "# Run:", "# Needs:", "# Expect:", "# Tested:"):
        assert word in header, word


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_finds_all_that_it_names(name: str, hub: Hub, tmp_path: Path) -> None:
    PUT[name](hub)
    rlhf("init", name, tmp_path / "run")
    plan = rlhf("run", tmp_path / "run", "--dry-run").stdout.splitlines()
    assert plan[0].split()[1] == "new" and len(plan) == len(list((tmp_path / "run").glob("*.yaml")))


@pytest.mark.training
def test_tldr_on_a_model_like_pythia(hub: Hub, tmp_path: Path) -> None:
    put_tldr(hub)
    run = tmp_path / "run"
    found = run_all("tldr", run, {"ppo": SHORT})
    stderr = found["stderr"]["text"]
    assert "warning[T02]" in stderr and "chosen" in stderr, "a pad token is added; bad and identical pairs are counted"
    assert found["reward"]["special_tokens"] == found["ppo"]["special_tokens"]
    stop = found["ppo"]["special_tokens"]
    assert stop["stop"] == stop["eos"] != stop["pad"]
    check_ppo(run)
    asked = {row["prompt"] for row in lines(run / "eval/samples.jsonl")}
    assert asked == {post(thing, 50) for thing in THINGS[8:]}
    report = json.loads((run / "eval/report.json").read_text())
    assert "base" in report["models"] and report["reward_model"]["accuracy"] >= 0


@pytest.mark.training
def test_hh_on_a_model_without_a_chat_template(hub: Hub, tmp_path: Path) -> None:
    put_hh(hub)
    run = tmp_path / "run"
    found = run_all("hh", run, {"ppo": SHORT})
    check_ppo(run)
    assert found["sft"]["template_sha256"] is None
    tokenizer = AutoTokenizer.from_pretrained(run / "reward/model")
    probe = found["reward"]["probes"][0]
    asked, answer = (tokenizer.decode(probe[key]) for key in ("prompt_ids", "response_ids"))
    assert asked.startswith("\n\nHuman: What is a ") and asked.endswith("And what else?\n\nAssistant:")
    assert answer == f" A {THINGS[8]} is good.<|endoftext|>"
    assert {row["prompt"] for row in lines(run / "eval/samples.jsonl")} == {
        dialogues(thing, 50)[0]["chosen"].removesuffix(f" A {thing} is good.") for thing in THINGS[8:]
    }


@pytest.mark.training
def test_sentiment_without_any_reward_model(hub: Hub, tmp_path: Path) -> None:
    put_sentiment(hub)
    run = tmp_path / "run"
    found = run_all("sentiment", run, {"sft": ["sft.max_length=64"], "ppo": ["ppo.num_train_epochs=0.5"]})
    check_ppo(run)
    assert found["ppo"]["parents"].keys() == {"models.sft"} and not (run / "reward").exists()
    updates = lines(run / "ppo/metrics.jsonl")
    assert len(updates) == 3, "half of 24 reviews, 4 at a time"
    lengths = {row["length"] for row in lines(run / "ppo/samples.jsonl")}
    assert lengths <= set(range(4, 16)), "nothing ends early, nothing is longer"
    openings = [row["prompt"] for row in lines(run / "ppo/samples.jsonl")]
    assert all(text.startswith("I saw") and 2 <= len(text.split()) <= 6 for text in openings)
    assert {"reward"} == lines(run / "eval/samples.jsonl")[0]["scores"].keys()


@pytest.mark.training
def test_functions_needs_neither_a_hub_nor_a_reward_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fewer = {"sft": ["sft.max_steps=4"], "ppo": ["ppo.total_episodes=16"]}
    found = run_all("functions", run, fewer)
    check_ppo(run)
    assert found["ppo"]["parents"].keys() == {"models.sft"} and not (run / "reward").exists()
    scores = lines(run / "ppo/samples.jsonl")[0]["scores"]
    assert scores.keys() == {"on_topic", "brief", "fresh"} and 0 <= scores["on_topic"] <= 1
    assert {"reward", "gold"} == lines(run / "eval/samples.jsonl")[0]["scores"].keys()


@pytest.mark.training
# The slow ones differ from these in their templates alone.
@pytest.mark.parametrize(
    "family", ["qwen3", "llama3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma"))]
)
def test_instruct_on_chat_models(family: str, hub: Hub, tmp_path: Path) -> None:
    put_instruct(hub, family)
    run, kind = tmp_path / "run", families.FAMILIES[family]
    found = run_all("instruct", run, {"ppo": SHORT})
    check_ppo(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "ppo/model")
    assert tokenizer.chat_template == kind.template
    stop = tokenizer.convert_tokens_to_ids(kind.stop)
    assert found["reward"]["special_tokens"]["stop"] == found["ppo"]["special_tokens"]["stop"] == stop
    for probe in found["reward"]["probes"]:
        assert probe["response_ids"][-1] == stop and probe["response_ids"].count(stop) == 1
        if kind.begins:
            begins = tokenizer.convert_tokens_to_ids(kind.begins)
            assert probe["prompt_ids"][0] == begins and probe["prompt_ids"].count(begins) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_checked_as_far_as_can_be_without_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name of the hub is told as not checked, once for each key; all else is right."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    assert CliRunner().invoke(app, ["init", name, str(tmp_path / "run")]).exit_code == 0
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"] and report["problems"] == [], result.output
    stages = {path.stem for path in (tmp_path / "run").glob("*.yaml")}
    assert {one["stage"] for one in report["checked"]} == stages
    assert report["not_checked"] and any("HF_HUB_OFFLINE" in one for one in report["not_checked"])
