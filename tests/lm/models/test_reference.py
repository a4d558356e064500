"""References equal the policy's initial model, stay so during training, and share what they should."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.lm import tiny
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    T5Config,
)

from trimtab_lm import DPOConfig
from trimtab_lm.dpo.setup import make_reference
from trimtab_lm.models.adapters import adapters_off
from trimtab_lm.models.reference import Reference, create_reference_model
from trimtab_lm.models.value_head import AutoModelForCausalLMWithValueHead
from trimtab_lm.ppo.policy import ActorCritic, ReferencePolicy
from trimtab_lm.tokens import forward
from trimtab_lm.tokens.logprobs import LanguageHead

TOKENS = {"vocab_size": 23, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **TOKENS),
    "llama": LlamaConfig(intermediate_size=24, tie_word_embeddings=False, **SIZES, **TOKENS),
    "opt": OPTConfig(word_embed_proj_dim=8, ffn_dim=24, **SIZES, **TOKENS),
    "neox": GPTNeoXConfig(intermediate_size=24, tie_word_embeddings=False, **SIZES, **TOKENS),
    "t5": T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, decoder_start_token_id=0, **TOKENS),
    "bart": BartConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        decoder_start_token_id=2,
        **TOKENS,
    ),
}
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])


def build(name: str = "gpt2"):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config)


def with_lora(model=None, **options):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
    return get_peft_model(model or build("llama"), config)


def logits(model) -> torch.Tensor:
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **inputs).logits


def train(model, steps: int = 2) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model) -> dict:
    return {
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "adapters": [str(layer) for layer in model.get_layer_status()],
        "active": model.active_adapter,
    }


def storage_bytes(*models) -> int:
    tensors = [t for m in models for t in [*m.parameters(), *m.buffers()]]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# Copies


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_full_copy_is_frozen_equal_and_apart(name):
    policy = build(name)
    before = logits(policy.eval())
    policy.train()
    reference = create_reference_model(policy)
    assert type(reference) is type(policy)
    assert not any(module.training for module in reference.modules())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(module.training for module in policy.modules())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    train(policy)
    assert torch.equal(logits(reference), before)
    assert not torch.equal(logits(policy.eval()), before)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shared", [0, 2, 3])
def test_shared_layers_are_one_storage_frozen_in_both(name, shared):
    policy = build(name)
    before = logits(policy.eval())
    reference = create_reference_model(policy, num_shared_layers=shared)
    tied = {"gpt2", "opt", "t5", "bart"}
    for (key, weight), (_, other) in zip(policy.named_parameters(), reference.named_parameters(), strict=True):
        layer = [int(part) for part in key.split(".") if part.isdigit()]
        if key.startswith(("lm_head", "embed_out")):
            expected = name in tied
        elif "encoder." in key.replace("decoder.", ""):
            expected = True
        elif layer:
            expected = layer[0] < shared
        else:
            expected = not key.endswith(("ln_f.weight", "ln_f.bias", "norm.weight", "norm.bias", "project_out.weight"))
            expected = expected or "emb" in key
        assert (weight.data_ptr() == other.data_ptr()) is expected, key
        assert weight.requires_grad is not expected, key
        assert not other.requires_grad
    if shared < 3:
        train(policy)
        assert not torch.equal(logits(policy), before)
    assert torch.equal(logits(reference), before)


def test_shared_layers_take_no_memory():
    policy = build("llama")
    layer = storage_bytes(policy.model.layers[0])
    head = storage_bytes(policy.lm_head) + storage_bytes(policy.model.norm)
    reference = create_reference_model(policy, num_shared_layers=2)
    rotary = storage_bytes(policy.model.rotary_emb)
    assert storage_bytes(policy, reference) == storage_bytes(policy) + layer + head
    assert rotary > 0
    policy = build("llama")
    assert storage_bytes(policy, create_reference_model(policy)) == 2 * storage_bytes(policy)


def test_gradients_left_on_shared_layers_are_dropped():
    policy = build()
    policy(input_ids=IDS, labels=IDS).loss.backward()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = policy.transformer.h[0].mlp.c_fc.weight.clone()
    create_reference_model(policy, num_shared_layers=1)
    optimizer.step()
    assert torch.equal(policy.transformer.h[0].mlp.c_fc.weight, before)


def test_a_wrapper_is_copied_with_its_head():
    policy = AutoModelForCausalLMWithValueHead(build()).eval()
    reference = create_reference_model(policy, num_shared_layers=1)
    assert type(reference) is AutoModelForCausalLMWithValueHead
    assert policy.v_head.summary.weight.requires_grad
    assert not reference.v_head.summary.weight.requires_grad
    with torch.no_grad():
        for one, other in zip(policy(IDS), reference(IDS), strict=True):
            assert one is other is None or torch.equal(one, other)


def test_patterns_and_unknown_layouts():
    policy = build()
    for pattern in ("transformer.h.{layer}", "pretrained_model.transformer.h.{layer}"):  # also the wrapper's names
        create_reference_model(policy, num_shared_layers=1, pattern=pattern)
    with pytest.raises(ValueError, match=r"model\.layers\.\{layer\} is not one ModuleList.*transformer\.h"):
        create_reference_model(policy, num_shared_layers=1, pattern="model.layers.{layer}")
    with pytest.raises(ValueError, match=r"does not end in '\.\{layer\}'"):
        create_reference_model(policy, num_shared_layers=1, pattern="transformer.h")
    blocks = policy.transformer.h
    policy.transformer.blocks_of_mine = blocks
    del policy.transformer.h
    assert create_reference_model(policy, num_shared_layers=3).transformer.blocks_of_mine is not blocks
    assert not any(p.requires_grad for p in blocks.parameters())
    del policy.transformer.blocks_of_mine
    with pytest.raises(ValueError, match="It has none"):
        create_reference_model(policy, num_shared_layers=1)


@pytest.mark.parametrize("build_policy", [with_lora, lambda: AutoModelForCausalLMWithValueHead(with_lora())])
def test_a_peft_model_is_copied_with_its_adapter_as_it_is_now(build_policy):
    policy = build_policy()
    inner = getattr(policy, "pretrained_model", policy)
    before, flags = logits(inner.eval()), state_of(inner)
    with inner.disable_adapter():
        assert (logits(inner) - before).abs().max() > 1e-3  # the adapter is already trained
    reference = create_reference_model(policy)
    assert type(reference) is type(policy)
    assert state_of(inner) == flags
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    train(inner)
    assert torch.equal(logits(getattr(reference, "pretrained_model", reference)), before)
    assert not torch.equal(logits(inner), before)


def test_a_peft_model_shares_its_first_layers_with_their_adapters():
    policy = with_lora()
    reference = create_reference_model(policy, num_shared_layers=2)
    for (name, one), (_, other) in zip(policy.named_parameters(), reference.named_parameters(), strict=True):
        is_shared = ".layers.0." in name or ".layers.1." in name or "embed_tokens" in name
        assert (one is other) == is_shared, name
        assert one.requires_grad == ("lora_" in name and not is_shared), name


def test_numbers_out_of_range_are_refused():
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"num_shared_layers={wrong}.*3 decoder layers"):
            create_reference_model(build(), num_shared_layers=wrong)


# Reference


def test_a_reference_is_a_copy_by_default():
    policy = AutoModelForCausalLMWithValueHead(build())
    before = logits(policy.pretrained_model.eval())
    policy.train()
    reference = Reference.of(policy)
    assert not reference.is_adapter_off
    train(policy.pretrained_model)
    with reference.active() as model:
        assert not torch.is_grad_enabled()
        assert torch.equal(logits(model), before)
    assert torch.is_grad_enabled()
    assert policy.pretrained_model.training
    shared = Reference.of(policy, num_shared_layers=1)
    policy_layer, shared_layer = policy.pretrained_model.transformer.h[0], shared.model.transformer.h[0]
    assert policy_layer.ln_1.weight.data_ptr() == shared_layer.ln_1.weight.data_ptr()


@pytest.mark.parametrize("wrap", [lambda m: m, AutoModelForCausalLMWithValueHead])
def test_a_given_reference_is_frozen_and_used(wrap):
    policy, ref_model = build(), build("llama").train()
    reference = Reference.of(policy, wrap(ref_model))
    with reference.active() as model:
        assert model is ref_model
    assert not any(p.requires_grad for p in ref_model.parameters())
    assert not ref_model.training
    assert all(p.requires_grad for p in policy.parameters())
    with pytest.warns(UserWarning, match="no effect: ref_model was given"):
        Reference.of(policy, ref_model, num_shared_layers=1)


def test_the_policy_is_no_reference_of_itself():
    policy = build("llama")
    with pytest.raises(ValueError, match="policy itself"):
        Reference.of(AutoModelForCausalLMWithValueHead(policy), policy)
    with pytest.raises(ValueError, match="carries its adapters"):
        Reference.of(with_lora(policy), policy)
    assert any(p.requires_grad for p in policy.parameters())


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 4]}])
def test_adapters_off_is_the_base_model_after_training_too(options):
    base = build("llama").eval()
    before = logits(base)
    policy = with_lora(base, **options).train()
    reference = Reference.of(policy)
    assert reference.is_adapter_off
    train(policy)
    state = state_of(policy)
    with reference.active() as model:
        assert not any(module.training for module in model.modules())
        assert torch.equal(logits(model), before)
        with reference.active() as again:  # nested: the inner exit must not switch adapters on
            pass
        assert torch.equal(logits(again), before)
    assert state_of(policy) == state
    assert not torch.allclose(logits(policy.eval()), before)


def test_an_exception_inside_leaves_the_adapter_active():
    policy = AutoModelForCausalLMWithValueHead(with_lora()).train()
    policy.pretrained_model.base_model.model.model.layers[0].eval()  # this layer's own flag must also survive
    state, before = state_of(policy.pretrained_model), logits(policy.pretrained_model)
    reference = Reference.of(policy)
    with pytest.raises(KeyboardInterrupt), reference.active():
        raise KeyboardInterrupt
    assert state_of(policy.pretrained_model) == state
    assert torch.equal(logits(policy.pretrained_model), before)
    assert torch.is_grad_enabled()


def test_a_frozen_adapter_and_a_switched_off_layer_stay_so():
    policy = with_lora()
    for parameter in policy.parameters():
        parameter.requires_grad = False
    off = policy.base_model.model.model.layers[1].self_attn.q_proj
    off.enable_adapters(False)
    state, before = state_of(policy), logits(policy)
    with pytest.warns(UserWarning, match="some adapter layers"), adapters_off(policy):
        assert not torch.equal(logits(policy), before)
    assert state_of(policy) == state
    assert torch.equal(logits(policy), before)


def test_the_second_of_two_adapters_is_active_again():
    policy = with_lora()
    policy.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    policy.set_adapter("second")
    before = logits(policy)
    with Reference.of(policy).active():
        pass
    assert policy.active_adapter == "second"
    assert torch.equal(logits(policy), before)


@pytest.mark.filterwarnings("error:.*base weights:UserWarning")
def test_prompt_tuning_switches_off_as_well():
    base = build("llama").eval()
    before = logits(base)
    policy = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    reference = Reference.of(policy)
    with reference.active() as model:
        assert torch.equal(logits(model), before)
    assert logits(policy).shape[1] == before.shape[1] + 2


def test_trainable_base_weights_are_warned_of_once():
    policy = with_lora(build("opt"), bias="lora_only")
    with pytest.warns(UserWarning, match=r"3 base weights of the PEFT policy train.*q_proj.*bias='none'"):
        reference = Reference.of(policy)
    del reference
    with pytest.warns(UserWarning, match="no effect: the adapters are switched off"):
        Reference.of(with_lora(), num_shared_layers=1)


@pytest.mark.parametrize("trainer", ["ppo", "dpo"])
def test_a_reference_is_first_run_where_all_its_layers_lie(trainer: str, monkeypatch):
    """Shared layers are on the device only when the policy is; here `meta` stands for that device."""
    devices: list[set[str]] = []

    def probe(head: LanguageHead) -> bool:
        devices.append({weight.device.type for weight in head.model.parameters()})
        return True

    base = tiny.gpt2()
    policy = tiny.with_value_head(base) if trainer == "ppo" else base
    bare = ActorCritic(policy) if trainer == "ppo" else base
    reference = create_reference_model(policy, num_shared_layers=1)
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    base.to("meta")
    assert {weight.device.type for weight in reference.parameters()} == {"cpu", "meta"}
    monkeypatch.setattr(LanguageHead, "_logits_agree", probe)
    monkeypatch.setattr(forward, "_agrees", lambda *_: True)
    accelerator: Any = SimpleNamespace(
        device=torch.device("meta"), is_fsdp2=False, distributed_type="NO", unwrap_model=lambda model: model
    )
    if trainer == "ppo":
        ReferencePolicy(bare, Reference.of(policy, reference), reference, accelerator)
    else:
        make_reference(policy, reference, DPOConfig(report_to="none", use_cpu=True), accelerator)
    assert devices == [{"meta"}]
