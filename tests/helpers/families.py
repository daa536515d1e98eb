"""Tiny random models of real families, with a tokenizer each: the family's special tokens, and its chat template.

The templates render a conversation as the families' templates do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from tokenizers.processors import TemplateProcessing
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

CHATML = """
{%- if messages[0].role != 'system' and default_system -%}
<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
{{ '' }}
{%- endif -%}
{%- for message in messages -%}
{%- set thought = '<think>\n\n</think>\n\n' if thinks and loop.last and message.role == 'assistant' else '' -%}
{{ '<|im_start|>' + message.role + '\n' + thought + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}"""
GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + message.content | trim }}
{{- '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
LLAMA3 = """
{{- bos_token -}}
{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '<|eot_id|>' }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""
SMOLLM3 = """
{%- set thinks = enable_thinking if enable_thinking is defined else true -%}
{{ '<|im_start|>system\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' }}
{{- ('/think' if thinks else '/no_think') + '<|im_end|>\n' }}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' + ('' if thinks else '<think>\n\n</think>\n') }}
{%- endif -%}"""
PHI4 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = """
{{- bos_token -}}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
{%- if message.role == 'user' -%}{{ '[INST]' + message.content + '[/INST]' }}
{%- else -%}{{ message.content + eos_token }}{%- endif -%}
{%- endfor -%}"""
GPT_OSS = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else -%}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
ENDS = "<|endoftext|>"


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer adds to byte-level BPE; `stop` ends a turn, or a text where there is no template."""

    architecture: str
    tokens: tuple[str, ...]
    roles: dict[str, str]  # eos_token, and where the family has them bos_token and pad_token
    stop: str
    template: str | None = None
    prefix: str | None = None  # token that the tokenizer puts before a text
    stops: tuple[str, ...] = ()  # of its generation config; default: its EOS token
    extra: dict[str, Any] = field(default_factory=dict)  # of the model's config
    unused_rows: int = 0  # of the embedding, beyond the tokens
    unread_token: str | None = None  # its id is beyond the embedding's rows


IM = (ENDS, "<|im_start|>", "<|im_end|>")
GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
GEMMA_ROLES = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
QWEN = {"eos_token": "<|im_end|>", "pad_token": ENDS}
FAMILIES = {
    "gpt2": Family("gpt2", (ENDS,), {"eos_token": ENDS, "bos_token": ENDS}, ENDS),
    # The unused rows are for the pad token that is added.
    "pythia": Family("gpt_neox", (ENDS, "<|padding|>"), {"eos_token": ENDS, "bos_token": ENDS}, ENDS, unused_rows=7),
    "qwen2": Family("qwen2", IM, QWEN, "<|im_end|>", "{%- set default_system = true %}" + CHATML, stops=IM[::-2]),
    "qwen3": Family("qwen3", IM, QWEN, "<|im_end|>", "{%- set thinks = true %}" + CHATML, stops=IM[::-2]),
    "gemma": Family(
        "gemma2", GEMMA_TOKENS, GEMMA_ROLES, "<end_of_turn>", GEMMA, prefix="<bos>", stops=("<eos>", "<end_of_turn>")
    ),
    "llama3": Family(
        "llama",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
        "<|eot_id|>",
        LLAMA3,
        prefix="<|begin_of_text|>",
        stops=("<|end_of_text|>", "<|eot_id|>"),  # in this order
    ),
}
KV = {"num_key_value_heads": 2, "head_dim": 8}
NEWER = {
    "gemma3": Family(
        "gemma3_text", GEMMA_TOKENS, GEMMA_ROLES, "<end_of_turn>", GEMMA, prefix="<bos>",
        stops=("<eos>", "<end_of_turn>"), extra={**KV, "sliding_window": 8}, unread_token="<image_soft_token>",
    ),
    "gemma4": Family(
        "gemma4_text", ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"), GEMMA_ROLES, "<turn|>",
        GEMMA.replace("<start_of_turn>", "<|turn>").replace("<end_of_turn>", "<turn|>"), prefix="<bos>",
        stops=("<eos>", "<turn|>"), extra={**KV, "global_head_dim": 8, "sliding_window": 8},
    ),
    # Its pad token is its EOS token.
    "smollm3": Family(
        "smollm3", ("<|begin_of_text|>", "<|end_of_text|>", *IM[1:]),
        {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, "<|im_end|>", SMOLLM3, extra=KV,
    ),
    "phi4": Family(
        "phi3", (ENDS, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), ENDS), "<|end|>", PHI4,
        stops=("<|end|>", ENDS), extra={**KV, "partial_rotary_factor": 0.75}, unused_rows=5,
    ),
    "mistral": Family(
        "mistral", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, "</s>", MISTRAL, prefix="<s>",
        extra={**KV, "sliding_window": 8},
    ),
    "gpt_oss": Family(
        "gpt_oss",
        ("<|startoftext|>", ENDS, "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": ENDS}, "<|return|>", GPT_OSS,
        stops=("<|return|>", ENDS, "<|call|>"),
        extra={**KV, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
}  # fmt: skip


def tokenizer(family: Family, texts: Sequence[str]) -> Any:
    """Train byte-level BPE on `texts`, with the family's tokens."""
    trained = PreTrainedTokenizerFast(tokenizer_object=_byte_level(texts, family.tokens), **family.roles)
    if family.prefix:
        special = [(family.prefix, trained.convert_tokens_to_ids(family.prefix))]
        trained.backend_tokenizer.post_processor = TemplateProcessing(f"{family.prefix} $A", special_tokens=special)
    trained.chat_template = family.template
    if family.unread_token:
        trained.add_special_tokens({"additional_special_tokens": [family.unread_token]})
    return trained


def write_causal(folder: Path, name: str, texts: Sequence[str]) -> None:
    """Write a causal model of family `name` with random weights, and its tokenizer."""
    family = (FAMILIES | NEWER)[name]
    trained = tokenizer(family, texts)
    size = "n_positions" if name == "gpt2" else "max_position_embeddings"
    ids = {f"{role}_token_id": getattr(trained, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    rows = len(trained) + family.unused_rows - (family.unread_token is not None)
    model = tiny.causal(family.architecture, vocab_size=rows, **{size: 512}, **ids, **family.extra)
    if family.stops:
        model.generation_config.eos_token_id = trained.convert_tokens_to_ids(list(family.stops))
    model.save_pretrained(folder)
    trained.save_pretrained(folder)


def write_sentiment_classifier(folder: Path, texts: Sequence[str]) -> None:
    """Write a DistilBERT with the labels NEGATIVE and POSITIVE."""
    trained = PreTrainedTokenizerFast(tokenizer_object=_byte_level(texts, ["[PAD]"]), pad_token="[PAD]")
    sizes = {"vocab_size": len(trained), "dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    config = DistilBertConfig(**sizes, id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1})
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    trained.save_pretrained(folder)


def _byte_level(texts: Sequence[str], special: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend
