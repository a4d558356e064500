"""DPO: the same loss for every layout of pairs, its reference, its statistics, and learning of preferences."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from trimtab_common.health import TrainingDivergedError
from trimtab_lm.dpo import DPOTrainer
from trimtab_lm.dpo.collator import DPODataCollatorWithPadding

LORA = {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.0}


def assert_equal_weights(one, other, rtol=1e-9):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=rtol * float(value.abs().max()), msg=name)


def summed_logprob(model, row, side):
    """Returns an answer's log-probability from a plain forward pass of one row in float64."""
    labels = torch.tensor(row[f"{side}_labels"])
    if model.config.is_encoder_decoder:
        prompt = torch.tensor(row["prompt_input_ids"])[None]
        logprobs = model(input_ids=prompt, labels=labels[None]).logits[0].log_softmax(-1)
        return logprobs.gather(1, labels[:, None]).sum()
    ids = torch.tensor(row[f"{side}_input_ids"])
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[labels[1:] != -100].sum()


@pytest.mark.parametrize("name", dpo.BUILDERS)
def test_loss_and_gradients_are_those_of_separate_padded_and_shared_prompts(name, tmp_path):
    """Compares Eq. 7 of the paper, from plain forward passes of single answers, with shared and repeated prompts."""
    policy, reference = (tiny.exact(dpo.BUILDERS[name](seed=seed)).eval() for seed in (0, 1))
    plain, plain_reference = copy.deepcopy(policy), copy.deepcopy(reference)
    trainer = dpo.trainer(policy, tmp_path, arguments={"ref_model": reference}, beta=0.3)
    rows = list(trainer.train_dataset)

    losses = []
    for row in rows:
        margins = []
        for model in (plain, plain_reference):
            margins.append(summed_logprob(model, row, "chosen") - summed_logprob(model, row, "rejected"))
        losses.append(-logsigmoid(0.3 * (margins[0] - margins[1].detach())))
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = {key: value.grad for key, value in plain.named_parameters()}

    kind = "encoder-decoder" if name == "t5" else "row"
    assert trainer.data_collator.layout == kind
    for collator in (trainer.data_collator, DPODataCollatorWithPadding(5, is_encoder_decoder=name == "t5")):
        policy.zero_grad()
        policy.train()
        loss = trainer.compute_loss(policy, collator(rows))
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for key, value in policy.named_parameters():
            scale = float(gradients[key].abs().max())
            torch.testing.assert_close(value.grad, gradients[key], rtol=1e-9, atol=1e-9 * scale, msg=key)


@pytest.mark.parametrize("name", dpo.BUILDERS)
@pytest.mark.parametrize("loss_type", ["sigmoid", ["ipo", "apo_zero"]])
def test_accumulated_micro_batches_are_one_update(name, loss_type, tmp_path):
    settings = {"loss_type": loss_type, "max_steps": 2, "seed": 1}
    whole, expected = dpo.trained(tiny.exact(dpo.BUILDERS[name]()), tmp_path, **settings)
    parts, weights = dpo.trained(
        tiny.exact(dpo.BUILDERS[name]()),
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        **settings,
    )
    assert_equal_weights(expected, weights)
    for key in ("loss", "rewards/margins", "logps/chosen", "entropy/rejected"):
        tolerance = 1e-6 if key == "loss" else 1e-9  # Trainer adds losses up in float32
        assert dpo.logged(parts, key) == pytest.approx(dpo.logged(whole, key), rel=tolerance)


def test_a_short_last_window_is_divided_by_its_own_pairs(tmp_path):
    """12 pairs in windows of 2 x 4: equals one SGD step on the mean over 8, and one on the mean over the other 4."""
    arguments = {"train_dataset": dpo.dataset(12)}
    _, weights = dpo.trained(
        tiny.exact(tiny.gpt2()),
        tmp_path,
        arguments=arguments,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_steps=-1,
        train_sampling_strategy="sequential",
    )
    model = tiny.exact(tiny.gpt2())
    trainer = dpo.trainer(model, tmp_path, arguments=arguments)
    rows = list(trainer.train_dataset)
    for part in (rows[:8], rows[8:]):
        model.zero_grad()
        trainer.compute_loss(model, trainer.data_collator(part)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
    assert_equal_weights(tiny.weights(model), weights)


def adapted(seed=0):
    torch.manual_seed(seed)
    return get_peft_model(tiny.exact(tiny.gpt2()), LoraConfig(**LORA))


def test_a_reference_by_adapters_off_is_a_frozen_copy(tmp_path):
    settings = {"max_steps": 3, "learning_rate": 0.5}
    _, off = dpo.trained(adapted(), tmp_path, **settings)
    _, copied = dpo.trained(adapted(), tmp_path, arguments={"ref_model": tiny.exact(tiny.gpt2())}, **settings)
    assert_equal_weights(off, copied)
    assert any(
        "lora_B" in name for name in tiny.moved(tiny.weights(adapted()), dpo.trained(adapted(), tmp_path)[0].model)
    )


def test_a_second_adapter_is_the_reference_and_the_first_trains(tmp_path):
    def with_two():
        model = adapted()
        torch.manual_seed(7)
        model.add_adapter("old", LoraConfig(**LORA, init_lora_weights=False))
        return model

    merged = with_two()
    merged.set_adapter("old")
    reference = merged.merge_and_unload()
    settings = {"max_steps": 2, "learning_rate": 0.5}
    trainer, by_adapter = dpo.trained(
        with_two(), tmp_path, model_adapter_name="default", ref_adapter_name="old", **settings
    )
    _, by_model = dpo.trained(adapted(), tmp_path, arguments={"ref_model": reference}, **settings)
    assert_equal_weights({k: v for k, v in by_adapter.items() if "old" not in k}, by_model)
    assert set(tiny.moved(tiny.weights(with_two()), trainer.model)) == {
        k for k in by_adapter if "lora_B.default" in k or "lora_A.default" in k
    }
    assert trainer.model.active_adapter == "default"


def test_model_adapter_name_chooses_what_trains(tmp_path):
    model = adapted()
    torch.manual_seed(7)
    model.add_adapter("new", LoraConfig(**LORA))
    before = tiny.weights(model)
    trainer, _ = dpo.trained(model, tmp_path, model_adapter_name="new")
    moved = tiny.moved(before, trainer.model)
    assert moved
    assert all(".new." in name for name in moved)


def test_at_the_start_rewards_are_zero_and_a_tie_is_no_success(tmp_path):
    trainer, _ = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path)
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-7)  # Trainer adds losses up in float32
    assert [first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")] == [0, 0, 0, 0]


def test_statistics_are_means_over_pairs_and_entropies_over_tokens(tmp_path):
    reference = tiny.exact(tiny.gpt2(seed=1))
    policy = tiny.exact(tiny.gpt2())
    plain, plain_reference = copy.deepcopy(policy).eval(), copy.deepcopy(reference).eval()
    arguments = {"ref_model": reference, "eval_dataset": dpo.dataset(7)}
    trainer = dpo.trainer(policy, tmp_path, arguments=arguments, beta=0.2, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    chosen, rejected = (
        torch.stack([summed_logprob(plain, row, side) for row in trainer.eval_dataset])
        for side in ("chosen", "rejected")
    )
    ref_chosen, ref_rejected = (
        torch.stack([summed_logprob(plain_reference, row, side) for row in trainer.eval_dataset])
        for side in ("chosen", "rejected")
    )
    rewards = 0.2 * (chosen - ref_chosen), 0.2 * (rejected - ref_rejected)
    expected = {
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "rewards/chosen": rewards[0].mean(),
        "rewards/rejected": rewards[1].mean(),
        "rewards/margins": (rewards[0] - rewards[1]).mean(),
        "rewards/accuracies": (rewards[0] > rewards[1]).double().mean(),
        "loss": -logsigmoid(rewards[0] - rewards[1]).mean(),
    }
    for name, value in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(float(value), rel=1e-9), name

    entropies = []
    for row in trainer.eval_dataset:
        ids, labels = torch.tensor(row["chosen_input_ids"]), torch.tensor(row["chosen_labels"])
        logprobs = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[labels[1:] != -100])
    assert metrics["eval_entropy/chosen"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-9)


# Learning -------------------------------------------------------------------------------------------------------------


def preferences(count=64):
    """The preferred answer repeats the prompt's letter."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(0, 4, (count, 2), generator=generator).tolist()
    return Dataset.from_list(
        [
            {"prompt": f"{'abcd'[i]} ", "chosen": "abcd"[i], "rejected": "abcd"[j if j != i else (i + 1) % 4]}
            for i, j in letters
        ]
    )


class SignFlipped(DPOTrainer):
    def dpo_loss(self, chosen, rejected, ref_chosen, ref_rejected, reference_free=False, **lengths):
        return super().dpo_loss(rejected, chosen, ref_rejected, ref_chosen, reference_free, **lengths)


class ShiftForgotten(DPOTrainer):
    """Scores the token that a position reads instead of the next one. (A scored prompt would cancel out.)"""

    def concatenated_inputs(self, batch, **kwargs):
        joined = super().concatenated_inputs(batch, **kwargs)
        labels, read = joined["concatenated_labels"], joined["concatenated_input_ids"].roll(1, 1)
        return joined | {"concatenated_labels": labels.where(labels == -100, read)}


@pytest.mark.parametrize(("kind", "learns"), [(DPOTrainer, True), (SignFlipped, False), (ShiftForgotten, False)])
def test_it_learns_the_preference(kind, learns, tmp_path):
    arguments = {"train_dataset": preferences(), "eval_dataset": preferences(32)}
    trainer, _ = dpo.trained(
        tiny.gpt2(),
        tmp_path,
        kind=kind,
        arguments=arguments,
        max_steps=40,
        learning_rate=5e-3,
        optim="adamw_torch",
        per_device_train_batch_size=16,
        logging_steps=20,
        beta=0.5,
    )
    plain = dpo.trainer(trainer.model, tmp_path, arguments={**arguments, "ref_model": tiny.gpt2()}, beta=0.5)
    metrics = plain.evaluate()
    assert (metrics["eval_rewards/margins"] > 2 and metrics["eval_rewards/accuracies"] > 0.95) is learns


# Features of transformers' Trainer -----------------------------------------------------------------------------------


def test_dropout_is_off_unless_asked_for_and_so_it_is_behind_checkpoints(tmp_path):
    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    _, expected = dpo.trained(tiny.exact(tiny.gpt2(**dpo.DROPLESS)), tmp_path)
    trainer, off = dpo.trained(tiny.exact(tiny.gpt2(**rates)), tmp_path)
    _, checkpointed = dpo.trained(tiny.exact(tiny.gpt2(**rates)), tmp_path, gradient_checkpointing=True)
    _, on = dpo.trained(tiny.exact(tiny.gpt2(**rates)), tmp_path, disable_dropout=False)
    assert_equal_weights(expected, off)
    assert_equal_weights(expected, checkpointed)
    assert float((on["transformer.wte.weight"] - off["transformer.wte.weight"]).abs().max()) > 1e-6
    assert trainer.model.transformer.drop.p == 0.3


def test_the_callers_class_of_optimizer_trains_with_its_arguments(tmp_path):
    chosen = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.0})}
    trainer, _ = dpo.trained(tiny.exact(tiny.llama()), tmp_path, arguments=chosen)
    assert tiny.moved(tiny.weights(tiny.exact(tiny.llama())), trainer.model) == {}


@pytest.mark.parametrize("build", [lambda: tiny.exact(tiny.llama()), adapted], ids=["copy", "adapters"])
def test_neftune_noise_reaches_the_policy_and_not_the_reference(build, tmp_path):
    runs = []
    for alpha in (None, 5.0):
        trainer = dpo.trainer(build(), tmp_path, neftune_noise_alpha=alpha)
        found = [tiny.logprobs_by_gradient(model) for model in {trainer.model, trainer.reference.model}]
        trainer.train()
        runs.append({has_gradient: logprobs for each in found for has_gradient, logprobs in each.items()})
    plain, noisy = runs
    torch.testing.assert_close(noisy[False], plain[False])
    assert float((noisy[True] - plain[True]).abs().max()) > 1e-3


def test_activation_checkpointing_with_adapters(tmp_path):
    _, expected = dpo.trained(adapted(), tmp_path, max_steps=2, learning_rate=0.5)
    _, weights = dpo.trained(adapted(), tmp_path, max_steps=2, learning_rate=0.5, gradient_checkpointing=True)
    assert_equal_weights(expected, weights)


def test_bfloat16_runs_policy_and_reference_alike(tmp_path):
    trainer, _ = dpo.trained(tiny.gpt2(), tmp_path, bf16=True)
    assert dpo.logged(trainer, "rewards/margins") == [0.0]


@pytest.mark.parametrize("resize", [False, True])
def test_lora_trains_and_saves_what_peft_loads(resize, tmp_path):
    model = tiny.gpt2()
    if resize:
        model.resize_token_embeddings(40)
    base = tmp_path / "base"
    model.save_pretrained(base)
    config = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["wte"] if resize else None)
    trainer, _ = dpo.trained(
        AutoModelForCausalLM.from_pretrained(base),
        tmp_path / "run",
        arguments={"peft_config": config},
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adamw_layerwise"])
def test_galore_trains_and_saves_what_transformers_loads(optim, tmp_path):
    pytest.importorskip("galore_torch")
    trainer, weights = dpo.trained(
        tiny.llama(),
        tmp_path,
        optim=optim,
        optim_target_modules=["attn", "mlp"],
        optim_args="rank=2",
        save_strategy="steps",
        save_steps=1,
    )
    assert tiny.moved(tiny.weights(tiny.llama()), trainer.model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert_equal_weights(weights, loaded.state_dict())


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(tmp_path):
    model = tiny.gpt2()
    trainer = dpo.trainer(model, tmp_path, arguments={"ref_model": tiny.gpt2(seed=1)})
    with torch.no_grad():
        trainer.reference.model.transformer.wte.weight.fill_(float("nan"))
    before = tiny.weights(model)
    with pytest.raises(TrainingDivergedError, match="no weight has moved"):
        trainer.train()
    assert tiny.moved(before, model) == {}


def test_the_model_of_another_trainer_gets_a_frozen_copy_as_reference(tmp_path):
    """Its forward is already extended: a copy must not score with the policy's weights."""
    model = tiny.exact(tiny.gpt2())
    _, expected = dpo.trained(copy.deepcopy(model), tmp_path, max_steps=2)
    dpo.trainer(model, tmp_path)
    trainer, weights = dpo.trained(model, tmp_path, max_steps=2)
    assert_equal_weights(expected, weights)
    assert dpo.logged(trainer, "rewards/margins")[1] != 0


def test_model_init_makes_the_model_that_trains_and_the_reference_is_its_first(tmp_path):
    arguments = {"model_init": lambda: tiny.exact(tiny.gpt2())}
    trainer, weights = dpo.trained(None, tmp_path, arguments=arguments, max_steps=2)
    _, expected = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path, max_steps=2)
    assert_equal_weights(expected, weights)
    trainer.train()
    assert_equal_weights(expected, tiny.weights(trainer.model))


def test_the_model_of_model_init_is_its_own_reference_by_its_adapters(tmp_path):
    settings = {"max_steps": 2, "learning_rate": 0.5}
    config = {"peft_config": LoraConfig(**LORA)}
    arguments = {"model_init": lambda: tiny.exact(tiny.gpt2()), **config}
    _, weights = dpo.trained(None, tmp_path, arguments=arguments, **settings)
    arguments = {**arguments, "ref_model": tiny.exact(tiny.gpt2())}
    trainer, expected = dpo.trained(None, tmp_path, arguments=arguments, **settings)
    assert_equal_weights(expected, weights)
    assert dpo.logged(trainer, "rewards/margins")[1] != 0
