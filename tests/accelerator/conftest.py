from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
from tests.accelerator.runs import forget_accelerator


@pytest.fixture(scope="session", autouse=True)
def device() -> ModuleType:
    """The pretend accelerator; `make test-accelerator` puts it on Python's path."""
    if find_spec("torch_musa") is None:
        pytest.skip("needs the pretend accelerator: run `make test-accelerator`")
    import torch_musa

    return torch_musa


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    forget_accelerator()
