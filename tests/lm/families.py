"""Builds a tiny model of any causal transformers class in code, by its configuration's type."""

import warnings
from typing import Any

import torch
from tests.lm import tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MllamaForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "word_embed_proj_dim"], 16),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"], 24),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"], 2),
    **dict.fromkeys(["head_dim", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "v_head_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["hidden_dropout", "attention_dropout", "dropout", "resid_dropout", "embed_dropout"], 0.0),
    **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout"], 0.0),
    **dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"], 0.0),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok"], 2),
    **dict.fromkeys(["n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["shared_expert_intermediate_size", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["rotary_dim", "qk_rope_head_dim"], 4),
    "is_decoder": True,
    "sep_token_id": tiny.EOS,
    **tiny.TOKENS,
}
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "num_attention_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": tiny.TOKENS["vocab_size"],
        "hidden_size_per_layer_input": 4,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {"vocab_size_per_layer_input": tiny.TOKENS["vocab_size"], "hidden_size_per_layer_input": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
}


def known_settings(model_type: str) -> set[str]:
    """Returns the names that the type's configuration has."""
    default = CONFIG_MAPPING[model_type]()
    return {*default.to_dict(), *default.attribute_map}


def causal(model_type: str, **settings: Any) -> PreTrainedModel:
    """Returns a model with large random weights, so that its numbers depend on everything that its attention reads.

    settings: of its configuration, beside or instead of the small ones; unknown ones are ignored.
    """
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    known = known_settings(model_type)
    sizes = {name: value for name, value in (SIZES | settings).items() if name in known}
    if "qk_rope_head_dim" in sizes:
        del sizes["head_dim"]
    if "layer_types" in default.to_dict() and "layer_types" not in settings:
        kinds = list(dict.fromkeys(default.layer_types or ["full_attention"]))
        sizes["layer_types"] = (kinds * 2)[:2]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = kind(**sizes | OWN.get(model_type, {}))
        is_mllama = model_type == "mllama_text_model"  # the mapping lists its outer configuration
        model = MllamaForCausalLM(config) if is_mllama else AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
    return model.eval()
