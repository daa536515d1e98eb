"""The model card of an export: its numbers are those of the run's files, its code runs, texts of others do nothing."""

import json
import re
from dataclasses import replace
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
from rlhf_cli.commands.export import card, card_context
from rlhf_cli.data import other_formats
from rlhf_cli.errors import RLHFError
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import save, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import ResolvedModel

TEXTS = ["What should I cook tonight?", "A lentil soup: it is quick, and it keeps.", "\n\nHuman: \n\nAssistant:"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of all four stages, of files alone."""
    folder = write_run(tmp_path / "demo")
    (folder / "sft/model").mkdir()
    begin(folder / "ppo", configs()["ppo"] | {"rewards": {"reward": {"model": "../reward", "weight": 1.0}}})
    change(folder / "ppo/manifest.json", parents=parents(folder))
    return folder


def parents(run: Path) -> dict[str, Any]:
    """What PPO was made from: the SFT model, and the reward model as its reward."""
    told = {name: {"path": f"../{name}", "stage": name, "sha256": sha_of(run / name)} for name in ("sft", "reward")}
    return {"models.sft": told["sft"], "models.reward": told["reward"], "rewards.reward.model": told["reward"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rows = tmp_path_factory.mktemp("texts") / "rows.jsonl"
    write_jsonl(rows, [{"text": text} for text in TEXTS])
    return tokenizers.train_tokenizer(rows, 280)


def chosen(run: Path, stage: str = "ppo", step: int | None = None) -> ResolvedModel:
    """A model of the run, and its evaluation: that it is of this model's, `checkpoints.choose` sees to."""
    manifest = json.loads((run / stage / "manifest.json").read_text())
    told = json.loads((run / "eval/report.json").read_text()) if (run / "eval/report.json").is_file() else None
    parent = Parent("RUN", run / stage, stage, run / stage / "model", manifest["model_sha256"], manifest)
    end = manifest.get("step") if stage == "ppo" else None
    return ResolvedModel(parent, step or end, step in (None, end), told)


def written(run: Path, tokenizer: Any, stage: str = "ppo", step: int | None = None, name: str = "policy") -> str:
    model = tiny.scorer() if stage == "reward" else tiny.causal()
    return card.write(
        card_context.build_context(chosen(run, stage, step), model, tokenizer, "float32", name, "me/policy")
    )


def plain(text: str) -> str:
    """What a reader sees of Markdown, tables as text: nothing of it may be markup of others."""
    return " ".join(text.replace("`", "").replace("\\", "").split())


# Numbers


def test_each_number_of_the_card_follows_its_file(run: Path, tokenizer: Any) -> None:
    was = written(run, tokenizer)
    told = report(gold=0.2)
    told["models"]["ppo"]["kl"] = 33.25
    change(run / "eval/report.json", **told)
    right = {"accuracy": 0.5, "accuracy_ci95": [0.44, 0.56]}
    change(run / "reward/manifest.json", metrics=right, card=CARD | right)
    config = configs()["ppo"] | {"rewards": {"reward": {"model": "../reward", "weight": 0.25}}}
    config["ppo"] |= {"kl_coef": 0.375, "gamma": 0.5}
    change(run / "ppo/manifest.json", git="a1b2")
    begin(run / "ppo", config)
    write_jsonl(run / "ppo/metrics.jsonl", metrics(objective__scores=[5.5 - 0.25 * step for step in range(20)]))
    now = written(run, tokenizer)
    for before, after in (
        ("PPO beats SFT on 63 % \\[57, 69\\]", "PPO loses to SFT: it is better on 20 % \\[14, 26\\]"),
        (
            "| PPO over SFT, gold | 63 % [57, 69] | 61 % | 3 | 256 |",
            "| PPO over SFT, gold | 20 % [14, 26]",
        ),
        ("| PPO | 12.300 [12.300, 12.300] | 21.5 | 97 % |", "| PPO | 33.250 [12.300"),
        ("Right on 75 % [69, 80] of 200 held-out pairs", "Right on 50 % [44, 56] of 200 held-out pairs"),
        ("| ppo | `ppo.kl_coef` | `0.2` | `0.05` |", "| ppo | `ppo.kl_coef` | `0.375` | `0.05` |"),
        ("- `reward`: a reward model (reward `reward-model`), weight 1", "weight 0.25"),
        ("less 0.2 times the KL divergence", "less 0.375 times the KL divergence"),
        ("| sft | `sft.learning_rate` | `0.001` | `2e-05` |", "| ppo | `ppo.gamma` | `0.5` | `1` |"),
        ("Begins at 0, ends at 1.7", "Begins at 5.5, ends at 1.25"),
    ):
        assert before in was and after in now and after not in was, (before, after)
    assert "The git repository around its folder stood at revision `a1b2` then." in now
    assert "may be guessing" in now and "Noted by the run, ppo: Reward score in training: It falls by" in plain(now)


def test_the_head_is_what_the_hub_reads(run: Path, tokenizer: Any) -> None:
    begin(run / "eval", {**configs()["eval"], "data": {"prompts": "Anthropic/hh-rlhf[test]"}})
    begin(
        run / "sft", {**configs()["sft"], "data": {"train": "HuggingFaceH4/ultrachat_200k", "eval": "other/held_out"}}
    )
    begin(run / "reward", {**configs()["reward"], "data": {"train": "Anthropic/hh-rlhf/harmless-base", "eval": None}})
    begin(run / "ppo", {**configs()["ppo"], "data": {"prompts": "./people/prompts"}})
    for stage, keys in (
        ("sft", ("train", "eval")),
        ("reward", ("train",)),
        ("ppo", ("prompts",)),
        ("eval", ("prompts",)),
    ):
        change(run / stage / "manifest.json", data={f"data.{key}": "ab" * 32 for key in keys})
    base = {"path": "Qwen/Qwen3-0.6B", "stage": "foreign", "sha256": "base", "revision": "main"}
    change(run / "sft/manifest.json", parents={"model.path": base})
    judge = {"path": "other/reward", "stage": "foreign", "sha256": "judge"}
    reward = json.loads((run / "reward/manifest.json").read_text())["parents"]
    change(run / "reward/manifest.json", parents={**reward, "model.path": judge})
    change(run / "ppo/manifest.json", parents=parents(run))
    text = written(run, tokenizer)
    head = ModelCard(text).data
    assert (head.library_name, head.pipeline_tag) == ("transformers", "text-generation")
    assert (head.base_model, head.base_model_relation) == ("Qwen/Qwen3-0.6B", "finetune"), "not the reward model's"
    assert head.datasets == ["Anthropic/hh-rlhf", "HuggingFaceH4/ultrachat_200k"], "no folder, and not the evaluation's"
    assert head.tags == ["rlhf", "ppo", "rlhf-cli"] and head.get("license") is None
    gold = next(each for each in head.eval_results if "gold" in each.metric_name)
    assert (gold.metric_type, gold.metric_value, gold.dataset_type) == ("win_rate", 0.63, "Anthropic/hh-rlhf")
    assert gold.metric_name == "Win rate, PPO over SFT by gold, 95 % interval 0.570 to 0.690, n 256"
    assert "`Qwen/Qwen3-0.6B at main`" in text and "`prompts`" in text and "people" not in text and "../" not in text
    change(run / "sft/manifest.json", parents={"model.path": {**base, "path": "../../secret/model"}})
    change(run / "ppo/manifest.json", parents=parents(run))
    text = written(run, tokenizer)
    assert ModelCard(text).data.base_model is None and "secret" not in text and "`model at main` `base`" in text


def test_nothing_is_told_of_stages_that_have_changed_since(run: Path, tokenizer: Any) -> None:
    change(run / "reward/manifest.json", model_sha256="another")
    text = written(run, tokenizer)
    assert "## The reward model" not in text and "\n| reward | " not in text and "\n| sft | " in text


def test_what_was_not_evaluated_says_so_and_has_no_numbers(run: Path, tokenizer: Any) -> None:
    (run / "eval/report.json").unlink()
    text = written(run, tokenizer)
    assert "No evaluation of this very model was found beside it." in text and "not evaluated" in text
    assert ModelCard(text).data.eval_results is None and not re.search("over SFT|gold|heldout", text)


def test_two_trainings_of_a_kind_are_told_apart(run: Path, tokenizer: Any) -> None:
    for place, key in (("base/sft", "base-model"), ("older/base/sft", "older-model")):
        begin(run / place, {**configs()["sft"], "sft": {"learning_rate": 0.5}, "data": {"train": f"../{key}.jsonl"}})
        finish(run / place, step=450, model_sha256=key, data={"data.train": "ab" * 32})
    older = {"model.path": {"path": "../../older/base/sft", "stage": "sft", "sha256": "older-model"}}
    change(run / "base/sft/manifest.json", parents=older)
    below = {"model.path": {"path": "../base/sft", "stage": "sft", "sha256": "base-model"}}
    change(run / "sft/manifest.json", parents=below)
    evaluated = json.loads((run / "eval/manifest.json").read_text())["parents"]
    change(run / "eval/manifest.json", parents={**evaluated, "models.base": below["model.path"]})
    told = report()
    change(run / "eval/report.json", models={"base": told["models"]["sft"], **told["models"]})
    text = written(run, tokenizer)
    assert "| sft | base/sft `base-model` | " in text and "| base/sft | base/sft olde `older-model` | " in text
    for line in ("`sft.learning_rate` | `0.5` | `2e-05` |", "`data.train` | `base-model.jsonl` |"):
        assert f"| base/sft | {line}" in text and f"\n| sft | {line}" not in text
    rows = re.findall(r"^\| \S+ \| `[^|]*` \|", text.replace("sft olde", "sft-olde"), re.MULTILINE)
    assert len(rows) == len(set(rows)) >= 8, "no row twice"
    assert "- base: base/sft `base-model`\n- SFT: sft `sft-model`\n- PPO: this model\n" in text


# Which policy


def test_a_policy_on_the_way_has_its_own_numbers(run: Path, tokenizer: Any) -> None:
    told = report()
    told["frontier"][0]["win_rate"] = {"reward": win(0.8), "gold": win(0.74)}
    change(run / "eval/report.json", **told)
    text = written(run, tokenizer, step=5)
    assert "policy after update 5 of 20." in text and "| PPO over SFT, gold | 74 % [" in text and "12.3" not in text
    assert "near-greedy |" not in text and "| ppo | " in text and "| 5 updates | " in text
    assert "ends at 0.4;" in text and "1.9" not in re.findall("Reward score.*", text)[0], "of later updates nothing"
    assert "`ppo-model` at its end" in text and "flatters" not in text
    assert "No evaluation of this very model" in written(run, tokenizer, step=7)
    picked = written(run, tokenizer, step=10)
    assert (
        "The evaluation picked it by the highest mean of gold: on these prompts its mean flatters it by some 0.010."
        in picked
    )
    assert "Within the noise of it: update 20." in picked


def test_a_stopped_run_says_why_and_what_this_is(run: Path, tokenizer: Any) -> None:
    best = {"step": 10, "metric": "objective/score/gold", "value": 0.8}
    change(run / "ppo/manifest.json", step=10, model_is="the best step", stopped="update 20: KL is <b>9</b>", best=best)
    write_jsonl(run / "ppo/watchdog.jsonl", [{"step": 9, "signal": "kl", "action": "warn"}])
    text = written(run, tokenizer)
    assert "the policy after update 10 of 20, the highest by `objective/score/gold`: " in text
    assert "the training was stopped (update 20: KL is \\<b\\>9" in text
    assert "Noted by the run, ppo: it was stopped: update 20" in text
    change(run / "ppo/manifest.json", stopped=None)
    assert "Noted by the run, ppo: the watchdog fired 1 time (kl)." in written(run, tokenizer)


def test_sft_and_reward_models_tell_of_themselves_alone(run: Path, tokenizer: Any) -> None:
    text = written(run, tokenizer, "sft")
    assert "## The reward model" not in text and "PPO" not in text and "| SFT | 0.000 [" in text
    reward = written(run, tokenizer, "reward")
    head = ModelCard(reward).data
    assert (head.pipeline_tag, head.tags) == ("text-classification", ["rlhf", "reward-model", "rlhf-cli"])
    assert head.eval_results[0].metric_value == 0.75 and "n 200" in head.eval_results[0].metric_name
    assert "Right on 75 % [69, 80]" in reward and "win rate" not in reward.lower() and "0.500 [0.410, 0.590]" in reward
    assert "| flagged |" in reward and "Between prompts" in reward


# What it was judged by


def test_what_its_rewards_and_judges_are(run: Path, tokenizer: Any) -> None:
    text = written(run, tokenizer)
    assert (
        re.search(r"- `gold`: the Python function `[a-z_.]+:[a-z]+`: a higher", text)
        and "- `reward`: the reward model that PPO was trained on" in text
    )
    assert "## The reward model" in text and "No other judge" not in text
    only = report()
    for each in (*only["models"].values(), *only["win_rate"].values()):
        each.pop("gold", None)
        each.get("judges", {}).pop("gold", None)
    change(run / "eval/report.json", **only | {"greedy": {}, "best_of": [], "frontier": []})
    alone = written(run, tokenizer)
    assert "No other judge than its own reward model has seen its answers" in alone
    headline = re.search(r"^- PPO .* by reward.*$", alone, re.MULTILINE)
    assert headline and "alone this proves nothing" in headline[0] and "alone this" not in text


def test_a_reward_model_that_only_began_the_value_model_is_no_reward(run: Path, tokenizer: Any) -> None:
    rewards = {
        "short": {"builtin": "length", "weight": 0.5},
        "house": {"url": "http://10.0.0.7:8000/score", "headers": {"Authorization": "HOUSE_KEY"}, "weight": 1.0},
        "rater": {"function": "raters:score", "weight": 0},
    }
    begin(run / "ppo", {**configs()["ppo"], "rewards": rewards})
    change(run / "ppo/manifest.json", parents={key: told for key, told in parents(run).items() if "." not in key[7:]})
    change(run / "reward/manifest.json", card=CARD | {"flags": [{"code": "R12", "text": "badly calibrated"}]})
    text = written(run, tokenizer)
    assert "- `short`: a rule, weight 0.5" in text and "- `house`: a service that is asked over the network, w" in text
    assert "- `rater`: a Python function, not optimised" in text and "10.0.0.7" not in text and "HOUSE_KEY" not in text
    assert "- `reward`: a reward model\n" in text and "\n| reward | " in text
    assert "## The reward model" not in text and "badly calibrated" not in text


def test_what_was_warned_of_is_told_without_places(run: Path, tokenizer: Any) -> None:
    told = {"warnings": ["warning[D13]: /home/me/data/heldout.jsonl:3: a prompt of it", "warning[R11]: /x: politeness"]}
    change(run / "eval/report.json", **told)
    text = written(run, tokenizer)
    assert (
        "Warned of by the evaluation, D13: evaluation prompts in training. Some evaluation prompts also occur" in text
    )
    assert "/home" not in text and "R11" not in text, "which stands with the report card"


# Texts of others


HOSTILE = "a|b`c*[x](http://e.vil)<img src=x>\u202e_d_\n# e"


def test_texts_of_others_stay_texts(run: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    name = HOSTILE.replace("/", "").replace("\n", " ") + "a-secret-of-mine.jsonl"
    begin(run / "eval", {**configs()["eval"], "data": {"prompts": f"../{name}"}})
    begin(run / "sft", {**configs()["sft"], "model": {"new": {"hidden_size": HOSTILE, "note": "/home/me/x"}}})
    for stage in ("eval", "sft"):
        change(run / stage / "manifest.json", data={"data.prompts": "ab" * 32})
    begin(run / "sft", {**configs()["sft"], "data": {"prompts": f"/home/me/{name}"}, "model": {"new": {"x": HOSTILE}}})
    change(run / "ppo/manifest.json", stopped=HOSTILE, versions={"rlhf": HOSTILE})
    text = written(run, tokenizer, name=HOSTILE)
    assert "\u202e" not in text and "a-secret-of-mine" not in text and "/home/me" not in text
    head, body = text.split("\n---\n", 1)
    assert yaml.safe_load(head.removeprefix("---\n"))["model-index"][0]["name"].startswith("a|b`c*[x](")
    page = MarkdownIt("commonmark").enable("table").render(body)
    assert "<img" not in page and 'href="http://e.vil' not in page and "<h1>e" not in page
    widths = {
        len(re.split(r"(?<!\\)\|", line)) for line in re.findall(r"^\| (?:sft|ppo|reward|eval) \| `.*", body, re.M)
    }
    assert widths == {6, 7}, "settings have four cells, data five, whatever stands in them"


# Its code


def asked(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is there after the card's code ran."""
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {}
    exec("\n".join(text.splitlines()[1:-1]), space)
    return space


@pytest.mark.parametrize("family", [*families.FAMILIES, "transcripts"])
@pytest.mark.parametrize("stage", ["ppo", "reward"])
def test_the_code_runs_and_reads_the_tokens_of_the_training(
    run: Path, family: str, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = families.FAMILIES["gpt2" if family == "transcripts" else family]
    spells = families.tokenizer(kind, TEXTS)
    tokenizers.ensure_pad_token(spells, stop_token_id=data.stop_token_id(spells))
    make, size = (
        tiny.scorer if stage == "reward" else tiny.causal,
        "n_positions" if family == "gpt2" else "max_position_embeddings",
    )
    model = make(kind.architecture, vocab_size=len(spells), pad_token_id=spells.pad_token_id, **{size: 256})
    save.set_special_token_ids(model, spells, data.stop_token_id(spells))
    if stage == "reward":
        model.config.reward_mean, model.config.reward_std = 0.25, 2.0
    folder = run / "out"
    save.save_model(model, spells, folder, "")
    turn = {"role": "user", "content": 'Say: "it\'s"\n```\nso 😀'}
    shown: Any = [turn] if kind.template or family == "transcripts" else turn["content"]
    prompt: Any = other_formats.render_transcript(shown) if family == "transcripts" else shown
    ids = data.encode(spells, prompt, None)[0]
    asks(run, stage, prompt)
    about = card_context.build_context(chosen(run, stage), model, spells, "float32", "policy", ".", shown)
    torch.manual_seed(0)
    space = asked(card.snippet(about), folder, monkeypatch)
    said = capsys.readouterr().out
    if stage == "ppo":
        assert space["inputs"]["input_ids"].tolist() == [ids] and space["output"].shape[1] <= len(ids) + 53
        return
    answer = card.ANSWER if kind.template else f" {card.ANSWER}"
    response = data.encode(spells, prompt, answer)[1]
    with torch.no_grad():
        raw = float(model.eval()(input_ids=torch.tensor([ids + response])).logits[0, 0])
    assert float(said) == pytest.approx((raw - 0.25) / 2.0, abs=1e-5)


def asks(run: Path, stage: str, prompt: Any) -> None:
    """Data of a stage whose rows write their prompts so, and a config that names it."""
    key, row = (
        ("prompts", {"prompt": prompt})
        if stage == "ppo"
        else ("train", {"prompt": prompt, "chosen": "a", "rejected": "b"})
    )
    if isinstance(prompt, list) and stage == "reward":
        row |= {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    write_jsonl(run / f"{stage}_rows.jsonl", [row])
    settings = {"ppo": {"total_episodes": 8, "response_length": 53}} if stage == "ppo" else {}
    begin(run / stage, {"stage": stage, "run": "..", "seed": 0, "data": {key: f"../{stage}_rows.jsonl"}, **settings})


def test_a_prompt_of_the_data_stands_in_it_where_that_was_asked_for(run: Path, tokenizer: Any) -> None:
    assert "Write a prompt here, of the kind" in written(run, tokenizer)
    with pytest.raises(RLHFError) as caught:
        card.held_out(ResolvedModel(Parent("RUN", run / "none/ppo", "ppo", run, "", {}), None, True, None))
    assert caught.value.problems[0].code == "M01" and "rlhf eval" in str(caught.value.problems[0].hint)

    def shown(*prompts: Any) -> Any:
        write_jsonl(run / "heldout.jsonl", [{"prompt": prompt} for prompt in prompts])
        begin(run / "eval", {**configs()["eval"], "data": {"prompts": "../heldout.jsonl"}})
        return card.held_out(chosen(run))

    assert shown("long" * 101, "Short?", "b") == "Short?" and shown("long" * 120, "long" * 101) == "long" * 101
    assert shown([{"role": "user", "content": "Short?"}]) == [{"role": "user", "content": "Short?"}]
    (run / "heldout.jsonl").unlink()
    with pytest.raises(RLHFError, match="D01"):
        card.held_out(chosen(run))


def test_the_prompt_is_written_as_the_training_wrote_them(run: Path, tokenizer: Any) -> None:
    def lines(prompts: str, shown: Any) -> str:
        about = card_context.build_context(chosen(run), tiny.causal(), tokenizer, "float32", "policy", ".", shown)
        return card.snippet(replace(about, prompts=prompts))

    talk = [{"role": "user", "content": "Soup?"}]
    assert "prompt = 'Soup?'" in lines("text", "Soup?") and f"messages = {talk}" in lines("template", "Soup?")
    dialogue = "prompt = '\\n\\nHuman: Soup?\\n\\nAssistant:'"
    assert dialogue in lines("transcript", "Soup?") and dialogue in lines("transcript", talk)
    assert dialogue in lines("transcript", other_formats.render_transcript(talk))
    assert "prompt = 'a[U+202E]b\\n```\\n'" in lines("text", "a\u202eb\n```\n")


def test_a_template_that_the_data_had_no_use_for_is_not_used(run: Path) -> None:
    spells = families.tokenizer(families.FAMILIES["qwen2"], TEXTS)

    def snippet() -> str:
        return card.snippet(card_context.build_context(chosen(run), tiny.causal(), spells, "float32", "policy", "."))

    asks(run, "ppo", "Tell me.")
    assert "apply_chat" not in snippet() and "A prompt is plain text" in written(run, spells)
    asks(run, "ppo", [{"role": "user", "content": "Tell me."}])
    assert "apply_chat_template" in snippet() and "Prompts are conversations" in written(run, spells)
    (run / "ppo_rows.jsonl").unlink()
    assert "apply_chat_template" in snippet(), "nothing says otherwise"


def test_answers_are_asked_for_as_they_were_sampled(run: Path, tokenizer: Any) -> None:
    told = report() | {"temperature": 0.7, "response_length": 24}
    change(run / "eval/report.json", **told)
    assert "temperature=0.7, top_k=0, max_new_tokens=24" in written(run, tokenizer)
    (run / "eval/report.json").unlink()
    begin(run / "ppo", {**configs()["ppo"], "ppo": {"temperature": 0.9, "response_length": {"min": 4, "max": 16}}})
    assert "temperature=0.9, top_k=0, max_new_tokens=16" in written(run, tokenizer)
    assert "max_new_tokens=128" in written(run, tokenizer, "sft")


def test_the_card_in_the_documents_has_what_cards_have(run: Path, tokenizer: Any) -> None:
    page = (Path(__file__).parents[1] / "docs/results/export.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"````markdown\n(.*?)````", page, re.DOTALL)

    def skeleton(text: str) -> list[str]:
        return re.findall(r"^(?:#+ .*|\| .*\n(?=\| ---)|[a-z_-]+:)", text, re.MULTILINE)

    change(run / "ppo/manifest.json", metrics={"objective/scores": 0.5})
    made = written(run, tokenizer, name="ci-ppo").replace("| 200 pairs, 128 probed |", "| 60 pairs, 60 probed |")
    assert skeleton(shown) == skeleton(made) and ModelCard(shown).data.tags == ModelCard(made).data.tags
