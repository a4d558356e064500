"""If vLLM or its server is missing or unusable, one line says so and what to change."""

import importlib.util
import json
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.lm import tiny

from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.rollout import SamplingSettings
from trimtab_lm.sampling.vllm.client import VLLMServerError


def backend(name: str, **options: Any) -> Any:
    return make_backend(name, SamplingSettings(), tiny.tokenizer(), options)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_engine_names_the_version_that_is_needed():
    with pytest.raises(ImportError, match=r"need vllm 0\.32 or newer, and none is installed: pip install 'trimtab-lm"):
        backend("vllm")


def test_an_old_engine_is_named_with_the_version_that_is_needed(monkeypatch: pytest.MonkeyPatch):
    old = types.ModuleType("vllm")
    old.__version__ = "0.11.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)
    with pytest.raises(ImportError, match=r"need vllm 0\.32 or newer, and 0\.11\.2 is installed: upgrade"):
        backend("vllm")


class Old(BaseHTTPRequestHandler):
    """Reports the version of an old vLLM, and has no other route."""

    def do_GET(self) -> None:
        body = json.dumps({"version": "0.11.2"}).encode()
        self.send_response(200 if self.path == "/version" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_old_server_is_named_with_the_version_that_is_needed(address: str):
    with pytest.raises(VLLMServerError, match=rf"{address} runs vLLM 0\.11\.2, and rollouts need 0\.32 or newer"):
        backend("vllm_server", servers=[address]).sync(tiny.llama(), 0)


def test_another_server_is_told_apart(address: str):
    with pytest.raises(VLLMServerError, match=r"has no /version: start it for rollouts, VLLM_SERVER_DEV_MODE=1 vllm"):
        backend("vllm_server", servers=[f"{address}/v1"]).sync(tiny.llama(), 0)


def test_a_server_that_is_not_there_is_named_with_the_option_to_change():
    nobody = "http://127.0.0.1:9"
    with pytest.raises(VLLMServerError, match=rf"{nobody} is unreachable after 1 retries .*refused.*servers=\.\.\."):
        backend("vllm_server", servers=[nobody], retries=1).sync(tiny.llama(), 0)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"give a list of addresses, such as \['http://localhost:8000'\]"):
        backend("vllm_server", servers="http://localhost:8000")
    with pytest.raises(ValueError, match=r"weight_transfer='rdma': use one of files, nccl"):
        backend("vllm_server", servers=["http://localhost:8000"], weight_transfer="rdma")
