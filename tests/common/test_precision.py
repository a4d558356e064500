"""How a device multiplies float32 matrices."""

from collections.abc import Iterator

import pytest
import torch

from trimtab_common.accelerators import multiplies_in_float32

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_float32_is_the_default():
    assert multiplies_in_float32(CPU)
    assert multiplies_in_float32(GPU)


def test_tf32_is_seen_for_all_devices():
    torch.set_float32_matmul_precision("high")
    assert not multiplies_in_float32(CPU)
    assert not multiplies_in_float32(GPU)


def test_tf32_is_seen_for_one_backend():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix"):
        torch.get_float32_matmul_precision()
    assert multiplies_in_float32(CPU)
    assert not multiplies_in_float32(GPU)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert multiplies_in_float32(GPU)
