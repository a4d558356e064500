"""The estimates of tools/roofline.py: bytes and operations by hand, and what they say about the LM head."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tools.roofline import (
    H100,
    HEADS,
    SHAPES,
    TRUNKS,
    Head,
    Roofline,
    heads_table,
    ours,
    peer,
    shared_table,
    step,
    steps_table,
)
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "speed.md"
SMALL = Head("small", 64, 1000, tokens=50)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def places(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "size", "flops"),
    [
        (lambda: numbers(3, 5) @ numbers(5, 7), 4 * (15 + 35 + 21), 2 * 3 * 5 * 7),
        (lambda: torch.mm(numbers(3, 5), numbers(5, 7), out=numbers(3, 7)), 4 * (15 + 35 + 21), 210),
        (lambda: numbers(3, 7).addmm_(numbers(3, 5), numbers(5, 7)), 4 * (21 + 15 + 35 + 21), 210),
        (lambda: numbers(6).add_(1.0), 4 * (6 + 6), 0),
        (lambda: numbers(6) + numbers(6), 4 * (6 + 6 + 6), 0),
        (lambda: numbers(6).expand(10, 6) + numbers(10, 6), 4 * (6 + 60 + 60), 0),
        (lambda: numbers(6).bfloat16(), 4 * 6 + 2 * 6, 0),
        (lambda: numbers(6).copy_(numbers(6, dtype=torch.bfloat16)), 2 * 6 + 4 * 6, 0),
        (lambda: numbers(6).fill_(0.0), 4 * 6, 0),
        (lambda: torch.exp(numbers(6), out=numbers(6)), 4 * (6 + 6), 0),
        (lambda: numbers(8, 100).sum(-1), 4 * (800 + 8), 0),
        (lambda: numbers(8, 100).gather(-1, places(8, 1)), 2 * 4 * 8 + 8 * 8, 0),
        (lambda: numbers(8, 100).scatter_add_(-1, places(8, 1), numbers(8, 1)), 3 * 4 * 8 + 8 * 8, 0),
        (lambda: torch.nn.functional.embedding(places(3), numbers(50, 4)), 2 * 4 * 12 + 8 * 3, 0),
    ],
)
def test_an_operation_moves_each_of_its_tensors_once(run: Callable[[], Tensor], size: int, flops: int):
    with Roofline() as count:
        run()
    assert (count.kernels, count.bytes, count.flops) == (1, size, flops)
    assert count.seconds == H100.launch


def test_views_and_empty_tensors_cost_nothing():
    with Roofline() as count:
        torch.empty_like(numbers(4, 6)).T[1:].view(5, 4).detach().split(2)
    assert (count.kernels, count.seconds) == (0, 0.0)


def test_a_kernel_takes_the_longest_of_three_times():
    count = Roofline()
    for size, flops in ((1, 1), (3 * 10**12, 1), (1, 650 * 10**12)):
        count.add(size, flops)
    assert count.seconds == pytest.approx(4e-6 + 1.0 + 1.0)


def test_the_products_of_a_head_are_three_or_four():
    """A sum, and logits that are kept, need no second product for the logits."""
    product = 2 * 50 * 64 * 1000
    assert ours(SMALL, is_summed=True).flops == 3 * product
    assert ours(SMALL, is_summed=False).flops == 3 * product
    assert ours(SMALL, is_summed=False, backward=False).flops == product
    assert peer(SMALL).flops == 4 * product
    assert peer(SMALL, backward=False).flops == product
    product = 2 * 8192 * 2048 * 128_256
    assert ours(HEADS[1], is_summed=True).flops == 3 * product
    assert ours(HEADS[1], is_summed=False).flops == 4 * product


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
@pytest.mark.parametrize("is_summed", [True, False])
def test_a_head_takes_at_most_half_as_long_again_as_its_products(head: Head, is_summed: bool):
    """Without a compiler it would take more than twice as long with a large vocabulary."""
    count, plain = (ours(head, is_summed=is_summed, compiles=compiles) for compiles in (True, False))
    assert count.seconds < 1.5 * count.products
    assert count.seconds < peer(head).seconds * 1.2
    if head.vocabulary > 100_000:
        assert plain.seconds > 1.5 * count.seconds


@pytest.mark.parametrize(
    ("number", "shared", "apart"),
    [(0, 8 * (512 + 2 * 256), 16 * (512 + 256)), (1, 8 * (256 + 8 * 96), 64 * (256 + 96)), (2, 8 * 1280, 8 * 1280)],
)
def test_a_step_reads_a_prompt_once_where_that_is_cheaper(number: int, shared: int, apart: int):
    """Eight answers of 1,024 tokens each get a copy of their prompt: attention would read too wide rows."""

    def head(head: Head, *, backward: bool) -> Roofline:
        return Roofline()

    small = TRUNKS[0]._replace(layers=1)
    for shares_prompts, positions in ((True, shared), (False, apart)):
        assert step(small, SHAPES[number], head, shares_prompts=shares_prompts)[0] == positions


@pytest.mark.slow
def test_the_page_holds_these_estimates():
    """Run `python -m tools.roofline` and copy its tables."""
    text = PAGE.read_text(encoding="utf-8")
    for table in (heads_table, steps_table, shared_table):
        assert "\n".join(table()) in text
