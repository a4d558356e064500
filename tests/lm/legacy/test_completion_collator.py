"""The loss covers only the answers, up to their stop token, however the templates around them tokenize."""

import json
import warnings

import pytest
import torch
from tests.lm import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trimtab_lm.legacy.completion_collator import DataCollatorForCompletionOnlyLM

SENTENCES = ["### Human: who sings?\n### Response: the birds sing.", "### Human: who sleeps?\n### Response: cats."]
RESPONSE, HUMAN = "### Response:", "### Human:"
TWO_TURNS = "### Human: who?\n### Response: the birds.</s>\n### Human: why?\n### Response: they like it 🐦.</s>"


def byte_level():
    """Like GPT-2 and Llama 3."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(SENTENCES * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def sentencepiece():
    """Like Llama 2: a text alone begins with a space that it lacks inside another text."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for text in SENTENCES * 5 for word in text.replace("\n", " ").split()]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    core.train_from_iterator([f"▁{word}" for word in words] + words, trainer)
    state = json.loads(core.to_str())  # make bytes ordinary tokens: training needs them as special ones
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(state))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def learnt(tokenizer, batch, ignore_index=-100):
    """Returns the text in each row that has a loss."""
    return [tokenizer.decode(row[row != ignore_index]).strip() for row in batch["labels"]]


def test_by_hand():
    tokenizer = tiny.tokenizer()
    ids = tokenizer("q a.b</s>")["input_ids"]
    batch = DataCollatorForCompletionOnlyLM("a.", tokenizer=tokenizer)([{"input_ids": ids}, {"input_ids": ids[2:]}])
    b, eos = tiny.VOCABULARY["b"], tiny.EOS
    assert batch["labels"].tolist() == [[-100] * 4 + [b, eos], [-100, -100, b, eos, -100, -100]]
    assert batch["input_ids"].tolist() == [ids, [*ids[2:], tiny.PAD, tiny.PAD]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
@pytest.mark.parametrize("instruction", [None, HUMAN])
def test_every_answer_of_a_dialogue_is_learnt_to_its_eos(build, instruction):
    tokenizer = build()
    rows = [tokenizer(text) for text in (TWO_TURNS, "### Human: who?\n### Response: cats.</s>")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = DataCollatorForCompletionOnlyLM(RESPONSE, instruction, tokenizer=tokenizer)(rows)
    assert learnt(tokenizer, batch) == ["the birds.</s> they like it 🐦.</s>", "cats.</s>"]


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_an_answer_without_eos_ends_at_the_next_instruction(build):
    tokenizer = build()
    row = tokenizer(TWO_TURNS.replace("</s>", ""))
    batch = DataCollatorForCompletionOnlyLM(RESPONSE, HUMAN, tokenizer=tokenizer)([row])
    assert learnt(tokenizer, batch)[0].replace("\n", "") == "the birds. they like it 🐦."


def test_an_answer_whose_end_cannot_be_told_is_left_out_with_a_warning():
    tokenizer = byte_level()
    row = tokenizer(TWO_TURNS.replace("</s>", ""))
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="instruction_template=") as caught:
        batches = [collator([row]), collator([row])]
    assert len(caught) == 1
    assert [learnt(tokenizer, batch) for batch in batches] == [["they like it 🐦."]] * 2


@pytest.mark.parametrize("before", ["\n", "", " ", "x\n\n", ". ", "ö🐦"])
@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_a_template_is_found_in_any_surroundings(build, before):
    tokenizer = build()
    row = tokenizer(f"who sings?{before}### Response: the birds</s>")
    batch = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer)([row])
    assert learnt(tokenizer, batch) == ["the birds</s>"]


@pytest.mark.parametrize("answer", ["🐦🐦🐦🐦 ö</s>", "birds</s>"])
@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_characters_of_many_tokens_behind_a_template_are_learnt_whole(build, answer):
    tokenizer = build()
    row = tokenizer(f"who?\n{RESPONSE}\n{answer}")
    batch = DataCollatorForCompletionOnlyLM(f"{RESPONSE}\n", tokenizer=tokenizer)([row])
    assert learnt(tokenizer, batch) == [answer]


def test_the_surroundings_change_the_tokens_of_the_template():
    """The template's own ids are not in the row; otherwise the test above would prove nothing."""
    tokenizer = sentencepiece()
    template, row = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (RESPONSE, f"who?\n{RESPONSE} a")
    )
    assert not any(row[i : i + len(template)] == template for i in range(len(row)))


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_an_answer_ends_before_an_instruction_that_shares_a_token_with_it(build):
    tokenizer = build()
    row = tokenizer("### Response: ö🐦### Human: who?\n### Response: cats")
    batch = DataCollatorForCompletionOnlyLM(RESPONSE, HUMAN, tokenizer=tokenizer)([row])
    assert learnt(tokenizer, batch)[0].replace(" ", "") == "ö🐦cats"


def test_a_token_shared_by_template_and_answer_is_learnt_if_more_than_space():
    words = ["q", ":", ":\n", ":y", "y", "</s>", " ", " Q", "yQ", "q:"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="q"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    collator = DataCollatorForCompletionOnlyLM("q:", "Q", tokenizer=tokenizer)
    assert collator.answer_mask([0, 2, 4, 5]) == [0, 0, 1, 1]
    assert collator.answer_mask([0, 3, 4, 5]) == [0, 1, 1, 1]
    assert collator.answer_mask([0, 1, 6, 5]) == [0, 0, 1, 1]
    assert collator.answer_mask([0, 1, 4, 7]) == [0, 0, 1, 0]
    assert collator.answer_mask([0, 1, 4, 8]) == [0, 0, 1, 1]
    # The "q" of the third turn is not a template, although there are as many of them as templates.
    assert collator.answer_mask([0, 3, 5, 9, 4, 5, 0, 4, 5, 0, 3, 5]) == [0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_a_long_dialogue_is_learnt_like_its_turns(build):
    """Its templates follow a row's start, a line break, a space and an emoji, and so have different tokens."""
    tokenizer = build()
    answers = [f"the birds sing {i}.</s>" for i in range(8)]
    gaps = ["\n", " ", "🐦", "x", "\n\n", "\n", " ", "\n"]
    text = "".join(
        f"### Human: who?{gap}### Response: {answer}{gap}" for answer, gap in zip(answers, gaps, strict=True)
    )
    for instruction in (None, HUMAN):
        collator = DataCollatorForCompletionOnlyLM(RESPONSE, instruction, tokenizer=tokenizer)
        assert learnt(tokenizer, collator([tokenizer(text)])) == [" ".join(answers)]


def test_templates_may_be_ids():
    tokenizer = byte_level()
    ids = tokenizer(TWO_TURNS)["input_ids"]
    templates = [tokenizer(f"\n{text}")["input_ids"][1:] for text in (RESPONSE, HUMAN)]
    batch = DataCollatorForCompletionOnlyLM(*templates, tokenizer)([ids])
    assert learnt(tokenizer, batch) == ["the birds.</s> they like it 🐦.</s>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_equal_to_eos_hides_padding_only_and_takes_the_ignore_index(side):
    tokenizer = byte_level()
    tokenizer.padding_side = side
    rows = [tokenizer(text) for text in (TWO_TURNS, "### Response: cats.</s>")]
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer, ignore_index=-7, pad_to_multiple_of=16)
    batch = collator(rows)
    assert learnt(tokenizer, batch, -7) == ["the birds.</s> they like it 🐦.</s>", "cats.</s>"]
    assert batch["input_ids"].shape[1] % 16 == 0
    assert (batch["labels"] != -100).all()
    for row, ids, mask, labels in zip(rows, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        assert ids[mask.bool()].tolist() == row["input_ids"]
        assert (ids[~mask.bool()] == tokenizer.eos_token_id).all()
        assert (labels[~mask.bool()] == -7).all()
        assert mask[-1 if side == "left" else 0] == 1


def test_padding_of_the_rows_themselves_changes_nothing():
    tokenizer = byte_level()
    row = tokenizer("### Response: cats.</s>")
    padded = tokenizer(["### Response: cats.</s>", TWO_TURNS], padding=True, return_tensors="pt")
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer)
    plain = collator([row])
    again = collator([{name: values[0] for name, values in padded.items()}])
    for name, values in plain.items():
        torch.testing.assert_close(again[name], values)


def test_rows_without_a_template_warn_once_and_are_ignored():
    tokenizer = byte_level()
    good, bad = tokenizer("### Response: cats.</s>"), tokenizer("Answer: cats.</s>")
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match=r"response_template='### Response:'.*begins with 'Answer: cats") as caught:
        batches = [collator([good, bad]), collator([bad, good]), collator([bad, bad])]
    assert len(caught) == 1
    assert [sorted(learnt(tokenizer, batch)) for batch in batches] == [["", "cats.</s>"]] * 2 + [["", ""]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"response_template": ""}, "response_template is empty"),
        ({"instruction_template": []}, "instruction_template is empty"),
        ({"mlm": True}, "mlm=False"),
        ({"tokenizer": None}, "tokenizer="),
        ({"tokenizer": tiny.tokenizer(pad_token=None)}, "no pad token"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForCompletionOnlyLM(**{"response_template": "a", "tokenizer": tiny.tokenizer(), **settings})
