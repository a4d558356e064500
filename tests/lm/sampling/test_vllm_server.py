"""vLLM's own server samples from the policy as it is: run by `make test-vllm`."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.sampling import wide

from trimtab_lm.sampling.rollout import SamplingSettings, StaleWeightsError
from trimtab_lm.sampling.vllm_server import VLLMServerError, VLLMServerRollout

pytest.importorskip("vllm", reason="vLLM's server is not installed here: make test-vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LIMIT = 8


class Server:
    """vLLM's OpenAI-type server in a process of its own, as `vllm serve` runs it.

    It is started by its module: the wheel for the CPU has no metadata for the command.
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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers of one untied and one of a tied policy."""
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


def sampler(servers: list[Server], temperature: float = 0.8, settings: Any = None, **options: Any) -> VLLMServerRollout:
    sampling = SamplingSettings(LIMIT, temperature, **(settings or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The sampler is not the policy")
        return VLLMServerRollout(
            sampling, tiny.tokenizer(), servers=[server.address for server in servers], **{"retries": 1, **options}
        )


@torch.no_grad()
@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}, None])
def test_the_servers_sample_from_the_policy_after_every_change_of_its_weights(servers: list[Server], adapters: Any):
    policy = wide.llama(seed=3)
    if adapters is not None:
        config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **adapters)
        policy = get_peft_model(policy, config).eval()
    rollouts = sampler(servers[:2])
    for version in range(3):
        rollouts.sync(policy, version)
        rollout = rollouts.generate(wide.PROMPTS, num_generations=4, version=version, seed=version)
        ratios = wide.ratios(policy, rollout, 4, temperature=0.8)
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)
        assert rollout.ended == [int(row[-1]) == tiny.EOS for row in rollout.completions]
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@torch.no_grad()
def test_greedy_completions_are_the_policys_after_a_change_of_its_weights(servers: list[Server]):
    policy, rollouts = wide.llama(seed=3), sampler(servers[:2], settings={"top_k": 1})
    before = wide.greedy(policy, LIMIT)
    rollouts.sync(policy, 0)
    answers = rollouts.generate(wide.PROMPTS, num_generations=1, version=0, seed=0).completions
    assert [row.tolist() for row in answers] == before
    policy.lm_head.weight.neg_()
    rollouts.sync(policy, 1)
    answers = rollouts.generate(wide.PROMPTS, num_generations=1, version=1, seed=0).completions
    assert [row.tolist() for row in answers] == wide.greedy(policy, LIMIT) != before


def test_one_seed_gives_one_rollout_however_many_servers_share_it(servers: list[Server]):
    policy, rollouts = wide.llama(), []
    for chosen, seed in ((servers[:2], 1), (servers[:1], 1), (servers[:2], 2)):
        backend = sampler(chosen, temperature=1.5)
        backend.sync(policy, 0)
        rows = backend.generate([wide.PROMPTS[0]] * 4, num_generations=2, version=0, seed=seed).completions
        rollouts.append([row.tolist() for row in rows])
    assert rollouts[0] == rollouts[1] != rollouts[2]
    assert len({tuple(row) for row in rollouts[0]}) > 4


def test_old_weights_and_prompts_without_room_are_refused(servers: list[Server]):
    rollouts = sampler(servers[:2])
    with pytest.raises(StaleWeightsError):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)
    rollouts.sync(wide.llama(), 0)
    with pytest.raises(ValueError, match=r"prompt of 57 tokens with 8 new ones is too long: 65 .* 64 positions. Lower"):
        rollouts.generate(tiny.rows(1, 57, 57), num_generations=1, version=0, seed=0)
    other = sampler(servers[:1])
    other.sync(wide.llama(seed=5), 0)
    with pytest.raises(StaleWeightsError, match=rf"{servers[0].address} sampled with the weights .* another run sends"):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)


def test_a_server_of_another_model_is_refused_and_goes_on(servers: list[Server]):
    with pytest.raises(ValueError, match=rf"{servers[0].address} serves .*plain, which is another .*: layers 2, not 3"):
        sampler(servers[:2]).sync(wide.llama(num_hidden_layers=3), 0)
    sampler(servers[:2]).sync(wide.llama(), 0)


def test_a_server_that_was_not_started_for_rollouts_says_how_to_start_it(servers: list[Server]):
    with pytest.raises(VLLMServerError, match=r"tells raw_logprobs.* start it with --logprobs-mode processed_logprobs"):
        sampler(servers[2:]).sync(wide.llama(tie_word_embeddings=True), 0)
    with pytest.raises(ValueError, match="give a list of addresses"):
        VLLMServerRollout(SamplingSettings(), tiny.tokenizer(), servers="http://localhost:8000")


def test_a_killed_server_is_named_with_the_option_to_change(servers: list[Server]):
    """The last test of the file: it kills the second server."""
    rollouts = sampler(servers[:2])
    rollouts.sync(wide.llama(), 0)
    servers[1].kill()
    with pytest.raises(VLLMServerError, match=rf"{servers[1].address} is unreachable after 1 retries .*servers=\.\.\."):
        rollouts.generate(wide.PROMPTS, num_generations=2, version=0, seed=0)
    with pytest.raises(VLLMServerError, match=rf"{servers[1].address} is unreachable after 1 retries"):
        rollouts.sync(wide.llama(), 1)
