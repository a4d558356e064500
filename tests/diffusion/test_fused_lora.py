"""Adapted linear layers as one operation: PEFT's numbers, and PEFT itself wherever the operation does not apply."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from tests.diffusion import tiny
from torch import Tensor, nn

from trimtab_diffusion.fused_lora import FusedLoraLinear, fuse_adapters
from trimtab_diffusion.lora import without_lora
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

SHAPES = {"vectors": (5, 6), "tokens": (3, 4, 6), "frames": (2, 3, 4, 6)}


class Block(nn.Module):
    def __init__(self, *, bias: bool):
        super().__init__()
        self.to_q = nn.Linear(6, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_q(x)


def pair(*, bias: bool = True, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, Any]:
    """PEFT's layer and the fused one, with equal weights; the map of the adapters is not zero."""
    with tiny.from_seed(0):
        config = LoraConfig(
            **{"r": 2, "lora_alpha": 3, "target_modules": ["to_q"], "init_lora_weights": False} | settings
        )
        plain = inject_adapter_in_model(config, Block(bias=bias)).to(dtype).eval()
    for name, weight in plain.named_parameters():
        weight.requires_grad_("lora_" in name)
    fused = copy.deepcopy(plain)
    fuse_adapters(fused)
    return plain, fused


def layer_of(block: nn.Module) -> FusedLoraLinear:
    layer: Any = block.to_q
    assert isinstance(layer, FusedLoraLinear)
    return layer


def results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of its weighted sum."""
    x = x.clone().requires_grad_()
    output = block(x)
    (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    gradients = {name: weight.grad for name, weight in block.named_parameters() if weight.requires_grad}
    assert len(gradients) >= 2
    return {"output": output.detach(), "x": x.grad, **gradients}


def assert_same(fused: dict[str, Tensor], plain: dict[str, Tensor], **tolerance: float) -> None:
    assert fused.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, msg=name, **tolerance)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_peft(shape: tuple[int, ...], bias: bool):
    plain, fused = pair(bias=bias)
    assert layer_of(fused).fused_adapter == "default"
    x = torch.randn(shape, generator=tiny.generator(1), dtype=torch.float64)
    assert_same(results(fused, x), results(plain, x), rtol=1e-12, atol=1e-12)


def test_inputs_may_be_transposed_and_need_no_gradient():
    plain, fused = pair()
    x = torch.randn(6, 4, 3, generator=tiny.generator(1), dtype=torch.float64).transpose(0, 2)
    torch.testing.assert_close(fused(x), plain(x))
    fused(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(fused.to_q.lora_A.default.weight.grad, plain.to_q.lora_A.default.weight.grad)


def test_autocast_computes_in_its_precision_and_trains_in_float32():
    plain, fused = pair(dtype=torch.float32)
    x = torch.randn(3, 4, 6, generator=tiny.generator(1))
    with torch.autocast("cpu", torch.bfloat16):
        rounded, reference = results(fused, x), results(plain, x)
    assert rounded["output"].dtype is torch.bfloat16
    assert rounded["to_q.lora_A.default.weight"].dtype is torch.float32
    assert_same(rounded, reference, rtol=0.05, atol=0.05)


def test_each_row_has_the_gradients_that_it_has_alone():
    _, fused = pair()
    x = torch.randn(3, 4, 6, generator=tiny.generator(1), dtype=torch.float64)
    alone = []
    for row in x.split(1):
        fused.zero_grad()
        fused(row).square().sum().backward()
        alone.append([layer_of(fused).lora_A.default.weight.grad, layer_of(fused).lora_B.default.weight.grad])
    fused.zero_grad()
    collected: list[tuple[Tensor, Tensor]] = []
    layer_of(fused).collect = lambda first, second: collected.append((first, second))
    fused(x).square().sum().backward()
    assert layer_of(fused).lora_A.default.weight.grad is None
    [(first, second)] = collected
    torch.testing.assert_close(first, torch.stack([a for a, _ in alone]))
    torch.testing.assert_close(second, torch.stack([b for _, b in alone]))


def add_a_second(block: Any) -> None:
    config = LoraConfig(r=3, target_modules=["to_q"], init_lora_weights=False)
    with tiny.from_seed(5):
        block.to_q.update_layer("second", 3, lora_alpha=2, config=config, init_lora_weights=False)
    block.to(torch.float64)
    block.to_q.set_adapter(["default", "second"])


def double_outputs(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return 2 * output


OTHERS: dict[str, Callable[[Any], object]] = {
    "switched off": lambda block: block.to_q.enable_adapters(False),
    "merged": lambda block: block.to_q.merge(),
    "two adapters": add_a_second,
    "a hook on the frozen layer": lambda block: block.to_q.base_layer.register_forward_hook(double_outputs),
    "a hook on an adapter": lambda block: block.to_q.lora_A.default.register_forward_hook(double_outputs),
    "weights that train": lambda block: block.requires_grad_(True),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_peft_computes_what_is_not_one_frozen_layer_with_one_adapter(change: Callable[[Any], object]):
    plain, fused = pair()
    x = torch.randn(3, 4, 6, generator=tiny.generator(1), dtype=torch.float64)
    usual = fused(x)
    for block in (plain, fused):
        change(block)
    assert layer_of(fused).fused_adapter is None
    torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=0)
    if change is not OTHERS["merged"] and change is not OTHERS["weights that train"]:
        assert not torch.allclose(fused(x), usual)


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_bias": True}], ids=lambda settings: next(iter(settings))
)
def test_peft_computes_adapters_of_other_kinds(settings: dict[str, Any]):
    plain, fused = pair(**settings)
    x = torch.randn(3, 4, 6, generator=tiny.generator(1), dtype=torch.float64)
    assert layer_of(fused).fused_adapter is None
    assert_same(results(fused, x), results(plain, x), rtol=0, atol=0)


def test_peft_computes_dropout_which_evaluation_does_not_have():
    plain, fused = pair(lora_dropout=0.5)
    x = torch.randn(3, 4, 6, generator=tiny.generator(1), dtype=torch.float64)
    assert_same(results(fused, x), results(plain, x), rtol=1e-12, atol=1e-12)
    outputs = []
    for block in (plain.train(), fused.train()):
        with tiny.from_seed(2):
            outputs.append(block(x))
    assert layer_of(fused).fused_adapter is None
    assert torch.equal(*outputs)


def test_inputs_of_another_precision_are_peft_s():
    plain, fused = pair(dtype=torch.float32)
    for block in (plain, fused):
        block.to_q.base_layer.to(torch.bfloat16)
    x = torch.randn(3, 4, 6, generator=tiny.generator(1)).bfloat16()
    assert fused(x).dtype is torch.bfloat16
    assert torch.equal(fused(x), plain(x))


def test_a_denoiser_s_adapters_are_fused_and_can_be_switched_off():
    unet = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=True).denoiser
    adapted = [module for module in unet.modules() if isinstance(module, lora.Linear)]
    assert adapted
    assert all(isinstance(module, FusedLoraLinear) and module.fused_adapter for module in adapted)
    with without_lora(unet):
        assert not any(module.fused_adapter for module in adapted)
