"""Reward models with their own tokenizer and chat template: responses are decoded, templated and encoded again."""

import json
import shutil
from pathlib import Path

import families
import pytest
import tiny
import torch
from ppo_folder import PPO, PROMPTS, fails, lines, must_succeed, ppo, rlhf, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import jsonl
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import save, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward, RetokenizingReward
from tests.reference.comparison import compare_run, disagreements

TEXTS = ["entirely different words zebra quartz", *PROMPTS]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def foreign(folder: Path, name: str = "foreign", family: str | None = None) -> None:
    """A reward model with another tokenizer than the policy's."""
    jsonl.write_jsonl(folder / "other.jsonl", [{"text": text} for text in TEXTS[:1]])
    tokenizer = tokenizers.train_tokenizer(folder / "other.jsonl", 270)
    if family:
        tokenizer = families.tokenizer(families.FAMILIES[family], TEXTS)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "pad_token_id": 0}
    save.save_model(tiny.scorer(**size, bos_token_id=None), tokenizer, folder / name, "An external model.")


def with_foreign(folder: Path, **source: object) -> None:
    rewards = {"other": {"model": "foreign", **source}}
    write(folder, "ppo", {**PPO, "models": {"sft": "sft_model", "value": "policy_head"}, "rewards": rewards})


def by_transformers(folder: Path, prompt: str, row: dict, stop: str) -> float:
    """The score by transformers: prompt and response are tokenized separately, the end is one token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [i for text in (prompt, row["response"]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    ids += [tokenizer.convert_tokens_to_ids(stop)] if row["ended"] or not row["response"] else []
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.mark.full
def test_ppo_passes_text_to_a_model_of_another_tokenizer(run_folder):
    foreign(run_folder)
    with_foreign(run_folder)
    result = must_succeed(ppo(run_folder))
    assert result.stderr.count("rewards.other.model: has its own tokenizer or template") == 1
    samples = lines(run_folder / "ppo/samples.jsonl")
    expected = [by_transformers(run_folder / "foreign", row["prompt"], row, "<eos>") for row in samples]
    assert samples and [row["scores"]["other"] for row in samples] == pytest.approx(expected, abs=1e-4)
    assert rlhf("check", run_folder / "ppo.yaml").exit_code == 0
    must_succeed(rlhf("verify", run_folder, "--step", "3"))
    assert disagreements(compare_run(run_folder, 3)) == {}


@pytest.mark.full
def test_a_judge_of_another_tokenizer_scores_the_text(run_folder):
    foreign(run_folder)
    assert ppo(run_folder).exit_code == 0
    result = rlhf("eval", "-c", run_folder / "eval.yaml", "-s", f"judges.strange={run_folder / 'foreign'}")
    assert result.exit_code == 0, result.output
    assert "judges.strange: has its own tokenizer or template" in result.stderr
    row = next(row for row in lines(run_folder / "eval/samples.jsonl"))
    assert "strange" in row["scores"]


def test_t04_the_value_model_cannot_be_a_copy_of_such_a_model(run_folder):
    foreign(run_folder)
    with_foreign(run_folder)
    for value, says in (("reward", "models.reward has another tokenizer"), ("./foreign", "models.value has another")):
        models = {"sft": "sft_model", "reward": "foreign", "value": value}
        write(run_folder, "ppo", {**PPO, "models": models})
        for result in (ppo(run_folder), rlhf("check", run_folder / "ppo.yaml")):
            fails(result, "T04", says, "set models.value: policy_head")


def test_the_same_tokenizer_needs_no_retokenizing(run_folder, monkeypatch):
    monkeypatch.setattr(RetokenizingReward, "__call__", lambda *_: pytest.fail("encoded again"))
    result = ppo(run_folder, "-s", "ppo.total_episodes=8")
    assert result.exit_code == 0 and "its own tokenizer" not in result.stderr


def conversations(folder: Path, turns: list[dict]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft_model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "sft_model")
    asked = [{"messages": [*turns, {"role": "user", "content": text}]} for text in PROMPTS]
    jsonl.write_jsonl(folder / "prompts.jsonl", asked)


def scored_conversations(run_folder, family):
    """Run PPO with a reward model of the family; yield three rows, their conversations and these by its template."""
    conversations(run_folder, [])
    foreign(run_folder, family=family)
    with_foreign(run_folder)
    must_succeed(ppo(run_folder, "-s", "ppo.total_episodes=8"))
    other = AutoTokenizer.from_pretrained(run_folder / "foreign")
    for row in lines(run_folder / "ppo/samples.jsonl")[:3]:
        asked = [{"role": "user", "content": row["prompt"].removeprefix("<user>").removesuffix("<a>")}]
        prompt = other.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        yield row, asked, prompt


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_conversations_are_rendered_by_its_own_template(run_folder, family):
    for row, _, prompt in scored_conversations(run_folder, family):
        expected = by_transformers(run_folder / "foreign", prompt, row, families.FAMILIES[family].stop)
        assert row["scores"]["other"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.full
def test_its_template_writes_the_whole_conversation(run_folder):
    """Qwen3's template writes an empty thought before an answer, and its generation prompt does not."""
    for row, asked, prompt in scored_conversations(run_folder, "qwen3"):
        other = AutoTokenizer.from_pretrained(run_folder / "foreign")
        whole = other.apply_chat_template([*asked, {"role": "assistant", "content": "MARK"}], tokenize=False)
        header = whole.removeprefix(prompt).partition("MARK")[0]
        assert header == "<think>\n\n</think>\n\n"
        answer = {**row, "response": header + row["response"]}
        expected = by_transformers(run_folder / "foreign", prompt, answer, "<|im_end|>")
        assert row["scores"]["other"] == pytest.approx(expected, abs=1e-4)


def test_d06_d14_a_template_that_rejects_the_prompts(run_folder):
    conversations(run_folder, [{"role": "system", "content": "Be kind."}])
    foreign(run_folder, family="gemma")
    with_foreign(run_folder)
    for result in (ppo(run_folder), rlhf("check", run_folder / "ppo.yaml")):
        fails(result, "D06", "System role not supported", "ppo.yaml")
    shutil.rmtree(run_folder / "foreign")
    foreign(run_folder)  # without any template
    fails(rlhf("check", run_folder / "ppo.yaml"), "D14")


class Letters:
    """A tokenizer with a token per letter; 99 is special."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(97 + i) for i in ids if i != 99)


def every_other_letter(text: str | None) -> list[int]:
    return [ord(letter) - 97 for letter in (text or "")[::2]]


def encode_pairs(prompts, responses):
    """Another tokenization of the same text: every other letter, and stop token 7."""
    pairs = zip(prompts, responses, strict=True)
    return [(every_other_letter(prompt), [*every_other_letter(response), 7]) for prompt, response in pairs]


def retokenizing(**changes) -> RetokenizingReward:
    options = {"name": "r", "tokenizer": Letters(), "encode": encode_pairs, "stop_token_id": 99, **changes}
    return RetokenizingReward(tiny.scorer(), 4, **options)


def test_retokenizing_by_hand():
    prompts, responses = [[1, 2, 3], [4, 5]], [[6, 8, 9, 99], [6, 8]]
    assert retokenizing().retokenize(prompts, responses) == ([[1, 3], [4]], [[6, 9, 7], [6]]), "no stop token"
    assert retokenizing(prompts={(4, 5): [11, 12]}).retokenize(prompts, responses)[0] == [[1, 3], [11, 12]]
    assert retokenizing(stop_token_id=None).retokenize(prompts, responses)[1] == [[6, 9], [6]]
    assert retokenizing(stop_token_id=[99, 8]).retokenize(prompts, responses)[1] == [[6, 9, 7], [6, 7]]
    assert retokenizing().retokenize([[1]], [[99]]) == ([[1]], [[7]])
    plain = ModelReward(tiny.scorer(), 4)
    rollout = Rollout.from_lists(prompts, responses, stop_token_id=99)
    again = Rollout.from_lists([[1, 3], [4]], [[6, 9, 7], [6]])
    assert retokenizing()(rollout).tolist() == plain(again).tolist()

    source = retokenizing()
    source.model.config.reward_length_slope, source.model.config.reward_length_mean = 0.5, 1.0
    assert (plain(again) - source(rollout)).tolist() == pytest.approx([0.5 * 2, 0.0], abs=1e-6), "of its own tokens"


def test_a_prompt_that_is_added_later_keeps_its_text():
    source = retokenizing(prompts={(1, 2): [11]})
    source.add_prompt([4, 5], "axcx")
    assert source.retokenize([[1, 2], [4, 5], [5]], [[6]] * 3)[0] == [[11], [0, 2], [5]]


@pytest.mark.parametrize(
    ("prompts", "says"), [([[1] * 9], "row 0 has 6 tokens, its model reads 5"), ([[99]], "to nothing")]
)
def test_r05_a_row_that_it_cannot_encode(prompts, says):
    with pytest.raises(RLHFError, match=f"R05.*reward `r`.*{says}"):
        retokenizing(context=5).retokenize(prompts, [[1]])


def test_c13_a_prompt_that_fills_its_context(run_folder):
    foreign(run_folder)
    config = json.loads((run_folder / "foreign/config.json").read_text())
    (run_folder / "foreign/config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    with_foreign(run_folder)
    for result in (ppo(run_folder), rlhf("check", run_folder / "ppo.yaml")):
        fails(result, "C13", "its context is 20")
