"""The attention mask of a tree, and the models in which only attention connects positions."""

from torch import Tensor

from trimtab_lm.interface import Model, base_of, decoder_config

_NAMES = """
apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm dbrx
deepseek_v2 deepseek_v3 diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint
gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama llama4_text megatron-bert mellum
minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder nanochat nemotron olmo
olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe rembert roc_bert seed_oss smollm3
solar_open stablelm starcoder2 vaultgemma xglm youtu
"""
VERIFIED = frozenset(_NAMES.split())
"""Types of models in which positions meet in attention alone, by masks that transformers makes or takes.

`tests/lm/tokens/test_families.py` compares each with plain rows that are longer than its windows. No short comparison
tells the other types apart: a window, a chunk or a choice of keys (BigBird, Doge, DeepSeek-V3.2) shows in long rows.
"""


def tree_mask(document: Tensor, branch: Tensor) -> Tensor:
    """Returns the attention mask of a tree: each position attends to its branch and its prefix, up to itself.

    Args:
        document, branch: [R, W], see `lay_out`.

    Returns:
        [R, 1, W, W], True where the position on the third axis attends to the one on the fourth.
    """
    same = document[:, :, None] == document[:, None, :]
    reads = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
    return (same & reads).tril()[:, None]


def is_verified(model: Model) -> bool:
    """Whether a model's class, or a base of it, is transformers' own for one of the `VERIFIED` types."""
    base = base_of(model)
    is_own = any(kind.__module__.startswith("transformers.models.") for kind in type(base).__mro__)
    return is_own and base.config.model_type in VERIFIED


def attends_fully(model: Model) -> bool:
    """Whether every layer of a verified model attends to all earlier tokens within the mask.

    A local layer would apply a tree's mask without its window. Configurations name the layers' kinds, or one window
    for all, or nothing.
    """
    config = decoder_config(model)
    kinds = set(getattr(config, "layer_types", None) or [])
    is_local = kinds - {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None
    return is_verified(model) and not is_local
