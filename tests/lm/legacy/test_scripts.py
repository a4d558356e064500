"""What TRL scripts import besides trainers."""

import os

import pytest
import torch
from tests.lm import tiny

from trimtab_lm import SFTConfig
from trimtab_lm.legacy.core import respond_to_batch
from trimtab_lm.legacy.scripts import (
    SIMPLE_CHAT_TEMPLATE,
    ModelConfig,
    ParserOfSharedFields,
    ScriptArguments,
    TrlParser,
    conversations_formatting_function,
    get_peft_config,
    get_quantization_config,
    maybe_apply_chat_template,
    maybe_extract_prompt,
    setup_chat_format,
    strtobool,
)

ASKED = [{"role": "user", "content": "a b"}]
ANSWERED = [{"role": "assistant", "content": "c"}]


def test_the_likeliest_tokens_follow_each_query_beyond_an_end_token():
    model = tiny.policy().eval()
    queries = torch.tensor([[5, 6, 7], [8, 9, 10]])
    responses = respond_to_batch(model, queries, txt_len=6, top_k=1)
    tokens = torch.cat([queries, responses], dim=1)
    likeliest = model.pretrained_model(tokens).logits.argmax(-1)
    assert torch.equal(responses, likeliest[:, 2:-1])
    model.pretrained_model.lm_head = torch.nn.Linear(tiny.WIDTH, model.pretrained_model.config.vocab_size)
    with torch.no_grad():
        model.pretrained_model.lm_head.bias[tiny.EOS] += 1e4
    assert respond_to_batch(model, queries, txt_len=3).tolist() == [[tiny.EOS] * 3] * 2


def test_a_base_model_learns_the_tokens_of_chatml():
    model, tokenizer = setup_chat_format(tiny.gpt2(), tiny.tokenizer(), resize_to_multiple_of=16)
    assert tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.get_input_embeddings().num_embeddings % 16 == 0
    assert tokenizer.convert_ids_to_tokens([model.config.bos_token_id, model.generation_config.eos_token_id]) == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    classifier, _ = setup_chat_format(tiny.scorer(), tiny.tokenizer())
    assert classifier.config.pad_token_id == tokenizer.pad_token_id
    with pytest.raises(ValueError, match="format='alpaca' is unknown"):
        setup_chat_format(model, tokenizer, "alpaca")


def test_rows_of_messages_become_texts_that_join_to_the_conversation():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    row = {"chosen": ASKED + ANSWERED, "rejected": [*ASKED, {"role": "assistant", "content": "d"}]}
    parts = maybe_extract_prompt(row)
    assert parts == {"prompt": ASKED, "chosen": ANSWERED, "rejected": [{"role": "assistant", "content": "d"}]}
    texts = maybe_apply_chat_template(parts, tokenizer)
    assert texts == {"prompt": "User: a b\n\nAssistant:", "chosen": " c\n\n", "rejected": " d\n\n"}
    assert maybe_apply_chat_template({"messages": ASKED + ANSWERED}, tokenizer) == {
        "text": "User: a b\n\nAssistant: c\n\n"
    }
    wholes = {"chosen": "User: a b\n\nAssistant: c\n\n", "rejected": "User: a b\n\nAssistant: d\n\n"}
    assert maybe_apply_chat_template(row, tokenizer) == wholes  # a reward model's, with the prompt in both
    assert maybe_apply_chat_template({"completion": ANSWERED}, tokenizer) == {"completion": "Assistant: c\n\n"}
    write = conversations_formatting_function(tokenizer, "talk")
    assert write({"talk": ASKED}) == "User: a b\n\n"
    assert write({"talk": [ASKED, ASKED]}) == ["User: a b\n\n"] * 2
    pair = {"chosen": "b", "rejected": "c"}
    for unchanged in ({"prompt": "a", **pair}, {"prompt": "a"}, pair, {"text": "a"}):
        assert maybe_apply_chat_template(unchanged, tokenizer) == unchanged
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="does not begin with its prompt '1'"):
        maybe_apply_chat_template(parts, tokenizer)


def test_the_arguments_of_a_model_choose_adapters_and_quantization():
    assert (get_peft_config(ModelConfig()), get_quantization_config(ModelConfig())) == (None, None)
    adapters = get_peft_config(ModelConfig(use_peft=True, lora_r=3, lora_target_modules=["c_attn"], use_rslora=True))
    assert (adapters.r, adapters.target_modules, adapters.use_rslora) == (3, {"c_attn"}, True)
    everywhere = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["all-linear"]))
    assert everywhere.target_modules == "all-linear"
    four = get_quantization_config(ModelConfig(load_in_4bit=True, torch_dtype="bfloat16", use_bnb_nested_quant=True))
    assert (four.load_in_4bit, four.bnb_4bit_compute_dtype, four.bnb_4bit_use_double_quant) == (
        True,
        torch.bfloat16,
        True,
    )
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    with pytest.raises(ValueError, match="both set"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)


def test_a_file_replaces_defaults_and_flags_replace_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TOLD", "")
    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}\nlearning_rate: 0.5\ndataset_name: texts\nseed: 7\nenv:\n  TOLD: here\n"
    )
    words = ["--config", str(tmp_path / "run.yaml"), "--seed", "3", "--gradient_checkpointing_use_reentrant"]
    script, args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config([*words, "--use_cpu"])
    assert (script.dataset_name, args.output_dir, args.learning_rate, args.seed) == ("texts", str(tmp_path), 0.5, 3)
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert os.environ["TOLD"] == "here"
    with pytest.raises(ValueError, match="sets learning_rate, output_dir, seed, which no dataclass"):
        TrlParser(ScriptArguments).parse_args_and_config(words[:2])
    (script,) = TrlParser(ScriptArguments, ignore_extra_args=True).parse_args_and_config(words[:2])
    assert script.dataset_name == "texts"
    (script,) = TrlParser(ScriptArguments, ignore_extra_args=True).parse_args_and_config(["=".join(words[:2])])
    assert (script.dataset_name, script.config) == ("texts", None)
    (tmp_path / "run.yaml").write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ValueError, match=r"run\.yaml: not readable as YAML: line 2 sets 'seed'"):
        TrlParser(ScriptArguments).parse_args_and_config(words[:2])


@pytest.mark.parametrize("words", [["--config"], ["--config", "--dataset_name", "texts"]])
def test_config_without_a_file_is_an_error_of_usage(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        TrlParser(ScriptArguments).parse_args_and_config(words)
    assert "error: --config needs the name of one YAML file." in capsys.readouterr().err


def test_words_of_truth():
    assert [strtobool(word) for word in ("YES", "on", "1", "False", "n")] == [True, True, True, False, False]
    with pytest.raises(ValueError, match="'maybe' is no truth value"):
        strtobool("maybe")


def test_a_setting_of_a_config_and_of_the_scripts_model_is_the_models(tmp_path):
    """TRL's configs of 2026 have `trust_remote_code`; its ModelConfig of 2024 has it too."""
    words = ["--output_dir", str(tmp_path), "--model_name_or_path", "m", "--trust_remote_code", "--use_cpu"]
    for parse in (
        TrlParser((SFTConfig, ModelConfig)).parse_args_and_config,
        ParserOfSharedFields([SFTConfig, ModelConfig]).parse_args_into_dataclasses,
    ):
        args, model = parse(words)
        assert model.trust_remote_code
        assert not args.model_init_kwargs
    assert SFTConfig(str(tmp_path), use_cpu=True).trust_remote_code is False  # an argument of the config as usual
