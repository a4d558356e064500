import os
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from tests.accelerator.runs import ACCELERATOR, forget_accelerator


@pytest.fixture(scope="session", autouse=True)
def accelerator() -> None:
    if find_spec("torch_musa") is None and not torch.cuda.is_available():
        pytest.skip("needs the pretend accelerator (run `make test-accelerator`) or a GPU (run `make gpu`)")
    if ACCELERATOR == "cuda":  # some of its sums are otherwise in any order, and no two runs have the same bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="session")
def device() -> ModuleType:
    """The pretend accelerator, which counts; a test that asks for it does not run on a GPU."""
    if find_spec("torch_musa") is None:
        pytest.skip("needs the pretend accelerator: run `make test-accelerator`")
    import torch_musa

    return torch_musa


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    forget_accelerator()
