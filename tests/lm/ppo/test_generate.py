"""`PPOTrainer.generate`: order, ends, lengths, random numbers, and settings that change the sampled policy."""

import warnings
from collections import Counter

import pytest
import torch
from accelerate.state import AcceleratorState
from tests.lm import tiny
from tests.lm.ppo.test_trainer import DOUBLE, GREEDY, PADS_WITH_EOS, SAMPLED, greedy, lora_policy

from trimtab_lm import (
    LengthSampler,
)

# -------------------------------------------------------------- generate


@pytest.mark.parametrize("return_prompt", [True, False])
def test_generate_gives_a_list_for_a_list_and_a_row_for_a_tensor(return_prompt):
    trainer, (queries, _, _) = tiny.ppo(tiny.policy(dtype=DOUBLE), arguments=PADS_WITH_EOS), tiny.batch(6)
    expected = [greedy(tiny.gpt2(0, DOUBLE).eval(), query) for query in queries]
    if return_prompt:
        expected = [torch.cat(pair) for pair in zip(queries, expected, strict=True)]
    with pytest.warns(UserWarning, match="do_sample=False"):
        responses = trainer.generate(queries, return_prompt=return_prompt, **GREEDY)
    assert [row.tolist() for row in responses] == [row.tolist() for row in expected]
    single = trainer.generate(queries[0], return_prompt=return_prompt, **GREEDY)
    assert single.tolist() == [expected[0].tolist()]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_generate_keeps_the_order_whatever_the_batching(batch_size):
    trainer, queries = tiny.ppo(tiny.policy(dtype=DOUBLE), arguments=PADS_WITH_EOS), tiny.rows(8, 1, 9)
    responses = trainer.generate(queries, batch_size=batch_size, return_prompt=False, **GREEDY)
    model = tiny.gpt2(0, DOUBLE).eval()
    assert [row.tolist() for row in responses] == [greedy(model, query).tolist() for query in queries]


def test_batch_size_of_generate_is_rows_at_a_time():
    trainer, rows = tiny.ppo(), []
    trainer.generate(tiny.rows(1, 2, 2), **SAMPLED)  # the first call also checks the sampler
    embeddings = trainer.model.pretrained_model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, ids, __: rows.append(len(ids[0])))
    trainer.generate(tiny.rows(5, 3, 9), batch_size=2, **SAMPLED)
    assert max(rows) == 2
    trainer.generate(tiny.rows(5, 3, 9), **SAMPLED)
    assert max(rows) == 5


def test_responses_end_with_their_end_token_and_hold_no_padding():
    trainer = tiny.ppo(tiny.policy(initializer_range=0.02), arguments=PADS_WITH_EOS)
    responses = trainer.generate(
        tiny.rows(200, 2, 9), batch_size=200, return_prompt=False, do_sample=True, max_new_tokens=20
    )
    assert all((row[:-1] != tiny.EOS).all() for row in responses)
    assert {len(row) for row in responses if row[-1] != tiny.EOS} == {20}
    assert sum(int(row[-1]) == tiny.EOS for row in responses) > 20


@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_a_stop_string_ends_a_response_though_end_tokens_pad():
    trainer, queries = tiny.ppo(tiny.policy(), arguments=PADS_WITH_EOS), tiny.rows(6, 2, 9)
    free = trainer.generate(queries, return_prompt=False, **GREEDY)
    stop = int(next(row for row in free if len(row) > 2)[1])
    text = trainer.tokenizer.decode(stop)
    rows = trainer.generate(queries, return_prompt=False, stop_strings=[text], **GREEDY)
    expected = [row[: row.tolist().index(stop) + 1] if stop in row else row for row in free]
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]
    assert any(int(row[-1]) == stop for row in rows)


def test_a_first_call_checks_the_sampler_also_with_stop_strings():
    trainer, query = tiny.ppo(), tiny.rows(1, 3, 3)[0]
    with pytest.warns(UserWarning, match="own loop"):
        row = trainer.generate(query, return_prompt=False, stop_strings=["a", "b"], **SAMPLED)
    assert row.shape[1] > 0


def test_no_queries_get_no_responses():
    trainer = tiny.ppo()
    assert trainer.generate([], **SAMPLED) == []
    assert trainer.generate([], generate_ref_response=True, **SAMPLED) == ([], [])


def test_an_end_token_inside_the_prompt_is_harmless():
    query = torch.tensor([tiny.EOS, 7, tiny.EOS, 8])
    row = tiny.ppo().generate([query], return_prompt=True, **SAMPLED)[0]
    assert row[:4].tolist() == query.tolist()
    assert len(row) > 4


def test_length_sampler_sets_the_number_of_new_tokens():
    trainer, lengths = tiny.ppo(arguments=PADS_WITH_EOS), iter([3, 5])
    queries = tiny.rows(20, 2, 4)
    for length in (3, 5):
        rows = trainer.generate(queries, length_sampler=lambda: next(lengths), return_prompt=False, do_sample=True)
        assert {len(row) for row in rows if row[-1] != tiny.EOS} == {length}
    rows = trainer.generate(queries, length_sampler=LengthSampler(2, 3), return_prompt=False, do_sample=True)
    assert max(len(row) for row in rows) == 2


@pytest.mark.parametrize("kind", ["adapter", "copy"])
@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_generate_ref_response_gives_the_text_of_the_reference_too(kind):
    queries, _, _ = tiny.batch()
    if kind == "adapter":
        trainer = tiny.ppo(lora_policy(DOUBLE), arguments=PADS_WITH_EOS)
    else:
        trainer = tiny.ppo(tiny.policy(1, DOUBLE), arguments={"ref_model": tiny.gpt2(0, DOUBLE), **PADS_WITH_EOS})
    responses, ref = trainer.generate(queries, generate_ref_response=True, return_prompt=False, **GREEDY)
    base = tiny.gpt2(0, DOUBLE).eval()
    assert [row.tolist() for row in ref] == [greedy(base, query).tolist() for query in queries]
    assert [row.tolist() for row in responses] != [row.tolist() for row in ref]
    assert [row.tolist() for row in responses] == [
        row.tolist() for row in trainer.generate(queries, return_prompt=False, **GREEDY)
    ]
    single, single_ref = trainer.generate(queries[0], generate_ref_response=True, return_prompt=False, **GREEDY)
    assert (single.tolist(), single_ref.tolist()) == ([responses[0].tolist()], [ref[0].tolist()])


def test_sampling_neither_reads_nor_moves_global_random_numbers():
    queries, _, _ = tiny.batch()

    def sampled(global_seed):
        torch.manual_seed(global_seed)
        trainer, state = tiny.ppo(seed=3), torch.get_rng_state()
        rows = [trainer.generate(queries, return_prompt=False, **SAMPLED) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), state)
        return [[row.tolist() for row in part] for part in rows]

    first, second = sampled(1)
    assert sampled(2) == [first, second]
    assert first != second


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_model_at_the_temperature(temperature):
    query, count = torch.tensor([9, 10]), 4000
    trainer = tiny.ppo()
    trainer.model.generation_config.top_k = 2  # the model's own setting must not change the trained policy
    rows = trainer.generate(
        [query] * count,
        batch_size=count,
        return_prompt=False,
        do_sample=True,
        max_new_tokens=1,
        temperature=temperature,
    )
    p = tiny.logprobs_of(tiny.gpt2(), query, torch.tensor([0]), temperature)[0].exp()
    seen = Counter(int(row) for row in rows)
    chi_square = sum((seen[token] - count * float(p[token])) ** 2 / (count * float(p[token])) for token in range(32))
    assert chi_square < 66  # 31 degrees of freedom: by chance once in 4000 seeds


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"top_k": 5}, "top_k=5.*drifts below 0"),
        ({"top_p": 0.9}, "top_p=0.9.*drifts below 0"),
        ({"min_p": 0.1}, "min_p=0.1.*drifts below 0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2.*KL is biased"),
        ({"min_length": 8}, "min_length=8.*negative KL"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id=0.*negative KL"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id=0.*negative KL"),
        ({"do_sample": False}, "do_sample=False.*not a sample"),
    ],
)
def test_settings_that_make_the_sampler_another_policy_are_reported_once(setting, message):
    trainer, (queries, _, _) = tiny.ppo(), tiny.batch()
    with pytest.warns(UserWarning, match=message):
        trainer.generate(queries, **SAMPLED | setting)
    with warnings.catch_warnings(action="error"):
        trainer.generate(queries, **SAMPLED | setting)
        tiny.ppo().generate(queries, top_k=0.0, top_p=1.0, min_length=-1, **SAMPLED)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_generate_has_no_dropout_and_leaves_the_mode_as_it_was(is_training):
    model = tiny.policy(dtype=DOUBLE, resid_pdrop=0.5, embd_pdrop=0.5).train(is_training)
    queries, _, _ = tiny.batch()
    responses = tiny.ppo(model, arguments=PADS_WITH_EOS).generate(queries, return_prompt=False, **GREEDY)
    plain = tiny.gpt2(0, DOUBLE).eval()
    assert [row.tolist() for row in responses] == [greedy(plain, query).tolist() for query in queries]
    assert all(module.training == is_training for module in model.modules())


def test_generate_computes_in_mixed_precision():
    dtypes = set()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = tiny.ppo(accelerator_kwargs={"mixed_precision": "bf16"})
        layer = trainer.model.pretrained_model.transformer.h[0].mlp.c_fc
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
        trainer.generate(tiny.rows(2, 2, 4), **SAMPLED)
        trainer.generate(tiny.rows(2, 2, 4), **SAMPLED)  # without the check of the first call
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert dtypes == {torch.bfloat16}
