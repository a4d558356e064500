"""Asynchronous rollouts: an engine elsewhere samples the next batch while the trainer learns from this one.

The next batch comes from the weights before the update on this one, so that every rollout after the first is one step
off-policy (Noukhovitch et al. 2024, arXiv:2410.18252).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trimtab_common.stats import everywhere
from trimtab_lm.interface import Model
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend

Request: TypeAlias = tuple[list[list[int]], int, int]
"""Token ids of prompts, how many completions of each, and a seed."""


def request_of(prompts: Sequence[Tensor], num_generations: int, seed: int) -> Request:
    """The request for completions of prompts, 1-D rows of token ids."""
    return [prompt.tolist() for prompt in prompts], num_generations, seed


class Pending:
    """The rollout sampled ahead, if there is one. A checkpoint waits for it, and holds it."""

    def __init__(self) -> None:
        self._request: Request | None = None
        self._future: Future[Rollout] = Future()

    def begin(self, backend: RolloutBackend, request: Request, *, version: int, policy_step: int) -> None:
        """Sample on a thread that waits for the engine."""

        prompts, size, seed = [torch.tensor(ids) for ids in request[0]], *request[1:]

        def sample() -> Rollout:
            rollout = backend.generate(prompts, num_generations=size, version=version, seed=seed)
            return rollout._replace(policy_step=policy_step)

        pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._request, self._future = request, pool.submit(sample)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Return once the engine has sampled it; raise the engine's error, if any."""
        if self._request is not None:
            self._result()

    def take(self, request: Request) -> Rollout | None:
        """The rollout, if it answers this request; raises the engine's error, if any."""
        if self._request != request:
            return None
        rollout, self._request = self._result(), None
        return rollout

    def drop(self) -> None:
        """Wait for the engine, and drop the rollout."""
        if self._request is not None:
            self._future.exception()
        self._request = None

    def state_dict(self) -> dict[str, Any]:
        """For torch.save; empty without a rollout."""
        if self._request is None:
            return {}
        return {"request": list(self._request), "rollout": list(self._result())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self.drop()
        if state:
            prompts, size, seed = state["request"]
            self._request, self._future = (prompts, size, seed), Future()
            self._future.set_result(Rollout(*state["rollout"]))

    def _result(self) -> Rollout:
        try:
            return self._future.result()
        except Exception:
            self._request = None  # the next try samples anew
            raise


class AsynchronousRollout:
    """Samples the next rollout on a thread, as soon as the trainer has taken the present one.

    A step calls `begin_step`, `sync` and `generate`, in this order. `generate` returns the rollout that was sampled
    ahead, and begins the upcoming one with the weights that were synced.

    Args:
        backend: samples in another process, so that its `generate` only waits (`is_remote`).
        pending: holds the rollout that is sampled ahead.

    Raises:
        ValueError: the backend samples in this process.
    """

    is_remote = True

    def __init__(self, backend: RolloutBackend, pending: Pending):
        if not getattr(backend, "is_remote", False):
            raise ValueError(
                f"asynchronous_rollouts=True needs a sampler in another process, and {type(backend).__name__} samples "
                "in this one, which trains meanwhile. Set rollout_backend='vllm_server', or leave it out."
            )
        self.backend, self.pending, self.settings = backend, pending, backend.settings
        self._policy_step = 0
        self._upcoming: Request | None = None

    def begin_step(
        self, policy_step: int, upcoming: Sequence[Tensor] | None, *, num_generations: int, seed: int
    ) -> None:
        """Begin a step of the trainer.

        Args:
            policy_step: optimizer steps that the policy has taken, for the rollouts that it samples.
            upcoming: prompts to sample from ahead once the rollout of this step is taken; None: nothing.
        """
        self._policy_step, self._upcoming = policy_step, None
        if upcoming is not None:
            self._upcoming = request_of(upcoming, num_generations, seed)

    def sync(self, model: Model, version: int) -> None:
        """Sample from the weights of a model from this call on, after the rollout that is sampled ahead. Collective."""
        everywhere(self.pending.wait)
        self.backend.sync(model, version)

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        """The rollout, sampled ahead or now; its `policy_step` is the sampling policy's."""
        rollout = self.pending.take(request_of(prompts, num_generations, seed))
        if rollout is None:
            rollout = self.backend.generate(prompts, num_generations=num_generations, version=version, seed=seed)
            rollout = rollout._replace(policy_step=self._policy_step)
        if rollout.logprobs is None:
            raise ValueError(
                f"asynchronous_rollouts=True needs the log-probabilities of the sampler, and "
                f"{type(self.backend).__name__} tells none. Use rollout_backend='vllm_server'."
            )
        if self._upcoming is not None:
            self.pending.begin(self.backend, self._upcoming, version=version, policy_step=self._policy_step)
            self._upcoming = None
        device = prompts[0].device if prompts else None
        completions, logprobs = ([row.to(device) for row in rows] for rows in (rollout.completions, rollout.logprobs))
        return rollout._replace(completions=completions, logprobs=logprobs)
