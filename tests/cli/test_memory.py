"""The printed memory per GPU equals the bytes really allocated, and hand-worked numbers."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from trimtab_cli.memory import Memory, MemoryConfig, engines, main, memory, size_of
from trimtab_cli.tables import GIB

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_weights_gradients_and_optimizer_states_are_the_bytes_that_a_training_allocates(weights, lora_rank):
    dtype = getattr(torch, weights)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=dtype)
    if lora_rank:
        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    allocated = [sum(tensor.nbytes for tensor in part) for part in (list(model.parameters()), gradients, moments)]

    config = MemoryConfig("llama", gpus=1, lora_rank=lora_rank, weights=weights)
    counted = memory(size_of(LLAMA, config), engines(config)["one GPU"], config)
    assert [counted.weights, counted.gradients, counted.optimizer] == allocated


def test_an_encoder_decoder_is_counted_too():
    model = tiny.t5()
    size = size_of(model.config, MemoryConfig("t5", tokens=64, length=32))
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    assert min(size.activations.values()) > 0


def test_shares_add_up_to_the_whole():
    """16 bytes per parameter in float32 with AdamW; ZeRO's are 2 + 2 + 12 (Rajbhandari et al. 2020, Figure 1)."""
    gpus = 8
    config = MemoryConfig("llama", gpus=gpus)
    size = size_of(LLAMA, config)
    state = {}
    for name, engine in engines(config).items():
        parts = memory(size, engine, config)
        state[name] = (parts.weights + parts.gradients + parts.optimizer) / size.parameters
    assert state == {"one GPU": 16, "DDP": 20, "ZeRO-2": 2 + 14 / gpus, "ZeRO-3": 16 / gpus, "FSDP2": 16 / gpus}


def test_a_reference_is_the_weights_again_and_a_critic_the_whole_training():
    config = MemoryConfig("llama", reference=True, critic=True)
    size, engine = size_of(LLAMA, config), engines(config)["FSDP2"]
    parts = memory(size, engine, config)
    assert parts.reference == parts.weights
    assert parts.critic == parts.weights + parts.gradients + parts.optimizer
    assert parts.activations == 2 * memory(size, engine, MemoryConfig("llama")).activations
    assert memory(size, engine, MemoryConfig("llama", reference=True, lora_rank=4)).reference == 0


def test_dpo_kto_and_ppo_hold_a_reference_unless_the_user_says_otherwise():
    trainers = ("sft", "reward", "dpo", "kto", "grpo", "ppo")
    holding = [name for name in trainers if MemoryConfig("llama", trainer=name).holds_reference]
    assert holding == ["dpo", "kto", "ppo"]
    assert not MemoryConfig("llama", trainer="dpo", reference=False).holds_reference
    assert not MemoryConfig("llama", trainer="dpo", lora_rank=4).holds_reference
    assert MemoryConfig("llama", trainer="grpo", reference=True).holds_reference


def test_more_answer_tokens_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"scored=9 answer tokens are more than the tokens=8 of a micro-batch"):
        MemoryConfig("llama", tokens=8, scored=9)


def activations(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> int:
    config = MemoryConfig("llama", **{"tokens": 4 * 64, "length": 64, "scored": 8, "checkpointing": False} | settings)
    return size_of(LLAMA, config).activations[dtype]


def test_activations_are_what_a_real_forward_pass_keeps_for_backward():
    """Backward needs less than a layer beside them. One token is scored: the head's part is small."""
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16).train()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(input_ids=torch.zeros(4, 64, dtype=torch.long), use_cache=False).last_hidden_state
    assert states.requires_grad
    forward = sum(kept.values())
    assert forward < activations(scored=1) < forward * (1 + 1 / LLAMA.num_hidden_layers)


def test_activations_grow_with_the_tokens_and_autocast_adds_copies_of_the_weights():
    few, more, most = (activations(tokens=tokens) for tokens in (256, 512, 768))
    assert most - more == pytest.approx(more - few, rel=0.01)
    copies = 2 * size_of(LLAMA, MemoryConfig("llama")).parameters  # the embedding is the head
    assert activations(torch.float32) > few + 0.8 * copies


def test_weights_are_not_counted_among_the_activations():
    """For one token there is little but the gradient of one weight at a time, and that of the head."""
    parameters = size_of(LLAMA, MemoryConfig("llama")).parameters
    assert activations(tokens=1, length=1, scored=1) < 2 * parameters * 2 / 3


def test_checkpointing_keeps_less_and_a_mask_of_answers_more():
    """A layer keeps the mask as numbers of two bytes, for each pair of positions in a row."""
    whole, rows, layers = activations(scored=32), 4, LLAMA.num_hidden_layers
    assert activations(scored=32, checkpointing=True) < whole / 1.5
    assert activations(scored=32, trainer="dpo") - whole > layers * rows * 64**2 * 2


def test_the_command_prints_a_row_for_each_engine(tmp_path, capsys):
    (file := tmp_path / "config.json").write_text(LLAMA.to_json_string())
    assert main(["--model", str(file), "--gpus", "4"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{file} on 4 GPUs, GiB on each:"
    assert head.split() == ["engine", *Memory._fields, "total"]
    assert [row.split()[0] for row in rows] == ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert float(rows[0].split()[1]) == round(4 * size_of(LLAMA, MemoryConfig("llama")).parameters / GIB, 1)


def test_by_default_the_weights_have_the_type_that_the_trainers_load(tmp_path, capsys):
    """float32; where only adapters train, the checkpoint's."""
    config = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 2**24, "dtype": torch.bfloat16})
    (file := tmp_path / "config.json").write_text(config.to_json_string())

    def weights(*words: str) -> str:
        assert main(["--model", str(file), "--gpus=1", "--tokens=8", "--length=8", *words]) == 0
        return capsys.readouterr().out.splitlines()[2].removeprefix("one GPU").split()[0]

    assert weights() == weights("--lora_rank=2", "--trainer=reward") == "2.0"
    assert weights("--lora_rank=2") == weights("--weights=bfloat16") == "1.0"
    assert weights("--lora_rank=2", "--weights=float32") == "2.0"


def test_one_gpu_is_one(tmp_path, capsys):
    (file := tmp_path / "config.json").write_text(LLAMA.to_json_string())
    assert main(["--model", str(file), "--gpus", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{file} on 1 GPU, GiB on it:\n")


def test_the_command_says_in_a_line_that_there_is_no_such_model(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trimtab memory: error: ")
