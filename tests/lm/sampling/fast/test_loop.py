"""Our loop for `generate` samples the same as transformers' loop, and reads fewer tokens."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from tests.lm import tiny
from tests.lm.sampling.test_backends import hybrid, lora, prefix_tuned, prompt_tuned, sliding
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from trimtab_lm.sampling.fast.loop import LARGE_VOCABULARY, LOOK_EVERY, draw, draw_by_inversion
from trimtab_lm.sampling.generate import Completer, cut_at_eos
from trimtab_lm.sampling.rollout import eos_token_ids, sampling_config
from trimtab_lm.tokens.layout import pad

LIMIT = 12
SEVERAL_ENDS = [tiny.EOS, 9, 10, 11]
RAGGED = [*tiny.rows(9, 1, 1), *tiny.rows(12, 2, 4), *tiny.rows(9, 20, 23), *tiny.rows(3, 45, 50)]


def reader_of_images() -> Any:
    """Returns a model with positions on three axes."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    axes = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    text = {**sizes, "num_key_value_heads": 2, "initializer_range": 0.3, "rope_parameters": axes, **tiny.TOKENS}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = {name: 28 + i for i, name in enumerate(names)} | {"pad_token_id": tiny.PAD, "eos_token_id": tiny.EOS}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    return tiny.seeded(Qwen2VLForConditionalGeneration, config)


def config_of(model: Any, **settings: Any) -> Any:
    return sampling_config(model, tiny.tokenizer(), max_new_tokens=LIMIT, **settings)[0]


def sampled(model: Any, prompts: Sequence[Tensor], repeats: int, settings: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Returns completions by `Completer`, with all prompts in one batch."""
    config = config_of(model, **settings)
    options = {"eos_ids": eos_token_ids(model, None, config), "batch_size": 512, **kwargs}
    torch.manual_seed(0)
    rows = [ids.tolist() for ids in Completer(model, config, **options)(prompts, repeats).completions]
    return [rows[start : start + repeats] for start in range(0, len(rows), repeats)]


def by_transformers(
    model: Any, prompts: Sequence[Tensor], repeats: int, settings: dict[str, Any], **kwargs: Any
) -> list[Any]:
    """Returns the same completions by transformers' `generate` alone, the longest prompt first."""
    config = config_of(model, **settings)
    config.num_return_sequences = repeats
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    input_ids, mask = pad([prompts[i] for i in order], tiny.PAD, side="left")
    torch.manual_seed(0)
    output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config, **kwargs)
    start = 1 if model.config.is_encoder_decoder else input_ids.shape[1]
    ends = eos_token_ids(model, None, config)
    rows = [cut_at_eos(row, ends, None).tolist() for row in output[:, start:]]
    groups = {prompt: rows[place * repeats : (place + 1) * repeats] for place, prompt in enumerate(order)}
    return [groups[i] for i in range(len(prompts))]


def tokens_read(model: Any, run: Callable[[], object]) -> list[tuple[int, int]]:
    """Returns the shape of the ids in each forward pass while `run` runs."""
    shapes: list[tuple[int, int]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, ids, __: shapes.append(tuple(ids[0].shape)))
    run()
    hook.remove()
    return shapes


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora, sliding, hybrid, tiny.t5, reader_of_images])
@pytest.mark.parametrize(
    ("repeats", "settings"),
    [
        (1, {"do_sample": False}),
        (1, {"do_sample": True}),
        (3, {"do_sample": True, "top_k": 1}),
        (3, {"do_sample": True, "temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 3}),
    ],
)
def test_the_samples_are_those_of_transformers_loop(build: Callable, repeats: int, settings: dict[str, Any]):
    model = tiny.exact(build()).eval()
    prompts = RAGGED if build is not hybrid else tiny.rows(5, 4, 4)  # its left padding is not exact
    settings = {**settings, "eos_token_id": SEVERAL_ENDS}
    expected = by_transformers(model, prompts, repeats, settings)
    assert len({len(row) for group in expected for row in group}) > 1
    assert sampled(model, prompts, repeats, settings) == expected


def test_greedy_completions_of_a_group_are_alike():
    (group,) = sampled(tiny.llama().eval(), tiny.rows(1, 4, 4), 3, {"do_sample": False})
    assert len(group) == 3
    assert group[0] == group[1] == group[2]


def test_rows_that_have_ended_are_no_longer_read():
    model, settings = tiny.llama().eval(), {"do_sample": True, "eos_token_id": list(range(1, 9))}
    prompts = tiny.rows(40, 4, 4)
    completions: list[Any] = []
    shapes = tokens_read(model, lambda: completions.extend(sampled(model, prompts, 1, settings)))
    lengths = [len(group[0]) for group in completions]
    for step, (rows, _) in enumerate(shapes):
        going_on = sum(length > step for length in lengths)
        assert going_on <= rows <= max(going_on / 0.75, 1)
    assert shapes[-1][0] < 10


@pytest.mark.parametrize("build", [tiny.llama, hybrid, prefix_tuned, tiny.t5])
@pytest.mark.parametrize("every", [5, LIMIT + 1])
def test_a_rare_look_at_which_rows_have_ended_changes_no_sample(
    build: Callable, every: int, monkeypatch: pytest.MonkeyPatch
):
    model, settings = tiny.exact(build()).eval(), {"do_sample": True, "eos_token_id": list(range(1, 12))}
    prompts = tiny.rows(6, 4, 4)
    expected = sampled(model, prompts, 3, settings)
    assert len({len(row) for group in expected for row in group}) > 1
    monkeypatch.setitem(LOOK_EVERY, "cpu", every)
    assert sampled(model, prompts, 3, settings) == expected


@pytest.mark.parametrize(("every", "steps"), [(1, 1), (5, 5), (LIMIT + 1, LIMIT)])
def test_when_all_rows_have_ended_the_next_look_ends_the_loop(every: int, steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOOK_EVERY, "cpu", every)
    model, settings = tiny.llama().eval(), {"do_sample": True, "eos_token_id": list(range(len(tiny.VOCABULARY)))}
    assert len(tokens_read(model, lambda: sampled(model, tiny.rows(6, 4, 4), 1, settings))) == steps


def test_a_prompt_is_read_once_for_its_group():
    model, settings = tiny.llama().eval(), {"do_sample": True, "min_new_tokens": LIMIT}
    shapes = tokens_read(model, lambda: sampled(model, tiny.rows(5, 50, 50), 3, settings))
    assert shapes == [(5, 49), *[(15, 1)] * LIMIT]
    assert tokens_read(model, lambda: sampled(model, tiny.rows(5, 50, 50), 1, settings)) == [
        (5, 50),
        *[(5, 1)] * (LIMIT - 1),
    ]


@pytest.mark.parametrize("vocabulary", [32, LARGE_VOCABULARY])
def test_what_a_row_draws_does_not_depend_on_the_rows_that_have_left(vocabulary: int):
    probs, left = torch.rand(6, vocabulary).softmax(-1), torch.tensor([1, 4, 5])
    torch.manual_seed(0)
    everyone = draw(probs, torch.arange(6), 6)
    torch.manual_seed(0)
    assert draw(probs[left], left, 6).tolist() == everyone[left].tolist()


def test_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_are_likely():
    count, likely = 20_000, torch.tensor([0, 1000, LARGE_VOCABULARY - 1])
    probs = torch.zeros(LARGE_VOCABULARY)
    probs[likely] = torch.tensor([0.1, 0.6, 0.25])
    probs[1001:1006] = 0.01
    torch.manual_seed(0)
    drawn = draw(probs.expand(count, -1), torch.arange(count), count).bincount(minlength=LARGE_VOCABULARY) / count
    assert drawn[probs == 0].sum() == 0
    assert ((drawn - probs).abs() <= 4.5 * (probs * (1 - probs) / count).sqrt()).all()


def test_tokens_of_tiny_probability_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    # Each is a quarter of single precision's rounding at 1: there four to eight of them would become one.
    probs = torch.cat([torch.tensor([1.0]), torch.full((LARGE_VOCABULARY,), 2.0**-25)])
    total, count = 1 + LARGE_VOCABULARY * 2.0**-25, 100
    places = torch.arange(1, count + 1, dtype=torch.float64)[:, None]  # the middle of each share
    monkeypatch.setattr(torch, "rand", lambda *_, **__: 1 - (1 + (places - 0.5) * 2.0**-25) / total)
    assert draw(probs.expand(count, -1), torch.arange(count), count).tolist() == list(range(1, count + 1))


@pytest.mark.parametrize("vocabulary", [32, LARGE_VOCABULARY])
def test_nothing_is_drawn_from_probabilities_that_are_not_finite(vocabulary: int):
    probs = torch.full((2, vocabulary), 1 / vocabulary)
    probs[1, 7] = float("nan")
    with pytest.raises(RuntimeError, match="nan"):
        draw(probs, torch.arange(2), 2)


def refuse(model: Any, *_: object, **__: object) -> Tensor:
    raise AssertionError("our loop ran")


class NeverEnds(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([tiny.EOS]), float("-inf"))


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [
        ({"repetition_penalty": 1.5}, {}),
        ({"no_repeat_ngram_size": 1}, {}),
        ({"cache_implementation": "dynamic"}, {}),
        ({"cache_implementation": "static"}, {}),
        ({"use_cache": False}, {}),
        ({"max_time": 100.0}, {}),
        ({}, {"logits_processor": [NeverEnds()]}),
        ({}, {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7]}),
    ],
)
def test_what_our_loop_does_not_know_is_done_by_that_of_transformers(
    settings: dict[str, Any], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    model = tiny.exact(tiny.llama()).eval()
    prompts, settings = tiny.rows(6, 2, 6), {"do_sample": True, **settings}
    expected = by_transformers(model, prompts, 2, settings, **kwargs)
    monkeypatch.setattr("trimtab_lm.sampling.fast.loop.decode", refuse)
    assert sampled(model, prompts, 2, settings, **kwargs) == expected


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora, sliding, hybrid, prompt_tuned, tiny.t5])
def test_our_loop_is_the_one_that_samples(build: Callable, monkeypatch: pytest.MonkeyPatch):
    @wraps(GenerationMixin._sample)
    def refuse_too(*_: object, **__: object) -> None:
        raise AssertionError("transformers' loop ran")

    model = build().eval()
    monkeypatch.setattr(GenerationMixin, "_sample", refuse_too)
    assert len(sampled(model, tiny.rows(3, 2, 6), 2, {"do_sample": True})) == 3


@pytest.mark.parametrize("count", [5, 128, 2048, 2049, 50257])
def test_inversion_finds_where_the_cumulative_distribution_reaches_a_number(count: int):
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(40, count, generator=generator)).softmax(-1)
    probs[:, 0], probs[:, -2:] = 0.0, 0.0
    uniform = 1 - torch.rand(40, 1, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 1.0, 1e-300  # the last token with a positive probability, and the first one
    cumulative = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
    tokens = draw_by_inversion(7 * probs, uniform)[:, None]
    reached, before = cumulative.gather(1, tokens), cumulative.gather(1, tokens - 1)
    assert (reached >= uniform - 1e-12).all()
    assert (before < uniform + 1e-12).all()
    assert (probs.gather(1, tokens) > 0).all()
