"""Each field of PPOConfig: what an observer from outside sees of it."""

import dataclasses
import math

import datasets
import pytest
import torch
from peft import LoraConfig
from tests.lm import tiny
from transformers import HfArgumentParser

from trimtab_lm import PPOConfig, PPOTrainer
from trimtab_lm.ppo import trainer as trainer_module
from trimtab_lm.ppo.loss import shaped
from trimtab_lm.ppo.statistics import ended

# The policy and its reference are different models, so KL is not 0 at the start.
pytestmark = pytest.mark.filterwarnings("ignore:step 1. health/other_reference")


class RecordingSGD(torch.optim.SGD):
    """Plain gradient descent that records the gradient norm of each update."""

    def __init__(self, model, lr=1.0):
        super().__init__(model.parameters(), lr=lr)
        self.norms: list[float] = []

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return super().step(closure)


class Spy(PPOTrainer):
    """Records the scores that enter the rewards, and the size of each minibatch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shaped: list[torch.Tensor] = []
        self.minibatches: list[int] = []

    def compute_rewards(self, scores, *args, **kwargs):
        self.shaped.append(scores.clone())
        return super().compute_rewards(scores, *args, **kwargs)

    def train_minibatch(self, *args, **kwargs):
        self.minibatches.append(len(kwargs["mask"]))
        return super().train_minibatch(*args, **kwargs)


def shaped_scores(scores, responses=None, model=None, **config):
    """Returns the scores of several batches as `step` changes them before they become rewards."""
    trainer = tiny.ppo(model, Spy, **config)
    queries, sampled, _ = tiny.batch()
    for part in scores:
        trainer.step(queries, responses or sampled, [torch.tensor(score) for score in part])
    return [part.tolist() for part in trainer.shaped]


def updates(**config):
    """Returns the weights after one step of plain gradient descent at rate 1, and the optimizer."""
    model = tiny.policy(dtype=torch.float64)
    optimizer = RecordingSGD(model, lr=config.pop("lr", 1.0))
    trainer = tiny.ppo(model, Spy, {"optimizer": optimizer}, **config)
    trainer.step(*tiny.batch(trainer.config.batch_size))
    return model, optimizer, trainer


# ------------------------------------------------------------ rejected settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1e-5}, r"learning_rate=-1e-05 must be a finite number above 0"),
        ({"learning_rate": math.nan}, r"learning_rate=nan"),
        ({"learning_rate": math.inf}, r"learning_rate=inf"),
        ({"cliprange": -0.2}, r"cliprange=-0.2"),
        ({"cliprange_value": 0}, r"cliprange_value=0"),
        ({"vf_coef": -0.1}, r"vf_coef=-0.1"),
        ({"ppo_epochs": 0}, r"ppo_epochs=0 must be a whole number of at least 1"),
        ({"steps": 0}, r"steps=0"),
        ({"compare_steps": 0}, r"compare_steps=0"),
        ({"batch_size": 4.5, "mini_batch_size": 1}, r"batch_size=4.5"),
        ({"gamma": 1.01}, r"gamma=1.01 must be a number from 0 to 1"),
        ({"lam": -0.1}, r"lam=-0.1"),
        ({"max_grad_norm": 0}, r"max_grad_norm=0"),
        ({"target": -6}, r"target=-6"),
        ({"horizon": 0}, r"horizon=0"),
        ({"target_kl": 0}, r"target_kl=0"),
        ({"ratio_threshold": -1}, r"ratio_threshold=-1"),
        ({"score_clip": 0}, r"score_clip=0"),
        ({"temperature": 0}, r"temperature=0"),
        ({"missing_eos_penalty": -1}, r"missing_eos_penalty=-1"),
        ({"init_kl_coef": -0.2}, r"init_kl_coef=-0.2"),
        ({"init_kl_coef": None}, r"init_kl_coef=None must be a finite number, 0 or above"),
        ({"seed": -1}, r"seed=-1"),
        ({"seed": 2**32}, r"seed=4294967296"),
        ({"save_steps": 1}, r"save_steps=1 needs an output_dir"),
        ({"output_dir": "out", "save_steps": 1, "save_total_limit": 0}, r"save_total_limit=0"),
        ({"batch_size": 6, "mini_batch_size": 4}, r"batch_size=6 does not split .* mini_batch_size 4"),
        ({"batch_size": 8, "mini_batch_size": 2, "gradient_accumulation_steps": 3}, r"2 x .* 3 = 6 responses"),
        ({"kl_penalty": "k4"}, r"kl_penalty='k4' is none of kl, .*full"),
        ({"log_with": "mlfow"}, r"'mlfow' is not a tracker.*mlflow.*wandb.*none"),
        ({"target": None}, r"adap_kl_ctrl needs target and horizon"),
        ({"horizon": None}, r"adap_kl_ctrl needs target and horizon"),
        ({"value_learning_rate": 0}, r"value_learning_rate=0 must be a finite number above 0"),
        ({"lr_warmup_steps": -1}, r"lr_warmup_steps=-1 must be a whole number, 0 or above"),
        ({"kl_gain": -1}, r"kl_gain=-1"),
        ({"max_kl_coef": 0}, r"max_kl_coef=0"),
        ({"max_kl_coef": 0.1}, r"init_kl_coef=0.2 is above max_kl_coef=0.1"),
        ({"max_kl_coef": 1.0, "adap_kl_ctrl": False}, r"max_kl_coef=1.0 .* adap_kl_ctrl=False"),
        ({"kl_gain": 2.0, "adap_kl_ctrl": False}, r"kl_gain=2.0 .* adap_kl_ctrl=False"),
        ({"use_score_norm": True}, r"set use_score_scaling=True as well"),
        ({"push_to_hub_if_best_kwargs": {"private": True}}, r"needs a repo_id"),
        ({"accelerator_kwargs": {"gradient_accumulation_steps": 2}}, r"divide the loss a second time"),
        ({"backward_batch_size": 3}, r"backward_batch_size=3 contradicts .* which make 1"),
        ({"world_size": 2, "global_batch_size": 256}, r"global_batch_size=256 contradicts .* which make 512"),
        ({"world_size": 2, "global_backward_batch_size": 1}, r"global_backward_batch_size=1 contradicts .* 2\."),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_changed_copies_are_checked():
    config = PPOConfig(batch_size=8, mini_batch_size=2)
    assert dataclasses.replace(config, learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(ValueError, match="learning_rate"):
        dataclasses.replace(config, learning_rate=-1.0)
    changed = dataclasses.replace(config, mini_batch_size=4, backward_batch_size=None)
    assert changed.backward_batch_size == 4


@pytest.mark.parametrize("old", ["forward_batch_size", "optimize_cuda_cache"])
def test_a_deprecated_field_warns_once_and_sets_its_successor(old, recwarn):
    new = {"forward_batch_size": "mini_batch_size", "optimize_cuda_cache": "optimize_device_cache"}[old]
    with pytest.warns(FutureWarning, match=rf"{old}=.* is now {new}="):
        config = PPOConfig(batch_size=8, **{old: 2})
    assert getattr(config, new) == 2
    assert getattr(config, old) is None
    recwarn.clear()
    assert getattr(dataclasses.replace(config, seed=1), new) == 2
    assert not recwarn


# -------------------------------------------------------------- filled at run time


@pytest.mark.parametrize(("kind", "is_peft"), [("gpt2", False), ("gpt2", True), ("t5", False)])
def test_facts_are_filled_in(kind, is_peft):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["c_attn"])} if is_peft else {}
    model = tiny.with_value_head(getattr(tiny, kind)(), **lora)
    config = PPOConfig(batch_size=8, mini_batch_size=2, gradient_accumulation_steps=2)
    assert (config.backward_batch_size, config.world_size, config.is_encoder_decoder) == (4, None, None)
    filled = PPOTrainer(config, model, tokenizer=tiny.tokenizer()).config
    assert (filled.is_encoder_decoder, filled.is_peft_model, filled.world_size) == (kind == "t5", is_peft, 1)
    assert (filled.backward_batch_size, filled.global_backward_batch_size, filled.global_batch_size) == (4, 4, 8)
    assert config.world_size is None


@pytest.mark.parametrize("claim", [{"is_encoder_decoder": True}, {"is_peft_model": True}, {"world_size": 2}])
def test_a_wrong_claim_about_the_run_is_refused(claim):
    (name,) = claim
    with pytest.raises(ValueError, match=rf"PPOConfig.{name}={claim[name]}, but it is"):
        tiny.ppo(**claim)


@pytest.mark.parametrize("claim", [{"global_batch_size": 8}, {"global_backward_batch_size": 8}])
def test_a_global_size_is_held_against_the_number_of_processes(claim):
    with pytest.raises(ValueError, match="contradicts the other sizes, which make 4"):
        tiny.ppo(**claim)


def test_a_changed_copy_computes_its_sizes_again():
    config = dataclasses.replace(PPOConfig(batch_size=8, mini_batch_size=2, world_size=2), mini_batch_size=4)
    assert (config.backward_batch_size, config.global_backward_batch_size) == (4, 8)
    assert dataclasses.replace(tiny.ppo().config, mini_batch_size=1).backward_batch_size == 1


# -------------------------------------------------------------- randomness and size of updates


def sampled_and_trained(seed):
    trainer = tiny.ppo(seed=seed, mini_batch_size=1, ppo_epochs=2)
    responses = trainer.generate(tiny.batch()[0], return_prompt=False, do_sample=True, max_new_tokens=6)
    trainer.step(*tiny.batch())
    return torch.nn.utils.rnn.pad_sequence(responses), tiny.weights(trainer.model)


def test_same_seed_same_bits_and_another_seed_others():
    responses, weights = sampled_and_trained(7)
    again, weights_again = sampled_and_trained(7)
    assert torch.equal(responses, again)
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    others, other_weights = sampled_and_trained(8)
    assert not torch.equal(responses, others)
    assert not all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_seed_orders_the_dataset():
    data = datasets.Dataset.from_dict({"input_ids": [[i] for i in range(4, 20)]})

    def order(seed):
        loader = tiny.ppo(arguments={"dataset": data}, seed=seed).dataloader
        return [int(ids) for batch in loader for ids in batch["input_ids"]]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("rate", [1e-3, 2e-2])
def test_first_step_of_adam_moves_by_the_learning_rate(rate):
    trainer = tiny.ppo(learning_rate=rate)
    before = tiny.weights(trainer.model)
    stats = trainer.step(*tiny.batch())
    assert max(tiny.moved(before, trainer.model).values()) == pytest.approx(rate, rel=1e-3)
    assert stats["ppo/learning_rate"] == rate


@pytest.mark.parametrize(
    ("sizes", "minibatches", "steps"),
    [
        ({"batch_size": 8, "mini_batch_size": 8}, [8], 1),
        ({"batch_size": 8, "mini_batch_size": 2}, [2] * 4, 4),
        ({"batch_size": 8, "mini_batch_size": 2, "gradient_accumulation_steps": 2}, [2] * 4, 2),
        ({"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 3}, [4] * 6, 6),
    ],
)
def test_sizes_make_minibatches_and_optimizer_steps(sizes, minibatches, steps):
    _, optimizer, trainer = updates(lr=1e-4, **sizes)
    assert trainer.minibatches == minibatches
    assert len(optimizer.norms) == steps


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (1, 8)])
def test_accumulation_is_the_large_batch_weighed_by_tokens(sizes):
    def weights(mini_batch_size, accumulation):
        trainer = tiny.ppo(
            tiny.policy(dtype=torch.float64),
            batch_size=8,
            mini_batch_size=mini_batch_size,
            gradient_accumulation_steps=accumulation,
            ppo_epochs=3,
        )
        stats = trainer.step(tiny.rows(8, 1, 6), tiny.rows(8, 1, 20, seed=1), [float(i) for i in range(8)])
        return tiny.weights(trainer.model), {k: v for k, v in stats.items() if k.startswith("ppo/loss")}

    (whole, whole_stats), (parts, part_stats) = weights(8, 1), weights(*sizes)
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=1e-7)
    assert part_stats == pytest.approx(whole_stats, rel=1e-7)


def test_max_grad_norm_limits_every_update():
    settings = {"lr": 1e-3, "batch_size": 4, "mini_batch_size": 1, "ppo_epochs": 2}
    _, free, _ = updates(**settings)
    _, clipped, _ = updates(max_grad_norm=0.05, **settings)
    assert len(clipped.norms) == 8
    assert min(free.norms) > 0.05
    assert clipped.norms == pytest.approx([0.05] * 8, rel=1e-4)


def test_reported_gradient_norm_is_that_of_the_update():
    model = tiny.policy(dtype=torch.float64)
    trainer = tiny.ppo(model, arguments={"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
    before = tiny.weights(model)
    stats = trainer.step(*tiny.batch())
    moves = [(value.detach() - before[name]).flatten() for name, value in model.named_parameters()]
    assert float(torch.cat(moves).norm()) == pytest.approx(stats["ppo/grad_norm"], rel=1e-9)


# -------------------------------------------------------------- KL


def kl_step(**config):
    """Runs one step of a model against a different one in float64; returns trainer, statistics and data."""
    trainer = tiny.ppo(
        tiny.policy(dtype=torch.float64), arguments={"ref_model": tiny.policy(seed=1, dtype=torch.float64)}, **config
    )
    data = tiny.batch()
    return trainer, trainer.step(*data), data


@pytest.mark.parametrize(
    ("kl_over_target", "factor"), [(1.1, 1 + 0.1 * 4 / 50), (9.0, 1 + 0.2 * 4 / 50), (0.3, 1 - 0.2 * 4 / 50)]
)
def test_adaptive_coefficient_moves_by_clipped_error_times_batch_over_horizon(kl_over_target, factor):
    kl = kl_step()[1]["objective/kl"]
    trainer, stats, _ = kl_step(adap_kl_ctrl=True, init_kl_coef=0.3, target=kl / kl_over_target, horizon=50)
    assert stats["objective/kl_coef"] == 0.3
    assert trainer.kl_ctl.value == pytest.approx(0.3 * factor, rel=1e-9)


def test_fixed_coefficient_stays():
    trainer, _, _ = kl_step(adap_kl_ctrl=False, init_kl_coef=0.3, target=None, horizon=None)
    assert trainer.kl_ctl.value == 0.3


ESTIMATES = {
    "kl": lambda p, q: p - q,
    "k1": lambda p, q: p - q,
    "abs": lambda p, q: (p - q).abs(),
    "mse": lambda p, q: (p - q).square() / 2,
    "k2": lambda p, q: (p - q).square() / 2,
    "k3": lambda p, q: (q - p).exp() - 1 - (q - p),
}


@pytest.mark.parametrize("kl_penalty", [*ESTIMATES, "full"])
def test_kl_penalty(kl_penalty):
    _, stats, (queries, responses, _) = kl_step(kl_penalty=kl_penalty, init_kl_coef=0.3)
    policy, reference = tiny.gpt2(0, torch.float64), tiny.gpt2(1, torch.float64)
    per_token = []
    for query, response in zip(queries, responses, strict=True):
        p, q = (tiny.logprobs_of(model, query, response) for model in (policy, reference))
        if kl_penalty == "full":
            per_token.append((p.exp() * (p - q)).sum(-1))
        else:
            taken = [x.gather(1, response[:, None])[:, 0] for x in (p, q)]
            per_token.append(ESTIMATES[kl_penalty](*taken))
    expected = torch.stack([row.sum() for row in per_token])
    assert stats["objective/kl"] == pytest.approx(float(expected.mean()), rel=1e-6)
    torch.testing.assert_close(stats["objective/kl_dist"].double(), expected, rtol=1e-6, atol=1e-6)
    assert stats["ppo/mean_non_score_reward"] == pytest.approx(-0.3 * float(torch.cat(per_token).mean()), rel=1e-6)


# -------------------------------------------------------------- advantages


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (0.5, 0.5, [0.13125, 0.325, 1.0]),  # A = 0.7, then -0.05 + 0.7 / 4 = 0.125, then 0 + 0.125 / 4
        (1.0, 0.0, [0.2, 0.3, 1.0]),  # one step ahead: the next value
        (1.0, 1.0, [1.0, 1.0, 1.0]),  # all the way: the return itself
        (0.5, 1.0, [0.25, 0.5, 1.0]),
    ],
)
def test_gamma_and_lam(gamma, lam, expected):
    values, rewards = torch.tensor([[0.1, 0.2, 0.3, 9.0]]), torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    _, _, returns = tiny.ppo(gamma=gamma, lam=lam).compute_advantages(values, rewards, mask)
    torch.testing.assert_close(returns, torch.tensor([[*expected, 0.0]]))


@pytest.mark.parametrize(("gamma", "lam"), [(0.0, 0.95), (1.0, 1.0)])
def test_gamma_reaches_the_step(gamma, lam):
    queries, responses, scores = tiny.batch()
    stats = tiny.ppo(gamma=gamma, lam=lam).step(queries, responses, scores)
    lengths = [len(row) for row in responses]
    # Without KL the score is the only reward: it is the return of the last token only, or of every token.
    reached = [1 if gamma == 0 else length for length in lengths]
    total = sum(float(score) * n for score, n in zip(scores, reached, strict=True))
    assert stats["ppo/returns/mean"] == pytest.approx(total / sum(lengths), rel=1e-5)


@pytest.mark.parametrize("is_whitened", [False, True])
def test_whiten_rewards_scales_to_variance_one_keeps_the_mean_and_the_outside(is_whitened):
    trainer = tiny.ppo(gamma=0.0, whiten_rewards=is_whitened)  # the return then equals the reward
    rewards, mask = torch.tensor([[1.0, 3.0, 0.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    _, _, returns = trainer.compute_advantages(torch.zeros(2, 3), rewards, mask)
    deviation = (8 / 3) ** 0.5 if is_whitened else 1.0  # of 1, 3, 5, whose mean is 3
    torch.testing.assert_close(returns, torch.where(mask.bool(), (rewards - 3) / deviation + 3, 0.0))


@pytest.mark.parametrize("is_whitened", [False, True])
def test_whiten_rewards_reaches_the_step(is_whitened):
    stats = tiny.ppo(gamma=0.0, whiten_rewards=is_whitened).step(*tiny.batch())
    assert (abs(stats["ppo/returns/var"] - 1) < 1e-3) == is_whitened


# -------------------------------------------------------------- losses


def loss_of(logratio=0.0, vpred=0.0, advantage=1.0, returns=0.0, **config):
    """Returns policy and value loss of one token with old log-probability -1 and old value 0, and their gradients."""
    logprobs = torch.tensor([[-1.0 + logratio]], requires_grad=True)
    vpreds = torch.tensor([[vpred]], requires_grad=True)
    policy_loss, value_loss, stats = tiny.ppo(**config).loss(
        old_logprobs=torch.tensor([[-1.0]]),
        values=torch.zeros(1, 1),
        logits=torch.zeros(1, 1, 5),
        vpreds=vpreds,
        logprobs=logprobs,
        mask=torch.ones(1, 1),
        advantages=torch.tensor([[advantage]]),
        returns=torch.tensor([[returns]]),
    )
    (policy_loss + value_loss).backward()
    return float(policy_loss), float(value_loss), float(logprobs.grad), float(vpreds.grad), stats


@pytest.mark.parametrize(
    ("cliprange", "ratio", "advantage", "loss", "gradient"),
    [
        (0.2, 1.5, 1.0, -1.2, 0.0),
        (0.6, 1.5, 1.0, -1.5, -1.5),
        (0.2, 0.5, -1.0, 0.8, 0.0),
        (0.6, 0.5, -1.0, 0.5, 0.5),
        (0.2, 1.5, -1.0, 1.5, 1.5),
    ],
)
def test_cliprange_stops_the_gradient(cliprange, ratio, advantage, loss, gradient):
    terms = loss_of(math.log(ratio), advantage=advantage, cliprange=cliprange)
    assert terms[0] == pytest.approx(loss, rel=1e-5)
    assert terms[2] == pytest.approx(gradient, rel=1e-5)
    assert terms[4]["policy/clipfrac"].value == (gradient == 0)


@pytest.mark.parametrize(("cliprange_value", "loss", "gradient"), [(0.2, 0.32, 0.0), (0.9, 0.125, -0.5)])
def test_cliprange_value_stops_the_gradient(cliprange_value, loss, gradient):
    terms = loss_of(vpred=0.5, returns=1.0, cliprange_value=cliprange_value, vf_coef=1.0)
    assert terms[1] == pytest.approx(loss)
    assert terms[3] == pytest.approx(gradient)
    assert terms[4]["val/clipfrac"].value == (gradient == 0)


@pytest.mark.parametrize("name", ["cliprange", "cliprange_value"])
def test_nothing_is_clipped_within_a_huge_range(name):
    key = {"cliprange": "ppo/policy/clipfrac", "cliprange_value": "ppo/val/clipfrac"}[name]

    def clipped(limit):
        model = tiny.policy()
        settings = {"ppo_epochs": 4, "learning_rate": 1e-2, "vf_coef": 1.0, "ratio_threshold": 1e9}
        return tiny.ppo(model, **settings, **{name: limit}).step(*tiny.batch())[key]

    assert clipped(1e-3) > 0.1
    assert clipped(1e6) == 0


def test_vf_coef_scales_the_update_of_the_value_head():
    def move(vf_coef):
        before = tiny.weights(tiny.policy(dtype=torch.float64))
        model, _, _ = updates(vf_coef=vf_coef)
        return model.v_head.summary.weight - before["v_head.summary.weight"]

    assert not move(0.0).any()
    torch.testing.assert_close(move(0.2), 2 * move(0.1))
    assert move(0.1).any()


# -------------------------------------------------------------- early stopping


def test_early_stopping_ends_the_updates_of_a_step():
    settings = {"ppo_epochs": 6, "lr": 0.05}
    _, never, _ = updates(early_stopping=True, target_kl=1e6, **settings)
    _, off, _ = updates(early_stopping=False, target_kl=1e-9, **settings)
    _, stopped, _ = updates(early_stopping=True, target_kl=1e-9, **settings)
    assert (len(never.norms), len(off.norms)) == (6, 6)
    assert len(stopped.norms) == 1  # before the first update the policy has not moved


def direct_minibatch(trainer, logratio):
    """Runs train_minibatch on two tokens with the given log-ratio, and a gradient that reaches the value head."""
    reach = trainer.model.v_head.summary.bias.sum()
    column = {"values": torch.zeros(1, 2), "mask": torch.ones(1, 2), "advantages": torch.tensor([[-1.0, 1.0]])}
    return trainer.train_minibatch(
        old_logprobs=torch.full((1, 2), -3.0),
        logprobs=torch.full((1, 2), -3.0 + logratio) + 0.0 * reach,
        logits=None,
        vpreds=torch.zeros(1, 2) + reach,
        returns=torch.ones(1, 2),
        **column,
    )


@pytest.mark.parametrize("logratio", [-2.0, 2.0])
def test_early_stopping_sees_moves_in_both_directions(logratio):
    class Moved(PPOTrainer):
        def batched_forward_pass(self, *args, **kwargs):
            logprobs, logits, values, mask = super().batched_forward_pass(*args, **kwargs)
            return logprobs + logratio * torch.is_grad_enabled(), logits, values, mask

    # The signed KL of log-ratio +2 is -2 nats, far below any target.
    for target, is_stopped in ((1.3, True), (1.4, False)):  # 2^2 / 2 = 2 nats are above 1.5 x 1.3 and below 1.5 x 1.4
        trainer = tiny.ppo(kind=Moved, early_stopping=True, target_kl=target)
        before = tiny.weights(trainer.model)
        assert trainer.step(*tiny.batch())["ppo/policy/early_stopped"] == is_stopped
        assert ("v_head.summary.bias" in tiny.moved(before, trainer.model)) != is_stopped


def test_a_ratio_above_the_threshold_leaves_the_weights_alone_momentum_included():
    trainer = tiny.ppo(ratio_threshold=5.0)
    trainer.step(*tiny.batch())  # Adam has momentum now
    before = tiny.weights(trainer.model)
    with pytest.warns(UserWarning, match=r"above ratio_threshold=5.0: it is left out"):
        stats = direct_minibatch(trainer, 2.0)
    assert stats["policy/skipped"].value == 1
    assert tiny.moved(before, trainer.model) == {}
    assert direct_minibatch(trainer, 1.0)["policy/skipped"].value == 0
    assert "v_head.summary.bias" in tiny.moved(before, trainer.model)


@pytest.mark.parametrize("order", [(2.0, 1.0), (1.0, 2.0)])
def test_a_minibatch_that_is_left_out_adds_nothing_to_the_step_of_another(order):
    alone, beside = tiny.ppo(ratio_threshold=5.0), tiny.ppo(ratio_threshold=5.0)
    direct_minibatch(alone, 1.0)
    for is_last, logratio in enumerate(order):
        with beside.accelerator.part_of_step(beside.optimizer_step.model, is_last=bool(is_last)):
            stats = direct_minibatch(beside, logratio)
        assert ("grad_norm" in stats) == is_last
    assert tiny.moved(tiny.weights(alone.model), beside.model) == {}


@pytest.mark.parametrize("flag", [False, True])
def test_optimize_device_cache_gives_memory_back_once_a_step(flag, monkeypatch):
    calls = []
    monkeypatch.setattr(trainer_module, "clear_device_cache", lambda: calls.append(1))
    trainer = tiny.ppo(optimize_device_cache=flag)
    for _ in range(2):
        trainer.step(*tiny.batch())
    assert len(calls) == 2 * flag


# -------------------------------------------------------------- scores


def test_scores_are_taken_as_they_are_by_default():
    assert shaped_scores([[1.0, 2.0, 3.0, 60.0]]) == [[1.0, 2.0, 3.0, 60.0]]


def test_use_score_scaling_divides_by_the_deviation_of_all_scores_so_far():
    batches = [[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 4.0, 4.0]]
    first, second = shaped_scores(batches, use_score_scaling=True)
    deviations = [torch.tensor(batches[0]).std(), torch.tensor(batches[0] + batches[1]).std()]
    assert first == pytest.approx([x / float(deviations[0]) for x in batches[0]], rel=1e-5)
    assert second == pytest.approx([x / float(deviations[1]) for x in batches[1]], rel=1e-5)


def test_use_score_norm_also_subtracts_the_mean():
    (scores,) = shaped_scores([[1.0, 2.0, 3.0, 6.0]], use_score_scaling=True, use_score_norm=True)
    deviation = (14 / 3) ** 0.5  # the sample 1, 2, 3, 6 has mean 3
    assert scores == pytest.approx([-2 / deviation, -1 / deviation, 0, 3 / deviation], rel=1e-5)


def test_score_clip_comes_after_scaling():
    assert shaped_scores([[-9.0, 0.5, 1.0, 9.0]], score_clip=0.75) == [[-0.75, 0.5, 0.75, 0.75]]
    (scores,) = shaped_scores([[1.0, 2.0, 3.0, 6.0]], use_score_scaling=True, score_clip=1.0)
    assert scores == pytest.approx([1 / (14 / 3) ** 0.5, 2 / (14 / 3) ** 0.5, 1.0, 1.0], rel=1e-5)


def test_statistics_hold_the_scores_as_given():
    trainer = tiny.ppo(use_score_scaling=True, score_clip=0.5)
    queries, responses, _ = tiny.batch()
    stats = trainer.step(queries, responses, [1.0, 2.0, 3.0, 6.0])
    assert stats["ppo/mean_scores"] == pytest.approx(3.0)
    assert stats["ppo/std_scores"] == pytest.approx(3.5**0.5)


def test_an_infinite_ratio_is_skipped_like_any_that_is_too_large():
    trainer = tiny.ppo(ratio_threshold=5.0)
    before = tiny.weights(trainer.model)
    old = torch.full((2, 3), -500.0)
    new, values = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    ones = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="left out"):
        trainer.train_minibatch(old, ones, new, None, values, ones, ones, ones)
    assert not tiny.moved(before, trainer.model)


def test_missing_eos_penalty_takes_the_end_token_that_generate_was_given():
    queries, _, scores = tiny.batch()
    trainer = tiny.ppo(missing_eos_penalty=2.0)
    token = int(tiny.rows(1, 1, 1)[0][0])
    trainer.generate(queries, do_sample=True, max_new_tokens=2, eos_token_id=token)
    responses = [torch.tensor([5, token]) for _ in range(4)]
    is_ended, given = ended(responses, trainer.sampler.eos_ids), torch.stack(scores)
    torch.testing.assert_close(shaped(given, is_ended, trainer.config, trainer.running), given)


def test_missing_eos_penalty_is_subtracted_where_no_end_token_stands_last():
    responses = [torch.tensor([5, tiny.EOS]), torch.tensor([tiny.EOS, 5]), torch.tensor([5]), torch.tensor([tiny.EOS])]
    (scores,) = shaped_scores([[1.0, 1.0, 2.0, 2.0]], responses, missing_eos_penalty=0.5)
    assert scores == [1.0, 0.5, 1.5, 2.0]


def test_any_of_several_end_tokens_ends_a_response():
    model = tiny.policy()
    model.generation_config.eos_token_id = [tiny.EOS, 9]
    responses = [torch.tensor([5, tiny.EOS]), torch.tensor([5, 9]), torch.tensor([5, 5]), torch.tensor([9, 5])]
    (scores,) = shaped_scores([[1.0] * 4], responses, model, missing_eos_penalty=1.0)
    assert scores == [1.0, 1.0, 0.0, 0.0]


# -------------------------------------------------------------- temperature


@pytest.mark.parametrize("source", ["config", "generate"])
def test_logprobs_are_taken_at_the_sampling_temperature(source):
    trainer = tiny.ppo(tiny.policy(dtype=torch.float64), temperature=0.7 if source == "config" else None)
    queries, responses, scores = tiny.batch()
    if source == "generate":
        trainer.generate(queries, do_sample=True, temperature=0.7, max_new_tokens=2)
    stats = trainer.step(queries, responses, scores)
    model = tiny.gpt2(0, torch.float64)
    expected = [tiny.taken_of(model, q, r, 0.7) for q, r in zip(queries, responses, strict=True)]
    torch.testing.assert_close(stats["objective/logprobs"].double(), torch.cat(expected))


def test_two_temperatures_are_refused():
    with pytest.raises(ValueError, match=r"temperature 0.9, but .* at 0.7"):
        tiny.ppo(temperature=0.7).generate(tiny.batch()[0], do_sample=True, temperature=0.9, max_new_tokens=2)


def test_scripts_read_it_with_the_parser_of_transformers():
    (config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(["--batch_size", "8", "--mini_batch_size", "4"])
    assert (config.batch_size, config.mini_batch_size, config.target) == (8, 4, 6)
