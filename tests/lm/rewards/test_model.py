import pytest
import torch
from tests.lm import tiny
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from trimtab_lm.rewards.model import RewardModel

QUERIES, RESPONSES = ["a query", "so", "what is it"], [" and an answer", "", " good"]


def alone(model, text: str) -> float:
    """Returns the score of a single text, which needs no padding."""
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    hidden = model.base_model(ids).last_hidden_state
    return float(model.score(hidden[0, -1])[0])


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_the_last_real_token_is_scored_whatever_pads(pad):
    model = tiny.scorer().eval()
    tokenizer = tiny.tokenizer(pad_token=pad)
    responses = [response + "</s>" for response in RESPONSES]
    scores = RewardModel(model, tokenizer, batch_size=2)(QUERIES, responses, label=["ignored"] * 3)
    expected = [alone(model, query + response) for query, response in zip(QUERIES, responses, strict=True)]
    assert scores == pytest.approx(expected, rel=1e-5)


def test_a_long_text_loses_its_beginning():
    model = tiny.scorer().eval()
    (score,) = RewardModel(model, tiny.tokenizer(), max_length=4)(["what is"], [" good"])
    assert score == pytest.approx(alone(model, "good"), rel=1e-5)


def test_a_classifier_of_several_labels_must_say_which_one():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 2}
    model = tiny.seeded(GPT2ForSequenceClassification, GPT2Config(**sizes | tiny.TOKENS)).eval()
    with pytest.raises(ValueError, match="2 labels"):
        RewardModel(model, tiny.tokenizer())
    scores = [RewardModel(model, tiny.tokenizer(), label=label)(QUERIES, RESPONSES) for label in (0, 1)]
    ids = torch.tensor([tiny.tokenizer()(QUERIES[1])["input_ids"]])
    logits = model.score(model.base_model(ids).last_hidden_state[0, -1])
    assert [score[1] for score in scores] == pytest.approx(logits.tolist(), rel=1e-5)


def test_an_encoder_is_scored_as_it_scores_itself():
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_labels": 1,
    }
    model = tiny.seeded(BertForSequenceClassification, BertConfig(**sizes, vocab_size=len(tiny.VOCABULARY))).eval()
    scores = RewardModel(model, tiny.tokenizer(), batch_size=3)(QUERIES, RESPONSES)
    for query, response, score in zip(QUERIES, RESPONSES, scores, strict=True):
        ids = torch.tensor([tiny.tokenizer()(query + response)["input_ids"]])
        assert score == pytest.approx(float(model(ids).logits), rel=1e-4, abs=1e-6)


def test_a_module_needs_its_tokenizer():
    with pytest.raises(ValueError, match="needs its tokenizer"):
        RewardModel(tiny.scorer())
