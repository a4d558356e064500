import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.lm import tiny
from tests.lm.reward.run_distributed import scorer as scorer_of_kind
from tests.lm.reward.run_distributed import trainer
from transformers import GPT2Config, GPT2ForSequenceClassification, T5GemmaConfig, T5GemmaForSequenceClassification

from trimtab_lm.rewards.functions import model_reward
from trimtab_lm.rewards.model import RewardModel

QUERIES, RESPONSES = ["a query", "so", "what is it"], [" and an answer", "", " good"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + m.content }}</s> {% endfor %}"


def alone(model, text: str) -> float:
    """Returns the score of a single text, which needs no padding."""
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    hidden = model.base_model(ids).last_hidden_state
    return float(model.score(hidden[0, -1])[0])


def turns(role: str, texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text}] for text in texts]


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_the_last_real_token_is_scored_whatever_pads(pad):
    model = tiny.scorer().eval()
    scores = RewardModel(model, tiny.tokenizer(pad_token=pad), batch_size=2)(QUERIES, RESPONSES, label=["ignored"] * 3)
    expected = [alone(model, f"{query}{response}</s>") for query, response in zip(QUERIES, RESPONSES, strict=True)]
    assert scores == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "pad"), [("gpt2", "<pad>"), ("llama", "<pad>"), ("llama", "</s>"), ("bert", "<pad>")])
@pytest.mark.parametrize("is_chat", [False, True])
def test_it_reads_a_text_as_reward_trainer_does(kind, pad, is_chat, tmp_path):
    tokenizer = tiny.tokenizer(pad_token=pad)
    tokenizer.chat_template = TEMPLATE
    chosen, rejected = RESPONSES[::2], [" bad", " no"]
    rows = {"prompt": QUERIES[::2], "chosen": chosen, "rejected": rejected}
    if is_chat:
        rows = {name: turns("user" if name == "prompt" else "assistant", texts) for name, texts in rows.items()}
    model = tiny.scorer() if kind == "gpt2" else scorer_of_kind(kind, pad_token_id=tokenizer.pad_token_id)
    reward_trainer = trainer(model, tmp_path, {"processing_class": tokenizer})
    expected = reward_trainer.predict(Dataset.from_dict(rows)).predictions
    reward = model_reward(RewardModel(reward_trainer.model, tokenizer))
    for i, side in enumerate(("chosen", "rejected")):
        assert reward(rows["prompt"], rows[side]) == pytest.approx(expected[:, i].tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 65}, "max_length=65, and the reward model has 64 positions"),
        ({"max_length": 0}, "max_length=0, and"),
        ({"label": 1}, "label=1, and the reward model has 1 labels"),
        ({"label": -1}, "label=-1, and"),
    ],
)
def test_a_label_and_a_length_that_the_model_has_not_are_refused(settings, message: str):
    with pytest.raises(ValueError, match=message):
        RewardModel(tiny.scorer(), tiny.tokenizer(), **settings)


def test_a_model_that_learnt_without_eos_reads_without_it():
    model, tokenizer = tiny.scorer().eval(), tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    reward = RewardModel(model, tokenizer, ends_in_eos=False)
    assert reward(["so"], [" good"]) == pytest.approx([alone(model, "so good")], rel=1e-5)
    conversation = turns("user", ["so"])[0]
    assert reward.score([conversation]) == pytest.approx([alone(model, "<s>uso</s> ")], rel=1e-5)
    with pytest.raises(ValueError, match="is empty, and the tokenizer adds no token"):
        reward([""], [""])


def test_an_empty_text_has_a_score():
    model = tiny.scorer().eval()
    assert RewardModel(model, tiny.tokenizer())(["", "so"], ["", " good"]) == pytest.approx(
        [alone(model, "</s>"), alone(model, "so good</s>")], rel=1e-5
    )


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_a_long_text_loses_its_beginning_but_not_bos(bos):
    model = tiny.scorer().eval()
    reward = RewardModel(model, tiny.tokenizer(), max_length=5 + bool(bos))
    with pytest.warns(UserWarning, match="8 tokens at its beginning"):
        (score,) = reward([f"{bos}what is"], [" good"])
    assert score == pytest.approx(alone(model, f"{bos}good</s>"), rel=1e-5)
    assert reward([f"{bos}what is"], [" good"]) == [score]  # without a second warning


def test_adapters_that_reward_trainer_saved_are_a_reward_model(tmp_path):
    scorer_of_kind("llama").save_pretrained(tmp_path / "base")
    rows = Dataset.from_dict({"prompt": QUERIES[::2], "chosen": RESPONSES[::2], "rejected": [" bad", " no"]})
    arguments = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"]), "train_dataset": rows}
    reward_trainer = trainer(str(tmp_path / "base"), tmp_path, arguments, max_steps=2, learning_rate=0.1)
    reward_trainer.train()
    reward_trainer.save_model(tmp_path / "adapter")
    expected = reward_trainer.predict(rows).predictions[:, 0].tolist()
    for reward in (RewardModel(str(tmp_path / "adapter")), RewardModel(reward_trainer.model, tiny.tokenizer())):
        assert reward(rows["prompt"], rows["chosen"]) == pytest.approx(expected, rel=1e-4)


def test_adapters_of_several_labels_keep_them(tmp_path):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 3}
    base = tiny.seeded(GPT2ForSequenceClassification, GPT2Config(**sizes | tiny.TOKENS))
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], task_type="SEQ_CLS"))
    with torch.no_grad():
        adapted.get_submodule("base_model.model.score.modules_to_save.default").weight.mul_(3.0)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    models = str(tmp_path / "adapter"), adapted
    read, expected = (RewardModel(model, tiny.tokenizer(), label=2)(QUERIES, RESPONSES) for model in models)
    assert read == pytest.approx(expected, rel=1e-5)


def test_a_model_stays_where_a_device_map_has_put_it(tmp_path):
    tiny.scorer().save_pretrained(tmp_path)
    places = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.h": "disk", "transformer.ln_f": "cpu"}
    options = {"device_map": places | {"transformer.drop": "cpu", "score": "cpu"}, "offload_folder": tmp_path / "disk"}
    divided = GPT2ForSequenceClassification.from_pretrained(tmp_path, **options)
    whole = RewardModel(tiny.scorer(), tiny.tokenizer())
    assert RewardModel(divided, tiny.tokenizer()).score(["ab", "hello"]) == whole.score(["ab", "hello"])


def t5gemma_scorer() -> T5GemmaForSequenceClassification:
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    part |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": tiny.TOKENS["vocab_size"]}
    config = T5GemmaConfig(encoder=part, decoder=part, num_labels=1, **tiny.TOKENS)
    return tiny.seeded(T5GemmaForSequenceClassification, config).eval()


def test_an_encoder_decoder_reads_through_its_own_forward():
    model = t5gemma_scorer()
    (score,) = RewardModel(model, tiny.tokenizer())(["so"], [" good"])
    ids = torch.tensor([tiny.tokenizer()("so good</s>")["input_ids"]])
    assert score == pytest.approx(float(model(input_ids=ids).logits), rel=1e-5)


def test_an_encoder_decoder_needs_padding_that_is_not_eos():
    """It finds the end of a text by the id of padding."""
    with pytest.raises(ValueError, match="T5GemmaForSequenceClassification finds padding by its id"):
        RewardModel(t5gemma_scorer(), tiny.tokenizer(pad_token="</s>"))


def test_a_decoder_with_virtual_tokens_is_refused():
    """PEFT gives it embeddings in place of ids, and it would read the scores of shorter texts at padding."""
    model = get_peft_model(tiny.scorer(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="virtual tokens before a text"):
        RewardModel(model, tiny.tokenizer())


def test_a_classifier_of_several_labels_must_say_which_one():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 2}
    model = tiny.seeded(GPT2ForSequenceClassification, GPT2Config(**sizes | tiny.TOKENS)).eval()
    with pytest.raises(ValueError, match="2 labels"):
        RewardModel(model, tiny.tokenizer())
    scores = [RewardModel(model, tiny.tokenizer(), label=label)(QUERIES, RESPONSES) for label in (0, 1)]
    ids = torch.tensor([tiny.tokenizer()(f"{QUERIES[1]}</s>")["input_ids"]])
    logits = model.score(model.base_model(ids).last_hidden_state[0, -1])
    assert [score[1] for score in scores] == pytest.approx(logits.tolist(), rel=1e-5)


def test_a_tokenizer_without_an_end_token_is_refused_with_what_to_set():
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="ends_in_eos=False"):
        RewardModel(tiny.scorer(), tokenizer)
    assert RewardModel(tiny.scorer(), tokenizer, ends_in_eos=False).score(["so"])


def test_a_module_needs_its_tokenizer():
    with pytest.raises(ValueError, match="needs its tokenizer"):
        RewardModel(tiny.scorer())
