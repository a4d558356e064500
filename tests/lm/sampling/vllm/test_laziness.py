"""Only programs that use vLLM import its requirements, and trainers import samplers only when a run asks for them."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_only_a_backend_that_is_asked_for_imports_vllm():
    program = """
import sys, tempfile
import trimtab_lm.sampling.backends, trimtab_lm.grpo.trainer, trimtab_lm.ppo.trainer
optional = ("trimtab_lm.environments", "trimtab_lm.sampling.asynchronous", "trimtab_lm.sampling.vllm")
assert not [name for name in sys.modules if name.startswith(optional)], "imported"
trimtab_lm.GRPOConfig(tempfile.mkdtemp(), rollout_backend="vllm", use_cpu=True)
assert not [name for name in sys.modules if name.startswith("trimtab_lm.sampling.vllm")], "before"
from trimtab_lm.sampling.vllm import VLLMServerRollout
assert "trimtab_lm.sampling.vllm.server" in sys.modules, "after"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
