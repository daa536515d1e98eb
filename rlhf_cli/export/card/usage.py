"""How the model is used, as code that runs with transformers alone, on the tokens that it was trained on."""

import json
from collections.abc import Mapping

from rlhf_cli import data
from rlhf_cli.export.card import example
from rlhf_cli.export.card.subject import Subject
from rlhf_cli.report.runs import is_number

ANSWER = "Write an answer to it here."
PROMPTS = {  # what goes to the model
    "template": "Prompts are conversations, lists of messages that the chat template of its tokenizer writes.",
    "text": "A prompt is plain text, which the answer goes on with: no chat template, no roles.",
    "transcript": r"A prompt is a transcript as a text, `\n\nHuman: ...\n\nAssistant:`, also that of one question.",
}
TOKENS = 128  # of an answer, where the run tells no length


def snippet(about: Subject) -> str:
    """Python: an answer to a prompt, or the score of one."""
    of_a_policy = about.model.can_generate()
    lines = [] if of_a_policy else ["import torch"]
    kind = "AutoModelForCausalLM" if of_a_policy else "AutoModelForSequenceClassification"
    trust = ", trust_remote_code=True" if getattr(about.model.config, "auto_map", None) else ""
    lines += [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{about.address}"{trust})',
        f'model = {kind}.from_pretrained("{about.address}"{trust})',
        "",
    ]
    lines += _answering(about) if of_a_policy else _scoring(about)
    return "```python\n" + "\n".join(lines) + "\n```"


def sampling(about: Subject) -> tuple[float, int] | None:
    """(temperature, most tokens of an answer) with which it was evaluated, or else trained; None for neither."""
    found = [about.report.get(key, about.stage.setting(f"ppo.{key}")) for key in ("temperature", "response_length")]
    temperature, length = found
    length = length.get("max") if isinstance(length, Mapping) else length
    return (temperature, length) if is_number(temperature) and isinstance(length, int) else None


def _answering(about: Subject) -> list[str]:
    found = sampling(about)
    how = f"do_sample=True, temperature={found[0]:g}, top_k=0, max_new_tokens={found[1]}" if found else ""
    how = how or f"max_new_tokens={TOKENS}"
    if about.prompts == "template":
        how_asked = "add_generation_prompt=True, return_dict=True, return_tensors"
        asked = [
            f"messages = {example.of(about)!r}",
            f'inputs = tokenizer.apply_chat_template(messages, {how_asked}="pt")',
        ]
    else:
        asked = [f"prompt = {example.of(about)!r}", 'inputs = tokenizer(prompt, return_tensors="pt")']
    return [
        *asked,
        f"output = model.generate(**inputs, {how})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _scoring(about: Subject) -> list[str]:
    """Prompt and answer are tokenised each by itself, as in the training: joined they may give other tokens."""
    tokenizer, config = about.tokenizer, about.model.config
    chat, stop = about.prompts == "template", data.stop_token_id(tokenizer)
    end = "tokenizer.eos_token_id"
    if stop != tokenizer.eos_token_id:
        end = f"tokenizer.convert_tokens_to_ids({json.dumps(tokenizer.convert_ids_to_tokens(stop))})"
    if chat:
        first = [
            "    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)"
            '["input_ids"]',
        ]
    else:
        first = ['    ids = tokenizer(prompt)["input_ids"]']
    result = "(raw - model.config.reward_mean) / model.config.reward_std" if hasattr(config, "reward_mean") else "raw"
    return [
        "",
        "def score(prompt, answer):",
        *first,
        f'    ids = ids + tokenizer(answer, add_special_tokens=False)["input_ids"] + [{end}]',
        "    with torch.no_grad():",
        "        raw = model(input_ids=torch.tensor([ids])).logits[0, 0].item()",
        f"    return {result}",
        "",
        "",
        f"prompt = {example.of(about)!r}",
        f'print(score(prompt, "{"" if chat else " "}{ANSWER}"))',
    ]
