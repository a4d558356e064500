"""The pretend accelerator refuses, counts and measures as its docstring says."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.pretend import build
from torch import Tensor
from torch.nn import functional as F

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("device")]


def on_device(*values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to("musa")


# What it refuses


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) + x,
        lambda x: x.add_(torch.ones(3)),
        lambda x: torch.where(torch.ones(3, dtype=torch.bool), x, x),
        lambda x: x.masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
        lambda x: x.gather(0, torch.zeros(1, dtype=torch.long)),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x[None] @ torch.ones(3, 3),
        lambda x: F.linear(x, torch.ones(3, 3)),
        lambda x: F.embedding(torch.zeros(2, dtype=torch.long), x[:, None]),
        lambda x: F.conv1d(x[None, None], torch.ones(1, 1, 1)),
        lambda x: F.scaled_dot_product_attention(x.expand(1, 1, 3, 3), x.expand(1, 1, 3, 3), torch.ones(1, 1, 3, 3)),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.equal(x, torch.ones(3)),
        lambda x: torch.mul(x, x, out=torch.ones(3)),
        lambda x: torch._foreach_add([x], [torch.ones(3)]),
    ],
)
def test_a_tensor_of_the_cpu_beside_one_of_the_device(mix: Callable[[Tensor], Any]):
    with pytest.raises(RuntimeError, match=r"on the same device|cpu"):
        mix(on_device(1, 2, 3))


def test_a_number_in_a_tensor_of_the_cpu_and_indices_of_the_cpu_are_accepted_as_on_a_gpu(device: ModuleType):
    x = on_device(1, 2, 3)
    assert (x * torch.tensor(2.0)).tolist() == [2, 4, 6]
    device.clear()
    assert x[torch.tensor([2, 0])].tolist() == [3, 1]
    assert device.copies() == 1  # the indices


def test_a_generator_of_the_other_side():
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device="musa", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand_like(torch.ones(3, device="musa")).bernoulli_(0.5, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator("musa"))


def test_more_memory_than_there_is(device: ModuleType):
    device.set_total_memory(device.memory_allocated() + 4096)
    try:
        assert torch.accelerator.get_memory_info("musa") == (4096, device.memory_allocated() + 4096)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 8192 bytes"):
            torch.empty(8192, dtype=torch.uint8, device="musa")
        torch.empty(4096, dtype=torch.uint8, device="musa")
    finally:
        device.set_total_memory(1 << 30)


# What it counts


@pytest.mark.parametrize(
    ("call", "operators", "waits", "copies"),
    [
        (lambda x: x + 1, {"add": 1}, {}, 0),
        (lambda x: x[None].expand(2, 3).T[1:].reshape(-1, 1).view(-1), {"copy_": 1}, {}, 0),
        (lambda x: x.view(3, 1).transpose(0, 1)[:, 1:], {}, {}, 0),
        (lambda x: x.double(), {"copy_": 1}, {}, 0),
        (lambda x: x.to("musa"), {}, {}, 0),
        (lambda x: x[0].item(), {}, {"item": 1}, 0),
        (lambda x: bool((x > 0).any()), {"gt": 1, "any": 1}, {"item": 1}, 0),
        (lambda x: x.tolist(), {}, {"copy to the host": 1}, 0),
        (lambda x: x.cpu(), {}, {"copy to the host": 1}, 0),
        (lambda x: x[:0].cpu(), {}, {}, 0),
        (lambda x: torch.ones(3).to("musa"), {}, {}, 1),
        (lambda x: torch.ones(3, device="musa"), {"fill_": 1}, {}, 0),
        (lambda x: torch.tensor([1.0], device="musa"), {}, {}, 1),
        (lambda x: x.copy_(torch.ones(3)), {}, {}, 1),
        (lambda x: x.nonzero(), {"nonzero": 1}, {"nonzero": 1}, 0),
        (lambda x: torch.where(x > 0), {"gt": 1, "nonzero": 1}, {"nonzero": 1}, 0),
        (lambda x: torch.where(x > 0, x, 0), {"gt": 1, "fill_": 1, "where": 1}, {}, 0),
        (lambda x: x[x > 0], {"gt": 1, "index": 1}, {"index by a mask": 1}, 0),
        (lambda x: x[x.long() % 2], {"copy_": 1, "remainder": 1, "index": 1}, {}, 0),
        (lambda x: x.__setitem__(x > 0, x[0]), {"gt": 1, "_index_put_impl_": 1}, {"index by a mask": 1}, 0),
        (lambda x: x.masked_select(x > 0), {"gt": 1, "masked_select": 1}, {"masked_select": 1}, 0),
        (lambda x: x.unique(), {"_unique2": 1}, {"_unique2": 1}, 0),
        (lambda x: torch.equal(x, x + 1), {"add": 1, "equal": 1}, {"equal": 1}, 0),
        (lambda x: x.repeat_interleave(2), None, {}, 0),
        (lambda x: x.repeat_interleave(x.long()), None, {"repeat_interleave": 1}, 0),
        (lambda x: x.repeat_interleave(x.long(), output_size=6), None, {}, 0),
        (lambda x: torch._foreach_add_([x, x, x], 1), {"_foreach_add_": 1}, {}, 0),
        (lambda x: F.layer_norm(x, (3,)), {"native_layer_norm": 1}, {}, 0),
        (lambda x: F.conv1d(x[None, None], x[None, None]), {"convolution_overrideable": 1}, {}, 0),
        (lambda x: torch.accelerator.synchronize(), {}, {"synchronize": 1}, 0),
    ],
)
def test_operators_waits_and_copies(
    call: Callable[[Tensor], Any],
    operators: dict[str, int] | None,
    waits: dict[str, int],
    copies: int,
    device: ModuleType,
):
    x = on_device(1, 2, 3)
    device.clear()
    call(x)
    if operators is not None:
        assert device.counts() == {f"aten::{name}": number for name, number in operators.items()}
    assert device.waits() == waits
    assert device.copies() == copies


def test_the_peak_is_exact(device: ModuleType):
    x = torch.zeros(1000, device="musa")
    before = device.memory_allocated()
    device.clear()
    assert device.peak() == before
    y = x + 1  # 4,000 bytes
    z = y.double()  # 8,000 more
    del y
    x.add_(1)
    assert device.peak() == before + 12_000
    assert device.memory_allocated() == before + 8_000
    device.clear()
    assert device.peak() == before + 8_000
    z.resize_(2000)  # the new bytes are there before the old ones are free
    assert device.peak() == before + 8_000 + 16_000
    del z
    assert device.memory_allocated() == before


def test_a_backward_pass_on_its_own_thread_is_counted(device: ModuleType):
    x = on_device(1, 2, 3).requires_grad_()
    loss = (x * x).sum()
    device.clear()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 4, 6]
    assert device.counts()["aten::mul"] >= 2


# What it computes


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x.conj() * x).real,
        lambda x: x.conj().clone(),
        lambda x: torch.view_as_real(x.conj().resolve_conj()),
        lambda x: x.imag.neg(),
        lambda x: torch.polar(x.abs(), x.angle()),
        lambda x: torch.view_as_complex(torch.view_as_real(x).flip(0).contiguous()),
        lambda x: x.conj().imag.clone(),  # negated by a bit, not by numbers
    ],
)
def test_complex_numbers(call: Callable[[Tensor], Tensor]):
    x = torch.tensor([1 + 2j, 3 - 1j])
    there = call(x.to("musa"))
    assert there.device.type == "musa"
    torch.testing.assert_close(there.cpu(), call(x))


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_is_one_launch_without_a_matrix_of_scores(mask: str | None, keys: int, device: ModuleType):
    def attend(where: str) -> list[Tensor]:
        torch.manual_seed(0)
        three = [torch.randn(1, heads, 64, 8).to(where).requires_grad_() for heads in (4, keys, keys)]
        seen = torch.ones(64, 64, dtype=torch.bool).tril().to(where)
        bias = {"bool": seen, "float": torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -1e9)}.get(mask)
        device.clear()
        options = {"attn_mask": bias, "is_causal": mask is None, "enable_gqa": keys < 4}
        output = F.scaled_dot_product_attention(*three, **options)
        (output**2).sum().backward()
        return [output.detach().cpu(), *(t.grad.cpu() for t in three)]  # type: ignore[union-attr]

    for there, here in zip(attend("musa"), attend("cpu"), strict=True):
        torch.testing.assert_close(there, here)
    attend("musa")
    names = {name for name in device.counts() if "attention" in name or "softmax" in name or "mm" in name}
    assert names == {"aten::scaled_dot_product_attention", "aten::scaled_dot_product_attention_backward"}


def test_gradients_of_complex_numbers():
    def gradient(where: str) -> Tensor:
        x = torch.tensor([1 + 2j, 3 - 1j], device=where).requires_grad_()
        (x * torch.tensor([2 - 1j, 1j], device=where)).abs().sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("musa"), gradient("cpu"))


def test_a_module_moves_as_it_does_to_a_gpu():
    """The parameters stay the same objects, so that an optimizer which holds them goes on."""
    module = torch.nn.Linear(3, 3)
    weight = module.weight
    module.to("musa")
    assert module.weight is weight
    assert weight.device == torch.device("musa", 0)


def test_draws_of_a_seed_come_again_and_leave_the_cpus_alone(device: ModuleType):
    torch.manual_seed(3)
    state, cpu = device.get_rng_state(), torch.get_rng_state()
    first = torch.randn(20, device="musa")
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.randn(20, device="musa"), first)
    device.set_rng_state(state)
    assert torch.equal(torch.randn(20, device="musa"), first)
    generator = torch.Generator("musa").manual_seed(5)
    copy = generator.clone_state()
    assert torch.equal(
        torch.randn(5, device="musa", generator=generator), torch.randn(5, device="musa", generator=copy)
    )


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_and_the_scaler_of_gradients(precision: str, dtype: torch.dtype):
    accelerator = Accelerator(mixed_precision=precision)
    assert accelerator.device.type == "musa"
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    with accelerator.autocast():
        hidden = torch.nn.functional.linear(torch.ones(2, 4, device="musa"), model.weight)
        assert hidden.dtype == dtype
        assert hidden.exp().dtype == torch.float32
        loss = hidden.float().pow(2).mean()
    assert (accelerator.scaler is not None) == (precision == "fp16")
    accelerator.backward(loss)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not torch.equal(model.weight, before)

    optimizer.zero_grad()
    if precision == "fp16":
        accelerator.backward((model.weight * float("inf")).sum())
        optimizer.step()
        assert optimizer.step_was_skipped


def test_two_devices():
    program = """
import torch, torch_musa
a, b = torch.ones(3, device="musa:0"), torch.ones(5, device="musa:1")
assert torch.accelerator.device_count() == 2
assert (b + 1).device == b.device and b.to("musa:0").device == a.device
assert torch_musa.memory_allocated(0) == 12 and torch_musa.memory_allocated(1) == 20
(b.requires_grad_() * 2).sum().backward()
assert b.grad.device == b.device
with torch.device("musa:1"):
    assert torch.randn(2).device.index == 1
try:
    a + torch.ones(3, device="musa:1")
except RuntimeError as error:
    print(error)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PRETEND_DEVICES": "2"}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert "same device" in answer.stdout


# Where it is not built


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(build, "compiled", lambda: tmp_path / "pretend.so")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="install g\\+\\+"):
        build.build()


def test_a_library_that_is_not_there_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: ModuleType
):
    monkeypatch.setattr(build, "compiled", lambda: tmp_path / "pretend.so")
    assert device.__spec__ is not None
    fresh = importlib.util.module_from_spec(device.__spec__)
    with pytest.raises(ImportError, match="make test-accelerator"):
        device.__spec__.loader.exec_module(fresh)  # type: ignore[union-attr]


def test_the_library_is_compiled_again_for_another_source_or_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = build.compiled()
    monkeypatch.setattr(torch, "__version__", "99.0")
    other_torch = build.compiled()
    monkeypatch.undo()
    (tmp_path / "pretend.cpp").write_text(build.SOURCE.read_text() + "// changed\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "pretend.cpp")
    assert len({before, other_torch, build.compiled()}) == 3
