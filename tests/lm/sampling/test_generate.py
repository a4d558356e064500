"""A response is cut at its end, and nowhere else."""

import torch
from tests.lm import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trimtab_lm.sampling.generate import cut_at_eos, response_texts
from trimtab_lm.sampling.rollout import PLAIN_SAMPLING, SamplingSettings, sampling_config
from trimtab_lm.tokens.layout import pad

EOS, PAD = 1, 0


def cut(*tokens: int, padding: int | None = None) -> list[int]:
    return cut_at_eos(torch.tensor(tokens), [EOS, 9], padding).tolist()


def test_a_response_ends_with_its_first_end_token():
    assert cut(5, EOS, PAD, EOS) == [5, EOS]
    assert cut(5, 9, EOS) == [5, 9]
    assert cut(EOS, EOS) == [EOS]


def test_a_pad_token_at_the_end_was_sampled_unless_something_else_stopped_the_row():
    assert cut(5, PAD, PAD) == [5, PAD, PAD]
    assert cut(5, PAD, 6, PAD, PAD, padding=PAD) == [5, PAD, 6]
    assert cut(PAD, PAD, padding=PAD) == [PAD]


def test_padding_is_recognized_by_length_and_not_by_token():
    rows, mask = pad([torch.tensor([PAD, 5]), torch.tensor([7, 8, PAD])], PAD, side="left")
    assert rows.tolist() == [[PAD, PAD, 5], [7, 8, PAD]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A small tokenizer like Llama's: a word's token includes the space before it, but a text's first space is lost."""
    words = ["<unk>", "</s>", "\u2581he", "\u2581went", "\u2581home", "ward", "<0xC3>", "<0xA9>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def test_a_response_keeps_the_space_that_stands_before_it():
    tokenizer = sentencepiece_like()
    queries = [torch.tensor([2, 3]), torch.tensor([4])]
    responses = [torch.tensor([4, 1]), torch.tensor([5, 3])]
    assert tokenizer.decode(responses[0], skip_special_tokens=True) == "home"
    assert response_texts(tokenizer, queries, responses) == [" home", "ward went"]
    assert response_texts(tokenizer, queries, responses, is_encoder_decoder=True) == ["home", "ward went"]


def test_a_character_that_begins_in_the_query_is_no_part_of_what_was_written():
    tokenizer = sentencepiece_like()
    query, response = torch.tensor([2, 6]), torch.tensor([7, 3])
    assert not tokenizer.decode([2, 6, 7, 3]).startswith(tokenizer.decode([2, 6]))
    assert response_texts(tokenizer, [query], [response]) == [tokenizer.decode(response)]


def test_texts_of_an_ordinary_tokenizer_are_those_of_the_responses():
    tokenizer, queries, responses = tiny.tokenizer(), tiny.rows(4, 2, 5), tiny.rows(4, 1, 5, seed=1)
    texts = response_texts(tokenizer, queries, responses)
    for query, response, text in zip(queries, responses, texts, strict=True):
        start = tokenizer.decode(query, skip_special_tokens=True)
        assert start + text == tokenizer.decode(torch.cat([query, response]), skip_special_tokens=True)


def test_of_two_least_lengths_generate_gets_the_one_that_it_follows():
    def least(**settings: int | None) -> tuple[int | None, int | None]:
        config, _ = sampling_config(tiny.llama(), tiny.tokenizer(), max_new_tokens=6, **settings)
        return config.min_new_tokens, config.min_length

    assert least() == (None, 0)
    assert least(min_new_tokens=3) == (3, None)
    assert least(min_new_tokens=0, min_length=-1) == (None, 0)
    assert least(min_length=4) == (None, 4)
    assert least(min_length=None, min_new_tokens=None) == (None, 0)


def test_none_leaves_each_sampling_setting_off():
    settings = dict.fromkeys(PLAIN_SAMPLING)
    config, _ = sampling_config(tiny.llama(), tiny.tokenizer(), do_sample=True, max_new_tokens=6, **settings)
    plain, _ = sampling_config(tiny.llama(), tiny.tokenizer(), do_sample=True, max_new_tokens=6)
    assert config.to_dict() == plain.to_dict()
    assert SamplingSettings.of(settings | {"max_new_tokens": 6}) == SamplingSettings(max_completion_length=6)
