"""Whatever stands in a model's folder: a code, or the weights of its files and no others. Never random ones in silence.

30 cases beside the 300 of tests/fuzzing/test_configs_and_rows.py, which `make fuzz CASES=` counts.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import check
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_cli.errors import CODES, RLHFError
from rlhf_cli.models import tokenizers
from rlhf_cli.models.load import init_reward_model, load_causal_lm
from tests.conftest import World
from tests.fuzzing.test_configs_and_rows import outcome

pytestmark = pytest.mark.full
VALUES = [
    0, 1, -1, 2, 3, 4, 8, 31, 48, 64, 336, 5000, 10**7, 10**12, 0.5, 1e-5, -0.1, 1e400, True, False, None, "", "abc",
    "gelu", "llama", "gpt2", "qwen2", "bert", "t5", "gemma3", "float16", "os.system", [], [1], ["LlamaForCausalLM"],
    ["LlamaForSequenceClassification"], {}, {"a": 1}, {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"rope_type": "linear", "factor": 2.0}, {"type": "Lowercase"}, {"type": "NFC"}, {"type": "ByteLevel"},
    {"type": "abc"}, {"0": "a", "1": "b"}, [[[[]]]], "\x1b[31m", "\ud800", "x" * 5000,
]  # fmt: skip
FILES = {
    "config.json": "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers head_dim "
    "num_attention_heads num_key_value_heads max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings "
    "attention_bias rope_parameters rope_theta dtype torch_dtype pad_token_id bos_token_id eos_token_id num_labels "
    "id2label problem_type use_cache quantization_config auto_map text_config is_encoder_decoder layer_types "
    "transformers_version initializer_range attn_implementation reward_mean",
    "tokenizer.json": "normalizer pre_tokenizer post_processor decoder added_tokens truncation padding version model "
    "model.vocab model.merges model.type model.unk_token model.byte_fallback",
    "tokenizer_config.json": "tokenizer_class eos_token bos_token pad_token model_max_length chat_template auto_map "
    "added_tokens_decoder padding_side add_bos_token extra_special_tokens clean_up_tokenization_spaces",
}
Tensors = dict[str, torch.Tensor]
TENSORS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "drop": lambda t, n: {k: v for k, v in t.items() if k != n},
    "prefix": lambda t, n: {f"transformer.{k}": v for k, v in t.items()},
    "no prefix": lambda t, n: {k.removeprefix("model."): v for k, v in t.items()},
    "other prefix": lambda t, n: {k.replace("model.", "base_model.model.", 1): v for k, v in t.items()},
    "rename": lambda t, n: {(f"{k}_" if k == n else k): v for k, v in t.items()},
    "layer": lambda t, n: {k.replace("layers.1.", "layers.2."): v for k, v in t.items()},
    "add": lambda t, n: {**t, f"{n}.more": torch.ones(2)},
    "head": lambda t, n: {**t, "lm_head.weight": torch.ones(336, 32)},
    "score": lambda t, n: {**t, "score.weight": torch.ones(1, 32)},
    "turn": lambda t, n: {**t, n: t[n].t().contiguous()},
    "cut": lambda t, n: {**t, n: t[n][:-1].clone()},
    "flat": lambda t, n: {**t, n: t[n].flatten()},
    "wrap": lambda t, n: {**t, n: t[n][None]},
    "empty": lambda t, n: {**t, n: t[n][:0].clone()},
    "half": lambda t, n: {**t, n: t[n].half()},
    "double": lambda t, n: {**t, n: t[n].double()},
    "whole numbers": lambda t, n: {**t, n: t[n].to(torch.int8)},
    "none": lambda t, n: {},
    "untouched": lambda t, n: t,
}

_at, _bytes = st.integers(0, 2**16), st.binary(min_size=0, max_size=4)
_names = st.sampled_from([(file, name) for file, names in FILES.items() for name in names.split()])
_weights = st.tuples(st.just("weights"), st.sampled_from(sorted(TENSORS)), _at)
_field = st.tuples(st.just("field"), _names, st.sampled_from(VALUES))
_without = st.tuples(st.just("without"), _names, st.none())
_files = st.sampled_from([*FILES, "model.safetensors", "generation_config.json"])
_raw = st.tuples(st.just("raw"), _files, st.tuples(_at, _bytes))
_step = st.one_of(_weights, _weights, _field, _field, _without, _raw)
STEPS = st.one_of(st.lists(_step, min_size=1, max_size=1), st.lists(_step, min_size=1, max_size=3))


def apply(folder: Path, what: str, where: Any, piece: Any) -> None:
    """One fault in a folder; none where an earlier one has left nothing to change."""
    try:
        if what == "weights":
            path = folder / "model.safetensors"
            tensors = load_file(path)
            name = sorted(tensors)[piece % len(tensors)]
            save_file(TENSORS[where](tensors, name), path, metadata={"format": "pt"})
        elif what == "raw":
            path, (at, new) = folder / where, piece
            raw = path.read_bytes()
            at %= len(raw) + 1
            path.write_bytes(raw[:at] + new + (raw[at + len(new) :] if new else b""))
        else:
            path = folder / where[0]
            content = json.loads(path.read_text())
            *parts, last = where[1].split(".")
            inside = content[parts[0]] if parts else content
            inside.pop(last, None) if what == "without" else inside.__setitem__(last, piece)
            path.write_text(json.dumps(content))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError):
        pass


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, and so that what is no number equals itself."""
    return tensor.detach().float().nan_to_num(nan=1e30, posinf=2e30, neginf=-2e30)


def only_in(some: Tensors, others: Tensors) -> set[str]:
    """The names of the tensors whose numbers no other tensor has: names may differ."""
    known = [numbers(tensor) for tensor in others.values()]
    return {name for name, one in some.items() if not any(torch.equal(numbers(one), other) for other in known)}


@pytest.fixture
def broken(world: World, tmp_path: Path) -> Callable[[Any], Path]:
    def make(steps: Any) -> Path:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(world.base, tmp_path / "model")
        for step in steps:
            apply(tmp_path / "model", *step)
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("load", [load_causal_lm, init_reward_model])
def test_models_with_faults(load: Any, broken: Callable[[Any], Path]) -> None:
    """160 cases: what is loaded is what is in the files, all of it."""
    ends = Counter[str]()
    head = {"score.weight"} if load is init_reward_model else set()

    @cases(80)
    @given(STEPS)
    def case(steps: Any) -> None:
        folder = broken(steps)
        try:
            tokenizer, model = tokenizers.load_tokenizer(folder), load(folder)
            tokenizers.check_vocabulary(model, tokenizer)
            tokenizer("Tell me of 12 suns.")
        except RLHFError as error:
            assert error.exit_code == 2 and error.problems[0].code in CODES
            ends[error.problems[0].code] += 1
            return
        ends["ok"] += 1
        tensors, weights = load_file(folder / "model.safetensors"), dict(model.named_parameters())
        assert only_in(weights, tensors) <= head and only_in(tensors, weights) <= {"lm_head.weight"}

    case()
    assert min(ends["ok"], ends["M01"], ends["M13"]) >= sum(ends.values()) // 50, ends


def test_the_deep_check_of_models_with_faults(folder: Path, broken: Callable[[Any], Path]) -> None:
    """40 cases through the command: a code, a place, and no traceback."""
    text = "model: {path: model}\ndata: {train: rows.jsonl}\nsft: {max_steps: 1, max_length: 100}\n"
    (folder / "x.yaml").write_text(text)
    ends = Counter[int]()

    @cases(40)
    @given(STEPS)
    def case(steps: Any) -> None:
        broken(steps)
        result = check("x.yaml", "--deep", "-q")
        ends[outcome(result, ("x.yaml", "model/", "rows.jsonl"))] += 1

    case()
    assert min(ends[0], ends[2]) >= 2, ends
