"""The prompts of generation calls, the record of a rollout, and the buffer that serves its parts."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.lm import tiny

from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.grpo import GRPOConfig
from trimtab_lm.grpo.batches import PromptBatches, RolloutBuffer, prompt_loader
from trimtab_lm.grpo.rollout import everyones_advantages, rollout_of
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.tokens.layout import lay_out, split

DECODER = {"is_encoder_decoder": False, "needed_for": "GRPO"}


def batches(rows=23, steps=2, prompts_per_step=4, repeats=3, **options):
    sizes = {"prompts_per_step": prompts_per_step, "steps": steps, "repeats": repeats, "seed": 0}
    return PromptBatches(rows, **sizes | options)


def rollout(*seeds, counted=True):
    """A prompt and three completions per seed; `old_logprobs` count up from 100 times the seed, advantages from 10."""
    rows = [tiny.rows(4, 2, 5, seed) for seed in seeds]
    sampled = Sampled([ids for row in rows for ids in row[1:]], [True] * 3 * len(rows))
    counted = torch.tensor(counted).expand(len(rows), 3)
    values = torch.arange(3.0) + 10 * torch.tensor(seeds)[:, None]
    built, _ = rollout_of([row[0] for row in rows], sampled, is_counted=counted, advantages=values)
    counts = built.lengths.view(-1, 3).sum(1).tolist()
    old = [torch.arange(count) + 100.0 * seed for count, seed in zip(counts, seeds, strict=True)]
    return replace(built, old_logprobs=torch.cat(old))


# Prompts


def test_every_batch_comes_as_often_as_asked_and_no_prompt_comes_twice():
    drawn = list(batches())
    assert len(drawn) == len(batches()) == 6  # 23 rows make two calls of 8, each repeated three times
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3] == drawn[4] == drawn[5]
    taken = drawn[0] + drawn[3]
    assert len(set(taken)) == 16
    assert set(taken) <= set(range(23))


def test_a_step_has_the_same_prompts_on_any_number_of_processes():
    """Each process takes its share of every step, not of the whole call."""
    whole = [batch for i, batch in enumerate(batches(prompts_per_step=4)) if i % 3 == 0]
    parts = [list(batches(prompts_per_step=2, rank=rank, world_size=2))[::3] for rank in (0, 1)]
    for call, first, second in zip(whole, *parts, strict=True):
        for step in (0, 1):
            shared = first[2 * step : 2 * step + 2] + second[2 * step : 2 * step + 2]
            assert sorted(shared) == sorted(call[4 * step : 4 * step + 4])


def test_epochs_and_seeds_have_orders_of_their_own_that_come_again():
    sampler = batches()
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first != list(batches(seed=1))
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert next(iter(batches(shuffle=False))) == list(range(8))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_call_of_more_prompts_than_there_are_goes_on_with_the_next_pass(shuffle):
    """Three calls of 8 prompts, shared by two processes, take eight passes over 3 prompts."""
    drawn = [batches(rows=3, prompts_per_step=2, world_size=2, rank=rank, shuffle=shuffle) for rank in (0, 1)]
    calls = []
    for epoch in range(3):
        for one in drawn:
            one.set_epoch(epoch)
        mine, yours = (list(one) for one in drawn)
        assert len(mine) == len(yours) == len(drawn[0]) == 3
        assert all(batch == mine[0] for batch in mine)
        steps = [mine[0][i : i + 2] + yours[0][i : i + 2] for i in (0, 2)]
        calls += [row for step in steps for row in step]
    passes = [calls[i : i + 3] for i in range(0, 24, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in passes)
    assert (len({tuple(one) for one in passes}) > 1) == shuffle


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="The dataset has no prompts"):
        batches(rows=0)


def test_the_loader_gives_whole_rows_and_leaves_the_random_numbers_alone():
    rows = Dataset.from_dict({"prompt": [str(i) for i in range(23)], "answer": list(range(23))})
    config = GRPOConfig("out", use_cpu=True, seed=0, steps_per_generation=2, num_iterations=3, report_to="none")
    loader = prompt_loader(rows, config, prompts_per_step=4)
    before = torch.get_rng_state()
    drawn = list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert [[row["answer"] for row in batch] for batch in drawn] == list(batches(repeats=6))
    assert len(loader) == 12
    loader.set_epoch(1)
    assert [row["answer"] for row in next(iter(loader))] != [row["answer"] for row in drawn[0]]


def tokenized(rows, **options):
    return tokenize_prompts(Dataset.from_dict(rows), tiny.tokenizer(), **DECODER | options)


def test_prompts_become_tokens_and_other_columns_stay():
    rows = tokenized({"prompt": ["ab", "c"], "answer": [1, 2]})
    assert rows.column_names == ["prompt", "answer", PROMPT_IDS]
    assert rows[PROMPT_IDS][0] == tiny.tokenizer()("ab")["input_ids"]
    assert tokenize_prompts(rows, tiny.tokenizer(), **DECODER) is rows
    assert tokenized({"prompt": ["ab"]}, is_encoder_decoder=True)[PROMPT_IDS][0][-1] == tiny.EOS


def test_a_conversation_is_written_by_the_template_with_the_header_of_the_answer():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}.{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}{% if shout %}x{% endif %}"
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}])
    ids = tokenize_prompts(rows, tokenizer, **DECODER)[PROMPT_IDS][0]
    assert tokenizer.decode(ids) == "u hi.a "
    options = {**DECODER, "chat_template_kwargs": {"shout": True}}
    assert tokenizer.decode(tokenize_prompts(rows, tokenizer, **options)[PROMPT_IDS][0]) == "u hi.a x"


def test_a_long_prompt_loses_its_beginning_and_that_is_said():
    with pytest.warns(UserWarning, match="max_prompt_length=3: cut 2 tokens from 1 of 2 rows"):
        rows = tokenized({"prompt": ["abcde", "xyz"]}, max_length=3)
    assert [tiny.tokenizer().decode(ids) for ids in rows[PROMPT_IDS]] == ["cde", "xyz"]


def test_what_is_no_dataset_of_prompts_is_refused():
    with pytest.raises(ValueError, match=r"GRPO cannot read a dataset with the columns \['question'\].*prompt"):
        tokenized({"question": ["a"]})
    with pytest.raises(ValueError, match="Row 1: The prompt is empty"):
        tokenized({"prompt": ["a", ""]})
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))
    with pytest.raises(TypeError, match=r"not from a IterableDataset.*Dataset.from_list"):
        tokenize_prompts(stream, tiny.tokenizer(), **DECODER)


# The record of a rollout


def test_completions_are_side_by_side_and_those_that_do_not_count_have_no_tokens():
    prompts, completions = tiny.rows(2, 2, 4), tiny.rows(4, 2, 5, seed=1)
    logprobs = [torch.full((len(row),), float(i)) for i, row in enumerate(completions)]
    counted, values = torch.tensor([[True, False], [True, True]]), torch.tensor([[1.0, 0.0], [2.0, -2.0]])
    sampled = Sampled(completions, [True, False, True, True], logprobs)
    built, written = rollout_of(prompts, sampled, is_counted=counted, advantages=values)
    lengths = list(map(len, completions))
    assert [group.prefix for group in built.groups] == [prompt.tolist() for prompt in prompts]
    assert built.groups[1].branches == [ids.tolist() for ids in completions[2:]]
    assert written.tolist() == lengths
    assert built.lengths.tolist() == [lengths[0], 0, *lengths[2:]]
    assert built.advantages.tolist() == [1, 0, 2, -2]
    assert built.sequence.tolist() == [0] * lengths[0] + [2] * lengths[2] + [3] * lengths[3]
    assert built.sampler_logprobs.tolist() == built.sequence.tolist()  # as the completions are numbered
    assert (built.totals.sequences, built.totals.tokens) == (3, len(built.sequence))


def test_the_tokens_are_those_of_the_layout():
    built = rollout(1, 2, counted=[[True, False, True], [True] * 3])
    batch = lay_out(built.groups, "tree", pad_token_id=tiny.PAD)
    assert torch.equal(batch["lengths"], built.lengths)
    assert torch.equal(batch["sequence"], built.sequence)
    read = sum(len(group.prefix) for group in built.groups) + len(built.sequence) + 1  # one for the masked completion
    assert int((batch["document"] >= 0).sum()) == read


def test_some_of_the_prompts_are_a_rollout_of_their_own():
    counted = [[True, False, True], [True] * 3, [False, True, True]]
    whole, parts = rollout(1, 2, 3, counted=counted), rollout(3, 1, counted=[counted[2], counted[0]])
    taken = whole[[2, 0]]
    assert taken.groups == parts.groups
    for name in ("is_counted", "lengths", "sequence", "advantages", "old_logprobs"):
        assert torch.equal(getattr(taken, name), getattr(parts, name)), name
    assert taken.ref_logprobs is None


def test_once_the_policy_has_moved_the_sampler_knows_the_old_one():
    told = replace(rollout(1), sampler_logprobs=torch.zeros(9))
    assert told.after_update() is told  # it already has the trainer's log-probabilities
    moved = replace(told, old_logprobs=None).after_update()
    assert (moved.old_logprobs, moved.sampler_logprobs) == (told.sampler_logprobs, None)


def test_batch_scaling_takes_all_prompts_and_group_scaling_each_by_itself():
    rewards, counted = torch.tensor([[0.0, 2.0], [10.0, 30.0]]), torch.ones(2, 2, dtype=torch.bool)
    by_group = everyones_advantages(rewards, counted, scale="group")
    torch.testing.assert_close(by_group, torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]) / 2**0.5)
    by_batch = everyones_advantages(rewards, counted, scale="batch")
    torch.testing.assert_close(by_batch, torch.tensor([[-1.0, 1.0], [-10.0, 10.0]]) / rewards.std())


# Buffer


def filled(passes=3):
    buffer = RolloutBuffer(micro_batches=2, passes=passes)
    buffer.fill(rollout(*range(6)), seed=5)
    return buffer


def taken(buffer, count):
    return [[int(value) // 10 for value in part.advantages[::3]] for part in buffer.take(count)]


def test_each_pass_takes_each_prompt_once_and_later_ones_in_orders_of_their_own():
    buffer = filled()
    orders = [[*one, *other] for one, other in (taken(buffer, 2) for _ in range(3))]
    assert orders[0] == [0, 1, 2, 3, 4, 5]
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[1] != orders[0] != orders[2] != orders[1]
    assert not buffer.serves(6)
    assert taken(filled(), 6) == [order[i : i + 3] for order in orders for i in (0, 3)]


def test_the_parts_of_a_group_stay_together_in_every_pass():
    """Two prompts with three completions each: a step has three micro-batches of one completion, and one prompt."""
    buffer, whole = RolloutBuffer(micro_batches=6, passes=8, parts=3), rollout(1, 2)
    buffer.fill(replace(whole, groups=split(whole.groups, 1)), seed=5)
    assert buffer.serves(2)
    assert not buffer.serves(6)
    steps = [[float(part.advantages) for part in buffer.take(3)] for _ in range(16)]
    assert [*map(tuple, steps[:2])] == [(10, 11, 12), (20, 21, 22)]
    assert {*map(tuple, steps)} == {(10, 11, 12), (20, 21, 22)}
    assert steps[::2] != steps[:1] * 8  # the order of prompts changes


def test_a_buffer_goes_on_from_its_state(tmp_path):
    whole, half = filled(), filled()
    expected = taken(whole, 6)
    taken(half, 3)
    torch.save(half.state_dict(), tmp_path / "state.pt")
    resumed = RolloutBuffer(micro_batches=2, passes=3)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert taken(resumed, 3) == expected[3:]
    assert not resumed.serves(6)
    assert torch.equal(resumed.rollout.old_logprobs, half.rollout.old_logprobs)


def test_a_used_up_rollout_is_not_saved_and_one_of_another_shape_not_taken():
    buffer, other = filled(passes=1), RolloutBuffer(micro_batches=4, passes=1)
    with pytest.raises(ValueError, match="has 2 micro-batches and 1 passes, the settings say 4 and 1"):
        other.load_state_dict(buffer.state_dict())
    taken(buffer, 2)
    assert buffer.state_dict()["rollout"] is None
    other.load_state_dict(buffer.state_dict())
    assert not other.serves(6)


def test_a_buffer_serves_its_rollout_alone():
    assert not RolloutBuffer(micro_batches=2, passes=1).serves(0)
    assert [filled().serves(prompts) for prompts in (5, 6)] == [False, True]
