"""Adapters on 4-bit weights learn on every CPU, even after an evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trimtab_lm import SFTConfig
from trimtab_lm.hf.models import with_adapters
from trimtab_lm.models.loading import bar_packing

pytest.importorskip("bitsandbytes")


def quantized(folder: Path) -> Any:
    """Returns a model with sizes that bitsandbytes packs."""
    tiny.llama(hidden_size=64, intermediate_size=128, head_dim=32).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def gradients(model: Any) -> dict[str, Tensor]:
    ids = torch.cat(tiny.rows(2, 6, 6)).view(2, 6)
    model.zero_grad()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model.eval()(input_ids=torch.cat(tiny.rows(1, 6, 6))[None])


def test_adapters_learn_after_an_evaluation_what_they_learn_before(tmp_path: Path):
    model = quantized(tmp_path)
    expected = gradients(model)
    bar_packing(model)
    evaluate(model)
    ours = gradients(model)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-2, atol=1e-4)
    assert max(float(gradient.abs().max()) for name, gradient in expected.items() if "layers.0" in name) > 1e-3


def test_adapters_that_a_model_has_stay_trained(tmp_path: Path):
    model = quantized(tmp_path)
    expected = gradients(model)
    ours = gradients(with_adapters(model, None, SFTConfig(str(tmp_path), report_to="none")))
    assert expected
    assert ours.keys() == expected.keys()


def pack(model: Any) -> None:
    """Marks weights as packed, as an evaluation does on a CPU with AVX512-BF16."""
    for module in model.modules():
        if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
            module.support_avx512bf16_for_cpu = state.packing_format_for_cpu = True


def test_weights_that_are_packed_already_are_refused(tmp_path: Path):
    model = quantized(tmp_path)
    pack(model)
    with pytest.raises(ValueError, match="Load the model again"):
        bar_packing(model)


def test_new_adapters_are_not_put_over_weights_that_are_packed_already(tmp_path: Path):
    base = quantized(tmp_path).unload()
    pack(base)
    with pytest.raises(ValueError, match="Load the model again"):
        with_adapters(base, LoraConfig(r=2, task_type="CAUSAL_LM"), SFTConfig(str(tmp_path), report_to="none"))
