"""Rows of tokens: what they contain, and that a model's results do not depend on the layout."""

import heapq
import inspect
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from transformers import masking_utils

from trimtab_lm.compat.models import attention_of
from trimtab_lm.tokens.attention import tree_mask
from trimtab_lm.tokens.forward import best_layout, masked_size, score_sequences_in_forward, score_tokens_in_forward
from trimtab_lm.tokens.layout import (
    TokenGroup,
    best_fit,
    cheapest_split,
    from_labels,
    lay_out,
    lean_width,
    sum_per_sequence,
)

D = torch.float64
A, B = [5, 6, 7], [8, 9]


def test_best_fit_fills_the_fullest_row_that_has_room():
    # 6 opens a row (room 4), 5 opens another (room 5); 4 goes to the fuller one, 5 fills the other, 2 opens a third.
    assert best_fit([5, 6, 4, 5, 2], 10) == [[0, 3], [1, 2], [4]]


def test_the_search_for_a_width_takes_twice_as_long_for_twice_the_pieces(monkeypatch: pytest.MonkeyPatch):
    steps: list[int] = []
    replace = heapq.heapreplace
    monkeypatch.setattr(heapq, "heapreplace", lambda rows, item: steps.append(1) or replace(rows, item))
    numbers = random.Random(0)
    counted = []
    for pieces in (500, 1000, 2000):
        steps.clear()
        lengths = [numbers.randint(20, 400) for _ in range(pieces)]
        width = lean_width(lengths)
        counted.append(len(steps))
        assert width * len(best_fit(lengths, width)) < 1.02 * sum(lengths)
    assert counted[1] <= 2.2 * counted[0]
    assert counted[2] <= 2.2 * counted[1]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_keeps_every_item_once_and_within_the_width(seed: int):
    lengths = torch.randint(1, 33, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = best_fit(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 32
    # Two rows that would fit into one: best-fit decreasing never leaves them.
    totals = sorted(sum(lengths[i] for i in row) for row in rows)
    assert totals[0] + totals[1] > 32


def test_a_tree_holds_the_prefix_once():
    batch = lay_out([TokenGroup([4], [A, B], [[1, 0, 1], [1, 1]])], "tree", pad_token_id=0, width=7)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 1, 2, 0]]
    assert batch["source"].tolist() == [0, 2, 0, 4]  # the prefix predicts both branches' first tokens
    assert batch["targets"].tolist() == [5, 7, 8, 9]
    assert batch["sequence"].tolist() == [0, 0, 1, 1]
    assert (batch["lengths"].tolist(), batch["ends"].tolist()) == ([2, 2], [3, 5])
    reads = tree_mask(batch["document"], batch["branch"])[0, 0]
    assert reads[4].nonzero()[:, 0].tolist() == [0, 4]
    assert reads[3].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert reads[6].nonzero()[:, 0].tolist() == [6]


def of_lengths(prefix: int, branches: list[int]) -> TokenGroup:
    return TokenGroup([4] * prefix, [[5] * length for length in branches], [[1] * length for length in branches])


@pytest.mark.parametrize(
    ("prefix", "answer", "together"),
    [
        (64, 64, 4),  # two rows of 320 cost 773, one of 576 costs 792, eight of 128 cost 1,067
        (64, 256, 1),  # eight rows of 320 cost 2,827, one of 2,112 costs 5,016
        (64, 4096, 1),
        (512, 64, 8),  # one row of 1,024 costs 1,707, two of 768 cost 2,304
        (512, 256, 4),  # two rows of 1,536 cost 6,144, one of 2,560 costs 6,827, eight of 768 cost 7,680
        (512, 512, 1),  # eight rows of 1,024 cost 10,923, four of 1,536 cost 12,288
    ],
)
def test_so_many_answers_share_a_prompt_that_a_step_costs_least(prefix: int, answer: int, together: int):
    """By W + W^2 / 6H for each row of W tokens, or W + W^2 / 12H with one answer, at a hidden size of 256."""
    group = of_lengths(prefix, [answer] * 8)
    assert [len(piece.branches) for piece in cheapest_split([group], 256)] == [together] * (8 // together)
    batch = lay_out([group], "tree", pad_token_id=0, hidden_size=256)
    assert batch["input_ids"].shape == (8 // together, prefix + together * answer)
    assert ("branch" in batch) == (together > 1)  # packed rows need no mask of ours
    whole = lay_out([group], "tree", pad_token_id=0)
    assert whole["input_ids"].shape == (1, prefix + 8 * answer)
    assert batch["targets"].tolist() == whole["targets"].tolist()
    assert batch["sequence"].tolist() == whole["sequence"].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_split_costs_no_more_than_a_row_for_each_answer_in_work_and_in_mask(seed: int):
    numbers, hidden_size = random.Random(seed), 2 ** (5 + seed % 5)
    groups = [
        of_lengths(numbers.randint(1, 400), [numbers.randint(1, 400) for _ in range(numbers.randint(1, 9))])
        for _ in range(numbers.randint(1, 5))
    ]
    pieces, alone = ([len(piece) for piece in split] for split in (cheapest_split(groups, hidden_size), apart(groups)))
    is_apart = len(pieces) == len(alone)
    work = sum(pieces) * (1 + max(pieces) / ((12 if is_apart else 6) * hidden_size))
    assert work <= sum(alone) * (1 + max(alone) / (12 * hidden_size))
    assert sum(pieces) * max(pieces) <= sum(alone) * (max(alone) + 6 * hidden_size)


def test_attention_that_skips_what_a_mask_excludes_needs_no_copies():
    model = tiny.llama()
    assert masked_size(model) == model.config.hidden_size
    model.set_attn_implementation("flex_attention")
    assert masked_size(model) is None


def test_packed_rows_hold_documents_side_by_side():
    groups = [TokenGroup.document(A), TokenGroup.document(B), TokenGroup.document([4])]
    batch = lay_out(groups, "packed", pad_token_id=0, width=5)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert batch["source"].tolist() == [0, 1, 3]  # nothing predicts a document's first token
    assert batch["lengths"].tolist() == [2, 1, 0]


def test_rows_of_one_sequence_each_are_causal_without_a_mask(monkeypatch: pytest.MonkeyPatch):
    model = tiny.llama().eval()
    score_tokens_in_forward(model)
    groups = [TokenGroup.document(A), TokenGroup.document([4, 5, 6, 7])]  # the first row ends in padding
    expected = model(tokens=lay_out(groups, "padded", pad_token_id=0)).logprobs
    masks: list[object] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, **options: object):
        masks.append((attn_mask, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")  # it waits for an accelerator
    batch = lay_out(groups, "packed", pad_token_id=0)
    assert "position_ids" not in batch
    torch.testing.assert_close(model(tokens=batch).logprobs, expected)
    assert set(masks) == {(None, True)}
    assert attention_of(model) == "sdpa"


def test_a_group_is_cut_where_its_sequences_part_or_a_token_counts():
    group = TokenGroup.of_sequences([[4, 5, 6, 7], [4, 5, 8, 9]], [[0, 0, 0, 1], [0, 0, 1, 1]])
    assert group == TokenGroup([4, 5], [[6, 7], [8, 9]], [[0, 1], [1, 1]])
    counted_early = TokenGroup.of_sequences([[4, 5, 6], [4, 5, 8]], [[0, 1, 1], [0, 1, 1]])
    assert counted_early.prefix == [4]
    same = TokenGroup.of_sequences([[4, 5], [4, 5]], [[0, 0], [0, 0]])
    assert same.branches == [[5], [5]]


def test_labels_say_where_they_are_predicted():
    labels = torch.tensor([[-100, 5, -100, 6], [7, 8, -100, -100]])
    columns = from_labels(labels)
    assert columns["source"].tolist() == [0, 2, 4]  # 7 comes first in its row: nothing predicts it
    assert columns["targets"].tolist() == [5, 6, 8]
    assert (columns["sequence"].tolist(), columns["lengths"].tolist()) == ([0, 0, 1], [2, 1])
    assert from_labels(labels, is_encoder_decoder=True)["source"].tolist() == [1, 3, 4, 5]


def test_sums_per_sequence():
    sums = sum_per_sequence(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2]), 3)
    assert sums.tolist() == [1.0, 0.0, 6.0]


# The model's side ------------------------------------------------------------------------------------------------


def apart(groups: list[TokenGroup]) -> list[TokenGroup]:
    """Returns each branch with a copy of its prefix."""
    return [
        TokenGroup(group.prefix, [ids], [counts])
        for group in groups
        for ids, counts in zip(group.branches, group.counts, strict=True)
    ]


def groups(count: int = 3) -> list[TokenGroup]:
    drawn = []
    for i in range(count):
        prefix, *branches = (row.tolist() for row in tiny.rows(4, 2, 6, seed=i))
        drawn.append(TokenGroup(prefix, branches, [[1] * (len(row) - 1) + [0] for row in branches]))
    return drawn


def lora(model):
    modules = "all-linear" if model.config.model_type != "t5" else ["q", "v", "wi", "lm_head"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=modules, init_lora_weights=False))
    return model.to(D)


MODELS = {
    "gpt2": lambda: tiny.exact(tiny.gpt2()),
    "llama": lambda: tiny.exact(tiny.llama()),
    "llama, grouped heads": lambda: tiny.exact(tiny.llama(num_key_value_heads=1)),
    "llama, LoRA": lambda: lora(tiny.exact(tiny.llama())),
}
SEQ2SEQ = {
    "t5": lambda: tiny.exact(tiny.t5(initializer_factor=1.0)),
    "t5, LoRA": lambda: lora(tiny.exact(tiny.t5(initializer_factor=1.0))),
}


def weighed(model, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns log-probabilities and entropies, and the gradient of a weighted sum of them."""
    model.zero_grad()
    scores = model(tokens=batch, temperature=0.8)
    weights = torch.linspace(-1, 2, len(scores.logprobs), dtype=D)
    (weights @ scores.logprobs + weights.flip(0) @ scores.entropy).backward()
    return torch.cat(scores[:2]), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_layouts_give_equal_scores_and_gradients(name: str):
    model = MODELS[name]().eval()
    score_tokens_in_forward(model)
    expected, expected_grads = weighed(model, lay_out(groups(), "padded", pad_token_id=0))
    assert len(expected_grads) > 2
    for layout in ("row", "tree", "packed"):
        for width in (1, 40):
            columns, grads = weighed(model, lay_out(groups(), layout, pad_token_id=0, width=width))
            torch.testing.assert_close(columns, expected, rtol=1e-9, atol=1e-9)
            for one, other in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()) + 1e-15)


def test_copies_of_a_prompt_give_equal_scores_and_gradients():
    """At hidden size 10, of four answers to a prompt two share it; at 1, none do."""
    model = tiny.exact(tiny.llama()).eval()
    score_tokens_in_forward(model)
    prefix, *branches = (row.tolist() for row in tiny.rows(5, 6, 6, seed=0))
    group = TokenGroup(prefix[:3], branches, [[1] * 6] * 4)
    expected, expected_grads = weighed(model, lay_out([group], "padded", pad_token_id=0))
    for hidden_size, rows in ((100, 1), (10, 2), (1, 4)):
        batch = lay_out([group], "tree", pad_token_id=0, hidden_size=hidden_size)
        assert len(batch["input_ids"]) == rows
        columns, grads = weighed(model, batch)
        torch.testing.assert_close(columns, expected, rtol=1e-9, atol=1e-9)
        for one, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()) + 1e-15)


def test_eager_attention_takes_the_same_masks():
    model = tiny.gpt2().eval()
    score_tokens_in_forward(model)
    batches = [lay_out(groups(), layout, pad_token_id=0, width=40) for layout in ("padded", "row", "tree", "packed")]
    expected = model(tokens=batches[0]).logprobs
    model.set_attn_implementation("eager")
    for batch in batches:
        torch.testing.assert_close(model(tokens=batch).logprobs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_an_encoder_reads_a_shared_prefix_once(name: str):
    model = SEQ2SEQ[name]().eval()
    score_tokens_in_forward(model)
    rows: list[int] = []
    encoder = model.get_encoder() if name == "t5" else model.get_base_model().get_encoder()
    encoder.register_forward_hook(lambda _, __, output: rows.append(len(output.last_hidden_state)))
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0}
    expected, expected_grads = weighed(model, lay_out(apart(groups()), "encoder-decoder", **ids))
    columns, grads = weighed(model, lay_out(groups(), "encoder-decoder", **ids))
    assert rows == [9, 3]
    torch.testing.assert_close(columns, expected, rtol=1e-9, atol=1e-9)
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()) + 1e-15)


def test_scores_are_those_of_the_plain_model():
    model = tiny.llama(dtype=D).eval()
    group = groups(1)[0]
    plain = [
        tiny.taken_of(model, torch.tensor(group.prefix), torch.tensor(row), temperature=0.8)[:-1]
        for row in group.branches
    ]
    score_tokens_in_forward(model)
    scores = model(tokens=lay_out([group], "tree", pad_token_id=0), temperature=0.8)
    torch.testing.assert_close(scores.logprobs, torch.cat(plain), rtol=1e-9, atol=1e-9)


def test_a_model_that_scores_tokens_otherwise_stays_the_same(tmp_path):
    model = tiny.gpt2().eval()
    before = inspect.signature(model.forward)
    ids = torch.tensor([[5, 6, 7]])
    logits = model(input_ids=ids).logits
    head = score_tokens_in_forward(model)
    assert score_tokens_in_forward(model) is head
    assert inspect.signature(model.forward) == before
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize(("build", "expected"), [(tiny.gpt2, "row"), (tiny.llama, "row"), (tiny.t5, "encoder-decoder")])
def test_the_leanest_layout_is_found(build, expected: str):
    assert best_layout(build(), share_prefix=True) == expected


def test_without_branches_there_is_no_mask_to_pay_for():
    assert best_layout(tiny.llama(), share_prefix=False) == "row"


def test_a_model_with_windows_gets_no_tree():
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(**sizes, num_key_value_heads=1, sliding_window=4, **tiny.TOKENS)
    assert best_layout(tiny.seeded(MistralForCausalLM, config), share_prefix=True) == "packed"


def test_a_model_that_mixes_a_row_gets_padding_and_says_so():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    model = tiny.seeded(MambaForCausalLM, MambaConfig(**sizes | tiny.TOKENS))
    with pytest.warns(UserWarning, match="MambaForCausalLM"):
        assert best_layout(model, share_prefix=True) == "padded"


@pytest.mark.parametrize("layout", ["row", "tree", "packed", "padded"])
def test_a_classifier_reads_the_last_token_whatever_it_is(layout: str):
    model = tiny.scorer(dtype=D).eval()
    hidden: list[torch.Tensor] = []
    sequences = [[4, 5, tiny.EOS], [4, 5, 6, 7, tiny.PAD]]  # the second ends with the padding token
    for ids in sequences:
        state = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        hidden.append(model.score(state))
    assert score_sequences_in_forward(model)
    group = TokenGroup.of_sequences(sequences, [[0, 0, 1], [0, 0, 1, 1, 1]])
    columns, _ = model(tokens=lay_out([group], layout, pad_token_id=tiny.PAD, width=12))
    torch.testing.assert_close(columns.to(D), torch.stack(hidden), rtol=1e-5, atol=1e-6)
