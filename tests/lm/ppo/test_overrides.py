"""PPOTrainer subclasses written against the documentation of early 2024 train, with the trainer's own results."""

import math
import warnings

import pytest
import torch
from peft import LoraConfig
from tests.lm import tiny
from torch import Tensor

from trimtab_lm import PPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:step .* health/", "ignore:step 1. health/other_reference")

DOUBLE = torch.float64


class ForwardOf2024(PPOTrainer):
    """Runs the given model, shifts the labels itself and returns columns over query and response."""

    def batched_forward_pass(self, model, queries, responses, model_inputs, return_logits=False, response_masks=None):
        columns = []
        size = self.config.mini_batch_size
        model.eval()
        for i in range(math.ceil(len(queries) / size)):
            span = slice(i * size, (i + 1) * size)
            inputs = {name: value[span] for name, value in model_inputs.items()}
            logits, _, values = model(**inputs)
            decoder = "decoder_" if self.is_encoder_decoder else ""
            ids, attention = inputs[decoder + "input_ids"], inputs[decoder + "attention_mask"]
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            mask = torch.zeros_like(attention)
            mask[:, :-1] = attention[:, 1:]
            for j, (query, response) in enumerate(zip(queries[span], responses[span], strict=True)):
                start = 0 if self.is_encoder_decoder else len(query) - 1
                mask[j, :start] = 0
                mask[j, start + len(response) :] = 0
                if response_masks is not None:
                    mask[j, start : start + len(response)] *= response_masks[i * size + j]
            columns.append((logprobs, logits[:, :-1] if return_logits else None, values[:, :-1], mask[:, :-1]))
        logprobs, logits, values, mask = zip(*columns, strict=True)
        return torch.cat(logprobs), torch.cat(logits) if return_logits else None, torch.cat(values), torch.cat(mask)


class RewardsOf2024(PPOTrainer):
    """Computes rewards row by row, with the KL of `_kl_penalty`, and only the four documented arguments."""

    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        rewards, non_score_rewards, kls = [], [], []
        for score, logprob, ref_logprob, mask in zip(scores, logprobs, ref_logprobs, masks, strict=True):
            kl = self._kl_penalty(logprob, ref_logprob)
            non_score_reward = -self.kl_ctl.value * kl
            reward = non_score_reward.clone()
            reward[mask.nonzero()[-1]] += score
            kls.append(kl)
            non_score_rewards.append(non_score_reward)
            rewards.append(reward)
        return torch.stack(rewards), torch.stack(non_score_rewards), torch.stack(kls)


class RewardsOfEarly2024(RewardsOf2024):
    """Returns no KL, as in the release before."""

    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        return super().compute_rewards(scores, logprobs, ref_logprobs, masks)[:2]


class AdvantagesOf2024(PPOTrainer):
    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor):
        values, rewards = values * mask, rewards * mask
        last, advantages = torch.zeros_like(values[:, 0]), []
        for t in reversed(range(values.shape[1])):
            following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
            last = (
                rewards[:, t]
                + self.config.gamma * following
                - values[:, t]
                + self.config.gamma * self.config.lam * last
            )
            advantages.append(last)
        raw = torch.stack(advantages[::-1], 1)
        at = raw[mask.bool()]
        return values, (raw - at.mean()) * (at.var(correction=0) + 1e-8).rsqrt(), raw + values


def mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


class LossOf2024(PPOTrainer):
    """Returns tensors, one of them with a number per token, and reads logits over the whole vocabulary."""

    is_nested = False

    def loss(self, old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns):
        reach = self.config.cliprange_value
        clipped = torch.max(torch.min(vpreds, values + reach), values - reach)
        value_loss = 0.5 * mean(torch.max((vpreds - returns) ** 2, (clipped - returns) ** 2), mask)
        ratio = torch.exp(logprobs - old_logprobs)
        clip = self.config.cliprange
        policy_loss = mean(torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)), mask)
        p = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
        total = policy_loss + self.config.vf_coef * value_loss
        nested = {
            "loss": {"policy": policy_loss.detach(), "value": value_loss.detach(), "total": total.detach()},
            "policy": {
                "entropy": mean(entropy, mask).detach(),
                "approxkl": 0.5 * mean((logprobs - old_logprobs) ** 2, mask).detach(),
                "policykl": mean(old_logprobs - logprobs, mask).detach(),
                "ratio": ratio.detach(),
            },
            "val": {"vpred": float(mean(vpreds, mask).detach()), "error": mean((vpreds - returns) ** 2, mask).detach()},
        }
        flat = {f"{group}/{name}": value for group, names in nested.items() for name, value in names.items()}
        return policy_loss, self.config.vf_coef * value_loss, nested if self.is_nested else flat


class NestedLossOf2024(LossOf2024):
    is_nested = True


class MinibatchOf2024(PPOTrainer):
    """Takes each optimizer step itself, as accelerate does under gradient accumulation."""

    def train_minibatch(self, old_logprobs, values, logprobs, logits, vpreds, mask, advantages, returns):
        self.model.train()
        policy_loss, value_loss, train_stats = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        self.accelerator.backward(policy_loss + value_loss)
        if self.config.max_grad_norm is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model_params, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return train_stats


class EverythingOf2024(ForwardOf2024, RewardsOf2024, AdvantagesOf2024, LossOf2024, MinibatchOf2024):
    pass


class Delegating(PPOTrainer):
    def batched_forward_pass(self, *args, **kwargs):
        return super().batched_forward_pass(*args, **kwargs)


def policy(kind: str):
    if kind == "encoder-decoder":
        return tiny.with_value_head(tiny.t5(0, DOUBLE, initializer_factor=1.0))
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    base = tiny.gpt2(0, DOUBLE, **rates)
    if kind != "adapter":
        return tiny.with_value_head(base)
    lora = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return tiny.with_value_head(base, peft_config=lora).to(DOUBLE)


def two_steps(trainer_class, kind="plain", masks=None, same_length=False, **config):
    """Returns the statistics of both steps, and the weights after them."""
    extra = {"critic": {"value_model": tiny.policy(1, DOUBLE)}, "bare reference": {"ref_model": tiny.gpt2(1, DOUBLE)}}
    extra["wrapped reference"] = {"ref_model": tiny.policy(1, DOUBLE)}
    model = policy(kind).train()
    sizes = {"batch_size": 8, "mini_batch_size": 2, "ppo_epochs": 2, "learning_rate": 1e-2}
    trainer = tiny.ppo(model, trainer_class, extra.get(kind, {}), **sizes | config)
    history = []
    for step in range(2):
        queries, responses, scores = tiny.batch(8, seed=step)
        if same_length:
            responses = tiny.rows(8, 4, 4, seed=step)
        chosen = None
        if masks:
            chosen = [(torch.arange(len(row)) % 3 != 1).long() for row in responses]
        history.append(trainer.step(queries, responses, scores, chosen))
    module = trainer.accelerator.unwrap_model(trainer.actor_critic)
    return history, tiny.weights(module)


def assert_same(one, other):
    (stats, weights), (expected, expected_weights) = one, other
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-7, msg=name)
    for mine, theirs in zip(stats, expected, strict=True):
        for name in theirs.keys() & mine.keys():
            if name.startswith(("time/", "health/")):
                continue
            torch.testing.assert_close(
                torch.as_tensor(mine[name], dtype=DOUBLE),
                torch.as_tensor(theirs[name], dtype=DOUBLE),
                rtol=1e-5,
                atol=1e-7,
                msg=name,
            )


@pytest.mark.parametrize(
    "kind", ["plain", "adapter", "critic", "bare reference", "wrapped reference", "encoder-decoder"]
)
@pytest.mark.parametrize("masks", [False, True])
def test_a_forward_pass_of_2024_gives_the_statistics_and_weights_of_the_built_in(kind, masks):
    replaced, built_in = (two_steps(one, kind, masks=masks) for one in (ForwardOf2024, PPOTrainer))
    assert replaced[0][1].keys() == built_in[0][1].keys()
    assert_same(replaced, built_in)


@pytest.mark.parametrize(
    ("trainer_class", "config"),
    [
        (ForwardOf2024, {"kl_penalty": "full", "init_kl_coef": 0.5}),
        (ForwardOf2024, {"gradient_accumulation_steps": 2, "whiten_rewards": True, "early_stopping": True}),
        (Delegating, {}),
        (Delegating, {"kl_penalty": "full"}),
        (RewardsOf2024, {}),
        (RewardsOf2024, {"kl_penalty": "full"}),
        (RewardsOfEarly2024, {"kl_penalty": "mse"}),
        (RewardsOfEarly2024, {"kl_penalty": "full"}),
        (AdvantagesOf2024, {}),
        (LossOf2024, {}),
        (NestedLossOf2024, {"early_stopping": True, "target_kl": 0.01}),
        (MinibatchOf2024, {"max_grad_norm": 0.5}),
        (MinibatchOf2024, {"gradient_accumulation_steps": 2, "same_length": True}),
        (EverythingOf2024, {"kl_penalty": "full"}),
    ],
)
def test_a_method_of_2024_gives_the_statistics_and_weights_of_the_built_in(trainer_class, config):
    kind = "plain"
    replaced, built_in = (two_steps(one, kind, **config) for one in (trainer_class, PPOTrainer))
    assert_same(replaced, built_in)
    assert {name for name in built_in[0][1] if name not in replaced[0][1]} <= {
        "ppo/grad_norm",
        "ppo/policy/skipped",
        "ppo/policy/early_stopped",
        "ppo/policy/clipfrac",
        "ppo/val/clipfrac",
    }


def test_early_stopping_ends_the_updates_of_a_train_minibatch_of_2024():
    calls = []

    class Counting(MinibatchOf2024):
        def train_minibatch(self, *args, **kwargs):
            calls.append(1)
            return super().train_minibatch(*args, **kwargs)

    two_steps(Counting, early_stopping=True, target_kl=100.0)
    assert len(calls) == 16
    calls.clear()
    two_steps(Counting, early_stopping=True, target_kl=1e-9)
    assert len(calls) == 2  # in each step the first minibatch moves the policy, as the second one shows


@pytest.mark.parametrize("kind", ["plain", "adapter", "critic", "bare reference", "wrapped reference"])
def test_a_forward_pass_is_given_models_that_are_called_like_a_model_with_a_value_head(kind):
    calls = []

    class Watching(ForwardOf2024):
        def batched_forward_pass(self, model, queries, responses, model_inputs, **options):
            logits, loss, values = model(**model_inputs, return_dict=True, use_cache=False)
            same = model(model_inputs["input_ids"], attention_mask=model_inputs["attention_mask"])[0]
            assert torch.equal(same, logits)
            assert (logits.shape[:2], loss) == (values.shape, None)
            assert isinstance(model, torch.nn.Module)
            calls.append((torch.is_grad_enabled(), len(queries), logits.detach()[0, 0]))
            return super().batched_forward_pass(model, queries, responses, model_inputs, **options)

    two_steps(Watching, kind, ppo_epochs=1)
    assert [gradients for gradients, _, _ in calls[:12]] == [False] * 8 + [True] * 4
    assert {rows for _, rows, _ in calls} == {2}
    (_, _, of_policy), (_, _, of_reference) = calls[0], calls[4]
    assert torch.equal(of_policy, of_reference) == (kind in ("plain", "critic"))


def test_step_statistics_of_2024_take_the_documented_data():
    class Recording(PPOTrainer):
        def record_step_stats(self, kl_coef: float, **data):
            mask, kls = data.pop("masks"), data.pop("kls")
            kl_list = (kls * mask).sum(-1)
            lengths = torch.tensor([len(row) for row in data["queries"]], dtype=torch.float)
            stats = {
                "objective/kl": kl_list.mean(),
                "objective/kl_dist": kl_list,
                "objective/kl_coef": kl_coef,
                "objective/logprobs": data["logprobs"],
                "objective/ref_logprobs": data["ref_logprobs"],
                "objective/entropy": (-data["logprobs"] * mask).sum(-1).mean(),
                "ppo/mean_non_score_reward": mean(data["non_score_reward"], mask),
                "ppo/mean_scores": data["scores"].mean(),
                "ppo/std_scores": data["scores"].std(),
                "tokens/queries_dist": lengths.numpy(),
                "tokens/responses_len_mean": sum(map(len, data["responses"])) / len(data["responses"]),
            }
            for name, value in data["train_stats"].items():
                stats[f"ppo/{name}"] = torch.mean(value, axis=0)
            stats["ppo/val/var_explained"] = 1 - stats["ppo/val/error"] / stats["ppo/returns/var"]
            return stats

    recorded, expected = two_steps(Recording), two_steps(PPOTrainer)
    for stats, theirs in zip(recorded[0], expected[0], strict=True):
        for name in (
            "objective/kl",
            "objective/kl_coef",
            "ppo/mean_scores",
            "ppo/mean_non_score_reward",
            "ppo/loss/policy",
            "ppo/policy/ratio",
            "ppo/returns/var",
            "ppo/val/error",
            "ppo/learning_rate",
            "tokens/responses_len_mean",
        ):
            assert stats[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name
            assert isinstance(stats[name], float), name
        for name in ("objective/kl_dist", "ppo/policy/advantages", "tokens/queries_dist"):
            torch.testing.assert_close(stats[name], theirs[name])
    assert_same((recorded[0], recorded[1]), (recorded[0], expected[1]))


def test_a_forward_pass_without_logits_trains_without_an_entropy():
    class Silent(ForwardOf2024):
        def batched_forward_pass(self, *args, **kwargs):
            logprobs, _, values, mask = super().batched_forward_pass(*args, **kwargs)
            return logprobs, None, values, mask

    (history, weights), (expected, expected_weights) = two_steps(Silent), two_steps(PPOTrainer)
    assert_same((history, weights), (expected, expected_weights))
    missing = {name for name in expected[1].keys() - history[1].keys() if not name.startswith("health/")}
    assert missing == {"objective/entropy", "objective/surprise", "ppo/policy/entropy"}


def test_logits_of_some_minibatches_alone_give_no_entropy_of_the_batch():
    class Halting(ForwardOf2024):
        passes = 0

        def batched_forward_pass(self, *args, **kwargs):
            self.passes += 1
            logprobs, logits, values, mask = super().batched_forward_pass(*args, **kwargs)
            return logprobs, logits if self.passes % 2 else None, values, mask

    (history, weights), (expected, expected_weights) = two_steps(Halting), two_steps(PPOTrainer)
    missing = {name for name in expected[1].keys() - history[1].keys() if not name.startswith("health/")}
    assert missing == {"objective/entropy", "objective/surprise"}
    torch.testing.assert_close(weights, expected_weights)


def test_masks_that_change_between_rollout_and_update_are_refused():
    class Changing(ForwardOf2024):
        def batched_forward_pass(self, *args, **kwargs):
            logprobs, logits, values, mask = super().batched_forward_pass(*args, **kwargs)
            if torch.is_grad_enabled():
                mask[0, mask[0].nonzero()[0]] = 0
            return logprobs, logits, values, mask

    with pytest.raises(ValueError, match=r"batched_forward_pass counts .* tokens in the rows of a minibatch"):
        two_steps(Changing)


def test_the_built_in_pass_computes_no_logits():
    """The head applies to the N tokens with a loss, in chunks: no forward pass returns a tensor [b, T, V]."""
    trainer = tiny.ppo()
    asked = []
    for model in (trainer.bare, trainer.reference_policy.actor):
        model.register_forward_pre_hook(lambda _, args, kwargs: asked.append(kwargs), with_kwargs=True)
    with warnings.catch_warnings(action="ignore"):
        trainer.step(*tiny.batch())
    assert len(asked) == 3
    assert not any(options["return_logits"] for options in asked)


def test_a_variant_in_the_folder_of_the_trainer_gets_the_logits_that_its_loss_reads():
    seen = []

    class Variant(PPOTrainer):
        def loss(self, old_logprobs, values, logits, *rest):
            seen.append(logits is not None)
            return super().loss(old_logprobs, values, logits, *rest)

    Variant.loss.__module__ = f"{PPOTrainer.__module__.rpartition('.')[0]}.variant"
    two_steps(Variant)
    assert seen
    assert all(seen)
