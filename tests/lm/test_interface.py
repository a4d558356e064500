"""What the wrappers of models and processors contain."""

import pytest
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.tiny import gpt2, t5, tokenizer
from transformers import ProcessorMixin

from trimtab_lm.interface import base_of, decoder_config, decoder_start_of, tokenizer_of


def test_a_causal_model_has_no_decoder_start():
    assert decoder_start_of(gpt2()) is None


def test_the_decoder_starts_from_what_generation_starts_from():
    model = t5()
    model.generation_config.decoder_start_token_id = 5
    model.config.decoder_start_token_id = 7
    assert decoder_start_of(model) == 5


def test_the_decoder_starts_from_the_models_configuration_where_generation_names_no_token():
    model = t5()
    model.generation_config.decoder_start_token_id = None
    model.config.decoder_start_token_id = 7
    assert decoder_start_of(model) == 7


def test_an_encoder_decoder_without_a_start_token_is_refused():
    model = t5()
    model.generation_config.decoder_start_token_id = None
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="names no decoder_start_token_id"):
        decoder_start_of(model)


def test_adapters_hide_neither_the_base_model_nor_its_configuration():
    base = t5()
    model = get_peft_model(base, LoraConfig(target_modules=["q"]))
    assert base_of(model) is base
    assert decoder_config(model).vocab_size == base.config.vocab_size
    assert decoder_start_of(model) == decoder_start_of(base)


class Pair(ProcessorMixin):
    """A processor with only a tokenizer."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer):
        super().__init__(tokenizer)


def test_the_tokenizer_of_a_processor_is_the_one_inside():
    inner = tokenizer()
    assert tokenizer_of(Pair(inner)) is inner
    assert tokenizer_of(inner) is inner
    with pytest.raises(TypeError, match="Pictures is none and holds none"):
        tokenizer_of(Pictures())


class Pictures(ProcessorMixin):
    """A processor without a tokenizer."""

    attributes = []

    def __init__(self):
        super().__init__()


def test_ppo_takes_the_tokenizer_of_a_processor():
    inner = tiny.tokenizer()
    assert tiny.ppo(arguments={"tokenizer": Pair(inner)}).tokenizer is inner
