"""Queries and responses without padding give the numbers of padded rows, and a repeated query is read once."""

from typing import Any

import pytest
import torch
from tests.lm import tiny

from trimtab_lm import PPOTrainer
from trimtab_lm.ppo.passes import Scores, exact_kl_of, score
from trimtab_lm.ppo.policy import Layouts

DOUBLE = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
QUERIES = tiny.rows(5, 2, 6)
RESPONSES = tiny.rows(5, 1, 7, seed=1)
MASKS = [(torch.arange(len(row)) % 3 != 1).long() for row in RESPONSES]
REPEATED = [QUERIES[i] for i in (3, 0, 3, 1, 0)]
SAMPLES = {
    "plain": (QUERIES, RESPONSES, None),
    "masked": (QUERIES, RESPONSES, MASKS),
    "equal queries": (REPEATED, RESPONSES, None),
    "equal queries, masked": (REPEATED, RESPONSES, MASKS),
}
Rows = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]
TRAINERS = {
    "gpt2": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE)),
    "llama": lambda: tiny.ppo(tiny.with_value_head(tiny.exact(tiny.llama()))),
    "t5": lambda: tiny.ppo(tiny.with_value_head(tiny.exact(tiny.t5(initializer_factor=1.0)))),
    "critic": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"value_model": tiny.exact(tiny.llama(1))}),
    "reference": lambda: tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"ref_model": tiny.exact(tiny.llama(1))}),
}


def scored(trainer: PPOTrainer, rows: Rows, model: Any = None, **options: Any) -> Scores:
    """Returns the scores of the policy, or of another model, at temperature 0.7."""
    queries, responses, masks = rows
    inputs = trainer.prepare_model_inputs(queries, responses)
    model = trainer.bare if model is None else model
    return score(model, model, queries, responses, inputs, masks, temperature=0.7, padding=trainer.padding, **options)


def padded(trainer: PPOTrainer, rows: Rows, model: Any = None) -> Scores:
    """Returns the same scores from the model's own forward pass on padded rows."""
    queries, responses, masks = rows
    inputs = trainer.prepare_model_inputs(queries, responses)
    logits, _, values = (trainer.bare if model is None else model)(**inputs)
    width = max(map(len, responses))
    columns = [logits.new_zeros(len(queries), width) for _ in range(3)]
    mask, all_logits = torch.zeros(len(queries), width, dtype=torch.long), logits.new_zeros(5, width, logits.shape[-1])
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        start = 0 if trainer.is_encoder_decoder else len(query) - 1
        counts = torch.ones_like(response) if masks is None else masks[i]
        at = logits[i, start : start + len(response)]
        log_p = (at / 0.7).log_softmax(-1)
        rows_of = (log_p.gather(1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
        for column, row in zip(columns, (*rows_of, values[i, start : start + len(response)]), strict=True):
            column[i, : len(response)] = row * counts
        mask[i, : len(response)] = counts
        all_logits[i, : len(response)] = at * counts[:, None]
    return Scores(columns[0], all_logits, columns[2], mask, columns[1])


@pytest.mark.parametrize("rows", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("kind", TRAINERS)
def test_scores_and_gradients_are_those_of_padded_rows(kind, rows):
    trainer = TRAINERS[kind]()
    trainer.actor_critic.eval()

    def gradients(policy: Scores) -> list[torch.Tensor]:
        trainer.actor_critic.zero_grad()
        assert policy.entropy is not None
        assert policy.values is not None
        (policy.logprobs.sum() + policy.entropy.square().sum() + policy.values.square().sum()).backward()
        return [p.grad.clone() for p in trainer.model_params if p.grad is not None]

    ours, plain = scored(trainer, rows, return_logits=True), padded(trainer, rows)
    for column, expected in zip((*ours, ours.entropy), (*plain, plain.entropy), strict=True):
        torch.testing.assert_close(column, expected, **CLOSE)
    of_plain = gradients(plain)
    largest = max(float(gradient.abs().max()) for gradient in of_plain)
    for gradient, other in zip(gradients(ours), of_plain, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10 * largest)
    with torch.no_grad():
        reference = trainer.reference_policy
        ref, plain_ref = scored(trainer, rows, reference), padded(trainer, rows, reference)
        torch.testing.assert_close(ref.logprobs, plain_ref.logprobs, **CLOSE)
        assert ref.values is None
        both = [scored(trainer, rows, model, return_head_inputs=True) for model in (trainer.bare, reference)]
        kl = exact_kl_of(trainer.bare, reference, *both, temperature=0.7)
        log_p, log_q = ((one.logits / 0.7).log_softmax(-1) for one in (plain, plain_ref))
        torch.testing.assert_close(kl, (log_p.exp() * (log_p - log_q)).sum(-1), **CLOSE)


def tokens_read(trainer: PPOTrainer, rows: Rows) -> dict[str, torch.Tensor]:
    """Returns the tokens that the policy reads for the rows."""
    read: list[Any] = []
    hook = trainer.bare.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs), with_kwargs=True)
    scored(trainer, rows)
    hook.remove()
    return read[0]["tokens"]


def test_rows_of_unlike_lengths_share_rows():
    """Lengths 4, 2, 2 and 2 fit into one row of ten, or three of four; separate padded rows would take sixteen."""
    queries = [torch.tensor([token]) for token in (5, 6, 7, 8)]
    responses = [torch.arange(6, 6 + length) for length in (3, 1, 1, 1)]
    trainer = TRAINERS["llama"]()
    for layouts, positions in ((trainer.bare.readers["tokens"], 10), (Layouts("packed", "tree"), 12)):
        trainer.bare.readers["tokens"] = layouts
        assert tokens_read(trainer, (queries, responses, None))["input_ids"].numel() == positions


def test_equal_queries_are_read_once():
    tokens = tokens_read(TRAINERS["gpt2"](), SAMPLES["equal queries"])
    read = tokens["document"] >= 0
    assert int(read.sum()) == sum(map(len, [QUERIES[i] for i in (0, 1, 3)])) + sum(map(len, RESPONSES))
    tokens = tokens_read(TRAINERS["t5"](), SAMPLES["equal queries"])
    assert len(tokens["input_ids"]) == 3


def test_long_answers_to_a_query_get_copies_of_it_where_attention_reads_a_mask():
    """Of hidden size 16: four answers of 2 tokens to 12 share a row of 20, and of 40 tokens none does."""
    trainer = TRAINERS["llama"]()
    trainer.bare.readers["tokens"] = Layouts("packed", "tree", 16)
    for length, shape in ((2, (1, 20)), (40, (4, 52))):
        rows = [torch.arange(12) + 4] * 4, [torch.full((length,), 5 + i) for i in range(4)], None
        read = tokens_read(trainer, rows)
        assert read["input_ids"].shape == shape
        assert ("branch" in read) == (length == 2)


def test_inputs_that_a_subclass_prepares_are_what_the_model_reads():
    class LeftPadded(PPOTrainer):
        """Runs the same rows, padded on the left, with the first token of each query replaced."""

        def prepare_model_inputs(self, queries, responses):
            queries = [torch.cat([query.new_tensor([tiny.BOS]), query[1:]]) for query in queries]
            inputs = super().prepare_model_inputs(queries, responses)
            shifts = (inputs["attention_mask"] == 0).sum(1).tolist()
            return {
                name: torch.stack([row.roll(shift) for row, shift in zip(column, shifts, strict=True)])
                for name, column in inputs.items()
            }

    queries, responses, scores = tiny.batch()
    others = [torch.cat([query.new_tensor([tiny.BOS]), query[1:]]) for query in queries]
    prepared = tiny.ppo(tiny.policy(dtype=DOUBLE), LeftPadded).step(queries, responses, scores)
    expected = tiny.ppo(tiny.policy(dtype=DOUBLE)).step(others, responses, scores)
    torch.testing.assert_close(prepared["objective/logprobs"], expected["objective/logprobs"], **CLOSE)
    plain = tiny.ppo(tiny.policy(dtype=DOUBLE)).step(queries, responses, scores)
    assert not torch.allclose(plain["objective/logprobs"], expected["objective/logprobs"])


def test_the_exact_kl_takes_no_forward_pass_of_its_own():
    trainer = tiny.ppo(kl_penalty="full", batch_size=4, mini_batch_size=2, ppo_epochs=1)
    runs = {"policy": 0, "reference": 0}
    for name, actor in (("policy", trainer.bare), ("reference", trainer.reference_policy.actor)):

        def count(*_: Any, name: str = name) -> None:
            runs[name] += 1

        actor.pretrained_model.base_model.register_forward_hook(count)
    trainer.step(*tiny.batch())
    assert runs == {"policy": 2 + 2, "reference": 2}  # scored and trained, in two minibatches
