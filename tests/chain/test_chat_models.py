"""Chat models of real families from `rlhf init` to the evaluation: tiny ones, with the quirks of their tokenizers."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import families
import pytest
from run_cli import must_succeed, rlhf
from transformers import AutoTokenizer

from rlhf_cli import config, data, jsonl
from rlhf_cli.commands.init import sizes

THINGS = ["river", "sun", "moon", "tree", "bird", "stone", "cloud", "fish", "wind", "rain"]
PAIRS = [
    {"prompt": f"What is a {thing}, {number}?", "chosen": f"A {thing} shines.", "rejected": "No."}
    for number in range(4)
    for thing in THINGS
]
SHORT = {
    "sft": ["sft.max_steps=2"],
    "reward": ["reward.max_steps=2", "reward.normalize_samples=4"],
    "ppo": [
        "ppo.total_episodes=8", "ppo.per_device_train_batch_size=4", "ppo.gradient_accumulation_steps=1",
        "ppo.num_samples_per_prompt=1", "ppo.response_length=8", "output.snapshots=0",
    ],
    "eval": ["eval.n=4", "eval.best_of=[2]", "eval.response_length=8"],
}  # fmt: skip
CHAT = [name for name in (families.FAMILIES | families.NEWER) if name not in ("gpt2", "pythia")]

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "measure_speed", lambda folder: sizes.Speed(training=20_000.0, generation=4_000.0))


def run_stages(run: Path, stages: list[str], changes: dict[str, list[str]]) -> None:
    """Run the stages; the policy starts at the reference, and every stop token of the family ends a response."""
    for stage in stages:
        options = [part for line in SHORT[stage] + changes.get(stage, []) for part in ("-s", line)]
        must_succeed(rlhf(stage, "-c", run / f"{stage}.yaml", *options))
    first = next(row for _, row in jsonl.read_jsonl(run / "ppo/metrics.jsonl"))
    assert first["policy/first_ratio_error"] < 1e-5 and abs(first["objective/kl"]) < 1e-5
    assert {"sft", "ppo"} <= json.loads((run / "eval/report.json").read_text())["models"].keys()


def check_stops(run: Path, name: str) -> None:
    kind = (families.FAMILIES | families.NEWER)[name]
    stops = json.loads((run / "ppo/manifest.json").read_text())["special_tokens"]["stop"]
    tokenizer = AutoTokenizer.from_pretrained(run / "ppo/model")
    generation = json.loads((run / "ppo/model/generation_config.json").read_text())
    known = {kind.stop, *kind.stops}
    assert set(tokenizer.convert_ids_to_tokens([stops] if isinstance(stops, int) else stops)) >= known
    assert generation["eos_token_id"] == stops and tokenizer.pad_token not in (None, kind.stop)


@pytest.mark.parametrize(
    "name",
    [name if name == "gpt_oss" else pytest.param(name, marks=pytest.mark.slow) for name in CHAT if name != "gemma4"],
)
def test_a_chat_model_from_pairs_to_the_evaluation(name: str, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    families.write_causal(tmp_path / "base", name, [row["prompt"] + row["chosen"] for row in PAIRS])
    run, kind = tmp_path / "run", (families.FAMILIES | families.NEWER)[name]
    options = ("--data", tmp_path / "pairs.jsonl", "--base", tmp_path / "base", "--minutes", "1")
    must_succeed(rlhf("init", "preferences", run, *options))
    assert ("enable_thinking: false" in (run / "sft.yaml").read_text()) == ("enable_thinking" in kind.template)
    assert ("2024-07-26" in (run / "sft.yaml").read_text()) == ("strftime_now" in kind.template)
    run_stages(run, ["sft", "reward", "ppo", "eval"], {})
    check_stops(run, name)


@pytest.mark.slow
def test_a_family_without_a_classifier_takes_functions_and_a_value_head(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": row["prompt"]}] for row in PAIRS]
    answers = [[{"role": "assistant", "content": row["chosen"]}] for row in PAIRS]
    pairs = zip(turns, answers, strict=True)
    jsonl.write_jsonl(tmp_path / "sft.jsonl", [{"prompt": turn, "completion": answer} for turn, answer in pairs])
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    families.write_causal(tmp_path / "base", "gemma4", [row["prompt"] + row["chosen"] for row in PAIRS])
    run = tmp_path / "run"
    options = ("--data", tmp_path / "pairs.jsonl", "--base", tmp_path / "base")
    refused = rlhf("init", "preferences", run, *options)
    assert "error[M10]: --base: transformers has no sequence classifier for gemma4_text" in refused.stderr
    assert refused.exit_code == 2 and "models.value: policy_head" in refused.stderr and not run.exists()
    must_succeed(rlhf("init", "functions", run))
    train, prompts = f"data.train={tmp_path / 'sft.jsonl'}", f"data.prompts={tmp_path / 'sft.jsonl'}"
    sft = ["model.new=null", f"model.path={tmp_path / 'base'}", train, "data.eval=null"]
    judge = "judges.gold=reward:score"  # the demo's knows only the demo's prompts
    run_stages(run, ["sft", "ppo", "eval"], {"sft": sft, "ppo": [prompts], "eval": [prompts, judge]})
    check_stops(run, "gemma4")


# tests/data/test_rendering.py has all templates of TRL's wheel.
THINKING = {  # template -> its variables for plain answers, the end of its prompts, its stop token
    "qwen3_5_think": ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>"),
    "deepseek_r1_distill": (
        {"generation_prompt": "<\uff5cAssistant\uff5c>"}, "<\uff5cAssistant\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "gptoss": (
        {"generation_prompt": "<|start|>assistant<|channel|>final<|message|>", "date": "2024-07-26"},
        "<|start|>assistant<|channel|>final<|message|>", "<|return|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THINKING)
def test_a_model_that_thinks_is_trained_on_plain_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, prompt_end, stop = THINKING[name]
    template = (Path(find_spec("trl").origin).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")
    special = {stop, families.ENDS, *re.findall(r"<\|[a-z_]+\|>|<\uff5c[^<>\s]+?\uff5c>", template)}
    roles = {"eos_token": stop, "pad_token": families.ENDS, "bos_token": families.ENDS}
    kind = families.Family("qwen3", tuple(sorted(special)), roles, stop, template)
    monkeypatch.setitem(families.NEWER, name, kind)
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    families.write_causal(tmp_path / "base", name, [row["prompt"] + row["chosen"] for row in PAIRS])
    run = tmp_path / "run"
    options = ("--data", tmp_path / "pairs.jsonl", "--base", tmp_path / "base", "--minutes", "1")
    must_succeed(rlhf("init", "preferences", run, *options))
    assert config.load("sft", run / "sft.yaml").data.chat_template_kwargs == variables
    by_hand = rlhf("check", run / "sft.yaml", "-s", "data.chat_template_kwargs=null")
    assert by_hand.exit_code == (2 if name.startswith("deepseek") else 0), by_hand.output
    wanted = ", ".join(
        f"{key}: {json.dumps(each, ensure_ascii=False)}" for key, each in variables.items() if key != "date"
    )
    assert "[T09]: " in by_hand.stderr and f"set data.chat_template_kwargs: {{{wanted}}}" in by_hand.stderr

    for stage in ("sft", "reward", "ppo"):
        sets = [part for line in SHORT[stage] for part in ("-s", line)]
        assert "T09" not in must_succeed(rlhf(stage, "-c", run / f"{stage}.yaml", *sets)).stderr
    served = AutoTokenizer.from_pretrained(run / "ppo/model")
    for row in (row for _, row in jsonl.read_jsonl(run / "data/sft.jsonl")):
        turns = [*row["prompt"], *row["completion"]]
        prompt, response = data.encode(served, row["prompt"], row["completion"][0]["content"])
        assert prompt == served.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert served.decode(prompt).endswith(prompt_end) and served.decode(response[-1:]) == stop
        whole = "".join(served.apply_chat_template(turns, tokenize=False).split())
        assert whole.startswith("".join(served.decode(prompt + response[:-1]).split()) + stop)
    asked = [row["prompt"] for file in sorted((run / "data").glob("*.jsonl")) for _, row in jsonl.read_jsonl(file)]
    prompts = [served.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) for turns in asked]
    texts = set(served.batch_decode(prompts, skip_special_tokens=True))
    samples = [row["prompt"] for _, row in jsonl.read_jsonl(run / "ppo/samples.jsonl")]
    assert samples and texts.issuperset(samples)
