"""Every chat template in TRL's wheel: prompt and answer are its own rendering of the whole conversation."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import template_trial
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import chat_templates, tokenizers

TEMPLATES = sorted((Path(find_spec("trl").origin).parent / "chat_templates").glob("*.jinja"))
NAMES = [path.stem for path in TEMPLATES]
SPECIAL = re.compile(
    r"<\|[^<>|\s{}']+\|>|<\uff5c[^<>\s]+?\uff5c>|<end_of_[a-z]+>|<start_of_turn>|<turn\|>|<\|turn>|</s>"
)
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]
SEVERAL = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Are you there?"},
    {"role": "assistant", "content": "I am."},
    *ASKED,
]
ANSWERS = {
    "plain": {"content": "It is 4."},
    "spaces": {"content": "  It is 4. \n"},
    "thought": {"content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
    "reasoning_content": {"content": "It is 4.", "reasoning_content": "Two and two."},
}
# Their generation prompt opens a thought, and no variable of theirs closes it.
OPEN = [name for name in NAMES if name.startswith("deepseek")]
THINKING = ("qwen3_5", "qwen3_6", "nemotron", "deepseek_r1_distill_training")
FINAL = "<|channel|>final<|message|>"
CHANNELS = {"gptoss": FINAL, "muse_glimmer": " to=user<|message|>"}
BYTES = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def test_the_wheel_has_the_templates() -> None:
    assert len(NAMES) >= 60 and {"qwen3_5_think", "nemotron_3_nano", "gptoss", "smolvlm", *OPEN} <= set(NAMES)


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process that tries a template: test_a_row_is_the_templates_rendering tries each."""
    monkeypatch.setattr(template_trial, "ends_by", lambda *_, **__: None)


def tokenizer_of(name: str) -> Any:
    """A tokenizer of single bytes, with the special tokens that occur in the template."""
    template = next(path for path in TEMPLATES if path.stem == name).read_text(encoding="utf-8")
    backend = Tokenizer(tokenizer_models.BPE(vocab=BYTES, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    made.add_tokens([AddedToken(text, special=True) for text in sorted(set(SPECIAL.findall(template)))])
    made.chat_template = template
    return made


def by_transformers(tokenizer: Any, turns: list[dict], *, prompt: bool) -> str:
    """The template's rendering of the messages, or of their contents as lists of parts if it reads only these."""
    if ASKED[0]["content"] not in tokenizer.apply_chat_template(ASKED, tokenize=False):
        turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)


def turns_for(tokenizer: Any) -> list[list[dict]]:
    """The two conversations; Gemma's first template takes no system prompt."""
    try:
        by_transformers(tokenizer, SEVERAL, prompt=False)
    except Exception as error:
        assert "System role not supported" in str(error)
        return [ASKED, SEVERAL[1:]]
    return [ASKED, SEVERAL]


def without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


def check_rendering(tokenizer: Any, turns: list[dict], answer: dict, response: Any) -> str:
    """Compare the tokens of a row with the template's rendering, and return the text of the response."""
    prompt, ids = data.encode(tokenizer, turns, response)
    stop, text = tokenizer.convert_ids_to_tokens(ids[-1]), tokenizer.decode(ids[:-1])
    assert tokenizer.decode(prompt) == by_transformers(tokenizer, turns, prompt=True)
    rendered = without_space(by_transformers(tokenizer, [*turns, {"role": "assistant", **answer}], prompt=False))
    ours = without_space(tokenizer.decode(prompt) + text)
    assert rendered.startswith(ours)
    behind = rendered[len(ours) :]
    assert behind.startswith(without_space(stop)) or (stop == "<eos>" and not behind)
    return text


@pytest.mark.full
@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_templates_rendering_or_is_refused(name: str, case: str) -> None:
    tokenizer, answer = tokenizer_of(name), ANSWERS[case]
    response = answer["content"] if len(answer) == 1 else {"role": "assistant", **answer}
    for turns in turns_for(tokenizer):
        if case == "thought" and name.startswith("qwen3_8"):  # with the content alone, the template opens two thoughts
            answer = ANSWERS["reasoning_content"]
        rendered = by_transformers(tokenizer, [*turns, {"role": "assistant", **answer}], prompt=False)
        if case in ("plain", "spaces"):
            refused = name in OPEN
        else:  # thoughts that the template leaves out, or that its generation prompt has closed
            refused = "Two and two." not in rendered or name.startswith("qwen3_5_nothink")
        if refused:
            with pytest.raises(RLHFError, match="T09"):
                data.encode(tokenizer, turns, response)
        else:
            text = check_rendering(tokenizer, turns, answer, response)
            prompt = tokenizer.decode(data.encode(tokenizer, turns, None)[0])
            last = prompt.rpartition(ASKED[0]["content"])[2] + text
            assert last.count("<think>") == last.count("</think>") <= 1


@pytest.mark.full
@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize("name", NAMES)
def test_with_the_variables_of_init_the_answers_text_follows_the_prompt(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    variables = chat_templates.variables_for_answers(tokenizer)
    chat_templates.set_template_variables(tokenizer, variables, where="sft.yaml")
    tokenizer.save_pretrained(tmp_path)
    served = AutoTokenizer.from_pretrained(tmp_path)
    for turns in turns_for(served):
        for case in ("plain", "spaces"):
            assert check_rendering(served, turns, ANSWERS[case], ANSWERS[case]["content"]).strip() == "It is 4."
        prompt = served.decode(data.encode(tokenizer, turns, None)[0])
        assert prompt == by_transformers(served, turns, prompt=True)
        assert prompt.count("<think>") == prompt.count("</think>")
        header = CHANNELS.get(name.removesuffix("_training"), "")
        assert prompt.endswith(header)
    assert ("generation_prompt" in variables) == (name in OPEN or bool(header))
    chat_templates.set_template_variables(tokenizer, {"generation_prompt": "A:"}, where="sft.yaml")
    assert data.encode(tokenizer, ASKED, None)[0][-2:] == tokenizer("A:").input_ids, "in place of the values before"


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name.startswith(("qwen3_5", "qwen3_6", "nemotron", "deepseek_r1_distill_training"))],
)
def test_with_thoughts_the_variables_of_init_close_none(name: str) -> None:
    tokenizer = tokenizer_of(name)
    variables = chat_templates.variables_for_answers(tokenizer, thoughts=True)
    assert variables == ({"enable_thinking": True} if "nothink" in name else {})
    chat_templates.set_template_variables(tokenizer, variables, where="sft.yaml")
    assert check_rendering(tokenizer, ASKED, ANSWERS["thought"], ANSWERS["thought"]["content"]).startswith("Two")


@pytest.mark.parametrize(
    ("name", "case", "says", "hint"),
    [
        (
            "deepseekv3", "plain", "ends with '<think>\\n', where the chat template writes 'It is 4.'",
            'set data.chat_template_kwargs: {generation_prompt: "<\uff5cAssistant\uff5c>"}',
        ),
        ("deepseekv3", "thought", "leaves out a part of the answer: 'Two and two.'", "remove it from the answer"),
        (
            "qwen3_5_nothink", "thought", "ends with '\\n</think>\\n\\n', where the chat template writes 'Two and two.",
            "set data.chat_template_kwargs: {enable_thinking: true}",
        ),
        ("llama3", "reasoning_content", "leaves out a part of the answer: 'Two and two.'", "remove it from the answer"),
    ],
)  # fmt: skip
def test_t09_says_what_to_set(name: str, case: str, says: str, hint: str, tmp_path: Path) -> None:
    good, bad = ({"messages": [*ASKED, {"role": "assistant", **ANSWERS[each]}]} for each in ("plain", case))
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [bad, bad] if name == "deepseekv3" else [good, bad])
    with pytest.raises(RLHFError) as error:
        data.sft_rows(tmp_path / "rows.jsonl", tokenizer_of(name), max_length=None)
    line = 1 if name == "deepseekv3" else 2
    assert error.value.exit_code == 2 and f"error[T09]: {tmp_path / 'rows.jsonl'}:{line}: " in str(error.value)
    assert says in str(error.value) and f"hint: {hint}" in str(error.value)
    if line == 2:
        source = DataSource(str(tmp_path / "rows.jsonl"), on_bad="drop")
        assert len(data.sft_rows(source, tokenizer_of(name), max_length=None)) == 1


@pytest.mark.parametrize(
    ("name", "header", "hint"),
    [
        ("qwen3_5_think", "</think>", "{enable_thinking: false}"),
        ("nemotron_3_nano", "</think>", "{enable_thinking: false}"),
        ("glm4moe_training", "<think></think>", "{enable_thinking: false}"),
        ("gptoss", FINAL, f'{{generation_prompt: "<|start|>assistant{FINAL}"}}'),
        ("qwen2_5", None, ""),
    ],
)  # fmt: skip
def test_t09_warns_of_a_header_in_the_answers(
    name: str, header: str | None, hint: str, tmp_path: Path, capsys: Any
) -> None:
    tokenizer, answers = tokenizer_of(name), [{"role": "assistant", "content": text} for text in ("It is 4.", "No.")]
    pair = {"prompt": ASKED, "chosen": [answers[0]], "rejected": [answers[1]]}
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [pair])
    (row,) = data.preference_rows(tmp_path / "pairs.jsonl", tokenizer, max_length=None)
    for ids, answer in ((row["chosen_ids"], answers[0]), (row["rejected_ids"], answers[1])):
        rendered = tokenizer.apply_chat_template([*ASKED, answer], tokenize=False)
        assert without_space(rendered).startswith(without_space(tokenizer.decode(ids)))
    warnings = [line for line in terminal.emitted_warnings() if "T09" in line]
    assert len(warnings) == (header is not None)
    if header:
        assert f"the chat template writes {header!r} before an answer" in warnings[0]
        assert f"hint: set data.chat_template_kwargs: {hint}, and" in capsys.readouterr().err


def test_a_thought_beside_the_content_is_trained(tmp_path: Path) -> None:
    tokenizer, good = tokenizer_of("qwen3_5_think"), {"role": "assistant", **ANSWERS["reasoning_content"]}
    bad = {"role": "assistant", "content": "It is 5.", "reasoning": "Two and three."}
    jsonl.write_jsonl(tmp_path / "sft.jsonl", [{"messages": [*ASKED, good]}])
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": ASKED, "chosen": [good], "rejected": [bad]}])
    (row,) = data.sft_rows(tmp_path / "sft.jsonl", tokenizer, max_length=None)
    (pair,) = data.preference_rows(tmp_path / "pairs.jsonl", tokenizer, max_length=None)
    assert tokenizer.decode(row["input_ids"]).endswith("<think>\nTwo and two.\n</think>\n\nIt is 4.<|im_end|>")
    assert pair["chosen_ids"] == row["input_ids"]
    assert tokenizer.decode(pair["rejected_ids"]).endswith("<think>\nTwo and three.\n</think>\n\nIt is 5.<|im_end|>")
    assert not [line for line in terminal.emitted_warnings() if "T09" in line]
    with pytest.raises(RLHFError, match=r"D05.*dropped 1 an answer has its thought or tool calls beside the"):
        data.preference_pairs(DataSource(str(tmp_path / "pairs.jsonl"), on_bad="drop"), reads_system_texts=True)


def test_sampled_text_is_never_refused() -> None:
    """Reward models of other templates read it: a header before it, or its own thought, or the text as it is."""
    texts = ["It is 4.", " It is 4. ", "<think>Two.</think>4", "</think>a</think>b", "<think>never closed"]
    tokenizer = tokenizer_of("qwen3_5_think")
    rows = data.encode_many(
        tokenizer, [None] * 5, [{"role": "assistant", "content": text} for text in texts], any_text=True
    )
    decoded = [tokenizer.decode(ids) for _, ids in rows]
    assert decoded == [
        "\n</think>\n\nIt is 4.<|im_end|>", "\n</think>\n\n It is 4. <|im_end|>", "Two.\n</think>\n\n4<|im_end|>",
        "</think>a</think>b<|im_end|>", "\n</think>\n\n<think>never closed<|im_end|>",
    ]  # fmt: skip


def test_a_template_without_the_answers_text_is_refused() -> None:
    tokenizer = tokenizer_of("llama3")
    tokenizers.set_chat_template(tokenizer, "{% for m in messages %}{{ m.role }}{% endfor %}")
    for use in (lambda: data.stop_token_id(tokenizer), lambda: data.encode(tokenizer, ASKED, "It is 4.")):
        with pytest.raises(RLHFError, match=r"T09.*leaves out the assistant's text"):
            use()
