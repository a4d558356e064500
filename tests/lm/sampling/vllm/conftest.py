"""vLLM servers for the tests of `make test-vllm`."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from tests.lm.sampling import wide


class Server:
    """A process with vLLM's OpenAI-compatible server, as `vllm serve` runs it.

    Starts it by its module, because the CPU wheel has no metadata for the command.
    """

    def __init__(self, model: str, folder: Path, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", *options]
        variables = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        for _ in range(500):
            try:
                if urllib3.request("GET", self.address + "/health", retries=False).status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                time.sleep(1)
            if self.process.poll() is not None:
                break
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


FOR_ROLLOUTS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Starts two servers of one policy, and one of a tied policy without the options for rollouts."""
    root = tmp_path_factory.mktemp("servers")
    plain, tied = wide.saved(root / "plain", seed=1), wide.saved(root / "tied", seed=1, tie_word_embeddings=True)
    started = [Server(model, root, *FOR_ROLLOUTS) for model in (plain, plain)]
    started.append(Server(tied, root, "--enable-scale-out"))
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            if server.process.poll() is None:
                server.kill()
