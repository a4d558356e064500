from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from experiments import assets
from experiments.assets import models

HEADS, KV_HEADS, LAYERS, CONTEXT = 4, 2, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "Ċ Ċ", "1 2", "a b", "Ġ ab"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def pairs(weight: Tensor, heads: int) -> Tensor:
    # llama.cpp rotates neighbouring rows of a head; transformers rotates the first half with the second.
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in weight.chunk(heads)])


def write_gguf(model: LlamaForCausalLM, file: Path) -> Path:
    """Writes the model as llama.cpp does, with a byte-level tokenizer like SmolLM2's."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.named_parameters():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.detach() if heads is None else pairs(weight.detach(), heads)
        writer.add_tensor(name, values.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converts a tiny GGUF file into a folder that an experiment can load."""
    path = tmp_path_factory.mktemp("gguf")
    model, tokenizer = assets.convert_gguf(write_gguf(llama(), path / "tiny.gguf"))
    model.save_pretrained(path / "plain")
    tokenizer.save_pretrained(path / "plain")
    return path / "plain"


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def test_a_converted_gguf_file_is_the_model_that_was_written(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "quantization_config" not in model.config.to_dict()
    tokens = torch.arange(3, 3 + CONTEXT)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, llama()(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab 12", ["ab", "Ġ", "1", "2"]),
        ("a   7", ["a", "ĠĠĠ", "7"]),
        ("1\n\n2", ["1", "ĊĊ", "2"]),
        ("ab ab", ["ab", "Ġab"]),
        ("<|im_start|>ab", ["<|im_start|>", "ab"]),
    ],
)
def test_digits_stand_alone(text: str, tokens: list[str], tokenizer: PreTrainedTokenizerFast):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


def test_padding_is_on_the_left_and_not_the_end_of_an_answer(folder: Path, tokenizer: PreTrainedTokenizerFast):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer(["ab", "ab ab"], padding=True)["input_ids"][0][0] == tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    assert model.config.pad_token_id == model.generation_config.pad_token_id == 0
    assert tokenizer.model_max_length == CONTEXT


def test_the_chat_template_comes_along(tokenizer: PreTrainedTokenizerFast):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "ab", "<|im_end|>"]


def test_a_name_is_a_model_that_is_downloaded_and_any_other_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "stories15m", lambda: Path("cache/stories15M-1"))
    assert assets.model_folder("stories15m") == "cache/stories15M-1"
    for name in ("gpt2", "runs/policy", "org/stories15m"):
        assert assets.model_folder(name) == name


@pytest.mark.downloads
def test_the_published_chat_model_knows_the_capital_of_france():
    folder = assets.smollm2_135m_instruct()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.downloads
def test_the_published_sentence_encoder_puts_a_cat_near_a_kitten():
    folder = assets.sentence_encoder()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = ["A cat sits on the mat.", "A kitten is lying on a rug.", "The stock market fell."]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"][..., None]
    cat, kitten, market = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
    assert cat @ kitten > 0.5
    assert cat @ market < 0.2


@pytest.mark.downloads
def test_the_published_story_model_tells_a_story():
    folder = assets.stories15m()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    story = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    assert tokenizer.decode(story, skip_special_tokens=True).startswith("Once upon a time, there was a")
