import copy

import pytest
import torch
from tests.lm.tiny import gpt2, llama, t5
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM

from trimtab_lm.tokens.dropout import dropout_rates_at_zero, without_dropout

IDS = torch.arange(4, 14)[None]


def opt():
    sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    return OPTForCausalLM(OPTConfig(**sizes, dropout=0.5, attention_dropout=0.5, layerdrop=0.5))


MODELS = {
    "gpt2": lambda: gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5),
    "llama": lambda: llama(attention_dropout=0.5),
    "t5": lambda: t5(dropout_rate=0.5),
    "opt": opt,
}


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    model(input_ids=IDS, **inputs, use_cache=False).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_dropout_with_checkpointing_that_engages_and_everything_restored(name, mode):
    model = getattr(MODELS[name]().double(), mode)()
    plain = copy.deepcopy(model).eval()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            function = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, f=function, **k: (calls.append(1), f(*a, **k))[1]
    before = [(module.training, dict(vars(module))) for module in model.modules()]

    with without_dropout(model):
        ours = gradients(model)

    for a, b in zip(ours, gradients(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert calls, "gradient checkpointing did not engage"
    for module, (training, attributes) in zip(model.modules(), before, strict=True):
        assert module.training is training
        rates = {name: value for name, value in attributes.items() if "drop" in name}
        assert {name: vars(module)[name] for name in rates} == rates


def test_an_exception_inside_restores_the_model_too():
    model = MODELS["opt"]().train()
    model.gradient_checkpointing_enable()
    layer = model.model.decoder.layers[0]
    with pytest.raises(KeyError), without_dropout(model):
        raise KeyError
    assert (layer.training, layer.dropout) == (True, 0.5)


def test_checkpointing_stays_off_where_there_are_no_gradients():
    model = MODELS["llama"]().train()
    model.gradient_checkpointing_enable()
    with torch.no_grad(), without_dropout(model):
        assert not any(module.training for module in model.modules())


def falcon():
    """A model that reads its dropout rates from the config in each forward pass."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    return FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.5, attention_dropout=0.5))


@pytest.mark.parametrize("name", [*MODELS, "falcon"])
def test_rates_at_zero_are_no_dropout_in_training_mode_and_are_put_back(name):
    model = (MODELS | {"falcon": falcon})[name]().double().train()
    plain = copy.deepcopy(model).eval()
    with_dropout = gradients(model)
    with dropout_rates_at_zero(model):
        ours = gradients(model)
        assert model.training
    expected = gradients(plain)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    assert any(not torch.allclose(one, other) for one, other in zip(with_dropout, expected, strict=True))
    assert any(not torch.allclose(one, other) for one, other in zip(gradients(model), expected, strict=True))
