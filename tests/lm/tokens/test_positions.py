"""How many positions models have: as many as their forward pass accepts when tried."""

import warnings

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from tests.lm import tiny
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    CLIPVisionConfig,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from trimtab_lm.rewards.model import RewardModel
from trimtab_lm.tokens.positions import Positions

LIMIT = 16
SIZES = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
BART = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def gpt_neo():
    layers = {"num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 2}
    config = GPTNeoConfig(hidden_size=16, vocab_size=32, intermediate_size=16, max_position_embeddings=LIMIT, **layers)
    return GPTNeoForCausalLM(config)


def opt():
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=LIMIT))


def gpt_j():
    return GPTJForCausalLM(GPTJConfig(vocab_size=32, n_positions=LIMIT, n_embd=16, n_layer=1, n_head=2, rotary_dim=4))


def mpt():
    return MptForCausalLM(MptConfig(vocab_size=32, d_model=16, n_heads=2, n_layers=1, max_seq_len=LIMIT))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))


def roberta():
    sizes = {"intermediate_size": 16, "max_position_embeddings": LIMIT + 2, "pad_token_id": 1, "num_labels": 1}
    return RobertaForSequenceClassification(RobertaConfig(**SIZES | sizes))


def reads(model, length: int, **inputs) -> bool:
    ids = torch.full((1, length), 5)
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    except (IndexError, RuntimeError):
        return False
    return True


LIMITED = [lambda: tiny.gpt2(n_positions=LIMIT), gpt_neo, opt, gpt_j, mpt, roberta]


@pytest.mark.parametrize("build", LIMITED, ids=["gpt2", "gpt_neo", "opt", "gpt_j", "mpt", "roberta"])
def test_a_model_with_a_table_reads_as_many_tokens_as_it_has_rows(build):
    model = build().eval()
    assert Positions.of(model) == (type(model).__name__, None, LIMIT, None)
    assert reads(model, LIMIT)
    assert not reads(model, LIMIT + 1)


@pytest.mark.parametrize("build", [lambda: tiny.llama(max_position_embeddings=LIMIT), bloom], ids=["llama", "bloom"])
def test_a_model_without_a_table_has_no_limit(build):
    model = build().eval()
    assert Positions.of(model)[:3] == (type(model).__name__, None, None)
    assert reads(model, 3 * LIMIT)


def test_a_sequence_beyond_the_positions_of_the_training_warns_with_the_same_words_for_every_row():
    positions = Positions.of(tiny.llama(max_position_embeddings=LIMIT))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 2):
            positions.check("The row", decoder=length, remedy="")
    (one, other) = (str(warning.message) for warning in caught)
    assert one == other
    assert f"beyond the {LIMIT} tokens for which LlamaForCausalLM was trained" in one


@pytest.mark.parametrize("kind", [(BartForConditionalGeneration, BartConfig), (MarianMTModel, MarianConfig)])
def test_encoder_and_decoder_have_their_own_tables(kind):
    model = kind[0](kind[1](**BART)).eval()
    assert Positions.of(model)[1:] == (LIMIT, LIMIT, None)
    short, full, long = (torch.full((1, length), 5) for length in (2, LIMIT, LIMIT + 1))
    assert reads(model, LIMIT, decoder_input_ids=full)
    assert not reads(model, LIMIT + 1, decoder_input_ids=short)
    assert not reads(model, 2, decoder_input_ids=long)


def test_relative_positions_have_no_limit():
    assert Positions.of(tiny.t5())[1:] == (None, None, None)


def test_virtual_tokens_take_positions():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny.gpt2(n_positions=LIMIT), config).eval()
    assert Positions.of(model)[1:] == (None, LIMIT - 4, None)
    assert reads(model, LIMIT - 4)
    assert not reads(model, LIMIT - 3)


def test_the_table_of_a_vision_tower_does_not_limit_the_text():
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(**SIZES, intermediate_size=16)
    assert Positions.of(LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)))[2] is None


def test_a_reward_model_reads_no_more_than_its_table_has():
    scorer = RewardModel(roberta(), tiny.tokenizer())
    assert scorer.max_length == LIMIT
    assert len(scorer(["a" * 40], ["b"])) == 1
