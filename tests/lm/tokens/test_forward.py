"""A model with a forward that takes tokens, and copies of it with their own weights."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.lm import tiny
from torch import Tensor, nn

from trimtab_lm.tokens.forward import score_sequences_in_forward, score_tokens_in_forward
from trimtab_lm.tokens.layout import TokenGroup, lay_out

IDS = torch.tensor([[1, 5, 6, 7, 8]])
TOKENS = lay_out([TokenGroup([1, 5], [[6, 7, 8]], [[1, 1, 1]])], "padded", pad_token_id=0)


def plain(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def scores(model: Any) -> Tensor:
    result = model(tokens=TOKENS)
    return result[0]


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight)


@pytest.mark.parametrize(
    ("build", "extend"),
    [(tiny.llama, score_tokens_in_forward), (tiny.scorer, score_sequences_in_forward)],
    ids=["language model", "classifier"],
)
@pytest.mark.parametrize("calls", [(plain, scores), (scores, plain)], ids=["plain first", "tokens first"])
def test_a_copy_runs_its_own_weights(build: Any, extend: Any, calls: Any):
    model = build().eval()
    extend(model)
    copied = deepcopy(model)
    expected = [call(model).detach() for call in calls]
    moved(model)
    for call, before in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(copied), before)
        assert not torch.allclose(call(model), before)


def test_a_copy_that_is_extended_again_has_a_head_of_its_own():
    model = tiny.llama().eval()
    head = score_tokens_in_forward(model)
    copied = deepcopy(model)
    assert score_tokens_in_forward(copied).model is copied
    assert score_tokens_in_forward(model) is head
