import gc
import os

# The expected numbers are a CPU's, so tests see no GPU; `make gpu` runs those that want one.
if "TESTS_ON_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import signal
from collections.abc import Iterator

import pytest
import torch
import wandb
from wandb.sdk.lib.module import unset_globals

# One thread, as in `make test`: sums have the same order on every machine, and two workers share two cores in peace.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Restores SIGINT, which shells ignore in background jobs: tests send it, and their programs inherit this."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    """Trainers collect garbage when they start, and would look through all that was imported each time (0.4 s)."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes W&B offline, without the machine's settings, in a separate session for each test."""
    # Before and after the environment changes: a session leaves its address there, and reads the rest only once.
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield
    wandb.teardown()
    unset_globals()  # transformers leaves its run open
