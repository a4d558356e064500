"""Best of n: the samples that score highest, best first."""

import pytest
import torch
from tests.lm import tiny
from transformers import GenerationConfig

from trimtab_lm.iterative_sft import BestOfNSampler
from trimtab_lm.sampling.backends import ContinuousBatchingRollout, TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

QUERIES = tiny.rows(3, 2, 4)


def sampler(model=None, scores=lambda texts: [text.count("a") for text in texts], **options) -> BestOfNSampler:
    model = tiny.gpt2() if model is None else model
    return BestOfNSampler(model, tiny.tokenizer(), scores, lambda: 5, **{"seed": 0, **options})


def test_the_best_samples_come_first():
    seen: list[list[str]] = []

    def scores(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [float(sum(map(ord, text))) for text in texts]

    best = sampler(scores=scores, sample_size=6, n_candidates=2).generate(QUERIES)
    assert len(best) == 3
    for texts, chosen in zip(seen, best, strict=True):
        assert len(texts) == 6
        assert [sum(map(ord, text)) for text in chosen] == sorted(
            (sum(map(ord, text)) for text in texts), reverse=True
        )[:2]


@pytest.mark.filterwarnings("ignore:Sampling takes longer")
def test_a_stop_string_ends_a_response():
    stops = [tiny.VOCABULARY[letter] for letter in "abcdefgh"]
    config = GenerationConfig(stop_strings=list("abcdefgh"))
    groups = sampler(sample_size=8, n_candidates=8, generation_config=config).generate_ids(QUERIES)
    responses = [ids.tolist() for group in groups for ids in group]
    assert not any(set(stops).intersection(ids[:-1]) for ids in responses)
    assert any(ids[-1] in stops and len(ids) < 5 for ids in responses)


def test_texts_hold_query_and_response():
    (best,) = sampler().generate(QUERIES[0])
    query = tiny.tokenizer().decode(QUERIES[0].tolist())
    assert best[0].startswith(query)
    assert 0 < len(best[0]) - len(query) <= 5


def test_ids_are_those_of_the_texts_and_end_in_eos_where_the_model_sampled_it():
    options = {"sample_size": 8, "n_candidates": 8}
    texts, responses = sampler(**options).generate(QUERIES), sampler(**options).generate_ids(QUERIES)
    for query, written, chosen in zip(QUERIES, texts, responses, strict=True):
        rows = [torch.cat([query, ids]) for ids in chosen]
        assert tiny.tokenizer().batch_decode(rows, skip_special_tokens=True) == written
    ends = {(len(ids) == 5, int(ids[-1]) == tiny.EOS) for group in responses for ids in group}
    assert {(True, False), (False, True)} <= ends <= {(True, False), (False, True), (True, True)}


@pytest.mark.parametrize(
    "queries", [QUERIES[0], QUERIES[0].tolist(), torch.stack([QUERIES[0], QUERIES[0]]), [QUERIES[0].tolist()] * 2]
)
def test_queries_come_in_every_documented_shape(queries):
    count = 2 if (isinstance(queries, torch.Tensor) and queries.dim() == 2) or isinstance(queries[0], list) else 1
    assert len(sampler().generate(queries)) == count


def test_no_queries_get_no_texts():
    assert sampler().generate([]) == sampler().generate_ids([]) == []


def test_a_seed_repeats_and_touches_no_global_random_number():
    state = torch.get_rng_state()
    one, other = sampler(seed=3), sampler(seed=3)
    first = one.generate(QUERIES)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert other.generate(QUERIES) == first
    assert one.generate(QUERIES) != first  # the next call samples anew
    assert sampler(seed=4).generate(QUERIES) != first


def test_queries_of_one_length_are_sampled_at_once_and_each_keeps_its_own_length():
    model, rows = tiny.gpt2().eval(), []
    model.transformer.wte.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    lengths = iter([3, 9, 3])
    seen: list[list[str]] = []

    def scores(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [0.0] * len(texts)

    end = tiny.TOKENS["vocab_size"] - 1
    greedy = GenerationConfig(do_sample=False, eos_token_id=end)
    best = BestOfNSampler(model, tiny.tokenizer(), scores, lambda: next(lengths), 4, 0, generation_config=greedy)
    best.generate(QUERIES)
    assert max(rows) == 2 * 4
    for query, length, texts in zip(QUERIES, (3, 9, 3), seen, strict=True):
        row = model.generate(query[None], do_sample=False, eos_token_id=end, max_new_tokens=length, pad_token_id=0)[0]
        assert texts == [tiny.tokenizer().decode(row, skip_special_tokens=True)] * 4


def test_an_encoder_decoder_model_gives_its_response_alone():
    texts = sampler(tiny.t5(), scores=lambda texts: [0.0] * len(texts)).generate(QUERIES[:1])
    assert len(texts[0]) == 1


def test_settings_of_the_sampling_have_their_effect():
    greedy = GenerationConfig(do_sample=False)
    one, other = sampler(generation_config=greedy, seed=1), sampler(seed=2)
    length = {"max_new_tokens": 4}
    assert one.generate(QUERIES, **length) == other.generate(QUERIES, do_sample=False, **length)
    special = sampler(generation_config=greedy).generate(torch.tensor([tiny.BOS, 5]), skip_special_tokens=False)
    assert special[0][0].startswith("<s>")


def test_the_model_stays_in_its_mode():
    model = tiny.gpt2().train()
    sampler(model).generate(QUERIES[0])
    assert model.training


@pytest.mark.parametrize("scores", [lambda texts: [1.0], lambda texts: [float("nan")] * len(texts)])
def test_bad_scores_are_refused(scores):
    with pytest.raises(ValueError, match=r"What queries_to_scores returned has (1 scores|nan for)"):
        sampler(scores=scores).generate(QUERIES[0])


def test_more_candidates_than_samples_are_refused():
    with pytest.raises(ValueError, match="n_candidates=5"):
        sampler(sample_size=4, n_candidates=5)


@pytest.mark.parametrize(
    "backend",
    [
        lambda settings: TransformersRollout(settings, tiny.tokenizer(), batch_size=3),
        lambda settings: ContinuousBatchingRollout(settings, tiny.tokenizer()),
    ],
    ids=["transformers", "continuous batching"],
)
def test_the_samples_come_from_any_backend(backend):
    """With top_k=1 only the greedy continuation is possible, which differs for each query."""
    seen: list[list[str]] = []

    def scores(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [float(i) for i in range(len(texts))]

    model, rollout = tiny.llama().eval(), backend(SamplingSettings(4, top_k=1))
    best = BestOfNSampler(model, tiny.tokenizer(), scores, None, 3, seed=0, rollout=rollout)
    with pytest.warns(UserWarning, match="top_k=1"):
        chosen = best.generate(QUERIES)
    for query, texts, (text,) in zip(QUERIES, seen, chosen, strict=True):
        row = model.generate(query[None], do_sample=False, max_new_tokens=4, pad_token_id=0)[0]
        assert texts == [tiny.tokenizer().decode(row, skip_special_tokens=True)] * 3
        assert text == texts[2]


def test_a_rollout_is_synced_before_each_call_and_draws_anew():
    model = tiny.gpt2()
    rollout = TransformersRollout(SamplingSettings(6), tiny.tokenizer(), batch_size=4)
    best = BestOfNSampler(model, tiny.tokenizer(), lambda texts: [0.0] * len(texts), None, seed=0, rollout=rollout)
    first, version = best.generate(QUERIES), rollout.version
    assert best.generate(QUERIES) != first
    assert rollout.version not in (None, version)


def test_settings_beside_a_rollout_are_refused():
    rollout = TransformersRollout(SamplingSettings(4), tiny.tokenizer(), batch_size=4)
    for length_sampler, options in ((lambda: 5, {"rollout": rollout}), (None, {})):
        with pytest.raises(ValueError, match=r"Give a length_sampler.*or a rollout"):
            BestOfNSampler(tiny.gpt2(), tiny.tokenizer(), len, length_sampler, **options)
    with pytest.raises(ValueError, match=r"samples by its own settings: leave \['top_k'\] out"):
        BestOfNSampler(tiny.gpt2(), tiny.tokenizer(), len, None, rollout=rollout).generate(QUERIES, top_k=3)
