"""The model card of an export: numbers are those of the run's files, its code runs, hostile texts stay text."""

import json
import re
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from report_run import CARD, begin, change, configs, finish, metrics, report, sha_of, win, write_run

from rlhf_cli import data
from rlhf_cli.commands.export.card import render_card
from rlhf_cli.commands.export.model_folder import held_out_prompt
from rlhf_cli.data.texts import render_transcript
from rlhf_cli.errors import RLHFError
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import save, tokenizers
from rlhf_cli.runs.manifest import Manifest
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import read_report
from rlhf_cli.runs.resolve import ResolvedModel

TEXTS = ["What should I cook tonight?", "A lentil soup: it is quick, and it keeps.", "\n\nHuman: \n\nAssistant:"]
TALK = [{"role": "user", "content": "Soup?"}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of all four stages, files only."""
    folder = write_run(tmp_path / "demo")
    (folder / "sft/model").mkdir()
    configure(folder, "ppo", rewards={"reward": {"model": "../reward", "weight": 1.0}})
    change(folder / "ppo/manifest.json", parents=parents(folder))
    return folder


def configure(run: Path, stage: str, **changes: Any) -> None:
    begin(run / stage, {**configs()[stage], **changes})


def parents(run: Path) -> dict[str, Any]:
    entries = {name: {"path": f"../{name}", "stage": name, "sha256": sha_of(run / name)} for name in ("sft", "reward")}
    return {
        "models.sft": entries["sft"], "models.reward": entries["reward"], "rewards.reward.model": entries["reward"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rows = tmp_path_factory.mktemp("texts") / "rows.jsonl"
    write_jsonl(rows, [{"text": text} for text in TEXTS])
    return tokenizers.train_tokenizer(rows, 280)


def card(run: Path, tokenizer: Any, stage: str = "ppo", step: int | None = None, **options: Any) -> str:
    """Return the card of a stage's last model, or of PPO's policy after `step`."""
    path = run / options.pop("folder", stage)
    manifest = json.loads((path / "manifest.json").read_text())
    has_report = (run / "eval/report.json").is_file()
    evaluation = read_report(run / "eval") if has_report else None
    parent = Parent("RUN", path, stage, path / "model", manifest["model_sha256"], Manifest.model_validate(manifest))
    end = manifest.get("step") if stage == "ppo" else None
    resolved = ResolvedModel(parent, step or end, step in (None, end), evaluation)
    model = options.pop("model", None) or (tiny.scorer() if stage == "reward" else tiny.causal())
    return render_card(resolved, model, tokenizer, **{"dtype": "float32", "name": "policy", "address": "."} | options)


# Numbers


def test_each_number_of_the_card_follows_its_file(run: Path, tokenizer: Any) -> None:
    before = card(run, tokenizer)
    evaluation = report(gold=0.2)
    evaluation["models"]["ppo"]["kl"] = 33.25
    change(run / "eval/report.json", **evaluation)
    accuracy = {"accuracy": 0.5, "accuracy_ci95": [0.44, 0.56]}
    change(run / "reward/manifest.json", metrics=accuracy, card=CARD | accuracy)
    change(run / "ppo/manifest.json", git="a1b2")
    ppo = configs()["ppo"]["ppo"] | {"kl_coef": 0.375, "gamma": 0.5}
    configure(run, "ppo", rewards={"reward": {"model": "../reward", "weight": 0.25}}, ppo=ppo)
    write_jsonl(run / "ppo/metrics.jsonl", metrics(objective__scores=[5.5 - 0.25 * step for step in range(20)]))
    after = card(run, tokenizer)
    for old, new in (
        ("PPO beats SFT: win rate 0.630 \\[0.570", "PPO loses to SFT: win rate 0.200 \\[0.140"),
        ("| PPO over SFT | gold | 0.630 [0.570, 0.690] | 0.610 | 3 | 256 |", "| PPO over SFT | gold | 0.200 [0.140"),
        ("| PPO | 12.30 | 21.5 | 97% |", "| PPO | 33.25 | "),
        ("Accuracy 0.750 [0.690, 0.800] on 200 held-out pairs", "Accuracy 0.500 [0.440, 0.560] on 200 held-out"),
        ("| `ppo.kl_coef` | `0.2` | `0.05` |", "| `ppo.kl_coef` | `0.375` | `0.05` |"),
        ("- `reward`: a reward model (reward `reward-model`), weight 1", "weight 0.25"),
        ("minus 0.2 times the KL from", "minus 0.375 times the KL from"),
        ("| `sft.learning_rate` | `0.001` | `2e-05` |", "| `ppo.gamma` | `0.5` | `1` |"),
    ):
        assert old in before and new in after and new not in before, (old, new)
    assert "was at revision `a1b2`." in after and "may be no better than chance" in after
    assert "Found in the run, ppo: Reward score in training: It falls by" in after


def test_the_metadata_is_what_the_hub_reads(run: Path, tokenizer: Any) -> None:
    sources = {
        "eval": {"prompts": "Anthropic/hh-rlhf[test]"},
        "sft": {"train": "HuggingFaceH4/ultrachat_200k", "eval": "other/held_out"},
        "reward": {"train": "Anthropic/hh-rlhf/harmless-base", "eval": None},
        "ppo": {"prompts": "./people/prompts"},
    }
    for stage, keys in sources.items():
        configure(run, stage, data=keys)
        change(run / stage / "manifest.json", data={f"data.{key}": "ab" * 32 for key, name in keys.items() if name})
    base = {"path": "Qwen/Qwen3-0.6B", "stage": "foreign", "sha256": "base", "revision": "main"}
    change(run / "sft/manifest.json", parents={"model.path": base})
    other = {"path": "other/reward", "stage": "foreign", "sha256": "other"}
    change(run / "reward/manifest.json", parents={"model.path": other})
    change(run / "ppo/manifest.json", parents=parents(run))
    text = card(run, tokenizer)
    head = ModelCard(text).data
    assert (head.library_name, head.pipeline_tag) == ("transformers", "text-generation")
    assert (head.base_model, head.base_model_relation) == ("Qwen/Qwen3-0.6B", "finetune"), "not the reward model's"
    assert head.datasets == ["Anthropic/hh-rlhf", "HuggingFaceH4/ultrachat_200k"], "no folder, not the evaluation's"
    assert head.tags == ["rlhf", "ppo", "rlhf-cli"] and head.get("license") is None
    gold = next(each for each in head.eval_results if "gold" in each.metric_name)
    assert (gold.metric_type, gold.metric_value, gold.dataset_type) == ("win_rate", 0.63, "Anthropic/hh-rlhf")
    assert gold.metric_name == "Win rate, PPO over SFT by gold: 0.630 [0.570, 0.690], n 256"
    assert "`Qwen/Qwen3-0.6B at main`" in text and "`prompts`" in text and "people" not in text and "../" not in text
    change(run / "sft/manifest.json", parents={"model.path": {**base, "path": "../../secret/model"}})
    change(run / "ppo/manifest.json", parents=parents(run))
    text = card(run, tokenizer)
    assert ModelCard(text).data.base_model is None and "secret" not in text and "`model at main` `base`" in text


def test_changed_stages_and_missing_evaluations_are_omitted(run: Path, tokenizer: Any) -> None:
    change(run / "reward/manifest.json", model_sha256="another")
    text = card(run, tokenizer)
    assert "## The reward model" not in text and "\n| reward | " not in text and "\n| sft | " in text
    (run / "eval/report.json").unlink()
    text = card(run, tokenizer)
    assert "This card has no evaluation of this model." in text and "does not know the quality of its answers" in text
    assert ModelCard(text).data.eval_results is None and not re.search("over SFT|gold|heldout", text)


def test_all_stages_above_are_shown_with_their_hashes(run: Path, tokenizer: Any) -> None:
    begin(run / "base/sft", {**configs()["sft"], "data": {"train": "../base.jsonl"}})
    finish(run / "base/sft", step=450, model_sha256="base-model", data={"data.train": "ab" * 32})
    below = {"model.path": {"path": "../base/sft", "stage": "sft", "sha256": "base-model"}}
    change(run / "sft/manifest.json", parents=below)
    text = card(run, tokenizer)
    assert "\n| sft | sft `base-model` | " in text and "\n| sft | fresh weights | " in text
    assert "| `data.train` | `base.jsonl` |" in text


def test_a_stage_folder_may_have_another_name(run: Path, tokenizer: Any) -> None:
    before = card(run, tokenizer)
    (run / "ppo").rename(run / "best")
    assert card(run, tokenizer, folder="best") == before


def test_a_snapshot_has_its_own_numbers(run: Path, tokenizer: Any) -> None:
    evaluation = report()
    evaluation["frontier"][0]["win_rate"] = {"reward": win(0.8), "gold": win(0.74)}
    change(run / "eval/report.json", **evaluation)
    text = card(run, tokenizer, step=5)
    assert "policy after update 5 of 20." in text and "| PPO over SFT | gold | 0.740 [" in text and "12.3" not in text
    assert "near-greedy |" not in text and "| ppo | " in text
    assert "`ppo-model` at its end" in text and "recommends it" not in text
    assert "no evaluation of this model" in card(run, tokenizer, step=7)


def test_the_recommended_policy_has_numbers_of_prompts_that_did_not_choose_it(run: Path, tokenizer: Any) -> None:
    text = card(run, tokenizer, step=10)
    assert "The evaluation recommends it: update 10 (the highest mean of gold). Its own numbers here are of" in text
    assert "| PPO over SFT | gold | 0.600 [" in text and "| PPO over SFT | gold | 0.630 [" not in text
    other = card(run, tokenizer, step=5)
    assert "| PPO over SFT | gold | 0.630 [" in other and "recommends" not in other, "another step"


def test_a_stopped_run_has_its_reason(run: Path, tokenizer: Any) -> None:
    best = {"step": 10, "metric": "objective/score/gold", "value": 0.8}
    change(run / "ppo/manifest.json", step=10, model_is="the best step", stopped="update 20: KL is <b>9</b>", best=best)
    write_jsonl(run / "ppo/watchdog.jsonl", [{"step": 9, "signal": "kl", "action": "warn"}])
    text = card(run, tokenizer)
    assert "the policy after update 10 of 20, the highest by `objective/score/gold`: " in text
    assert "the training was stopped (update 20: KL is \\<b\\>9" in text
    assert "Found in the run, ppo: it was stopped: update 20" in text
    change(run / "ppo/manifest.json", stopped=None)
    assert "Found in the run, ppo: the watchdog fired 1 time (kl)." in card(run, tokenizer)


def test_cards_of_sft_and_reward_models_describe_these_only(run: Path, tokenizer: Any) -> None:
    text = card(run, tokenizer, "sft")
    assert "## The reward model" not in text and "PPO" not in text and "| SFT | 0.00 |" in text
    reward = card(run, tokenizer, "reward")
    head = ModelCard(reward).data
    assert (head.pipeline_tag, head.tags) == ("text-classification", ["rlhf", "reward-model", "rlhf-cli"])
    assert head.eval_results[0].metric_value == 0.75 and "n 200" in head.eval_results[0].metric_name
    assert (
        "Accuracy 0.750 [0.690, 0.800] on 200" in reward
        and "win rate" not in reward.lower()
        and "0.500 [0.410, 0.590]" in reward
    )
    assert "| flagged |" in reward and "mean little across prompts" in reward and "ensemble" not in reward

    members = {
        number: {"path": f"../members/{number}/reward", "stage": "reward", "sha256": "other"} for number in ("2", "3")
    }
    change(run / "reward/manifest.json", members=members)
    assert "It is the first of 3 members of an ensemble" in card(run, tokenizer, "reward")
    named = {f"rewards.reward.models.{number}": entry for number, entry in members.items()}
    change(run / "ppo/manifest.json", parents=parents(run) | named)
    assert "- `reward`: an ensemble of reward models (reward `reward-model`, reward `other`" in card(run, tokenizer)


def test_judges_are_described_and_the_own_reward_model_is_no_proof(run: Path, tokenizer: Any) -> None:
    text = card(run, tokenizer)
    assert re.search(r"- `gold`: the Python function `[a-z_.]+:[a-z]+`: a higher", text)
    assert "- `reward`: the reward model that PPO was trained on" in text
    assert "## The reward model" in text and "Only its own reward model" not in text
    only = report()
    for each in (*only["models"].values(), *only["win_rate"].values()):
        each.pop("gold", None)
        each.get("judges", {}).pop("gold", None)
    change(run / "eval/report.json", **only | {"greedy": {}, "best_of": [], "frontier": []})
    alone = card(run, tokenizer)
    assert "Only its own reward model judged its answers" in alone


def test_a_judge_that_compared_answers_is_described(run: Path, tokenizer: Any) -> None:
    results = report()
    results["win_rate"]["ppo_vs_sft"] |= {"people": {"value": 0.5, "n": 8}, "llm": {"value": 0.5, "n": 32}}
    change(run / "eval/report.json", **results)
    configure(run, "eval", judges={"people": {"labels": "../labels/compare"}, "llm": {"openai": {"model": "m"}}})
    text = card(run, tokenizer)
    assert "- `people`: people, who compared other answers of the same models\n" in text
    assert "- `llm`: `m`, a language model that compared the answers" in text


def test_other_rewards_and_warnings_show_no_address_and_no_path(run: Path, tokenizer: Any) -> None:
    rewards = {
        "short": {"builtin": "length", "weight": 0.5},
        "house": {"url": "http://10.0.0.7:8000/score", "headers": {"Authorization": "HOUSE_KEY"}, "weight": 1.0},
        "rater": {"function": "raters:score", "weight": 0},
    }
    configure(run, "ppo", rewards=rewards)
    only_models = {key: entry for key, entry in parents(run).items() if key.startswith("models.")}
    change(run / "ppo/manifest.json", parents=only_models)
    change(run / "reward/manifest.json", card=CARD | {"flags": [{"code": "R12", "text": "badly calibrated"}]})
    warnings = ["warning[D13]: /home/me/data/heldout.jsonl:3: a prompt of it", "warning[R11]: /x: politeness"]
    change(run / "eval/report.json", warnings=warnings)
    text = card(run, tokenizer)
    assert "- `short`: a rule, weight 0.5" in text and "- `house`: a service on the network, weight 1" in text
    assert "- `rater`: a Python function, a held-out judge, not optimized" in text
    assert "- `reward`: a reward model\n" in text and "\n| reward | " in text
    assert "## The reward model" not in text and "badly calibrated" not in text, "PPO was not trained on it"
    assert "Warning of the evaluation, D13: evaluation prompts in training." in text
    assert not re.search("10.0.0.7|HOUSE_KEY|/home|R11", text)


HOSTILE = "a|b`c*[x](http://e.vil)<img src=x>\u202e_d_\n# e"


def test_texts_of_others_stay_texts(run: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    name = HOSTILE.replace("/", "").replace("\n", " ") + "a-secret-of-mine.jsonl"
    configure(run, "eval", data={"prompts": f"../{name}"})
    configure(
        run, "sft", data={"prompts": f"/home/me/{name}"}, sft={"x": HOSTILE.replace("/", ""), "note": "/home/me/x"}
    )
    for stage in ("eval", "sft"):
        change(run / stage / "manifest.json", data={"data.prompts": "ab" * 32})
    change(run / "ppo/manifest.json", stopped=HOSTILE, versions={"rlhf": HOSTILE})
    text = card(run, tokenizer, name=HOSTILE)
    assert "\u202e" not in text and "a-secret-of-mine" not in text and "/home/me" not in text
    head, body = text.split("\n---\n", 1)
    assert yaml.safe_load(head.removeprefix("---\n"))["model-index"][0]["name"].startswith("a|b`c*[x](")
    page = MarkdownIt("commonmark").enable("table").render(body)
    assert "<img" not in page and 'href="http://e.vil' not in page and "<h1>e" not in page
    rows = re.findall(r"^\| (?:(?:sft|ppo|reward|eval) \| )?`[a-z]+\..*", body, re.MULTILINE)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5, 7}, "settings have three cells, data five"


# Code


def snippet(text: str) -> str:
    return re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)[0]


def write_rows(run: Path, stage: str, prompt: Any) -> None:
    """Write data whose rows have prompts of this form, and a config that names it."""
    row: dict[str, Any] = {"prompt": prompt}
    if stage == "reward":
        talk = isinstance(prompt, list)
        row |= {key: [{"role": "assistant", "content": key}] if talk else key for key in ("chosen", "rejected")}
    write_jsonl(run / f"{stage}_rows.jsonl", [row])
    settings = {"ppo": {"total_episodes": 8, "response_length": 53}} if stage == "ppo" else {}
    rows = {"train" if stage == "reward" else "prompts": f"../{stage}_rows.jsonl"}
    begin(run / stage, {"stage": stage, "run": "..", "seed": 0, "data": rows, **settings})


@pytest.mark.full
@pytest.mark.parametrize("family", [*families.FAMILIES, "transcripts"])
@pytest.mark.parametrize("stage", ["ppo", "reward"])
def test_the_code_runs_and_reads_the_tokens_of_training(
    run: Path, family: str, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = families.FAMILIES["gpt2" if family == "transcripts" else family]
    tokenizer = families.tokenizer(kind, TEXTS)
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=data.stop_token_id(tokenizer))
    build = tiny.scorer if stage == "reward" else tiny.causal
    size = {"n_positions" if family == "gpt2" else "max_position_embeddings": 256}
    model = build(kind.architecture, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **size)
    save.set_special_token_ids(model, tokenizer, data.stop_token_id(tokenizer))
    if stage == "reward":
        model.config.reward_mean, model.config.reward_std = 0.25, 2.0
        if family == "gpt2":
            model.config.reward_length_slope, model.config.reward_length_mean = 0.5, 3.0
    save.save_model(model, tokenizer, run / "out", "")
    turn = {"role": "user", "content": 'Say: "it\'s"\n```\nso 😀'}
    example: Any = [turn] if kind.template or family == "transcripts" else turn["content"]
    prompt: Any = render_transcript(example) if family == "transcripts" else example
    ids = data.encode(tokenizer, prompt, None)[0]
    write_rows(run, stage, prompt)
    source = snippet(card(run, tokenizer, stage, model=model, example=example))
    monkeypatch.chdir(run / "out")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(source, names)
    if stage == "ppo":
        assert names["inputs"]["input_ids"].tolist() == [ids] and names["output"].shape[1] <= len(ids) + 53
        return
    answer = f"{'' if kind.template else ' '}Write an answer to it here."
    response = data.encode(tokenizer, prompt, answer)[1]
    with torch.no_grad():
        raw = float(model.eval()(input_ids=torch.tensor([ids + response])).logits[0, 0])
    if family == "gpt2":
        raw -= 0.5 * (len(response) - 3.0)
    assert float(capsys.readouterr().out) == pytest.approx((raw - 0.25) / 2.0, abs=1e-5)


def test_the_example_is_a_short_held_out_prompt(run: Path, tokenizer: Any) -> None:
    assert "Write a prompt here, of the kind" in card(run, tokenizer)
    with pytest.raises(RLHFError, match=r"(?s)^error\[M01\].*hint: .*rlhf eval"):
        held_out_prompt(run / "none")

    def held_out(*prompts: Any) -> Any:
        write_jsonl(run / "heldout.jsonl", [{"prompt": prompt} for prompt in prompts])
        configure(run, "eval", data={"prompts": "../heldout.jsonl"})
        return held_out_prompt(run)

    assert held_out("long" * 101, "Short?", "b") == "Short?" and held_out("long" * 120, "long" * 101) == "long" * 101
    assert held_out(TALK) == TALK
    (run / "heldout.jsonl").unlink()
    with pytest.raises(RLHFError, match="D01"):
        held_out_prompt(run)


@pytest.mark.full
def test_the_example_has_the_format_of_training(run: Path, tokenizer: Any) -> None:
    def code(rows: Any, example: Any = None, with_template: bool = False) -> str:
        write_rows(run, "ppo", rows)
        chat = families.tokenizer(families.FAMILIES["qwen2"], TEXTS)
        return snippet(card(run, chat if with_template else tokenizer, example=example))

    assert "prompt = 'Soup?'" in code("plain", "Soup?")
    assert "prompt = 'a[U+202E]b\\n```\\n'" in code("plain", "a\u202eb\n```\n")
    dialogue = render_transcript(TALK)
    for example in ("Soup?", TALK, dialogue):
        assert "prompt = '\\n\\nHuman: Soup?\\n\\nAssistant:'" in code(dialogue, example)
    assert f"messages = {TALK}" in code(TALK, "Soup?", with_template=True)
    assert "apply_chat" not in code("plain", with_template=True), "the training did not use the template"


def test_the_code_samples_as_the_evaluation_or_the_training_did(run: Path, tokenizer: Any) -> None:
    change(run / "eval/report.json", **report() | {"temperature": 0.7, "response_length": 24})
    assert "temperature=0.7, top_k=0, max_new_tokens=24" in card(run, tokenizer)
    (run / "eval/report.json").unlink()
    configure(run, "ppo", ppo={"temperature": 0.9, "response_length": {"min": 4, "max": 16}})
    assert "temperature=0.9, top_k=0, max_new_tokens=16" in card(run, tokenizer)
    assert "max_new_tokens=128" in card(run, tokenizer, "sft")


def test_the_card_in_the_docs_has_the_same_sections(run: Path, tokenizer: Any) -> None:
    page = (Path(__file__).parents[3] / "docs/results/export.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"````markdown\n(.*?)````", page, re.DOTALL)

    def skeleton(text: str) -> list[str]:
        return re.findall(r"^(?:#+ .*|\| .*\n(?=\| ---)|[a-z_-]+:)", text, re.MULTILINE)

    change(run / "ppo/manifest.json", metrics={"objective/scores": 0.5})
    text = card(run, tokenizer, name="ci-ppo").replace("| 200 pairs, 128 probed |", "| 60 pairs, 59 probed |")
    assert skeleton(example) == skeleton(text) and ModelCard(example).data.tags == ModelCard(text).data.tags
