from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(scope="session", autouse=True)
def device() -> ModuleType:
    """The pretend accelerator; `make test-accelerator` puts it on Python's path."""
    if find_spec("torch_musa") is None:
        pytest.skip("needs the pretend accelerator: run `make test-accelerator`")
    import torch_musa

    return torch_musa


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps one precision for a process; each test has its own."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
