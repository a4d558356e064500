"""The exact probabilities of answers, against the enumeration of all completions."""

import string
from itertools import product
from math import exp

import pytest
import torch
from tests.lm import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.evaluation import answer_logprobs
from experiments.shao_2024_grpo import exact
from experiments.shao_2024_grpo.answers import right

END, SPACE_AND_NEW_LINE = 2, 4
VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": END, "<unk>": 3, " \n": SPACE_AND_NEW_LINE, " ": 5, "\n": 6, "+": 7, "=": 8}
VOCABULARY |= {digit: len(VOCABULARY) + i for i, digit in enumerate(string.digits)}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for a space with a new line."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" \n|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def completions(length: int) -> list[list[int]]:
    """Every completion of at most `length` tokens: it stops at the end token, or after the last."""
    every = product(range(len(VOCABULARY)), repeat=length)
    return [list(row) for row in sorted({tuple(ids[: ids.index(END) + 1]) if END in ids else ids for ids in every})]


def enumerated(model: torch.nn.Module, prompt: torch.Tensor, length: int) -> dict[str, float]:
    """The probability of each line, over all completions."""
    rows, lines = [torch.tensor(row) for row in completions(length)], dict[str, float]()
    shares = answer_logprobs(model, [prompt] * len(rows), rows, batch_size=4096)
    for text, share in zip(tokenizer().batch_decode(rows, skip_special_tokens=True), shares, strict=True):
        line = text.partition("\n")[0].strip()
        lines[line] = lines.get(line, 0.0) + exp(share)
    return lines


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_probabilities_of_lines_are_sums_over_all_completions(length: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exact, "LEAST", 0.0)
    monkeypatch.setattr(exact, "LEAST_RIGHT", 0.0)
    model = tiny.llama(0, vocab_size=len(VOCABULARY)).train()
    prompts = [torch.tensor(ids) for ids in ([9, 7, 10, 8], [12, 7, 8], [9, 7, 11, 8], [9, 9, 10, 8])]
    settings = {"max_tokens": length, "end_ids": [END], "batch_size": 2}
    for prompt, lines in zip(
        prompts, exact.line_probabilities(model, tokenizer(), prompts, [7] * 4, **settings), strict=True
    ):
        assert lines == pytest.approx(enumerated(model, prompt, length), abs=1e-5)
        assert sum(lines.values()) == pytest.approx(1, abs=1e-4)
    assert model.training


@pytest.mark.parametrize(("length", "answer"), [(1, 7), (2, 7), (3, 7), (2, 16), (3, 16)])
def test_the_right_line_keeps_its_probability_where_rare_beginnings_are_dropped(length: int, answer: int):
    model = tiny.llama(0, vocab_size=len(VOCABULARY))
    prompt = torch.tensor([9, 7, 10, 8])
    (lines,) = exact.line_probabilities(model, tokenizer(), [prompt], [answer], max_tokens=length, end_ids=[END])
    every = enumerated(model, prompt, length)
    assert lines[str(answer)] == pytest.approx(every[str(answer)], rel=2e-3, abs=10 * exact.LEAST_RIGHT)
    assert right([str(answer)], [answer]) == [1]
    assert all(share <= every[line] + 1e-6 for line, share in lines.items())


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [("", True), (" ", True), ("1", True), (" 1", True), ("1 ", False), ("16 ", True), ("6", False)],
)
def test_a_line_begins_with_spaces_and_digits_in_order(text: str, is_possible: bool):
    assert exact.is_beginning(text, "16") == is_possible


def test_a_temperature_near_zero_leaves_the_likeliest_completion():
    model, prompt = tiny.llama(0, vocab_size=len(VOCABULARY)), torch.tensor([12, 7, 8])
    settings = {"max_tokens": 1, "temperature": 1e-4, "end_ids": [END]}
    likeliest = int(model(prompt[None]).logits[0, -1].argmax())
    digits = {VOCABULARY[digit]: int(digit) for digit in string.digits}
    for token, answer in digits.items():
        (lines,) = exact.line_probabilities(model, tokenizer(), [prompt], [answer], **settings)
        assert lines.get(str(answer), 0.0) == pytest.approx(float(token == likeliest), abs=1e-3)
