"""Tensors move to an accelerator and back in one copy, whatever their kinds."""

from types import ModuleType

import pytest
import torch

from trimtab_common.accelerators import moved

pytestmark = pytest.mark.accelerator
HOST = torch.device("cpu")
TENSORS = [
    torch.tensor([True, False, True]),
    torch.arange(6).view(2, 3).T,
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.rand(0, 4),
    torch.rand(6)[::2],
    torch.arange(4)[::2][1:],  # one number, whose stride is 2
    torch.rand(2, 2, dtype=torch.float64),
    torch.rand(3, requires_grad=True),
]


def test_tensors_of_several_kinds_move_in_one_copy(device: ModuleType):
    place = torch.device("musa", 0)
    device.clear()
    there = moved(TENSORS, place)
    assert device.copies() == 1
    assert {tensor.device for tensor in there} == {place}
    device.clear()
    back = moved(there, HOST)
    assert device.waits() == {"copy to the host": 1}
    for before, after in zip(TENSORS, back, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(before, after)


def test_what_is_there_stays(device: ModuleType):
    place = torch.device("musa", 0)
    here, there = torch.ones(3), torch.ones(3, device=place)
    device.clear()
    first, second = moved([there, here], place)
    assert first is there
    assert torch.equal(second, there)
    assert device.copies() == 1
    assert moved([here], HOST)[0] is here
