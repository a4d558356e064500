"""While a CPU decodes, the head reads a transposed copy of its weight: the logits stay, and so does the head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from torch import nn

from trimtab_lm.sampling.generate import sample_groups, sampling_config
from trimtab_lm.sampling.head import COPIED_ROWS, FEWEST_STEPS, head_by_columns, transposed

MANY = 64


def forwards(model: Any, steps: int = MANY) -> bool:
    """Whether the head has another forward inside the block. It has its own before and after."""
    head = model.get_output_embeddings()
    before = dict(vars(head))
    with head_by_columns(model, steps):
        is_replaced = vars(head).get("forward") is not before.get("forward")
    assert vars(head) == before
    return is_replaced


@pytest.mark.parametrize("rows", [1, COPIED_ROWS - 1, COPIED_ROWS, 2 * COPIED_ROWS + 3])
def test_a_matrix_is_transposed(rows: int):
    weight = torch.randn(rows, 7, generator=torch.Generator().manual_seed(0))
    copy = transposed(weight)
    assert copy.is_contiguous()
    assert torch.equal(copy, weight.t())


@pytest.mark.parametrize("bias", [False, True])
def test_the_logits_are_those_of_the_head(bias: bool):
    model = tiny.llama()
    torch.manual_seed(0)
    model.lm_head = nn.Linear(model.config.hidden_size, 1000, bias=bias)
    hidden = torch.randn(3, 1, model.config.hidden_size)
    usual = model.lm_head(hidden)
    with head_by_columns(model, MANY), torch.no_grad():
        assert "forward" in vars(model.lm_head)
        torch.testing.assert_close(model.lm_head(hidden), usual, rtol=1e-5, atol=1e-6)


def test_a_rollout_uses_the_copy_and_samples_the_same(monkeypatch: pytest.MonkeyPatch):
    model, results, seen = tiny.llama(), [], []
    model.get_output_embeddings().register_forward_hook(lambda head, *_: seen.append("forward" in vars(head)))
    config, _ = sampling_config(model, pad_token_id=tiny.PAD, max_new_tokens=FEWEST_STEPS, min_new_tokens=FEWEST_STEPS)
    for fewest in (FEWEST_STEPS, FEWEST_STEPS + 1):
        monkeypatch.setattr("trimtab_lm.sampling.head.FEWEST_STEPS", fewest)
        torch.manual_seed(0)
        groups = sample_groups(model, tiny.rows(3, 4, 9), config, eos_ids=[tiny.EOS], batch_size=8, num_generations=2)
        results.append([row.ids.tolist() for group in groups for row in group])
    half = len(seen) // 2
    assert all(seen[:half])
    assert not any(seen[half:])
    assert results[0] == results[1]


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(lambda module, args: None)
    return model


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"])).get_base_model()


OTHERS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.double(),
    "an adapter": adapted,
    "an engine's hook": hooked,
}


def test_plain_heads_are_copied_where_it_pays():
    assert forwards(tiny.llama())
    assert not forwards(tiny.llama(), steps=FEWEST_STEPS - 1)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_heads_are_left_alone(change: Callable[[Any], Any]):
    assert not forwards(change(tiny.llama()))


def test_autocast_has_products_of_its_own():
    with torch.autocast("cpu", torch.bfloat16):
        assert not forwards(tiny.llama())


def test_an_error_gives_the_head_back():
    model = tiny.llama()
    with pytest.raises(KeyError), head_by_columns(model, MANY):
        raise KeyError
    assert "forward" not in vars(model.lm_head)
