"""A decoding step on a CPU reads few columns of padding, and attends as if it had read all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lm import tiny
from tests.lm.sampling.test_backends import lora, sliding
from tests.lm.sampling.test_decoding import config_of
from torch.nn.functional import scaled_dot_product_attention

from trimtab_lm.interface import base_of
from trimtab_lm.sampling import ragged
from trimtab_lm.sampling.generate import sample_groups
from trimtab_lm.sampling.ragged import ALIGNED, MOST_ALIKE, RUN, RaggedMask, ragged_runs
from trimtab_lm.tokens.forward import leaves_masks_to_sdpa

PROMPTS = [*tiny.rows(4, 50, 52), *tiny.rows(9, 20, 23), *tiny.rows(12, 2, 4)]


def mask_of(*lengths: int, width: int) -> torch.Tensor:
    return torch.stack([torch.arange(width) >= width - length for length in lengths]).long()


def test_attention_is_that_of_the_plain_mask():
    mask = mask_of(300, 299, 40, 180, 33, 1, 1, width=300)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, 3, size, 8, generator=generator, dtype=torch.float64) for size in (1, 300, 300))
    expected = scaled_dot_product_attention(query, key, value, mask[:, None, None].bool())
    own = RaggedMask.of(mask, ragged_runs(mask))
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, attn_mask=own), expected)
    assert not own.was_read
    assert torch.equal(own + 0, mask[:, None, None])  # what reads the mask elsewhere gets its numbers
    assert own.was_read


def test_runs_are_the_rows_in_order_and_leave_out_what_costs_more_than_a_call():
    mask = mask_of(*[800] * 5, *[790] * 5, *[100] * 40, 700, width=800)
    assert ragged_runs(mask) == [(0, 10, 0), (10, 50, 800 - 112), (50, 51, 96)]
    assert ragged_runs(mask_of(90, 50, 10, width=90)) == [(0, 3, 0)]  # less than what a call costs


def test_runs_are_found_among_rows_of_any_order():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2000, (500,), generator=generator).tolist()
    mask = mask_of(*lengths, width=2000)
    runs = ragged_runs(mask)
    assert len(runs) <= MOST_ALIKE
    assert [row for start, end, _ in runs for row in range(start, end)] == list(range(500))
    for start, end, column in runs:
        assert column % ALIGNED == 0
        assert column <= 2000 - max(lengths[start:end])
    cost = sum(RUN + (end - start) * (2000 - column) for start, end, column in runs)
    assert cost <= RUN + 500 * 2000


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora])
@torch.no_grad()
def test_a_batch_is_decoded_without_its_padding(build: Callable, monkeypatch: pytest.MonkeyPatch):
    """The same tokens, of fewer keys; `RUN` is small here, as the prompts are."""
    monkeypatch.setattr(ragged, "RUN", 8)
    read: list[int] = []

    def counting(query: Any, key: Any, *args: Any, **options: Any) -> Any:
        read.append(key.shape[0] * key.shape[2])
        return scaled_dot_product_attention(query, key, *args, **options)

    model = tiny.exact(build()).eval()
    config = config_of(model, do_sample=True, top_k=1, min_new_tokens=12)
    options = {"eos_ids": [tiny.EOS], "batch_size": 64}

    def decoded() -> list[list[int]]:
        return [group[0].ids.tolist() for group in sample_groups(model, PROMPTS, config, **options)]

    monkeypatch.setattr(ragged, "leaves_masks_to_sdpa", lambda _: False)
    expected = decoded()
    monkeypatch.setattr(ragged, "leaves_masks_to_sdpa", leaves_masks_to_sdpa)
    monkeypatch.setattr(ragged, "scaled_dot_product_attention", counting)
    assert decoded() == expected
    layers = base_of(model).config.num_hidden_layers
    assert 0 < sum(read) < 0.7 * layers * sum(len(PROMPTS) * (52 + step) for step in range(12))


def test_models_that_cannot_take_the_mask_are_left_alone():
    assert leaves_masks_to_sdpa(tiny.llama())
    assert not leaves_masks_to_sdpa(sliding())
    eager = tiny.llama()
    leaves_masks_to_sdpa(eager)
    eager.set_attn_implementation("eager")
    assert not leaves_masks_to_sdpa(eager)
