"""An engine receives the policy's weights as in a checkpoint, with adapters merged."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.lm import tiny
from transformers import MixtralConfig, MixtralForCausalLM

from trimtab_lm.sampling.vllm.weights import checkpoint_weights


def adapted(seed: int = 0, **settings: Any) -> Any:
    config = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **settings}
    torch.manual_seed(seed)
    model = get_peft_model(tiny.llama(), LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens" in name:
            torch.nn.init.normal_(parameter)
    return model


POLICIES = {
    "plain": tiny.llama,
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "saved": lambda: adapted(modules_to_save=["lm_head"]),
    "tokens": lambda: adapted(trainable_token_indices=[5, 9]),
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", POLICIES)
@torch.no_grad()
def test_a_plain_model_with_these_weights_is_the_policy_which_stays_as_it_was(kind: str):
    policy = POLICIES[kind]().eval()
    before = tiny.weights(policy)
    plain = tiny.llama(seed=9, tie_word_embeddings=kind == "tied").eval()
    result = plain.load_state_dict(checkpoint_weights(policy), strict=False)
    assert result.missing_keys == (["lm_head.weight"] if kind == "tied" else [])
    assert result.unexpected_keys == []
    row = tiny.rows(1, 9, 9)[0][None]
    torch.testing.assert_close(plain(row).logits, policy(row).logits, rtol=1e-4, atol=1e-4)
    assert tiny.moved(before, policy) == {}


def test_an_adapter_that_is_merged_already_is_not_merged_twice():
    policy = adapted()
    policy.merge_adapter()
    merged = checkpoint_weights(policy)
    policy.unmerge_adapter()
    for name, value in checkpoint_weights(policy).items():
        torch.testing.assert_close(merged[name], value)
    with policy.disable_adapter():
        base = checkpoint_weights(policy)
    torch.testing.assert_close(base, dict(tiny.llama().named_parameters()))


def test_weights_have_the_names_of_a_checkpoint(tmp_path: Any):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
    }
    mixture = tiny.seeded(MixtralForCausalLM, MixtralConfig(**sizes, **tiny.TOKENS))
    for policy in (mixture, tiny.gpt2(), tiny.llama(tie_word_embeddings=True)):
        policy.save_pretrained(tmp_path)
        torch.testing.assert_close(checkpoint_weights(policy), load_file(tmp_path / "model.safetensors"))


def test_a_tie_that_the_adapter_breaks_is_refused():
    policy = get_peft_model(
        tiny.llama(tie_word_embeddings=True), LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    )
    with pytest.raises(ValueError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the adapter changes"):
        checkpoint_weights(policy)
