"""Prompts that wait take the places of completions that have ended, and are completed as if they had not waited."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.lm import tiny
from tests.lm.sampling.test_backends import hybrid, lora, prompt_tuned, sliding
from tests.lm.sampling.test_decoding import LIMIT, RAGGED, SEVERAL_ENDS, config_of, sampled, tokens_read
from torch import Tensor

from trimtab_lm.compat.generation import CACHE
from trimtab_lm.sampling.cache import PASS
from trimtab_lm.sampling.generate import sample_groups
from trimtab_lm.sampling.waiting import Waiting, can_wait

ENDS_EARLY = {"do_sample": True, "eos_token_id": list(range(1, 9))}


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora])
@pytest.mark.parametrize(("repeats", "batch_size"), [(1, 1), (1, 4), (1, 7), (3, 2), (3, 4), (3, 10)])
def test_greedy_completions_are_those_of_one_large_batch(build: Callable, repeats: int, batch_size: int):
    model, settings = tiny.exact(build()).eval(), {"do_sample": True, "top_k": 1, "eos_token_id": SEVERAL_ENDS}
    expected = sampled(model, RAGGED, repeats, settings)
    assert len({len(row) for group in expected for row in group}) > 2
    assert sampled(model, RAGGED, repeats, settings, batch_size=batch_size) == expected


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_batch_stays_full_as_long_as_prompts_wait(repeats: int):
    model, prompts, size = tiny.llama().eval(), tiny.rows(60, 4, 4), 12
    completions: list[Any] = []
    shapes = tokens_read(
        model, lambda: completions.extend(sampled(model, prompts, repeats, ENDS_EARLY, batch_size=size))
    )
    steps = [rows for rows, tokens in shapes if tokens == 1]
    assert max(steps) == size
    waits = len(steps) - LIMIT  # steps after which no prompt can wait any more
    assert waits > LIMIT
    assert min(steps[:waits]) > 0.75 * size - repeats
    lengths = [len(row) for group in completions for row in group]
    assert sum(steps) < 1.35 * sum(lengths)  # batches of twelve, each to its last row, would read 2.4 for each
    assert [(len(group), min(map(len, group)) > 0) for group in completions] == [(repeats, True)] * 60


@pytest.mark.slow
def test_waiting_rows_are_drawn_from_the_softmax():
    model, prompt = tiny.llama().eval(), tiny.rows(1, 4, 4)[0]
    count, settings = 4000, {"do_sample": True, "temperature": 1.5, "eos_token_id": list(range(1, 16))}
    groups = sampled(model, [prompt] * count, 1, settings, batch_size=16)
    with torch.no_grad():
        probs = (model(prompt[None]).logits[0, -1] / 1.5).softmax(-1)
        first = int(probs[16:].argmax()) + 16  # the likeliest that does not end the completion
        second = (model(torch.cat([prompt, torch.tensor([first])])[None]).logits[0, -1] / 1.5).softmax(-1)
    for drawn, expected in (
        ([row[0] for (row,) in groups], probs),
        ([row[1] for (row,) in groups if row[0] == first], second),
    ):
        assert len(drawn) > 100
        frequency = torch.tensor(drawn).bincount(minlength=len(expected)) / len(drawn)
        deviation = (expected * (1 - expected) / len(drawn)).sqrt()
        assert ((frequency - expected).abs() < 4.5 * deviation + 1e-9).all()


def test_neighbours_draw_independently():
    groups = sampled(tiny.llama().eval(), tiny.rows(1, 4, 4) * 200, 1, ENDS_EARLY, batch_size=8)
    rows = [tuple(row) for (row,) in groups if len(row) > 3]
    assert len(rows) > 30
    assert sum(left == right for left, right in pairwise(rows)) < 3


def test_a_batch_whose_long_prompts_are_done_is_no_longer_as_wide(monkeypatch: pytest.MonkeyPatch):
    model, widths = tiny.llama().eval(), list[int]()
    prompts = [*tiny.rows(4, 50, 50), *tiny.rows(60, 3, 3)]

    def note(_: object, __: object, arguments: dict[str, Any]) -> None:
        widths.append(arguments[CACHE].get_seq_length())

    model.register_forward_pre_hook(note, with_kwargs=True)
    sampled(model, prompts, 1, ENDS_EARLY, batch_size=4)
    assert max(widths) >= 50
    assert max(widths[len(widths) // 2 :]) <= 3 + LIMIT


def test_prompts_of_like_length_are_read_together_when_they_take_places():
    model = tiny.llama().eval()
    prompts = [*tiny.rows(2, 60, 60), *tiny.rows(2, 40, 40)]
    assert 2 * PASS > 2 * 20
    shapes = tokens_read(model, lambda: sampled(model, prompts, 1, {**ENDS_EARLY, "top_k": 1}, batch_size=2))
    assert shapes[0] == (2, 60)
    assert all(tokens in (1, 39) for _, tokens in shapes[1:])  # the last token of a prompt comes with the next step


@pytest.mark.parametrize("build", [sliding, hybrid, prompt_tuned, tiny.t5])
def test_where_no_row_can_join_there_are_batches(build: Callable):
    check_batches(build().eval(), {"do_sample": True})


@pytest.mark.parametrize("setting", [{"min_new_tokens": 2}, {"min_length": 8}, {"repetition_penalty": 1.1}])
def test_settings_that_look_at_the_whole_batch_make_batches(setting: dict[str, Any]):
    check_batches(tiny.llama().eval(), {"do_sample": True, **setting})


def check_batches(model: Any, settings: dict[str, Any]) -> None:
    calls = list[int]()
    generate = model.generate

    def counted(**arguments: Any) -> Any:
        calls.append(len(arguments["input_ids"]))
        return generate(**arguments)

    model.generate = counted
    groups = sampled(model, tiny.rows(10, 4, 4), 1, settings, batch_size=4)
    assert calls == [4, 4, 2]
    assert [len(group) for group in groups] == [1] * 10


def test_what_counts_from_the_first_prompts_cannot_wait():
    model = tiny.llama().eval()
    assert can_wait(model, config_of(model, do_sample=True))
    assert can_wait(model, config_of(model, do_sample=True, min_new_tokens=0, min_length=-1))
    assert not can_wait(model, config_of(model, do_sample=True, min_new_tokens=1))
    assert not can_wait(sliding().eval(), config_of(model, do_sample=True))
    config = config_of(model, do_sample=True)
    config.max_new_tokens, config.max_length = None, 30
    assert not can_wait(model, config)


def test_prompts_leave_the_line_with_all_their_completions():
    ids = torch.tensor([[5, 6, 7], [0, 8, 9], [0, 4, 3], [0, 0, 2]])
    waiting = Waiting(ids, (ids > 0).long(), repeats=3)
    first, mask = waiting.take(7)
    assert (first.tolist(), mask.tolist(), bool(waiting)) == ([[5, 6, 7], [0, 8, 9]], [[1, 1, 1], [0, 1, 1]], True)
    assert waiting.take(3)[0].tolist() == [[4, 3]]
    assert waiting.take(100)[0].tolist() == [[2]]
    assert not waiting


def test_nobody_waits_where_there_is_no_prompt():
    model = tiny.llama().eval()
    no_prompts: list[Tensor] = []
    assert sample_groups(model, no_prompts, config_of(model, do_sample=True), eos_ids=[1], num_generations=3) == []
