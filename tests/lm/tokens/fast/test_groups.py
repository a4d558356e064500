"""Attention group by group gives the numbers of a whole-row mask, at the cost of the groups."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.lm import tiny
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM, OPTConfig, OPTForCausalLM

from trimtab_lm.tokens.attention import tree_mask
from trimtab_lm.tokens.fast import GroupMask
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.inputs import TokenReader
from trimtab_lm.tokens.layout import TokenGroup, lay_out

SHARED = TokenGroup([4, 5, 6, 7, 8], [[9, 10, 11], [12, 13], [14] * 6], [[1] * 3, [1] * 2, [1] * 6])
ALONE = TokenGroup([4, 5], [[6, 7, 8]], [[1] * 3])
APART = TokenGroup([], [[4] * 9, [5] * 2], [[1] * 9, [1] * 2])


def masks(groups: list[TokenGroup]) -> tuple[GroupMask, torch.Tensor]:
    batch = lay_out(groups, "row", pad_token_id=0)
    columns = batch["document"], batch["branch"]
    return GroupMask.of(*columns), tree_mask(*columns)


class Widths(TorchDispatchMode):
    """Records the number of queries and keys in each attention kernel that runs inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.seen.append((args[0].shape[2], args[1].shape[2]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("groups", [[SHARED], [ALONE, SHARED], [APART, SHARED, ALONE]])
def test_attention_by_group_is_attention_under_the_mask_of_the_row(groups: list[TokenGroup], dtype: torch.dtype):
    by_group, mask = masks(groups)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, mask.shape[-1], 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    results = []
    for attn_mask in (by_group, mask):
        output = scaled_dot_product_attention(*inputs, attn_mask=attn_mask, scale=0.5)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_attention_by_group_costs_what_the_groups_cost():
    by_group, _ = masks([APART, SHARED, ALONE])
    inputs = torch.randn(3, 1, 2, by_group.shape[-1], 8)
    with Widths() as widths:
        scaled_dot_product_attention(*inputs, attn_mask=by_group)
    # Two sequences of 9 and 2; a prefix of 5 and its branches; a query of 2 with its only response of 3.
    assert widths.seen == [(9, 9), (2, 2), (5, 5), (3, 8), (2, 7), (6, 11), (5, 5)]


def test_documents_in_a_row_are_read_one_by_one_without_columns_that_name_them():
    model = tiny.exact(tiny.llama()).eval()
    score_tokens_in_forward(model)
    batch = lay_out([TokenGroup.document([4] * 7), TokenGroup.document([5] * 3)], "row", pad_token_id=0)
    with Widths() as widths:
        model(tokens={name: column for name, column in batch.items() if name not in ("document", "branch")})
    assert set(widths.seen) == {(7, 7), (3, 3)}


def test_a_model_that_reads_the_mask_elsewhere_gets_its_numbers():
    by_group, mask = masks([SHARED, ALONE])
    assert (by_group.shape, by_group.dtype, by_group.device) == (mask.shape, mask.dtype, mask.device)
    assert not by_group.was_read
    torch.testing.assert_close(torch.zeros(mask.shape).masked_fill(~by_group, -1.0), mask.float() - 1)
    assert by_group.was_read


def test_a_model_that_writes_with_the_mask_or_joins_it_gets_its_numbers():
    by_group, mask = masks([SHARED, ALONE])
    torch.testing.assert_close(torch.zeros(mask.shape).masked_fill_(by_group, -1.0), -mask.float())
    torch.testing.assert_close(torch.zeros(mask.shape).add_(by_group), mask.float())
    assert torch.equal(torch.cat([by_group, ~mask]), torch.cat([mask, ~mask]))
    assert torch.equal(by_group.data, mask)


def test_dropout_draws_its_numbers_over_the_whole_row():
    by_group, mask = masks([SHARED, ALONE])
    inputs = torch.randn(3, 1, 2, mask.shape[-1], 8)
    outputs = []
    for attn_mask in (by_group, mask):
        torch.manual_seed(0)
        outputs.append(scaled_dot_product_attention(*inputs, attn_mask=attn_mask, dropout_p=0.5))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama])
def test_layers_that_are_recomputed_get_the_same_mask(build, use_reentrant: bool):
    model = build().train()
    score_tokens_in_forward(model)
    batch = lay_out([SHARED, ALONE], "row", pad_token_id=0)
    gradients = []
    for is_recomputed in (False, True):
        if is_recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        torch.manual_seed(0)
        model(tokens=batch).logprobs.sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_row_waits_for_no_accelerator_and_no_noise(monkeypatch):
    model = tiny.llama()
    assert best_layout(model, share_prefix=True, is_noisy=True) == "tree"
    assert best_layout(model, share_prefix=False, is_noisy=True) == "packed"
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: True))
    assert best_layout(model, share_prefix=True) == "tree"


def test_a_model_with_windows_keeps_them_in_a_single_row():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(**sizes, num_key_value_heads=1, sliding_window=4, **tiny.TOKENS)
    model = tiny.seeded(MistralForCausalLM, config)
    batch = lay_out([TokenGroup.document([4] * 7), TokenGroup.document([5] * 3)], "packed", pad_token_id=0, width=10)
    assert "attention_mask" not in TokenReader(model).inputs(batch)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2} | tiny.TOKENS
MIXING = {
    "convolutions": (
        Lfm2ForCausalLM,
        Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    ),
    "one causal mask": (OPTForCausalLM, OPTConfig(**SIZES, word_embed_proj_dim=16, ffn_dim=24)),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_reads_the_document_before_gets_padding(name: str):
    """Position ids alone do not separate documents in LFM2's convolutions or in OPT's mask, which ignore them."""
    kind, config = MIXING[name]
    model = tiny.seeded(kind, config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    with pytest.warns(UserWarning, match=kind.__name__):
        assert best_layout(model, share_prefix=False, is_noisy=True) == "padded"


def test_a_mask_keeps_documents_apart_where_position_ids_do_not():
    kind, config = MIXING["one causal mask"]
    assert best_layout(tiny.seeded(kind, config), share_prefix=False) == "row"
