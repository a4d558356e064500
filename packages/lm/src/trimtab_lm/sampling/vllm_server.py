"""Rollouts by vLLM servers: `vllm serve` on other devices, or on other machines."""

import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import urllib3
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trimtab_common.stats import gather_over_ranks, world_size
from trimtab_lm.models.interface import Model
from trimtab_lm.models.sharding import whole_weights
from trimtab_lm.sampling.generate import eos_token_ids
from trimtab_lm.sampling.rollout import (
    Notes,
    Rollout,
    SamplingSettings,
    StaleWeightsError,
    check_room,
    require_version,
)
from trimtab_lm.sampling.vllm import (
    LOGPROBS_MODE,
    OLDEST_VLLM,
    PACKS_HEADS,
    check_served,
    engine_policy,
    sampling_of,
    sampling_params,
)
from trimtab_lm.sampling.weights import checkpoint_weights
from trimtab_lm.tokens.positions import Positions

START = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode {LOGPROBS_MODE}"
"""How a server of rollouts is started: with vLLM's routes for weights, and for tokens in and out."""
SHARED_MEMORY = Path("/dev/shm")
T = TypeVar("T")


class VLLMServerError(RuntimeError):
    """A server is gone, or cannot do what a rollout needs."""


def rank() -> int:
    """This process's number among those that train together."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def everywhere(call: Callable[[], None]) -> None:
    """Calls a function in every process, and raises the first error of any of them in all. Collective."""
    failure: Exception | None = None
    try:
        call()
    except (VLLMServerError, ValueError) as error:
        failure = error
    for first in filter(None, gather_over_ranks(failure)):
        raise first


class VLLMServerRollout:
    """Samples by one or several vLLM servers, which get the policy's weights before each rollout that needs them.

    The servers run vLLM alone, in an environment of their own; `START` is their command. The policy's weights are
    written as a checkpoint into a folder, and each server reloads them from there by vLLM's own `reload_weights`, while
    it samples nothing. Of several training processes, the first sends and the others wait.

    Args:
        settings: how completions are drawn.
        tokenizer: the policy's.
        servers: their addresses, such as "http://localhost:8000". Prompts are spread over them.
        weights_folder: a folder that the training processes and all servers share, for the weights; None: shared
            memory (/dev/shm) for servers on this machine, or the folder for temporary files where there is none.
        concurrency: prompts that are with a server at a time.
        timeout: seconds to wait for an answer.
        retries: of a request that does not reach a server. Waits double from half a second.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        servers: Sequence[str],
        weights_folder: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
    ):
        if isinstance(servers, str) or not servers:
            raise ValueError(f"servers={servers!r}: give a list of addresses, such as ['http://localhost:8000'].")
        self.settings, self.tokenizer = settings, tokenizer
        self.servers = [address.rstrip("/") for address in servers]
        self.weights_folder = weights_folder or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None)
        self.concurrency, self.retries = concurrency, retries
        self.run = ""  # names the weights of this training run
        self.positions, self.devices = Positions("a vLLM server", None, None), set[str]()
        self.eos_ids: list[int] = []
        self.version: int | None = None
        patience = urllib3.Retry(
            total=retries,
            read=min(1, retries),  # an answer that does not come in time is asked for once more
            backoff_factor=0.5,
            status_forcelist=(502, 503, 504),
            raise_on_status=False,
            allowed_methods=None,
        )
        self._http = urllib3.PoolManager(
            len(self.servers), maxsize=concurrency, retries=patience, timeout=urllib3.Timeout(connect=10, read=timeout)
        )
        Notes()(sampling_of(settings))

    def sync(self, model: Model, version: int) -> None:
        if self.version == version:
            return
        if not self.run:
            everywhere(lambda: self._connect(engine_policy(model)))
        # A meeting of all processes: none still samples from the old weights.
        self.run = gather_over_ranks(self.run or uuid.uuid4().hex)[0]
        with whole_weights(model):
            weights = checkpoint_weights(model, repeat_ties=PACKS_HEADS in self.devices)
            everywhere(lambda: self._send(weights, version))  # the others wait for the first process, which sends
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        check_room(self.positions, prompts, self.settings, remedy="start the servers with a larger --max-model-len")

        def choices(number: int) -> list[dict[str, Any]]:
            server = self.servers[(number + rank()) % len(self.servers)]
            params = sampling_params(self.settings, self.eos_ids, n=num_generations, seed=seed, number=number)
            body = {"token_ids": prompts[number].tolist(), "sampling_params": params}
            answer = self._ask(server, "/inference/v1/generate", body)["choices"]
            self._check_version(server, answer, version)
            return sorted(answer, key=lambda choice: choice["index"])

        with ThreadPoolExecutor(self.concurrency * len(self.servers)) as pool:
            answers = list(pool.map(choices, range(len(prompts))))
        rollout = Rollout([], [], logprobs := [])
        for prompt, answer in zip(prompts, answers, strict=True):
            for choice in answer:
                taken = [token["logprob"] for token in choice["logprobs"]["content"]]
                rollout.completions.append(torch.tensor(choice["token_ids"], dtype=torch.long, device=prompt.device))
                rollout.ended.append(choice["finish_reason"] == "stop")
                logprobs.append(torch.tensor(taken, device=prompt.device))
        return rollout

    def _check_version(self, server: str, answer: Sequence[dict[str, Any]], version: int) -> None:
        sampled_by = {span["version"] for choice in answer for span in choice["weight_versions"]}
        if sampled_by != {self._label(version)}:
            raise StaleWeightsError(
                f"The vLLM server {server} sampled with the weights {sorted(sampled_by)}, not with version {version} "
                "of this run: it was started again since it got them, or another run sends its weights there. Give "
                "each run its servers, and resume this one from its checkpoint."
            )

    def _label(self, version: int) -> str:
        return f"{self.run}/{version}"

    def _send(self, weights: dict[str, Tensor], version: int) -> None:
        """Give every server the weights of a version; only the first process does."""
        if rank():
            return
        with tempfile.TemporaryDirectory(prefix="trimtab-weights-", dir=self.weights_folder) as folder:
            # A copy of each: a checkpoint must not hold two views of one tensor.
            copies = {name: weight.to("cpu", copy=True).contiguous() for name, weight in weights.items()}
            save_file(copies, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self._ask_all("/pause?mode=wait", {})  # also drops the cached keys and values
            self._ask_all("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._ask_all("/update_weight_version", {"new_version": self._label(version)})
        self._ask_all("/resume", {})

    def _connect(self, policy: PreTrainedModel) -> None:
        """Check that every server can sample from this policy, and how long its sequences may be."""

        def check(server: str) -> tuple[int, str]:
            found = self._ask(server, "/version")["version"]
            if Version(found) < Version(OLDEST_VLLM):
                raise VLLMServerError(
                    f"The server {server} runs vLLM {found}, and rollouts need {OLDEST_VLLM} or newer: upgrade it."
                )
            info = self._ask(server, "/server_info?config_format=json")["vllm_config"]
            config = info["model_config"]
            if config["logprobs_mode"] != LOGPROBS_MODE:
                raise VLLMServerError(
                    f"The vLLM server {server} tells {config['logprobs_mode']}, and rollouts need those of the sampled "
                    f"distribution: start it with --logprobs-mode {LOGPROBS_MODE}."
                )
            inspection = self._ask(server, "/collective_rpc", {"method": "get_model_inspection"})["results"][0]
            check_served(inspection, policy, where=f"The vLLM server {server} serves {config['model']}, which")
            return int(config["max_model_len"]), str(info["device_config"]["device"])

        lengths, devices = zip(*self._all(check), strict=True)
        self.positions, self.devices = self.positions._replace(decoder=min(lengths)), set(devices)
        self.eos_ids = eos_token_ids(policy, self.tokenizer.eos_token_id)

    def _all(self, call: Callable[[str], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(call, self.servers))

    def _ask_all(self, path: str, body: dict[str, Any]) -> None:
        self._all(lambda server: self._ask(server, path, body))

    def _ask(self, server: str, path: str, body: dict[str, Any] | None = None) -> Any:
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
