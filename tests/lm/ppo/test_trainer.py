"""PPOTrainer: each argument, each method, and the loop on top of them."""

import math
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny

from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean
from trimtab_lm import (
    PPOTrainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:step .* health/")

# The model may sample this pad token, and then it cannot be distinguished from padding.
PADS_WITH_EOS = {"tokenizer": tiny.tokenizer(pad_token="</s>")}
GREEDY = {"do_sample": False, "max_new_tokens": 6}
SAMPLED = {"do_sample": True, "max_new_tokens": 6}
DOUBLE = torch.float64


def lora_policy(dtype=torch.float32, seed=0, **options):
    """Returns a GPT-2 with an adapter that already has an effect, and a value head."""
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, **options)
    return tiny.with_value_head(tiny.gpt2(seed, dtype), seed, peft_config=config).to(dtype)


class FirstMinibatch(PPOTrainer):
    """Keeps the arguments of a step's first minibatch, and counts the minibatches."""

    first = None
    calls = 0

    def train_minibatch(self, *args, **kwargs):
        self.calls += 1
        self.first = self.first or kwargs
        return super().train_minibatch(*args, **kwargs)


def greedy(model, query, count=6):
    """Decodes greedily, token by token, up to and including the end token."""
    ids = query
    while len(ids) < len(query) + count and not (len(ids) > len(query) and ids[-1] == tiny.EOS):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids[None]).logits[0, -1].argmax()[None]])
    return ids[len(query) :]


def toy_data(count=8, **columns):
    return Dataset.from_dict({"query": [letter * 3 for letter in "abcdefgh"[:count]], **columns}).map(
        lambda row: {"input_ids": tiny.tokenizer()(row["query"])["input_ids"]}
    )


# -------------------------------------------------------------- constructor arguments


def test_config_defaults_to_the_documented_one():
    trainer = PPOTrainer(model=tiny.policy(), tokenizer=tiny.tokenizer())
    assert (trainer.config.batch_size, trainer.config.learning_rate, trainer.config.seed) == (256, 1e-5, 0)


def test_constructor_leaves_global_random_numbers_and_the_callers_objects_alone():
    model, tokenizer = tiny.policy(), tiny.tokenizer()
    model.train()
    np_state, state, weights = np.random.get_state()[1].copy(), torch.get_rng_state(), tiny.weights(model)
    side = (tokenizer.padding_side, tokenizer.truncation_side)
    tiny.ppo(model, arguments={"tokenizer": tokenizer}, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == np_state).all()
    assert tiny.moved(weights, model) == {}
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (tokenizer.padding_side, tokenizer.truncation_side) == side


def test_without_ref_model_the_reference_is_the_model_as_it_was():
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), learning_rate=1e-2)
    queries, responses, scores = tiny.batch()
    with warnings.catch_warnings(action="error"):
        first = trainer.step(queries, responses, scores)
    assert first["objective/kl"] == 0
    second = trainer.step(queries, responses, scores)
    start = torch.cat([tiny.taken_of(tiny.gpt2(0, DOUBLE), q, r) for q, r in zip(queries, responses, strict=True)])
    torch.testing.assert_close(second["objective/ref_logprobs"], start)
    assert second["objective/kl"] != 0


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_another_ref_model_gives_kl_from_the_start_and_says_so(is_wrapped):
    reference = tiny.policy(1, DOUBLE) if is_wrapped else tiny.gpt2(1, DOUBLE)
    before = tiny.weights(reference)
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"ref_model": reference})
    queries, responses, scores = tiny.batch()
    with pytest.warns(UserWarning, match="before the first update, policy and reference differ by up to"):
        stats = trainer.step(queries, responses, scores)
    expected = [tiny.taken_of(tiny.gpt2(1, DOUBLE), q, r) for q, r in zip(queries, responses, strict=True)]
    torch.testing.assert_close(stats["objective/ref_logprobs"], torch.cat(expected))
    assert stats["objective/kl"] != 0
    assert tiny.moved(before, reference) == {}


def test_num_shared_layers_shares_storage_and_freezes_it():
    trainer = tiny.ppo(tiny.policy(), arguments={"num_shared_layers": 1}, learning_rate=1e-2)
    policy = dict(trainer.model.pretrained_model.named_parameters())
    before = tiny.weights(trainer.model)
    trainer.step(*tiny.batch())
    reference = dict(trainer.ref_model.pretrained_model.named_parameters())
    shared = {name for name in policy if policy[name].data_ptr() == reference[name].data_ptr()}
    assert {name.split(".")[2] for name in policy if ".h." in name and name in shared} == {"0"}
    assert "transformer.wte.weight" in shared
    moved = {name.removeprefix("pretrained_model.") for name in tiny.moved(before, trainer.model)}
    assert moved & shared == set()
    assert {"transformer.h.1.mlp.c_fc.weight", "v_head.summary.weight"} <= moved


def test_lr_scheduler_is_stepped_once_per_ppo_step():
    model = tiny.policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    arguments = {"optimizer": optimizer, "lr_scheduler": scheduler}
    trainer = tiny.ppo(model, arguments=arguments, mini_batch_size=1, ppo_epochs=3)
    rates = [trainer.step(*tiny.batch())["ppo/learning_rate"] for _ in range(3)]
    assert rates == [0.1, 0.05, 0.025]


def test_the_given_optimizer_makes_the_update():
    model = tiny.policy(dtype=DOUBLE)
    trainer = tiny.ppo(model, arguments={"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)})
    before = tiny.weights(model)
    trainer.step(*tiny.batch())
    assert tiny.moved(before, model) == {}


def test_critic_with_a_trunk_of_its_own():
    model, critic = tiny.policy(dtype=DOUBLE), tiny.policy(1, DOUBLE)
    trainer = tiny.ppo(model, arguments={"value_model": critic}, vf_coef=1.0)
    queries, responses, scores = tiny.batch()
    critic.eval()
    with torch.no_grad():
        ids = torch.cat([queries[0], responses[0]])[None]
        expected = critic(input_ids=ids)[2][0, len(queries[0]) - 1 : -1]
    before, critic_before = tiny.weights(model), tiny.weights(critic)
    inputs = trainer.prepare_model_inputs(queries, responses)
    _, _, values, _ = trainer.batched_forward_pass(model, queries, responses, inputs)
    torch.testing.assert_close(values[0, : len(responses[0])], expected)
    trainer.step(queries, responses, scores)
    assert not any(name.startswith("v_head") for name in tiny.moved(before, model))
    assert any(name.startswith("pretrained_model") for name in tiny.moved(before, model))
    critic_moved = tiny.moved(critic_before, critic)
    assert {"v_head.summary.weight", "pretrained_model.transformer.h.0.mlp.c_fc.weight"} <= set(critic_moved)


@pytest.mark.parametrize("build", [tiny.policy, tiny.scorer])
def test_a_critic_recomputes_its_activations_too(build):
    def run(is_checkpointing):
        critic, calls = build(1, DOUBLE), []
        layers = [module for name, module in critic.named_modules() if name.endswith(".attn")]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
        model = tiny.policy(dtype=DOUBLE)
        trainer = tiny.ppo(model, arguments={"value_model": critic}, gradient_checkpointing=is_checkpointing)
        trainer.step(*tiny.batch())
        return tiny.weights(critic), len(calls) / len(layers)

    (plain, calls), (weights, more) = run(False), run(True)
    assert more == calls + 1  # each layer runs again in backward
    for name in plain:
        torch.testing.assert_close(weights[name], plain[name], rtol=0, atol=1e-8)


def test_policy_and_critic_do_not_share_a_loss():
    """With a separate critic, the value loss never reaches the policy."""

    def policy_after(vf_coef):
        model = tiny.policy(dtype=DOUBLE)
        critic = tiny.policy(1, DOUBLE)
        parameters = [*model.parameters(), *critic.parameters()]
        arguments = {"value_model": critic, "optimizer": torch.optim.SGD(parameters, lr=0.1)}
        tiny.ppo(model, arguments=arguments, vf_coef=vf_coef).step(*tiny.batch())
        return tiny.weights(model)

    without, heavy = policy_after(0.0), policy_after(10.0)
    assert all(torch.equal(without[name], heavy[name]) for name in without)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sequence_classifier_goes_on_as_critic(has_bias: bool):
    scorer = tiny.scorer(1, DOUBLE).eval()
    if has_bias:
        scorer.score = torch.nn.Linear(scorer.score.in_features, 1, dtype=DOUBLE)
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), arguments={"value_model": scorer})
    queries, responses, scores = tiny.batch()
    inputs = trainer.prepare_model_inputs(queries, responses)
    _, _, values, _ = trainer.batched_forward_pass(trainer.model, queries, responses, inputs)
    read = torch.cat([queries[0], responses[0]])[:-1]  # the last token's value is predicted before it
    with torch.no_grad():
        expected = scorer(input_ids=read[None]).logits
    torch.testing.assert_close(values[0, len(responses[0]) - 1], expected[0, 0])
    before = tiny.weights(scorer)
    trainer.step(queries, responses, scores)
    assert "transformer.h.0.mlp.c_fc.weight" in tiny.moved(before, scorer)


def test_with_an_adapter_the_reference_is_the_base_model_and_stays_what_it_was():
    model = lora_policy(DOUBLE)
    trainer = tiny.ppo(model, learning_rate=1e-2)
    queries, responses, scores = tiny.batch()
    before = tiny.weights(model)
    with pytest.warns(UserWarning, match="before the first update"):
        trainer.step(queries, responses, scores)
    stats = trainer.step(queries, responses, scores)
    base = tiny.gpt2(0, DOUBLE)
    expected = [tiny.taken_of(base, q, r) for q, r in zip(queries, responses, strict=True)]
    torch.testing.assert_close(stats["objective/ref_logprobs"], torch.cat(expected))
    moved = tiny.moved(before, model)
    assert moved
    assert all("lora" in name or name.startswith("v_head") for name in moved)
    assert any("lora_B" in name for name in moved)
    assert trainer.ref_model is None
    parameters = dict(model.named_parameters())
    assert parameters[
        "pretrained_model.base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    ].requires_grad
    with torch.no_grad():  # the adapter is on again
        gap = model(input_ids=queries[0][None])[0] - base(input_ids=queries[0][None]).logits
    assert float(gap.abs().max()) > 1e-3


# -------------------------------------------------------------- data


def test_dataloader_shuffles_drops_the_remainder_and_keeps_columns():
    data = Dataset.from_dict(
        {"input_ids": [[4 + i] * (1 + i % 3) for i in range(11)], "query": [str(i) for i in range(11)]}
    )
    loader = tiny.ppo(arguments={"dataset": data}).dataloader
    epochs = [[row for batch in loader for row in batch["query"]] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [8, 8]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0], key=int)
    for batch in loader:
        assert [ids.tolist() for ids in batch["input_ids"]] == [data[int(i)]["input_ids"] for i in batch["query"]]


def test_data_collator_makes_the_batches():
    def collate(rows):
        return {"first": torch.tensor([row["input_ids"][0] for row in rows])}

    (batch,) = tiny.ppo(arguments={"dataset": toy_data(4), "data_collator": collate}).dataloader
    assert sorted(batch["first"].tolist()) == [tiny.VOCABULARY[letter] for letter in "abcd"]


def test_prepare_dataloader_takes_any_indexable_dataset():
    rows = [{"input_ids": torch.tensor([i]), "note": i} for i in range(4, 9)]
    trainer = tiny.ppo()
    (batch,) = trainer.prepare_dataloader(rows)
    assert [int(ids) for ids in batch["input_ids"]] == batch["note"]
    (notes,) = trainer.prepare_dataloader(rows, lambda rows: [row["note"] for row in rows])
    assert notes == batch["note"]  # both loaders begin with the seed's first permutation


# -------------------------------------------------------------- rewards, advantages, losses


def test_compute_rewards_puts_the_score_on_the_last_token_that_counts():
    trainer = tiny.ppo(init_kl_coef=0.5)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -7.0]])
    ref_logprobs = torch.tensor([[-2.0, -2.0, -1.0], [-1.5, -4.0, 9.0]])
    masks = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rewards, non_score, kl = trainer.compute_rewards(torch.tensor([10.0, -10.0]), logprobs, ref_logprobs, masks)
    assert kl.tolist() == [[1.0, 0.0, -2.0], [0.5, 2.0, 0.0]]
    assert non_score.tolist() == [[-0.5, 0.0, 1.0], [-0.25, -1.0, 0.0]]
    assert rewards.tolist() == [[-0.5, 0.0, 11.0], [-0.25, -11.0, 0.0]]


def test_compute_advantages_whitens_and_goes_across_gaps():
    trainer = tiny.ppo(gamma=0.5, lam=0.5)
    values, rewards = torch.tensor([[0.1, 7.0, 0.2, 0.3]]), torch.tensor([[0.0, 7.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 1]])
    kept_values, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    torch.testing.assert_close(returns, torch.tensor([[0.13125, 0.0, 0.325, 1.0]]))  # as without the second token
    raw = np.array([0.03125, 0.125, 0.7])
    expected = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(
        advantages[mask.bool()], torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-4
    )
    assert advantages[0, 1] == 0
    assert kept_values.tolist() == [pytest.approx([0.1, 0.0, 0.2, 0.3])]


def columns_of(trainer, seed=0):
    """Returns arguments of `loss` and `train_minibatch` for a random minibatch; the outputs require gradients."""
    queries, responses, _ = tiny.batch(seed=seed)
    inputs = trainer.prepare_model_inputs(queries, responses)
    with torch.no_grad():
        _, logits, values, mask = trainer.batched_forward_pass(trainer.model, queries, responses, inputs, True)
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(mask.shape, generator=generator, dtype=values.dtype) for _ in range(4)]
    reach = trainer.model.v_head.summary.weight.sum()
    return {
        "old_logprobs": -2 + 0.1 * noise[0],
        "values": values,
        "logprobs": -2 + 0.1 * noise[1] + 0.01 * reach,
        "logits": logits,
        "vpreds": values + 0.1 * noise[2] + reach,
        "mask": mask,
        "advantages": noise[3],
        "returns": values + 1,
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_is_the_mean_over_counted_tokens_and_takes_logits(temperature):
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), vf_coef=0.3, temperature=temperature)
    arguments = columns_of(trainer)
    names = ("old_logprobs", "values", "logits", "vpreds", "logprobs", "mask", "advantages", "returns")
    policy_loss, value_loss, stats = trainer.loss(*(arguments[name] for name in names))
    policy, value, entropies = [], [], []
    for i, j in arguments["mask"].nonzero().tolist():
        at = {name: float(tensor[i, j].detach()) for name, tensor in arguments.items() if name != "logits"}
        ratio = math.exp(at["logprobs"] - at["old_logprobs"])
        policy.append(max(-ratio * at["advantages"], -min(max(ratio, 0.8), 1.2) * at["advantages"]))
        near = min(max(at["vpreds"], at["values"] - 0.2), at["values"] + 0.2)
        value.append(max((at["vpreds"] - at["returns"]) ** 2, (near - at["returns"]) ** 2) / 2)
        p = (arguments["logits"][i, j] / temperature).softmax(-1)
        entropies.append(float(-(p * p.log()).sum()))
    assert float(policy_loss.detach()) == pytest.approx(np.mean(policy))
    assert float(value_loss.detach()) == pytest.approx(0.3 * np.mean(value))
    assert stats["policy/entropy"].value == pytest.approx(np.mean(entropies))
    assert stats["loss/total"].value == pytest.approx(np.mean(policy) + 0.3 * np.mean(value))


@pytest.mark.parametrize("is_after_a_step", [False, True])
def test_train_minibatch_alone_is_one_update_with_the_gradient_of_its_loss(is_after_a_step):
    model = tiny.policy(dtype=DOUBLE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = tiny.ppo(model, arguments={"optimizer": optimizer}, mini_batch_size=2)
    if is_after_a_step:
        optimizer.param_groups[0]["lr"] = 1e-3
        trainer.step(*tiny.batch())
        optimizer.param_groups[0]["lr"] = 1.0
    names = ("old_logprobs", "values", "logits", "vpreds", "logprobs", "mask", "advantages", "returns")
    arguments = columns_of(trainer)
    policy_loss, value_loss, _ = trainer.loss(*(arguments[name] for name in names))
    (gradient,) = torch.autograd.grad(policy_loss + value_loss, model.v_head.summary.weight)
    before = model.v_head.summary.weight.detach().clone()
    stats = trainer.train_minibatch(**columns_of(trainer))
    torch.testing.assert_close(before - model.v_head.summary.weight.detach(), gradient)
    assert stats["grad_norm"].value == pytest.approx(float(gradient.norm()))
    assert stats["loss/total"].value == pytest.approx(float((policy_loss + value_loss).detach()))


# -------------------------------------------------------------- step


@pytest.mark.parametrize("kind", ["plain", "adapter", "critic", "dropout", "llama", "t5"])
def test_the_first_minibatch_finds_the_policy_that_was_rolled_out(kind):
    arguments = {}
    if kind == "adapter":
        model = lora_policy(DOUBLE)
    elif kind in ("llama", "t5"):
        model = tiny.with_value_head(getattr(tiny, kind)(0, DOUBLE))
    else:
        drops = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if kind == "dropout" else {}
        model = tiny.policy(dtype=DOUBLE, **drops)
    if kind == "critic":
        arguments = {"value_model": tiny.policy(1, DOUBLE)}
    model.train()
    trainer = tiny.ppo(model, FirstMinibatch, arguments, mini_batch_size=2)
    queries, _, scores = tiny.batch()
    responses = trainer.generate(queries, return_prompt=False, temperature=0.7, **SAMPLED)
    with warnings.catch_warnings(action="ignore"):
        trainer.step(queries, responses, scores)
    logratio = trainer.first["logprobs"] - trainer.first["old_logprobs"]
    assert float(logratio.detach().abs().max()) < 1e-9
    assert float((trainer.first["vpreds"] - trainer.first["values"]).detach().abs().max()) < 1e-9


def test_masked_tokens_at_the_end_change_nothing():
    queries, responses, scores = tiny.batch()
    tails = tiny.rows(4, 0, 5, seed=9)

    def weights(is_longer):
        trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), mini_batch_size=2, ppo_epochs=2, whiten_rewards=True)
        if not is_longer:
            stats = trainer.step(queries, responses, scores)
        else:
            rows = [torch.cat(pair) for pair in zip(responses, tails, strict=True)]
            masks = [(torch.arange(len(r)) < len(shorter)).long() for r, shorter in zip(rows, responses, strict=True)]
            stats = trainer.step(queries, rows, scores, masks)
        return tiny.weights(trainer.model), stats

    (usual, stats), (longer, longer_stats) = weights(False), weights(True)
    for name in usual:
        torch.testing.assert_close(longer[name], usual[name], rtol=0, atol=1e-6)
    for name in (
        "objective/kl",
        "objective/entropy",
        "ppo/returns/mean",
        "ppo/val/var",
        "ppo/loss/value",
        "ppo/grad_norm",
    ):
        assert longer_stats[name] == pytest.approx(stats[name], rel=1e-6, abs=1e-9), name


def test_a_masked_gap_counts_in_no_statistic():
    queries, responses, scores = tiny.batch()
    masks = [torch.ones_like(row) for row in responses]
    for mask in masks:
        mask[1] = 0
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), FirstMinibatch)
    stats = trainer.step(queries, responses, scores, masks)
    model = tiny.gpt2(0, DOUBLE)
    expected = [
        tiny.taken_of(model, query, response)[mask.bool()]
        for query, response, mask in zip(queries, responses, masks, strict=True)
    ]
    torch.testing.assert_close(stats["objective/logprobs"], torch.cat(expected))
    assert len(stats["ppo/policy/advantages"]) == sum(int(mask.sum()) for mask in masks)
    for name in ("logprobs", "vpreds", "advantages", "values"):
        assert not trainer.first[name].detach()[:, 1].any()


@pytest.mark.parametrize("is_checkpointing", [False, True])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_dropout_is_off_and_gradient_checkpointing_engages(is_checkpointing, is_adapter):
    def run(drops, checkpointing):
        base = tiny.gpt2(0, DOUBLE, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), drops))
        lora = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=drops)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tiny.with_value_head(base, **{"peft_config": lora} if is_adapter else {}).to(DOUBLE).train()
        calls = []
        for name, module in model.named_modules():
            if name.endswith(".attn"):
                module.register_forward_pre_hook(lambda *_: calls.append(1))
        trainer = tiny.ppo(model, temperature=1.0, gradient_checkpointing=checkpointing)
        calls.clear()
        trainer.step(*tiny.batch())
        rates = {module.p for name, module in model.named_modules() if name.endswith(("drop", "resid_dropout"))}
        assert rates == {drops}
        assert all(module.training for module in model.modules())
        return tiny.weights(model), len(calls)

    plain, plain_calls = run(0.0, False)
    weights, calls = run(0.5, is_checkpointing)
    for name in plain:
        torch.testing.assert_close(weights[name], plain[name], rtol=0, atol=1e-8)
    assert calls == plain_calls + 2 * is_checkpointing  # each of the two layers runs again in backward


def test_two_steps_and_generations_leave_an_eval_model_in_eval_mode():
    model = tiny.policy().eval()
    trainer = tiny.ppo(model)
    trainer.step(*tiny.batch())
    assert not any(module.training for module in model.modules())


SCALARS = [
    *(f"objective/{name}" for name in ("kl", "kl_coef", "entropy")),
    *(f"ppo/{name}" for name in ("mean_non_score_reward", "mean_scores", "std_scores", "learning_rate")),
    *(f"ppo/loss/{name}" for name in ("policy", "value", "total")),
    *(f"ppo/policy/{name}" for name in ("entropy", "approxkl", "policykl", "clipfrac", "advantages_mean", "ratio")),
    *(f"ppo/returns/{name}" for name in ("mean", "var")),
    *(f"ppo/val/{name}" for name in ("vpred", "error", "clipfrac", "mean", "var", "var_explained")),
    *(f"tokens/{kind}_len_{name}" for kind in ("queries", "responses") for name in ("mean", "std")),
    *(
        f"time/ppo/{name}"
        for name in ("forward_pass", "compute_rewards", "compute_advantages", "optimize_step", "calc_stats", "total")
    ),
]
ROWS = {
    "objective/kl_dist": 4,
    "objective/logprobs": 23,
    "objective/ref_logprobs": 23,
    "ppo/policy/advantages": 23,
    "tokens/queries_dist": 4,
    "tokens/responses_dist": 4,
}


def test_statistics_are_documented_finite_and_of_the_right_kind():
    stats = tiny.ppo(ppo_epochs=2, mini_batch_size=2).step(*tiny.batch())
    for name in SCALARS:
        assert isinstance(stats[name], float), name
        assert math.isfinite(stats[name]), name
    for name, length in ROWS.items():
        assert stats[name].shape == (length,), name
        assert bool(stats[name].isfinite().all()), name
    assert stats["time/ppo/total"] >= stats["time/ppo/optimize_step"] > 0


def test_statistics_against_numbers_from_outside():
    queries, responses, scores = tiny.batch()
    trainer = tiny.ppo(tiny.policy(dtype=DOUBLE), gamma=1.0, lam=1.0)
    stats = trainer.step(queries, responses, scores)
    model = tiny.gpt2(0, DOUBLE)
    log_p = [tiny.logprobs_of(model, q, r) for q, r in zip(queries, responses, strict=True)]
    entropy = [float(-(x.exp() * x).sum()) for x in log_p]
    returns = np.concatenate([[float(score)] * len(row) for score, row in zip(scores, responses, strict=True)])
    lengths = np.array([len(row) for row in responses])
    expected = {
        "objective/entropy": np.mean(entropy),
        "ppo/policy/entropy": np.sum(entropy) / lengths.sum(),
        "ppo/returns/mean": returns.mean(),
        "ppo/returns/var": returns.var(),
        "ppo/mean_scores": np.mean([float(score) for score in scores]),
        "tokens/responses_len_mean": lengths.mean(),
        "tokens/responses_len_std": lengths.std(),
        "tokens/queries_len_mean": np.mean([len(row) for row in queries]),
        "ppo/policy/ratio": 1.0,
        "ppo/policy/advantages_mean": 0.0,
    }
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_statistics_of_minibatches_are_weighed_by_tokens():
    queries, scores = tiny.rows(4, 2, 3), [0.0, 1.0, 2.0, 3.0]
    responses = [row for length in (1, 2, 9, 20) for row in tiny.rows(1, length, length, seed=length)]

    def stats_of(mini_batch_size):
        model = tiny.policy(dtype=DOUBLE)
        arguments = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
        return tiny.ppo(model, arguments=arguments, mini_batch_size=mini_batch_size).step(queries, responses, scores)

    whole, parts = stats_of(4), stats_of(1)
    for name in ("ppo/policy/entropy", "ppo/val/vpred", "ppo/val/error", "ppo/loss/value", "ppo/loss/policy"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-9), name


def test_record_step_stats_may_be_extended_and_gather_stats_makes_numbers():
    class Extended(PPOTrainer):
        def record_step_stats(self, kl_coef, **data):
            assert kl_coef == 0.2
            longest = float(max(map(len, data["responses"])))
            return {**super().record_step_stats(kl_coef, **data), "mine/longest": longest}

    trainer = tiny.ppo(kind=Extended)
    queries, responses, scores = tiny.batch()
    assert trainer.step(queries, responses, scores)["mine/longest"] == max(map(len, responses))
    gathered = trainer.gather_stats({"mean": Mean(6.0, 4.0), "plain": 2, "rows": torch.tensor([1.0, 2.0])})
    assert (gathered["mean"], gathered["plain"], gathered["rows"].tolist()) == (1.5, 2.0, [1.0, 2.0])


@pytest.mark.parametrize(
    "name", ["compute_rewards", "compute_advantages", "loss", "batched_forward_pass", "train_minibatch"]
)
def test_step_goes_through_the_methods_that_may_be_overridden(name):
    calls = []

    def spied(self, *args, **kwargs):
        calls.append(name)
        return getattr(PPOTrainer, name)(self, *args, **kwargs)

    tiny.ppo(kind=type("Spied", (PPOTrainer,), {name: spied})).step(*tiny.batch())
    assert calls


def test_a_value_head_that_diverges_is_named_before_weights_are_lost():
    model = tiny.policy()
    model.v_head.summary.bias.data.fill_(float("nan"))
    trainer = tiny.ppo(model)
    before = tiny.weights(model.pretrained_model)
    with pytest.raises(TrainingDivergedError, match=r"values of response 0, 1, 2, 3 \(4 of 4\)"):
        trainer.step(*tiny.batch())
    assert tiny.moved(before, model.pretrained_model) == {}
