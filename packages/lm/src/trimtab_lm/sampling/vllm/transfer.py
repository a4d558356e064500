"""Sends weights to vLLM servers: by shared files, or by NCCL between GPUs."""

import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from .client import VLLMServers
from .engine import installed_vllm

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import ParamMeta, TrainerWeightTransferEngine

SHARED_MEMORY = Path("/dev/shm")


class WeightFiles:
    """Writes a checkpoint that the servers reload by vLLM's `reload_weights`.

    Args:
        servers: the servers that get the weights.
        folder: where all processes and servers can read; None: shared memory (/dev/shm), for servers on this machine,
            or the folder for temporary files where there is none.
    """

    def __init__(self, servers: VLLMServers, folder: str | None):
        self.servers, self.folder = servers, folder or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None)

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Give every server the weights, and leave it paused."""
        with tempfile.TemporaryDirectory(prefix="trimtab-weights-", dir=self.folder) as folder:
            # A copy of each: a checkpoint must not hold two views of one tensor.
            copies = {name: weight.to("cpu", copy=True).contiguous() for name, weight in weights.items()}
            save_file(copies, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self.servers.ask_all("/pause?mode=wait", {})
            kwargs = {"weights_path": folder}
            self.servers.ask_all("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


class WeightBroadcast:
    """Broadcasts weights over NCCL by vLLM's weight-transfer engine, which must be installed beside the trainer too.

    The servers are started with --weight-transfer-config '{"backend": "nccl"}'. The first training process is rank 0 of
    a group with all workers of all servers, which meets at its first `send`.

    Args:
        servers: the servers that get the weights.
        trainer_address: under which the servers reach this machine; None: its host name.
    """

    def __init__(self, servers: VLLMServers, trainer_address: str | None):
        installed_vllm()
        self.servers, self.address = servers, trainer_address or socket.gethostname()
        self.weights: Mapping[str, Tensor] = {}
        self.sizes: list[int] = []  # workers of each server
        self._engine: TrainerWeightTransferEngine | None = None

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Give every server the weights, and leave it paused."""
        self.weights = weights
        self.servers.ask_all("/pause?mode=wait", {})
        self._engine = self._engine or self._meet()
        self._engine.send_weights()
        self.weights = {}

    def _meet(self) -> "TrainerWeightTransferEngine":
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.sizes = self.servers.of_each(lambda server: int(self.servers.ask(server, "/get_world_size")["world_size"]))
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        info = NCCLTrainerInitInfo(self.address, port, 1 + sum(self.sizes), rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=self, source=self)

    # vLLM's WeightSource: the tensors, and what they are.

    def metadata(self) -> "list[ParamMeta]":
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())

    # vLLM's VLLMWeightSyncClient: the same calls on all servers at once.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's workers come after those of the servers before it."""
        first = init_info["rank_offset"]
        offsets = {server: first + sum(self.sizes[:number]) for number, server in enumerate(self.servers.addresses)}
        self.servers.of_each(
            lambda server: self.servers.ask(
                server, "/init_weight_transfer_engine", {"init_info": {**init_info, "rank_offset": offsets[server]}}
            )
        )

    def start_weight_update(self) -> None:
        self.servers.ask_all("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.servers.ask_all("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.servers.ask_all("/finish_weight_update", {"weight_version": weight_version})
