"""Rollouts by vLLM servers: `vllm serve` on other devices, or on other machines."""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trimtab_common.sharding import whole_weights
from trimtab_common.stats import everywhere, gather_over_ranks, rank
from trimtab_lm.interface import Model
from trimtab_lm.sampling.rollout import (
    Notes,
    Rollout,
    SamplingSettings,
    StaleWeightsError,
    check_room,
    require_version,
)
from trimtab_lm.tokens.positions import Positions

from .client import VLLMServerError, VLLMServers
from .engine import (
    LOGPROBS_MODE,
    OLDEST_VLLM,
    PACKS_HEADS,
    check_served,
    distortions_of,
    engine_policy,
    sampling_params,
)
from .transfer import WeightBroadcast, WeightFiles
from .weights import checkpoint_weights

TRANSFERS = ("files", "nccl")


class VLLMServerRollout:
    """Samples by one or several vLLM servers, which get the policy's weights before each rollout that needs them.

    The servers run vLLM alone, in an environment of their own; `client.START` is their command. Each takes new
    weights by vLLM's own methods while it samples nothing, and tells with each token which weights sampled it. Of
    several training processes, the first sends and the others wait.

    Args:
        servers: their addresses, such as "http://localhost:8000". Prompts are spread over them.
        weight_transfer: "files" (see `WeightFiles`) or "nccl" (see `WeightBroadcast`), where trainer and servers run on
            GPUs.
        weights_folder: for "files", a folder that the training processes and all servers share. None: shared memory.
        trainer_address: for "nccl", where the servers reach the first training process. None: its host name.
        concurrency: simultaneous prompts at a server.
        timeout: seconds to wait for an answer.
        retries: how often a request that does not reach a server is sent again. Waits double from half a second.
    """

    is_remote = True

    def __init__(
        self,
        settings: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        servers: Sequence[str],
        weight_transfer: str = "files",
        weights_folder: str | None = None,
        trainer_address: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 5,
    ):
        if isinstance(servers, str) or not servers:
            raise ValueError(f"servers={servers!r}: give a list of addresses, such as ['http://localhost:8000'].")
        if weight_transfer not in TRANSFERS or (weight_transfer == "nccl" and not torch.cuda.is_available()):
            raise ValueError(
                f"weight_transfer={weight_transfer!r}: use one of {', '.join(TRANSFERS)}; nccl needs GPUs on both "
                f"sides (here CUDA is {'' if torch.cuda.is_available() else 'not '}available)."
            )
        self.settings, self.tokenizer = settings, tokenizer
        self.servers = VLLMServers(servers, concurrency=concurrency, timeout=timeout, retries=retries)
        self.sender: WeightFiles | WeightBroadcast = WeightFiles(self.servers, weights_folder)
        if weight_transfer == "nccl":
            self.sender = WeightBroadcast(self.servers, trainer_address)
        self.run, self.label = "", ""  # name this training run, and the weights that the servers hold
        self.positions, self.devices = Positions("a vLLM server", None, None), set[str]()
        self.eos_ids: list[int] = []
        self.version: int | None = None
        Notes()(distortions_of(settings))

    def sync(self, model: Model, version: int) -> None:
        if self.version == version:
            return
        if not self.run:
            everywhere(lambda: self._connect(engine_policy(model)))
        self.run = self.run or uuid.uuid4().hex
        # A meeting of all processes: none still samples from the old weights. They may number them differently.
        self.label = gather_over_ranks(f"{self.run}/{version}")[0]
        with whole_weights(model):
            weights = checkpoint_weights(model, repeat_ties=PACKS_HEADS in self.devices)
            everywhere(lambda: self._send(weights))  # the others wait for the first process, which sends
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        check_room(self.positions, prompts, self.settings, remedy="start the servers with a larger --max-model-len")
        addresses, label = self.servers.addresses, self.label

        def choices(number: int) -> list[dict[str, Any]]:
            server = addresses[(number + rank()) % len(addresses)]
            params = sampling_params(self.settings, self.eos_ids, n=num_generations, seed=seed, number=number)
            body = {"token_ids": prompts[number].tolist(), "sampling_params": params}
            answer = self.servers.ask(server, "/inference/v1/generate", body)["choices"]
            self._check_label(server, answer, label)
            return sorted(answer, key=lambda choice: choice["index"])

        with ThreadPoolExecutor(self.servers.concurrency * len(addresses)) as pool:
            answers = list(pool.map(choices, range(len(prompts))))
        rollout = Rollout([], [], logprobs := [])
        for prompt, answer in zip(prompts, answers, strict=True):
            for choice in answer:
                taken = [token["logprob"] for token in choice["logprobs"]["content"]]
                rollout.completions.append(torch.tensor(choice["token_ids"], dtype=torch.long, device=prompt.device))
                rollout.ended.append(choice["finish_reason"] == "stop")
                logprobs.append(torch.tensor(taken, device=prompt.device))
        return rollout

    def _check_label(self, server: str, answer: Sequence[dict[str, Any]], label: str) -> None:
        sampled_by = {span["version"] for choice in answer for span in choice["weight_versions"]}
        if sampled_by != {label}:
            raise StaleWeightsError(
                f"The vLLM server {server} sampled with the weights {sorted(sampled_by)}, not with {label!r} of this "
                "run: it was started again since it got them, or another run sends its weights there. Give each run "
                "its servers, and resume this one from its checkpoint."
            )

    def _send(self, weights: dict[str, Tensor]) -> None:
        """Give every server the weights with their label; only the first process does."""
        if rank():
            return
        self.sender.send(weights)
        self.servers.ask_all("/update_weight_version", {"new_version": self.label})
        self.servers.ask_all("/resume", {})

    def _connect(self, policy: PreTrainedModel) -> None:
        """Check that every server can sample from this policy, and how long its sequences may be."""

        def check(server: str) -> tuple[int, str]:
            found = self.servers.ask(server, "/version")["version"]
            if Version(found) < Version(OLDEST_VLLM):
                raise VLLMServerError(
                    f"The server {server} runs vLLM {found}, and rollouts need {OLDEST_VLLM} or newer: upgrade it."
                )
            info = self.servers.ask(server, "/server_info?config_format=json")["vllm_config"]
            config = info["model_config"]
            if config["logprobs_mode"] != LOGPROBS_MODE:
                raise VLLMServerError(
                    f"The vLLM server {server} tells {config['logprobs_mode']}, and rollouts need those of the sampled "
                    f"distribution: start it with --logprobs-mode {LOGPROBS_MODE}."
                )
            inspection = self.servers.ask(server, "/collective_rpc", {"method": "get_model_inspection"})["results"][0]
            check_served(inspection, policy, where=f"The vLLM server {server} serves {config['model']}, which")
            return int(config["max_model_len"]), str(info["device_config"]["device"])

        lengths, devices = zip(*self.servers.of_each(check), strict=True)
        self.positions, self.devices = self.positions._replace(decoder=min(lengths)), set(devices)
        self.eos_ids = self.settings.end_tokens(policy, self.tokenizer)
