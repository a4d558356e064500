import os
import signal
from collections.abc import Iterator

import pytest
import torch
import wandb
from wandb.sdk.lib.module import unset_globals

# As `make test` runs it: sums are then in one order on every machine, and two workers do not fight for two cores.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Heed SIGINT, which a shell lets its background jobs ignore: tests send it, and their programs inherit this."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B offline, with no setting of the machine's, in a session of the test's own."""
    # Both before the environment changes and after: a session leaves its address there, and reads the rest once.
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield
    wandb.teardown()
    unset_globals()  # transformers leaves its run open
