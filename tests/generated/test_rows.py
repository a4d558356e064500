"""Rows with any characters, messages, ids and types become what was requested, or raise an error of ours."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.lm import tiny
from tests.lm.data.test_tokenization import CHATML, CHATML_MARKED, byte_level, sentencepiece

from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.data.formats import COLUMN_SETS, RowFormat, preference_parts, prepare_dataset, row_format
from trimtab_lm.data.prompts import ShuffledBatches, tokenize_prompts
from trimtab_lm.data.tokenization import (
    encode_messages,
    encode_preference,
    encode_prompt,
    encode_prompt_completion,
    encode_seq2seq,
    encode_text,
)
from trimtab_lm.data.truncation import truncate_answers, truncate_columns, truncate_row
from trimtab_lm.reward.collator import PairCollator
from trimtab_lm.rewards.functions import RewardSet, as_completions
from trimtab_lm.sampling.generate import cut_at_eos, response_texts
from trimtab_lm.sft.config import SFTConfig
from trimtab_lm.sft.data import pack
from trimtab_lm.tokens.layout import TokenGroup, best_fit, lay_out, lean_width, pad
from trimtab_lm.tokens.positions import Positions

from .inputs import anything, odd_text, result_or_our_error

TOKENIZERS = {
    "bytes": byte_level(CHATML),
    "bytes, marked": byte_level(CHATML_MARKED),
    "pieces": sentencepiece(CHATML),
    "characters": tiny.tokenizer(),
}
tokenizers = st.sampled_from(sorted(TOKENIZERS)).map(TOKENIZERS.__getitem__)
readers = st.sampled_from(["bytes", "bytes, marked", "pieces"]).map(TOKENIZERS.__getitem__)
ids = st.lists(st.integers(4, 30), max_size=12)
some_ids = st.lists(st.integers(4, 30), min_size=1, max_size=12)
modes = st.sampled_from(["keep_start", "keep_end"])
limits = st.one_of(st.none(), st.integers(0, 14))
message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": odd_text})
conversation = st.lists(message, min_size=1, max_size=4)


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


# Truncation ----------------------------------------------------------------------------------------------------------


@given(ids, limits, modes, st.integers(4, 8), st.data())
def test_a_truncated_row_is_part_of_the_row(row, limit, mode, bos, data):
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row)))
    cut = truncate_row(row, mask, max_length=limit, mode=mode, bos_token_id=bos, stop_ids=[5])
    assert len(cut.input_ids) == len(cut.mask) == (len(row) if limit is None else min(len(row), limit))
    assert is_subsequence(cut.input_ids, row)
    assert cut.tokens_cut == len(row) - len(cut.input_ids)
    assert cut.is_emptied == (any(mask) and not any(cut.mask))
    if mode == "keep_end" and row[:1] == [bos] and limit is not None and limit > 1:
        assert cut.input_ids[0] == bos


@given(ids, some_ids, some_ids, limits, limits, modes)
def test_a_truncated_pair_has_room_and_answers(prompt, chosen, rejected, longest, longest_prompt, mode):
    row = {"prompt_input_ids": prompt, "chosen_input_ids": prompt + chosen, "rejected_input_ids": prompt + rejected}
    options = {"max_length": longest, "max_prompt_length": longest_prompt, "mode": mode}
    assume((longest is None or longest >= 2) and longest_prompt != 0)  # as the configs require
    cut = truncate_answers(row, **options)
    kept = cut["prompt_input_ids"]
    assert longest_prompt is None or len(kept) <= longest_prompt
    for side in ("chosen", "rejected"):
        assert cut[f"{side}_input_ids"][: len(kept)] == kept
        assert len(kept) < len(cut[f"{side}_input_ids"]) <= (longest or 99)


@given(ids, ids, limits, modes)
def test_each_column_has_its_limit(prompt, target, limit, mode):
    cut = truncate_columns({"prompt": prompt, "labels": target}, {"prompt": limit}, mode=mode)
    assert cut["labels"] == target
    assert len(cut["prompt"]) == (len(prompt) if limit is None else min(len(prompt), limit))


# Packing and layouts -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 40))
def test_packing_is_a_permutation_into_rows_that_fit(lengths, width):
    rows = best_fit(lengths, width)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= width for row in rows)
    assert len(rows) <= 1 or sum(lengths) > width
    assert max(lengths) <= lean_width(lengths) <= 2 * max(lengths)


@given(st.lists(some_ids, min_size=1, max_size=6))
def test_packed_documents_hold_every_token_once(rows):
    packed = pack(
        Dataset.from_dict({"input_ids": rows, "labels": rows}), SFTConfig("unused", max_length=12, use_cpu=True)
    )
    parts = []
    for i in range(len(packed)):
        row = packed[i]
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 12
        start = 0
        for length in row["seq_lengths"]:
            parts.append(row["input_ids"][start : start + length])
            start += length
    assert sorted(parts) == sorted(rows)


groups_of_tokens = st.lists(st.tuples(some_ids, st.lists(some_ids, min_size=1, max_size=3)), min_size=1, max_size=4)


@given(groups_of_tokens, st.sampled_from(["padded", "packed", "tree", "row", "encoder-decoder"]), st.data())
def test_every_layout_predicts_each_counted_token_once(rows, layout, data):
    counts = [
        [data.draw(st.lists(st.integers(0, 1), min_size=len(b), max_size=len(b))) for b in branches]
        for _, branches in rows
    ]
    groups = [TokenGroup(prefix, branches, count) for (prefix, branches), count in zip(rows, counts, strict=True)]
    batch = lay_out(groups, layout, pad_token_id=0, decoder_start_token_id=1)
    targets = [
        token
        for (_, branches), group in zip(rows, counts, strict=True)
        for branch, count in zip(branches, group, strict=True)
        for token, counted in zip(branch, count, strict=True)
        if counted
    ]
    assert batch["targets"].tolist() == targets
    assert batch["lengths"].tolist() == [sum(count) for group in counts for count in group]
    assert int(batch["lengths"].sum()) == len(batch["source"])
    if layout in ("padded", "packed"):  # a token directly precedes the one that it predicts
        assert batch["input_ids"].flatten()[batch["source"] + 1].tolist() == targets


@given(st.lists(some_ids, min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_padding_adds_nothing_that_counts(rows, value, side):
    padded, mask = pad([torch.tensor(row) for row in rows], value, side=side)
    assert [row[keep.bool()].tolist() for row, keep in zip(padded, mask, strict=True)] == rows


@given(some_ids, st.lists(st.integers(4, 8), max_size=3))
def test_a_response_ends_with_its_first_end_token(row, ends):
    cut = cut_at_eos(torch.tensor(row), ends, None).tolist()
    assert cut == row[: len(cut)]
    assert not set(cut[:-1]) & set(ends)
    assert cut[-1] in ends or cut == row


@given(st.lists(some_ids, min_size=1, max_size=4), st.sampled_from(["padded", "packed"]))
def test_a_collator_labels_every_token_that_counts(rows, layout):
    batch = DocumentCollator(0, layout=layout)([{"input_ids": row, "labels": row} for row in rows])
    labels = batch["labels"][batch["labels"] != -100]
    assert sorted(labels.tolist()) == sorted(token for row in rows for token in row[1:])


@given(st.lists(st.tuples(some_ids, some_ids), min_size=1, max_size=3), st.sampled_from(["padded", "packed", "tree"]))
def test_a_pair_collator_ends_each_answer_at_its_last_token(pairs, layout):
    rows = [{"input_ids_chosen": chosen, "input_ids_rejected": rejected} for chosen, rejected in pairs]
    batch = result_or_our_error(lambda: PairCollator(0, layout)(rows))
    assert batch["input_ids"].flatten()[batch["ends"]].tolist() == [side[-1] for pair in pairs for side in pair]


# Texts and conversations ---------------------------------------------------------------------------------------------


@given(tokenizers, odd_text, st.booleans())
def test_a_text_is_tokenized_with_one_end(tokenizer, text, add_eos):
    row = encode_text(tokenizer, text, add_eos=add_eos)["input_ids"]
    plain = list(tokenizer(text)["input_ids"])
    assert row[: len(plain)] == plain
    assert not add_eos or row[-1] == tokenizer.eos_token_id
    assert len(row) <= len(plain) + 1


@given(tokenizers, odd_text, odd_text)
def test_a_completion_counts_and_its_prompt_does_not(tokenizer, prompt, completion):
    row = result_or_our_error(lambda: encode_prompt_completion(tokenizer, prompt, completion))
    if isinstance(row, Exception):
        assert not completion
        return
    mask = row["completion_mask"]
    assert len(mask) == len(row["input_ids"])
    assert set(mask) <= {0, 1}
    assert mask == sorted(mask)  # first the prompt, then the completion
    assert mask[-1] == 1
    assert row["input_ids"][-1] == tokenizer.eos_token_id


@given(readers, conversation, st.booleans())
def test_answers_of_a_conversation_count(tokenizer, messages, assistant_only):
    row = result_or_our_error(lambda: encode_messages(tokenizer, messages, assistant_only=assistant_only))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if isinstance(row, Exception):
        return
    assert len(row["assistant_masks"]) == len(row["input_ids"])
    assert sum(row["assistant_masks"]) > 0
    if assistant_only:
        assert answers


@given(readers, conversation, conversation)
def test_a_conversation_is_prompt_and_completion(tokenizer, prompt, completion):
    row = result_or_our_error(lambda: encode_prompt_completion(tokenizer, prompt, completion))
    if not isinstance(row, Exception):
        whole = tokenizer.decode(encode_prompt(tokenizer, prompt)["input_ids"])
        before = tokenizer.decode(row["input_ids"][: row["completion_mask"].index(1)])
        assert whole.startswith(before)  # the completion's header may begin as the answer's
        assert before.startswith(whole[: whole.rindex("<|im_start|>")])


@given(odd_text, odd_text, odd_text)
def test_an_implicit_prompt_and_its_answers_are_the_texts(prompt, chosen, rejected):
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    parts = result_or_our_error(lambda: preference_parts(row))
    if isinstance(parts, Exception):
        assert chosen == rejected
        return
    assert (parts[0] + parts[1], parts[0] + parts[2]) == (row["chosen"], row["rejected"])


@given(tokenizers, odd_text, odd_text, odd_text)
def test_a_preference_pair_shares_its_prompt(tokenizer, prompt, chosen, rejected):
    row = result_or_our_error(
        lambda: encode_preference(tokenizer, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    )
    if isinstance(row, Exception):
        return
    shared = row["prompt_input_ids"]
    for side in ("chosen", "rejected"):
        assert row[f"{side}_input_ids"][: len(shared)] == shared
        assert len(row[f"{side}_input_ids"]) > len(shared)


@given(tokenizers, st.lists(odd_text, min_size=1, max_size=3))
def test_texts_of_responses_are_what_they_add(tokenizer, texts):
    queries = [torch.tensor(tokenizer(text)["input_ids"] or [5]) for text in texts]
    responses = [torch.tensor(tokenizer(text[::-1])["input_ids"] or [5]) for text in texts]
    assert all(isinstance(text, str) for text in response_texts(tokenizer, queries, responses))


ENCODERS = {
    "encode_text": lambda value: encode_text(TOKENIZERS["bytes"], value),
    "encode_prompt": lambda value: encode_prompt(TOKENIZERS["bytes"], value),
    "encode_messages": lambda value: encode_messages(TOKENIZERS["bytes"], value, assistant_only=True),
    "completion": lambda value: encode_prompt_completion(TOKENIZERS["bytes"], "a", value),
    "prompt": lambda value: encode_prompt_completion(TOKENIZERS["bytes"], value, "a"),
    "chosen": lambda value: encode_preference(TOKENIZERS["bytes"], {"prompt": "a", "chosen": value, "rejected": "b"}),
    "implicit": lambda value: preference_parts({"chosen": value, "rejected": "b"}),
    "seq2seq": lambda value: encode_seq2seq(TOKENIZERS["bytes"], value, "a"),
}


messages_of_anything = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from(["role", "content"]), anything),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": st.one_of(st.integers(), st.booleans())}),
    ),
    max_size=2,
)


@given(st.sampled_from(sorted(ENCODERS)), st.one_of(anything, messages_of_anything))
def test_rows_of_wrong_types_are_refused_in_our_words(name, value):
    result_or_our_error(lambda: ENCODERS[name](value))


@given(st.lists(st.sampled_from([*"abc", *{c for sets in COLUMN_SETS.values() for s in sets for c in s}]), unique=True))
def test_a_recognized_format_has_its_columns(columns):
    accepted = list(RowFormat)
    kind = result_or_our_error(lambda: row_format(columns, accepted, needed_for="SFT"))
    if not isinstance(kind, Exception):
        choices = (("text",),) if kind is RowFormat.TEXT else COLUMN_SETS[kind]
        assert any(set(choice) <= set(columns) for choice in choices)


@pytest.mark.parametrize("bad", [None, 5, 1.5, True])
def test_the_row_of_a_wrong_type_is_numbered(bad):
    tokenizer = TOKENIZERS["bytes"]
    dataset = Dataset.from_dict({"text": [1, 2]} if isinstance(bad, (int, float)) else {"text": ["a", bad]})
    with pytest.raises(ValueError, match=r"Row \d: The text is .* a text is needed. Convert it"):
        prepare_dataset(dataset, lambda row: encode_text(tokenizer, row["text"]))


# Prompts and their batches -------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31 - 1), st.integers(1, 3), st.data())
def test_batches_of_all_processes_are_a_permutation_that_resumes(rows, size, seed, processes, data):
    ranks = [ShuffledBatches(rows, size, seed=seed, rank=rank, world_size=processes) for rank in range(processes)]
    for _ in range(2):
        seen = [row for batches in ranks for batch in batches for row in batch]
        assert set(seen) <= set(range(rows))
        if rows >= size * processes:
            assert len(seen) == len(set(seen)) == rows - rows % (size * processes)
    stop = data.draw(st.integers(0, len(ranks[0])))
    one, other = (ShuffledBatches(rows, size, seed=seed, rank=0, world_size=processes) for _ in range(2))
    iterator = iter(one)
    for _ in range(stop):
        next(iterator)
    other.load_state_dict(one.state_dict())
    rest = list(iterator)
    assume(rest)
    assert list(other) == rest


@settings(max_examples=10)
@given(st.lists(odd_text, min_size=1, max_size=4), st.integers(1, 6))
def test_prompts_are_cut_from_their_start(texts, limit):
    dataset = Dataset.from_dict({"prompt": texts})
    options: Any = {"is_encoder_decoder": False, "needed_for": "GRPO", "positions": Positions("Model", None, None)}

    def call(longest: int | None) -> Any:
        return tokenize_prompts(dataset, tokenizer=TOKENIZERS["pieces"], max_length=longest, **options)

    whole, cut = result_or_our_error(lambda: call(None)), result_or_our_error(lambda: call(limit))
    if isinstance(whole, Exception) or isinstance(cut, Exception):
        return
    for long, short in zip(whole["prompt_ids"], cut["prompt_ids"], strict=True):
        assert len(short) == min(len(long), limit)
        assert is_subsequence(short, long)


# Rewards -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=3, max_size=3), min_size=1, max_size=3))
def test_rewards_are_weighted_sums_of_those_that_apply(columns):
    functions = [lambda completions, column=column: column for column in columns]
    names, weights = [f"f{i}" for i in range(len(columns))], [float(i + 1) for i in range(len(columns))]
    rewards = RewardSet(functions, weights, names=names)
    scored = result_or_our_error(lambda: rewards(["p"] * 3, ["a", "b", "c"], [[5]] * 3))
    told = [[column[i] for column in columns] for i in range(3)]
    if isinstance(scored, Exception):
        assert any(all(score is None for score in row) for row in told)
        return
    for i, row in enumerate(told):
        plain = sum(weight * score for weight, score in zip(weights, row, strict=True) if score is not None)
        assert scored.rewards[i].item() == pytest.approx(plain, rel=1e-5, abs=1e-2)


@given(anything)
def test_a_reward_function_may_return_anything(value):
    rewards = RewardSet(lambda completions: value, names=["f"])
    result_or_our_error(lambda: rewards(["p"] * 2, ["a", "b"], [[5]] * 2))


@given(st.one_of(st.lists(odd_text, max_size=2), st.lists(conversation, max_size=2)), st.integers(1, 3))
def test_completions_have_the_format_of_their_prompts(prompts, count):
    texts = ["x"] * (len(prompts) * count)
    completions = as_completions(prompts, texts)
    assert len(completions) == len(texts)
    assert all(isinstance(one, str) == isinstance(prompts[0], str) for one in completions)
