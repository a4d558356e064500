"""The step that is under way between its evaluation and its last update: what a checkpoint holds to finish it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from trimtab_common.stats import Mean, packed, unpacked

from .experience import Experience, Minibatch


class Evaluated(NamedTuple):
    """A batch before its first update, and what its updates have recorded so far.

    Attributes:
        rollout: with all columns, on the host.
        mismatch: how far the sampler differs from the policy.
        recorded: the minibatches of the updates that are done.
    """

    rollout: Experience
    mismatch: dict[str, Mean | Tensor]
    recorded: list[Minibatch]


class Unfinished:
    """The evaluated batch whose updates are under way, if there is one.

    Attributes:
        batch: None between steps.
    """

    def __init__(self) -> None:
        self.batch: Evaluated | None = None

    @contextmanager
    def under_way(self, batch: Evaluated) -> Iterator[None]:
        """Checkpoints inside the block hold the batch."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None

    def state_dict(self) -> dict[str, Any]:
        """For torch.save; empty between steps."""
        if self.batch is None:
            return {}
        rollout, mismatch, recorded = self.batch
        rows = [minibatch._asdict() for minibatch in recorded]
        return {"rollout": dict(vars(rollout)), "mismatch": packed(mismatch), "recorded": packed(rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` returned."""
        recorded = [Minibatch(**row) for row in unpacked(state["recorded"])]
        self.batch = Evaluated(Experience(**state["rollout"]), unpacked(state["mismatch"]), recorded)


def placed(rollout: Experience, device: torch.device, *, tokens: torch.device) -> Experience:
    """A rollout of the host with its columns on the device of the models, and its token ids and masks on `tokens`."""
    of_tokens = ("queries", "responses", "response_masks", "model_inputs")
    columns = {
        name: send_to_device(column, tokens if name in of_tokens else device) for name, column in vars(rollout).items()
    }
    return replace(rollout, **{**columns, "lengths": rollout.lengths})
