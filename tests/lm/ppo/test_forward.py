"""`PPOTrainer.batched_forward_pass`: padding, the reference, encoder-decoder models."""

import pytest
import torch
from tests.lm import tiny
from tests.lm.ppo.test_trainer import DOUBLE, SAMPLED

# -------------------------------------------------------------- forward passes


def left_padded(queries, responses):
    rows = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])
    mask = torch.stack([torch.cat([row.new_zeros(width - len(row)), torch.ones_like(row)]) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("mini_batch_size", [1, 2, 4])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_batched_forward_pass_equals_rows_alone(kind, side, mini_batch_size):
    base = getattr(tiny, kind)(0, DOUBLE)
    trainer = tiny.ppo(tiny.with_value_head(base), mini_batch_size=mini_batch_size, temperature=0.7)
    queries, responses, _ = tiny.batch()
    inputs = left_padded(queries, responses) if side == "left" else trainer.prepare_model_inputs(queries, responses)
    logprobs, no_logits, values, mask = trainer.batched_forward_pass(trainer.model, queries, responses, inputs)
    with_logits = trainer.batched_forward_pass(trainer.model, queries, responses, inputs, return_logits=True)
    width = max(map(len, responses))
    assert no_logits is None
    assert logprobs.shape == values.shape == mask.shape == (4, width)
    assert with_logits[1].shape == (4, width, len(tiny.VOCABULARY))
    trainer.model.eval()
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        log_p = tiny.logprobs_of(base, query, response, 0.7)
        with torch.no_grad():
            logits, _, own_values = trainer.model(input_ids=torch.cat([query, response])[None])
        here = slice(len(query) - 1, len(query) + len(response) - 1)
        assert mask[i].tolist() == [1] * len(response) + [0] * (width - len(response))
        span = slice(0, len(response))
        torch.testing.assert_close(logprobs[i, span], log_p.gather(1, response[:, None])[:, 0])
        torch.testing.assert_close(values[i, span], own_values[0, here])
        torch.testing.assert_close(with_logits[1][i, span], logits[0, here])
        assert not logprobs[i, len(response) :].any()
        assert not values[i, len(response) :].any()


def test_batched_forward_pass_of_the_reference_has_no_values():
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"ref_model": tiny.gpt2(1, DOUBLE)})
    queries, responses, _ = tiny.batch()
    inputs = trainer.prepare_model_inputs(queries, responses)
    logprobs, _, values, _ = trainer.batched_forward_pass(trainer.ref_model, queries, responses, inputs)
    expected = tiny.taken_of(tiny.gpt2(1, DOUBLE), queries[2], responses[2])
    torch.testing.assert_close(logprobs[2, : len(expected)], expected)
    assert values is None


def test_encoder_decoder_step_takes_its_logprobs_from_the_decoder():
    base = tiny.t5(0, DOUBLE)
    trainer = tiny.ppo(tiny.with_value_head(base), mini_batch_size=2)
    queries, responses, scores = tiny.batch()
    expected = []
    with torch.no_grad():
        for query, response in zip(queries, responses, strict=True):
            logits = base.eval()(input_ids=query[None], labels=response[None]).logits[0]
            expected.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    before = tiny.weights(trainer.model)
    stats = trainer.step(queries, responses, scores)
    torch.testing.assert_close(stats["objective/logprobs"], torch.cat(expected))
    assert stats["objective/kl"] == 0
    assert {"v_head.summary.weight", "pretrained_model.encoder.block.0.layer.0.SelfAttention.q.weight"} <= set(
        tiny.moved(before, trainer.model)
    )


def test_a_decoder_start_token_in_front_of_a_response_is_not_part_of_it():
    def weights(with_start):
        trainer = tiny.ppo(tiny.with_value_head(tiny.t5(0, DOUBLE)))
        queries, responses, scores = tiny.batch()
        masks = [torch.ones(len(row) + with_start, dtype=torch.long) for row in responses]
        rows = [torch.cat([torch.tensor([tiny.PAD]), row]) for row in responses] if with_start else responses
        stats = trainer.step(queries, rows, scores, masks)
        return tiny.weights(trainer.model), stats["tokens/responses_len_mean"]

    (without_start, length), (same, same_length) = weights(False), weights(True)
    assert all(torch.equal(without_start[name], same[name]) for name in without_start)
    assert length == same_length


def test_a_decoder_start_token_that_the_policy_samples_is_a_part_of_its_response():
    trainer = tiny.ppo(tiny.with_value_head(tiny.t5(0, DOUBLE)))
    queries, responses, scores = tiny.batch()
    responses[1] = torch.cat([torch.tensor([tiny.PAD]), responses[1]])
    stats = trainer.step(queries, responses, scores)
    assert stats["tokens/responses_len_mean"] == sum(map(len, responses)) / len(responses)


def test_a_start_token_alone_stays_where_every_response_begins_with_one():
    trainer = tiny.ppo(tiny.with_value_head(tiny.t5(0, DOUBLE)))
    queries, responses, scores = tiny.batch()
    given = [torch.tensor([tiny.PAD]), *(torch.cat([torch.tensor([tiny.PAD]), row]) for row in responses[1:])]
    stats = trainer.step(queries, given, scores)
    assert stats["tokens/responses_len_mean"] == (1 + sum(map(len, responses[1:]))) / len(responses)


@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_encoder_decoder_generates_responses_without_start_token():
    trainer = tiny.ppo(tiny.with_value_head(tiny.t5(0, DOUBLE)))
    queries, _, _ = tiny.batch()
    responses = trainer.generate(queries, return_prompt=False, **SAMPLED)
    assert all(1 <= len(row) <= 6 for row in responses)
    base = tiny.t5(0, DOUBLE).eval()
    (row,) = trainer.generate([queries[0]], do_sample=False, max_new_tokens=1)
    with torch.no_grad():
        logits = base(input_ids=queries[0][None], decoder_input_ids=torch.tensor([[tiny.PAD]])).logits
    assert row.tolist() == [int(logits[0, -1].argmax())]
