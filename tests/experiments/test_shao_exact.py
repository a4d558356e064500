"""The exact probability of a right answer, against the enumeration of all completions."""

import string
from itertools import product

import pytest
import torch
from tests.lm import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.evaluation import answer_logprobs, next_logprobs
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


@pytest.mark.parametrize(("length", "answer"), [(1, 7), (2, 7), (3, 7), (2, 16), (3, 16)])
def test_the_probability_is_the_sum_over_all_right_completions(length: int, answer: int):
    model = tiny.llama(0, vocab_size=len(VOCABULARY)).train()
    prompts = [torch.tensor([9, 7, 10, 8]), torch.tensor([12, 7, 8])]
    found = exact.probability_of_right(
        model, tokenizer(), prompts, [answer, answer], max_tokens=length, end_ids=[END], batch_size=3
    )
    rows = [torch.tensor(row) for row in completions(length)]
    texts = tokenizer().batch_decode(rows, skip_special_tokens=True)
    for prompt, probability in zip(prompts, found, strict=True):
        shares = torch.tensor(answer_logprobs(model, [prompt] * len(rows), rows, batch_size=4096)).double().exp()
        assert float(shares.sum()) == pytest.approx(1, abs=1e-4)
        enumerated = float(shares @ torch.tensor(right(texts, [answer] * len(rows))).double())
        assert probability == pytest.approx(enumerated, rel=2e-3, abs=10 * exact.LEAST)
        assert probability > 0
    assert model.training


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [("", True), (" ", True), ("1", True), (" 1", True), ("1 ", False), ("16 ", True), ("6", False)],
)
def test_a_line_begins_with_spaces_and_digits_in_order(text: str, is_possible: bool):
    assert exact.is_beginning(text, "16") == is_possible


def test_a_temperature_near_zero_leaves_the_likeliest_completion():
    model, prompt = tiny.llama(0, vocab_size=len(VOCABULARY)), torch.tensor([12, 7, 8])
    settings = {"max_tokens": 1, "temperature": 1e-4, "end_ids": [END]}
    likeliest = int(next_logprobs(model, [prompt]).argmax())
    digits = {VOCABULARY[digit]: int(digit) for digit in string.digits}
    for token, answer in digits.items():
        (found,) = exact.probability_of_right(model, tokenizer(), [prompt], [answer], **settings)
        assert found == pytest.approx(float(token == likeliest), abs=1e-3)


def test_the_next_tokens_probabilities_are_those_of_a_plain_forward_pass():
    model, rows = tiny.llama(0), tiny.rows(4, 2, 6)
    plain = torch.stack([model(row[None]).logits[0, -1].log_softmax(-1) for row in rows])
    torch.testing.assert_close(next_logprobs(model, rows), plain, rtol=1e-4, atol=1e-5)
