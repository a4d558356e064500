"""The printed memory per GPU equals the bytes really allocated, and hand-worked numbers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from transformers import AutoModelForCausalLM, LlamaConfig

from trimtab_cli.memory import GIB, Memory, MemoryConfig, engines, main, memory, size_of

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
    counted = memory(size_of(LLAMA, lora_rank), engines(config)["one GPU"], config)
    assert [counted.weights, counted.gradients, counted.optimizer] == allocated


def test_an_encoder_decoder_is_counted_too():
    model = tiny.t5()
    size = size_of(model.config)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    assert size.layers == model.config.num_layers + model.config.num_decoder_layers


def test_shares_add_up_to_the_whole():
    """16 bytes per parameter in float32 with AdamW; ZeRO's are 2 + 2 + 12 (Rajbhandari et al. 2020, Figure 1)."""
    size, gpus = size_of(LLAMA), 8
    config = MemoryConfig("llama", gpus=gpus)
    state = {}
    for name, engine in engines(config).items():
        parts = memory(size, engine, config)
        state[name] = (parts.weights + parts.gradients + parts.optimizer) / size.parameters
    assert state == {"one GPU": 16, "DDP": 20, "ZeRO-2": 2 + 14 / gpus, "ZeRO-3": 16 / gpus, "FSDP2": 16 / gpus}


def test_a_reference_is_the_weights_again_and_a_critic_the_whole_training():
    size, engine = size_of(LLAMA), engines(MemoryConfig("llama"))["FSDP2"]
    parts = memory(size, engine, MemoryConfig("llama", reference=True, critic=True))
    assert parts.reference == parts.weights
    assert parts.critic == parts.weights + parts.gradients + parts.optimizer
    adapted = memory(size_of(LLAMA, 4), engine, MemoryConfig("llama", reference=True, lora_rank=4))
    assert adapted.reference == 0


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer():
    """34 x hidden units per token and layer without checkpointing (Korthikanti et al. 2022, Equation 1)."""
    size, engine = size_of(LLAMA), engines(MemoryConfig("llama"))["one GPU"]
    kept = [
        memory(size, engine, MemoryConfig("llama", tokens=10, checkpointing=on)).activations for on in (False, True)
    ]
    assert kept == [10 * 32 * 34 * 3, 10 * 32 * (34 + 2 * 3)]


def test_the_command_prints_a_row_for_each_engine(tmp_path, capsys):
    (file := tmp_path / "config.json").write_text(LLAMA.to_json_string())
    assert main(["--model", str(file), "--gpus", "4"]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["engine", *Memory._fields, "total"]
    assert [row.split()[0] for row in rows] == ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]
    assert float(rows[0].split()[1]) == round(4 * size_of(LLAMA).parameters / GIB, 1)


def test_the_command_says_in_a_line_that_there_is_no_such_model(tmp_path, capsys):
    assert main(["--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trimtab memory: error: ")
