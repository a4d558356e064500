"""How many completions are sampled at a time: the caller's number, or as many as fit."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.lm import tiny
from tests.lm.sampling.fast.test_loop import config_of, tokens_read
from tests.lm.sampling.test_backends import hybrid, lora, prompt_tuned, sliding

from trimtab_lm import PPOTrainer
from trimtab_lm.sampling import generate
from trimtab_lm.sampling.generate import (
    AS_MANY_AS_FIT,
    CPU_ROOM,
    DEVICE_ROOM,
    SCORE_BYTES,
    Automatic,
    Completer,
    batches_of,
    completions_at_a_time,
)


def test_the_documented_default_is_four_and_stands_for_as_many_as_fit():
    default = inspect.signature(PPOTrainer.generate).parameters["batch_size"].default
    assert default == 4
    assert isinstance(default, Automatic)


@pytest.mark.parametrize(("batch_size", "rows"), [(4, [4, 4, 2]), (AS_MANY_AS_FIT, [10])])
def test_a_batch_size_that_the_caller_gives_is_kept(batch_size: int, rows: list[int]):
    model = sliding().eval()
    config = config_of(model, do_sample=True)
    sample = partial(Completer(model, config, eos_ids=[], batch_size=batch_size), tiny.rows(10, 4, 4))
    assert [count for count, tokens in tokens_read(model, sample) if tokens > 1] == rows


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora, sliding, hybrid, prompt_tuned, tiny.t5])
def test_every_model_has_a_size(build: Callable):
    assert completions_at_a_time(build(), 100, read=1) > 1


def test_a_completion_takes_its_keys_and_values_and_its_scores(monkeypatch: pytest.MonkeyPatch):
    model, tokens = tiny.llama(), 50
    config = model.config
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    states = 2 * tokens * config.num_hidden_layers * heads * head_dim * 4
    row = states + SCORE_BYTES * config.vocab_size
    assert completions_at_a_time(model, tokens, read=1) == CPU_ROOM // row
    assert completions_at_a_time(model.to(torch.bfloat16), tokens, read=1) == CPU_ROOM // (row - states // 2)
    monkeypatch.setattr(generate, "CPU_ROOM", 10)
    weights = sum(weight.numel() * 2 for weight in model.parameters())
    assert completions_at_a_time(model, 1, read=1) == max(weights // 2 // (row - states + states // 100), 1)
    assert completions_at_a_time(model, 10**9, read=1) == 1


def test_a_device_of_unknown_memory_has_its_own_room():
    on_cpu, on_device = (
        completions_at_a_time(tiny.llama(), 50, read=1),
        completions_at_a_time(tiny.llama().to("meta"), 50, read=1),
    )
    assert on_device == pytest.approx(on_cpu * DEVICE_ROOM / CPU_ROOM, rel=1e-3)


def test_batches_hold_prompts_of_like_length():
    prompts = [torch.ones(length) for length in (2, 5, 3, 5, 2)]
    assert batches_of(prompts, 2, 1, is_split=False) == [([1, 3], 0, 1), ([2, 0], 0, 1), ([4], 0, 1)]
    assert batches_of(prompts, 7, 3, is_split=False) == [([1, 3], 0, 3), ([2, 0], 0, 3), ([4], 0, 3)]
    assert batches_of(prompts[:2], 2, 3, is_split=False) == [([1], 0, 2), ([1], 2, 1), ([0], 0, 2), ([0], 2, 1)]
    assert batches_of(prompts, 9, 1, is_split=True) == [([1, 3], 0, 1), ([2], 0, 1), ([0, 4], 0, 1)]
    assert batches_of([], 4, 2, is_split=False) == []
