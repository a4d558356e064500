"""`torch.compile` with the inductor's CPU backend: compiled steps make the numbers of plain ones.

A CUDA build compiles the same graphs with Triton in place of C++; the graphs are shown here, its kernels are not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from tests.lm import tiny
from tests.lm.sampling.fast.test_loop import sampled
from tests.test_every_trainer import ANSWERS, PREFERENCES, WORDS, length
from torch._dynamo.utils import counters
from transformers import CompileConfig

from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # inductor runs g++
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled before or after; accelerate allows one backend per program."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


def sft(folder: str, **config: Any) -> SFTTrainer:
    args = SFTConfig(folder, packing=True, max_length=24, **SETTINGS | config)
    rows = Dataset.from_dict({"text": WORDS})
    return SFTTrainer(tiny.llama(), args, train_dataset=rows, processing_class=tiny.tokenizer())


def reward(folder: str, **config: Any) -> RewardTrainer:
    args, scorer = RewardConfig(folder, **SETTINGS | config), tiny.scorer()
    for dropout in scorer.modules():
        if isinstance(dropout, torch.nn.Dropout):
            dropout.p = 0.0
    return RewardTrainer(scorer, args, train_dataset=PREFERENCES, processing_class=tiny.tokenizer())


def dpo(folder: str, **config: Any) -> DPOTrainer:
    args = DPOConfig(folder, **SETTINGS | config)
    return DPOTrainer(tiny.llama(), args=args, train_dataset=PREFERENCES, processing_class=tiny.tokenizer())


def kto(folder: str, **config: Any) -> KTOTrainer:
    args = KTOConfig(folder, **SETTINGS | config)
    return KTOTrainer(tiny.llama(), args=args, train_dataset=ANSWERS, processing_class=tiny.tokenizer())


def grpo(folder: str, **config: Any) -> GRPOTrainer:
    args = GRPOConfig(folder, num_generations=2, max_completion_length=6, **SETTINGS | config)
    prompts = Dataset.from_dict({"prompt": WORDS})
    return GRPOTrainer(tiny.llama(), length, args, prompts, processing_class=tiny.tokenizer())


@pytest.mark.parametrize("build", [sft, reward, dpo, kto, grpo])
def test_a_compiled_trainer_takes_the_same_steps(build: Callable[..., Any], tmp_path: Path):
    def trained(**config: Any) -> tuple[list[float], Any]:
        trainer = build(str(tmp_path), gradient_checkpointing=False, **config)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model

    losses, model = trained()
    assert not counters["stats"]
    losses_compiled, compiled = trained(torch_compile=True, torch_compile_backend="inductor")
    assert counters["inductor"]
    assert losses_compiled == pytest.approx(losses, rel=1e-5)
    assert_same(model, compiled)


def test_a_compiled_ppo_takes_the_same_steps(tmp_path: Path):
    def trained(**accelerate: Any) -> tuple[list[float], PPOTrainer, Any]:
        sizes = {"steps": 2, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3}
        config = PPOConfig(output_dir=str(tmp_path), accelerator_kwargs={"cpu": True, **accelerate}, **sizes)
        prompts, policy = Dataset.from_dict({"query": WORDS}), tiny.policy()
        trainer = PPOTrainer(config, policy, tokenizer=tiny.tokenizer(), dataset=prompts)
        history = trainer.train(
            lambda queries, responses, **_: length(responses), generation_kwargs={"max_new_tokens": 6}
        )
        return [stats["ppo/loss/total"] for stats in history], trainer, policy

    losses = trained()[0]
    assert not counters["stats"]
    AcceleratorState._reset_state(reset_partial_state=True)
    compiled, trainer, policy = trained(dynamo_backend="inductor")
    assert counters["inductor"]
    assert compiled == pytest.approx(losses, rel=1e-5)  # AdamW turns rounding into steps of weights without a gradient
    trainer.save_pretrained(str(tmp_path / "compiled"))
    assert_same(policy, type(policy).from_pretrained(tmp_path / "compiled"))


def test_a_compiled_decoding_step_with_a_static_cache_samples_the_same_tokens():
    """On a GPU `cache_implementation="static"` alone compiles the step, and there with CUDA graphs."""
    model, prompts = tiny.llama().eval(), tiny.rows(3, 5, 9)
    compiling = CompileConfig(backend="inductor", mode="default")
    compiling._compile_all_devices = True
    plain = sampled(model, prompts, 1, {"do_sample": True})
    compiled = sampled(
        model, prompts, 1, {"do_sample": True, "cache_implementation": "static", "compile_config": compiling}
    )
    assert counters["inductor"]
    assert compiled == plain


def assert_same(one: Any, other: Any) -> None:
    """The weights differ by rounding at most."""
    weights = tiny.weights(other)
    for name, weight in tiny.weights(one).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
