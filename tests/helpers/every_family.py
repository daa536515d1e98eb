"""A small random model of each causal family of transformers that a small config builds."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# A field is set where a config has it. A larger spread than the usual 0.02 gives distributions that differ.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "dim_ff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads", "expand", "mamba_expand"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_head_dim", "index_head_dim"), 16),
    "mamba_d_head": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "conv_kernel"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "index_topk"), 6),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "is_decoder": True,
}
LATENT_ATTENTION = [
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
    "minicpm3", "youtu",
]  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in LATENT_ATTENTION},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {
        "n_mamba_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 2, "num_hidden_layers": 6,
        "attention_head_dim": 16, "num_key_value_heads": 4, "attention_hidden_size": 64,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "ctrl": {"dff": 64},
    "xlnet": {"d_inner": 64},
    "xlm": {"causal": True},
    "doge": {"num_experts": 16},
    "modernbert-decoder": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "bamba": {"attn_layer_indices": [1], "attn_rotary_emb": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"},
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mpt": {"expansion_ratio": 2},
    "phi": {"num_key_value_heads": 4},
    "cpmant": {"dim_head": 8, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
MAX_PARAMETERS = 20_000_000  # a family whose config needs more is left out
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config(name: str, **fields: Any) -> Any:
    """The small config of a family, with 64 tokens by default."""
    default = AutoConfig.for_model(name)
    text = default.get_text_config()
    sections = {key: value for key, value in vars(default).items() if hasattr(value, "get_text_config")}
    if text is default:
        return AutoConfig.for_model(name, **_fields(default, OWN_SIZES.get(name, {}) | fields))
    sizes = {key: _fields(each, fields if each is text else {}) for key, each in sections.items()}
    return AutoConfig.for_model(name, **sizes)


def causal(name: str, seed: int = 0, **fields: Any) -> Any:
    """A model of a family with random weights. Raises what transformers raises if the small config builds none."""
    small = config(name, **fields)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(small).num_parameters()
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(small).eval()


def _fields(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    wanted = {"vocab_size": 64, "vocab_size_per_layer_input": 64, **SIZES, **ids, **fields}
    known = vars(default).keys() | default.to_dict().keys()
    aliases = {alias: own for alias, own in default.attribute_map.items() if own in wanted}
    return {
        name: value
        for name, value in wanted.items()
        if name in fields or ((name in known or name in default.attribute_map) and name not in aliases)
    }
