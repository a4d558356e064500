"""Provokes each fault of a PPO run in a real trainer; the health report names it."""

import re
import warnings

import pytest
import torch
from tests.lm import tiny
from tests.loss_scale import with_loss_scale

from trimtab_common.health import TrainingDivergedError

pytestmark = pytest.mark.filterwarnings("ignore:step .* health/", "ignore:The sampler is not the policy")
LETTER = tiny.VOCABULARY["a"]


def share_of_a(response):
    return float((response == LETTER).double().mean())


def length(response):
    return float(len(response))


def said(trainer, *, steps, reward=share_of_a, sample=None, queries=None, new_tokens=8, until=None, **generation):
    """Loops over `step` for `steps` steps, or until an alert; returns the first warning about each condition."""
    size, texts = trainer.config.batch_size, {}
    for step in range(steps):
        rows = tiny.rows(size, 2, 5, seed=step) if queries is None else queries
        options = {"do_sample": True, "max_new_tokens": new_tokens, **generation}
        sampler = trainer.generate if sample is None else sample
        responses = sampler(rows, return_prompt=False, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step(rows, responses, [reward(response) for response in responses])
        for warning in caught:
            if found := re.search(r"health/(\w+): (.*)", str(warning.message)):
                texts.setdefault(found[1], found[2])
        if until in texts:
            break
    return texts


def ppo(model=None, **config):
    return tiny.ppo(
        model, arguments=config.pop("arguments", None), **{"batch_size": 32, "mini_batch_size": 32, **config}
    )


def of_model(model):
    """Returns a sampler that the trainer does not know."""
    return ppo(tiny.with_value_head(model)).generate


def likely_ends(model, nats):
    """Returns the model with EOS `nats` more likely."""
    with torch.no_grad():
        row = model.transformer.wte.weight[tiny.EOS]
        model.transformer.ln_f.bias += nats * row / row.square().sum()
    return model


def test_a_sampler_at_another_temperature():
    for temperature, name in ((0.5, "likelier_than_samples"), (2.0, "unlikelier_than_samples")):
        elsewhere = of_model(tiny.gpt2())
        texts = said(ppo(), steps=2, sample=elsewhere, temperature=temperature)
        assert texts.keys() == {name}
        assert re.search(r"-?\d\.\d+ nats per token, (below -|above )0\.05: .*temperature", texts[name])
    assert not said(ppo(), steps=2, temperature=0.5)  # the trainer also scores at this temperature


def test_active_top_k_and_top_p():
    for setting in ({"top_k": 3}, {"top_p": 0.5}):
        texts = said(ppo(), steps=2, **setting)
        assert texts.keys() == {"likelier_than_samples"}
        assert "top_k=0, top_p=1" in texts["likelier_than_samples"]


def test_a_doubled_bos():
    queries = [torch.cat([torch.tensor([tiny.BOS, tiny.BOS]), row]) for row in tiny.rows(32, 2, 5)]
    texts = said(ppo(), steps=1, queries=queries)
    assert texts.keys() == {"doubled_bos"}
    assert "two BOS tokens is 1, above 0: the tokenizer adds a BOS" in texts["doubled_bos"]
    assert "add_special_tokens=False" in texts["doubled_bos"]
    assert not said(ppo(), steps=1, queries=[row[1:] for row in queries])


def test_a_pad_token_that_is_eos_in_a_model_that_never_stops():
    model = tiny.with_value_head(likely_ends(tiny.gpt2(), -20.0))
    with_pad_of_eos = {"tokenizer": tiny.tokenizer(pad_token="</s>")}
    texts = said(ppo(model, arguments=with_pad_of_eos), steps=10)
    assert texts.keys() == {"never_ends"}
    assert "is 0, below 0.01 at each of the last 10 checks: no response ends" in texts["never_ends"]
    assert "pad token is the EOS token" in texts["never_ends"]
    assert "never_ends" not in said(ppo(model), steps=10)  # pad is not EOS here, so the length may be intended


def test_rewards_of_a_million():
    texts = said(ppo(), steps=1, reward=lambda row: 1e6 * share_of_a(row))
    assert texts.keys() == {"reward_scale"}
    assert re.search(r"the scale .*e\+0\d, above 100: .*use_score_scaling", texts["reward_scale"])
    assert "reward_scale" not in said(ppo(use_score_scaling=True), steps=1, reward=lambda row: 1e6 * share_of_a(row))


def test_a_constant_reward():
    texts = said(ppo(learning_rate=1e-4), steps=10, reward=lambda row: 0.5)
    assert texts.keys() == {"constant_rewards"}
    assert "is 0, below 1e-06 at each of the last 10 checks: there is nothing" in texts["constant_rewards"]


def test_responses_that_grow_for_the_reward():
    model = tiny.with_value_head(likely_ends(tiny.gpt2(), 3.0))
    trainer = ppo(model, learning_rate=1e-2, ppo_epochs=2, init_kl_coef=0.0)
    texts = said(trainer, steps=40, reward=length, new_tokens=24, until="growing_responses")
    assert re.search(r"responses have .* \(3 times the first\): the reward favours length", texts["growing_responses"])


def test_a_reward_for_length_where_responses_begin_near_their_limit():
    texts = said(ppo(learning_rate=1e-3), steps=10, reward=lambda row: 0.1 * length(row))
    assert texts.keys() == {"growing_responses"}
    assert re.search(r"correlation of 1, above 0.7 .*: the reward favours length", texts["growing_responses"])


def test_a_collapsing_entropy():
    trainer = ppo(learning_rate=2e-2, ppo_epochs=2, init_kl_coef=0.0)
    texts = said(trainer, steps=40, until="entropy_collapse")
    assert re.search(r"entropy is .* \(0.05 times the first\): the policy stops exploring", texts["entropy_collapse"])


def test_a_reference_that_is_not_the_policy_at_the_start():
    texts = said(ppo(arguments={"ref_model": tiny.gpt2(1)}), steps=1)
    assert re.search(r"differ by up to \d.* nats, above 0.001: the reference is not", texts["other_reference"])


def test_a_row_whose_numbers_are_not_finite():
    model = tiny.with_value_head(tiny.llama())
    trainer = ppo(model, batch_size=4, mini_batch_size=4)
    with torch.no_grad():
        model.pretrained_model.model.embed_tokens.weight[7] = torch.nan
    before = tiny.weights(model)
    queries, responses = tiny.rows(4, 2, 5), tiny.rows(4, 3, 7, seed=1)
    for rows in (queries, responses):
        for row in rows:
            row[row == 7] = 8
    queries[2][0] = 7
    with pytest.raises(TrainingDivergedError, match=r"logprobs of response 2 \(1 of 4\) are not finite. No update"):
        trainer.step(queries, responses, [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="scores has nan for response 1"):
        trainer.step(queries, responses, [0.0, float("nan"), 2.0, 3.0])
    assert all(torch.equal(before[n].nan_to_num(), w.nan_to_num()) for n, w in model.state_dict().items())


def test_a_kl_that_runs_away():
    trainer = ppo(learning_rate=2e-2, ppo_epochs=2, init_kl_coef=1e-3, target=1.0, horizon=1e6)
    texts = said(trainer, steps=40, until="runaway_kl")
    assert re.search(r"KL to the reference is .* above 5 \(5 times the target\): .* Raise", texts["runaway_kl"])
    fixed = ppo(learning_rate=2e-2, ppo_epochs=2, init_kl_coef=0.0, adap_kl_ctrl=False)
    texts = said(fixed, steps=40, until="far_from_reference")
    assert "nats per token, above 2: " in texts["far_from_reference"]


def test_a_negative_kl():
    trainer = ppo(learning_rate=1e-2, ppo_epochs=2, init_kl_coef=0.0)
    said(trainer, steps=10)
    texts = said(trainer, steps=1, sample=of_model(tiny.gpt2()))
    assert re.search(r"KL to the reference is -.*, below -1: responses are not drawn", texts["negative_kl"])


def test_an_adaptive_coefficient_that_winds_up():
    reference = {"ref_model": tiny.gpt2(1)}
    trainer = ppo(arguments=reference, learning_rate=1e-4, init_kl_coef=0.01, target=0.1, horizon=32)
    texts = said(trainer, steps=15)
    assert re.search(
        r"coefficient is 0.1.*, above 0.1 \(10 times the first\), and KL .*target", texts["kl_coef_winds_up"]
    )


def test_a_dead_critic():
    texts = said(ppo(learning_rate=1e-4, vf_coef=0.0), steps=20)
    assert re.search(r"explained variance .* is -.*, below -0.5 .* does not learn", texts["bad_value_function"])
    silent = tiny.with_value_head(tiny.gpt2(), v_head_init_strategy="zero")
    texts = said(ppo(silent, vf_coef=0.0), steps=10)
    assert re.search(r"is 0 times that of the returns, below 0.001 .* gives all tokens one", texts["dead_critic"])


def test_an_overflow_of_fp16_skips_the_update_and_lowers_the_scale(monkeypatch: pytest.MonkeyPatch):
    """A loss scale begins too large for most models, so training continues, as in other libraries."""
    trainer = tiny.ppo(max_grad_norm=1.0)
    scaler = with_loss_scale(trainer, 1024.0, monkeypatch)
    trainer.optimizer_step.optimizer = trainer.optimizer
    overflow = next(trainer.model.parameters()).register_hook(lambda gradient: gradient + torch.inf)
    before = tiny.weights(trainer.model)
    stats = trainer.step(*tiny.batch())
    assert stats["ppo/policy/overflowed"] == 1
    assert "ppo/grad_norm" not in stats
    assert all(torch.equal(weight, before[name]) for name, weight in tiny.weights(trainer.model).items())
    assert scaler.get_scale() == 512
    overflow.remove()
    stats = trainer.step(*tiny.batch(seed=3))
    assert stats["ppo/policy/overflowed"] == 0
    assert stats["ppo/grad_norm"] > 0
    assert any(tiny.moved(before, trainer.model).values())
