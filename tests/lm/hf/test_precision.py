"""Trained weights are float32 unless the caller chooses a type, and trained half-precision weights give one warning."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from tests.test_every_trainer import ANSWERS, PREFERENCES, SETTINGS, WORDS, length

from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.models.loading import check_precision

BUILDS: dict[str, tuple[type, type, Any]] = {
    "sft": (SFTTrainer, SFTConfig, Dataset.from_dict({"text": WORDS})),
    "iterative_sft": (IterativeSFTTrainer, IterativeSFTConfig, None),
    "reward": (RewardTrainer, RewardConfig, PREFERENCES),
    "dpo": (DPOTrainer, DPOConfig, PREFERENCES),
    "kto": (KTOTrainer, KTOConfig, ANSWERS),
    "grpo": (GRPOTrainer, GRPOConfig, Dataset.from_dict({"prompt": WORDS})),
}
LORA = LoraConfig(r=2, target_modules=["c_attn"])
HALF, FULL = torch.bfloat16, torch.float32
WARNING = "trained weights are bfloat16, such as .*updates much smaller than a weight round away"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model in bfloat16 and its tokenizer."""
    folder = tmp_path_factory.mktemp("half")
    tiny.gpt2(dtype=HALF).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def build(name: str, folder: Path, model: Any, peft_config: Any = None, *, ref_model: Any = None, **config: Any) -> Any:
    kind, config_kind, rows = BUILDS[name]
    options: dict[str, Any] = {"ref_model": ref_model} if ref_model else {}
    if name == "grpo":
        options, config = {"reward_funcs": length}, {"max_completion_length": 4} | config
    args = config_kind(str(folder), **SETTINGS | {"max_steps": 1, "save_strategy": "no"} | config)
    options |= {"args": args, "train_dataset": rows, "processing_class": tiny.tokenizer(), "peft_config": peft_config}
    return kind(model, **options)


def trained_types(model: torch.nn.Module) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters() if weight.requires_grad}


@pytest.mark.parametrize("name", BUILDS)
def test_a_half_precision_checkpoint_by_name_trains_in_float32(name: str, checkpoint: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained weights are")
        trainer = build(name, tmp_path, checkpoint)
    assert {weight.dtype for weight in trainer.model.parameters()} == {FULL}


@pytest.mark.parametrize("name", BUILDS)
def test_a_dtype_that_the_caller_chooses_is_taken_with_a_warning(name: str, checkpoint: str, tmp_path: Path):
    for chosen in ({"dtype": "auto"}, {"torch_dtype": "bfloat16"}):
        with pytest.warns(UserWarning, match=WARNING):
            trainer = build(name, tmp_path, checkpoint, model_init_kwargs=chosen)
        assert trained_types(trainer.model) == {HALF}


@pytest.mark.parametrize("name", sorted(BUILDS.keys() - {"reward"}))
def test_under_adapters_the_weights_keep_the_checkpoints_type(name: str, checkpoint: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained weights are")
        trainer = build(name, tmp_path, checkpoint, LORA)
    assert trained_types(trainer.model) == {FULL}
    assert trainer.model.get_base_model().transformer.wte.weight.dtype == HALF


def test_modules_that_train_beside_adapters_are_float32(checkpoint: str, tmp_path: Path):
    head = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"])
    assert trained_types(build("sft", tmp_path, checkpoint, head).model) == {FULL}
    assert trained_types(build("reward", tmp_path, checkpoint, LORA).model) == {FULL}


def test_a_reference_by_name_has_the_type_of_a_policy_by_name(checkpoint: str, tmp_path: Path):
    for name in ("dpo", "kto"):
        assert build(name, tmp_path, checkpoint, ref_model=checkpoint).reference.model.dtype == FULL
        assert build(name, tmp_path, checkpoint, LORA, ref_model=checkpoint).reference.model.dtype == HALF


def test_ppo_by_name_trains_in_float32(checkpoint: str):
    kind = AutoModelForCausalLMWithValueHead
    assert trained_types(kind.from_pretrained(checkpoint)) == {FULL}
    assert kind.from_pretrained(checkpoint, dtype="auto").pretrained_model.dtype == HALF
    adapted = kind.from_pretrained(checkpoint, peft_config=LORA)
    assert (trained_types(adapted), adapted.pretrained_model.transformer.wte.weight.dtype) == ({FULL}, HALF)
    assert trained_types(PPOTrainer(PPOConfig(model_name=checkpoint)).model) == {FULL}


def test_an_adapter_loads_on_a_base_model_of_the_checkpoints_type(checkpoint: str, tmp_path: Path):
    kind = AutoModelForCausalLMWithValueHead
    kind.from_pretrained(checkpoint, peft_config=LORA).save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert (trained_types(again), again.pretrained_model.transformer.wte.weight.dtype) == ({FULL}, HALF)


def test_a_model_in_memory_in_half_precision_gives_one_warning(tmp_path: Path):
    ppo = {"config": PPOConfig(), "tokenizer": tiny.tokenizer()}
    for make in (
        lambda: build("sft", tmp_path, tiny.gpt2(dtype=HALF)),
        lambda: PPOTrainer(model=tiny.policy(dtype=HALF), **ppo),
    ):
        with pytest.warns(UserWarning, match=WARNING) as caught:
            make()
        (one,) = [warning for warning in caught if "round away" in str(warning.message)]
        assert "dtype=torch.float32" in str(one.message)
        assert one.filename == __file__


def accelerator(precision: str, engine: DistributedType = DistributedType.NO) -> Any:
    return SimpleNamespace(mixed_precision=precision, distributed_type=engine)


def test_float16_weights_under_scaled_gradients_are_refused():
    """torch's GradScaler raises `Attempting to unscale FP16 gradients` at the first step."""
    with pytest.raises(
        ValueError, match=r"trained weights are float16, such as .*needs float32 weights.*torch.float32"
    ):
        check_precision(tiny.gpt2(dtype=torch.float16), accelerator("fp16"))
    check_precision(tiny.gpt2(), accelerator("fp16"))


@pytest.mark.parametrize(("precision", "engine"), [("no", DistributedType.DEEPSPEED), ("bf16", DistributedType.FSDP)])
def test_engines_that_keep_float32_weights_give_no_warning(precision: str, engine: DistributedType):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_precision(tiny.gpt2(dtype=HALF), accelerator(precision, engine))
    with pytest.warns(UserWarning, match=WARNING):
        check_precision(tiny.gpt2(dtype=HALF), accelerator("no", DistributedType.FSDP))
