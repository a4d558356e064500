"""Requests to vLLM servers, with a one-line error for each kind of failure."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import urllib3

from .engine import LOGPROBS_MODE, OLDEST_VLLM

START = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode {LOGPROBS_MODE}"
"""How a server of rollouts is started: with vLLM's routes for weights, and for tokens in and out."""
T = TypeVar("T")


class VLLMServerError(RuntimeError):
    """A server is gone, or cannot do what a rollout needs."""


class VLLMServers:
    """Several vLLM servers of one model.

    Requests go by urllib3: its pools serve many threads, and it repeats requests, with waits that double.

    Args:
        addresses: such as "http://localhost:8000".
        concurrency: simultaneous requests to a server.
        timeout: seconds to wait for an answer.
        retries: how often a request that does not reach its server is sent again. Waits begin with half a second.
    """

    def __init__(self, addresses: Sequence[str], *, concurrency: int, timeout: float, retries: int):
        self.addresses = [address.rstrip("/") for address in addresses]
        self.concurrency, self.retries = concurrency, retries
        patience = urllib3.Retry(
            total=retries,
            read=min(1, retries),  # an answer that does not come in time is asked for once more
            backoff_factor=0.5,
            status_forcelist=(502, 503, 504),
            raise_on_status=False,
            allowed_methods=None,
        )
        self._http = urllib3.PoolManager(
            len(addresses), maxsize=concurrency, retries=patience, timeout=urllib3.Timeout(connect=10, read=timeout)
        )

    def ask(self, server: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer of a server: to a POST of `body`, or to a GET without one.

        Raises:
            VLLMServerError: the server does not answer, or answers with an error.
        """
        try:
            response = self._http.request("GET" if body is None else "POST", server + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            reason = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            raise VLLMServerError(
                f"The vLLM server {server} is unreachable after {self.retries} retries ({reason}). Is it running, and "
                "is its address in servers=... (rollout_backend_kwargs) right? Its log says why it ended."
            ) from error
        if response.status in (403, 404):
            raise VLLMServerError(
                f"The server {server} has no {path.partition('?')[0]}: start it for rollouts, {START}, with vLLM "
                f"{OLDEST_VLLM} or newer."
            )
        if response.status >= 400:
            text = response.data.decode(errors="replace")
            raise VLLMServerError(
                f"The vLLM server {server} failed at {path.partition('?')[0]} ({response.status}): {text[:500]} "
                "Its log says more. Out of memory: lower its --gpu-memory-utilization, --max-num-seqs or "
                "--max-model-len. Weights that it cannot read: set weights_folder to a folder that all share."
            )
        return response.json() if response.data else {}

    def ask_all(self, path: str, body: dict[str, Any]) -> None:
        """Post to every server at the same time."""
        self.of_each(lambda server: self.ask(server, path, body))

    def of_each(self, call: Callable[[str], T]) -> list[T]:
        """Calls a function for every server at the same time, and returns the results."""
        with ThreadPoolExecutor(len(self.addresses)) as pool:
            return list(pool.map(call, self.addresses))
