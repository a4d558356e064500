"""Every documented argument and method of DPOTrainer does what it says, also in the spelling of 2024."""

import inspect
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from transformers import TrainerCallback, TrainingArguments

from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.dpo.collator import DPODataCollatorWithPadding
from trimtab_lm.dpo.loss import LOSSES, WITHOUT_REFERENCE
from trimtab_lm.legacy.arguments import DPO

# Every documented argument of 2024 ------------------------------------------------------------------------------------


def make(folder, **arguments):
    """Calls the constructor of 2024."""
    args = TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        max_grad_norm=0.0,
    )
    settings = {"model": tiny.exact(tiny.gpt2()), "args": args, "train_dataset": dpo.dataset(4)}
    settings |= {"tokenizer": tiny.tokenizer(), "ref_model": None, "eval_dataset": dpo.dataset(4)}
    return DPOTrainer(**settings | arguments)


def loss_of(trainer):
    """Returns the loss of the first batch after the policy has moved away from the reference."""
    trainer.train()
    return trainer.evaluate()["eval_loss"]


class Note(TrainerCallback):
    calls = 0

    def on_step_end(self, *args, **kwargs):
        Note.calls += 1


def adapters():
    model = get_peft_model(tiny.exact(tiny.gpt2()), LoraConfig(r=2, target_modules=["c_attn"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    return model


def longest(trainer):
    return max(len(row["chosen_input_ids"]) for row in trainer.train_dataset)


def longest_prompt(trainer):
    return max(len(row["prompt_input_ids"]) for row in trainer.train_dataset)


def first_prompt(trainer):
    return trainer.train_dataset[3]["prompt_input_ids"]


def padding(trainer):
    trainer.data_collator.layout = "tree"  # a single row has no padding
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[3]])
    return int(batch["input_ids"][batch["document"] == -1][0])


T5 = {"model": lambda: tiny.exact(tiny.t5(initializer_factor=1.0))}
EFFECTS = {
    "model": ({"model": lambda: tiny.exact(tiny.llama())}, lambda trainer: type(trainer.model).__name__),
    "ref_model": ({"ref_model": lambda: tiny.exact(tiny.gpt2(seed=1))}, loss_of),
    "beta": ({"beta": 0.5}, loss_of),
    "label_smoothing": ({"label_smoothing": 0.2}, loss_of),
    "loss_type": ({"loss_type": "hinge"}, loss_of),
    "args": (
        {"args": lambda: DPOConfig("out", report_to="none", use_cpu=True, seed=7)},
        lambda trainer: trainer.args.seed,
    ),
    "data_collator": (
        {"data_collator": DPODataCollatorWithPadding()},
        lambda trainer: type(trainer.data_collator).__name__,
    ),
    "label_pad_token_id": ({"label_pad_token_id": -7}, lambda trainer: trainer.train_dataset[0]["chosen_labels"][0]),
    "padding_value": ({"padding_value": 9}, padding),
    "truncation_mode": ({"truncation_mode": "keep_start", "max_prompt_length": 2}, first_prompt),
    "train_dataset": ({"train_dataset": dpo.dataset(3)}, lambda trainer: len(trainer.train_dataset)),
    "eval_dataset": ({"eval_dataset": {"a": dpo.dataset(3)}}, lambda trainer: sorted(trainer.evaluate())),
    "tokenizer": (
        {"tokenizer": lambda: tiny.tokenizer(eos_token="z")},
        lambda trainer: trainer.train_dataset[0]["chosen_input_ids"][-1],
    ),
    "model_init": ({"model": None, "model_init": lambda: tiny.llama()}, lambda trainer: type(trainer.model).__name__),
    "callbacks": ({"callbacks": [Note()]}, lambda trainer: (setattr(Note, "calls", 0), trainer.train(), Note.calls)[2]),
    "optimizers": (
        {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), None)},
        lambda trainer: tiny.moved(tiny.weights(tiny.exact(tiny.gpt2())), (trainer.train(), trainer.model)[1]) == {},
    ),
    "preprocess_logits_for_metrics": (
        {
            "preprocess_logits_for_metrics": lambda x, labels: x[:, :1],
            "compute_metrics": lambda prediction: {"width": prediction.predictions.size},
        },
        lambda trainer: trainer.evaluate().get("eval_width"),
    ),
    "max_length": ({"max_length": 6}, longest),
    "max_prompt_length": ({"max_prompt_length": 2}, longest_prompt),
    "max_target_length": (
        T5 | {"max_target_length": 2},
        lambda trainer: len(trainer.train_dataset[3]["chosen_labels"]),
    ),
    "peft_config": (
        {"peft_config": LoraConfig(target_modules=["c_attn"])},
        lambda trainer: type(trainer.model).__name__,
    ),
    "is_encoder_decoder": None,
    "disable_dropout": ({"disable_dropout": False}, loss_of),
    "generate_during_eval": (
        {"generate_during_eval": True},
        lambda trainer: (setattr(trainer, "tables", Tables()), trainer.evaluate(), len(trainer.tables.added))[2],
    ),
    "compute_metrics": (
        {"compute_metrics": lambda p: {"mine": 1}},
        lambda trainer: trainer.evaluate().get("eval_mine"),
    ),
    "precompute_ref_log_probs": (
        {"precompute_ref_log_probs": True},
        lambda trainer: set(trainer.train_dataset.column_names),
    ),
    "model_init_kwargs": None,
    "ref_model_init_kwargs": None,
    "model_adapter_name": (
        {"model": adapters, "model_adapter_name": "other"},
        lambda trainer: trainer.model.active_adapter,
    ),
    "ref_adapter_name": ({"model": adapters, "ref_adapter_name": "other"}, lambda trainer: trainer.reference.adapter),
    "dataset_num_proc": ({"dataset_num_proc": 1}, lambda trainer: trainer.args.dataset_num_proc),
    "reference_free": ({"reference_free": True}, lambda trainer: trainer.reference is None),
    "force_use_ref_model": None,  # the reference is used anyway
}
"""Argument -> arguments that set it, and the resulting difference.

None if another test checks it: test_dpo_reference.py, test_models_by_name, or test_the_kind_of_model_is_read_off_it.
"""


class Tables:
    def __init__(self):
        self.added = []

    def add(self, trainer, name, columns, rows):
        self.added.append((name, columns, rows))


def fresh(arguments):
    names = ("model", "ref_model", "args", "tokenizer")
    return {
        name: value() if inspect.isfunction(value) and name in names else value for name, value in arguments.items()
    }


def test_every_documented_argument_is_in_the_table():
    assert set(EFFECTS) == set(DPO)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name, effect in EFFECTS.items() if effect is not None])
def test_every_documented_argument_has_an_effect(name, tmp_path):
    arguments, effect = EFFECTS[name]
    without = {key: value for key, value in arguments.items() if key != name}
    if name == "model_init":
        without.pop("model")
    assert effect(make(tmp_path / "a", **fresh(arguments))) != effect(make(tmp_path / "b", **fresh(without)))


def test_the_script_of_2024_trains(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    with pytest.warns(FutureWarning, match="beta"):
        trainer = DPOTrainer(
            tiny.gpt2(),
            tiny.gpt2(seed=1),
            beta=0.1,
            args=args,
            train_dataset=dpo.dataset(),
            tokenizer=tiny.tokenizer(),
            max_length=16,
            max_prompt_length=6,
        )
    trainer.train()
    assert isinstance(trainer.args, DPOConfig)
    assert args.remove_unused_columns  # the caller's object is unchanged
    with pytest.warns(FutureWarning):
        positional = DPOTrainer(
            tiny.gpt2(),
            tiny.gpt2(seed=1),
            0.3,
            0.1,
            "robust",
            args,
            None,
            -100,
            0,
            "keep_start",
            dpo.dataset(),
            None,
            tiny.tokenizer(),
        )
    config = positional.args
    assert (config.beta, config.label_smoothing, config.loss_type) == (0.3, 0.1, "robust")
    assert (config.truncation_mode, config.padding_value, len(positional.train_dataset)) == ("keep_start", 0, 8)


def test_arguments_may_all_be_left_out_but_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = DPOTrainer(tiny.gpt2(), processing_class=tiny.tokenizer())
    assert trainer.args.beta == 0.1
    assert trainer.evaluate(dpo.dataset(2))["eval_loss"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("arguments", [{"model_init": lambda: tiny.gpt2()}, {"model": None}])
def test_there_is_one_model(arguments, tmp_path):
    model = arguments.pop("model", tiny.gpt2())
    with pytest.raises(ValueError, match="either a model or model_init"):
        dpo.trainer(model, tmp_path, arguments=arguments)


def test_a_model_without_a_name_needs_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="Pass processing_class=tokenizer"):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments={"processing_class": None})


def test_the_kind_of_model_is_read_off_it(tmp_path):
    with pytest.raises(ValueError, match="GPT2LMHeadModel says False"):
        dpo.trainer(tiny.gpt2(), tmp_path, is_encoder_decoder=True)


# Methods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_dpo_loss_is_the_loss_of_the_config(name, tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, loss_type=name, beta=0.2)
    logps = [
        torch.tensor([-3.0, -1.0]),
        torch.tensor([-2.0, -5.0]),
        torch.tensor([-2.5, -2.0]),
        torch.tensor([-2.0, -4.0]),
    ]
    losses, chosen, rejected = trainer.dpo_loss(*logps)
    assert losses.shape == (2,)
    if name in WITHOUT_REFERENCE:
        torch.testing.assert_close((chosen, rejected), (0.2 * logps[0], 0.2 * logps[1]))
        return
    torch.testing.assert_close(chosen, torch.tensor([-0.1, 0.2]))
    torch.testing.assert_close(rejected, torch.tensor([0.0, -0.2]))
    margin = torch.tensor([-0.5, 2.0])  # difference of the log-ratios
    closed = {
        "sigmoid": -torch.nn.functional.logsigmoid(0.2 * margin),
        "hinge": 1 - 0.2 * margin,
        "ipo": (margin - 2.5) ** 2,  # it treats its log-probabilities as averages
    }
    if name in closed:
        torch.testing.assert_close(losses, closed[name])
    free = trainer.dpo_loss(*logps, reference_free=True)
    torch.testing.assert_close(free[1], 0.2 * logps[0])


def test_ipo_divides_by_the_length_of_each_answer(tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, loss_type="ipo", beta=0.5)
    logps = [torch.tensor([x]) for x in (-4.0, -6.0, -2.0, -3.0)]
    losses, _, _ = trainer.dpo_loss(*logps, chosen_length=torch.tensor([2]), rejected_length=torch.tensor([3]))
    torch.testing.assert_close(losses, torch.tensor([((-4 + 2) / 2 - (-6 + 3) / 3 - 1) ** 2]))


@pytest.mark.parametrize("loss_type", ["simpo", ["simpo", "sft"]])
def test_the_rewards_of_simpo_are_per_token_as_its_margin(loss_type, tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, loss_type=loss_type, beta=0.5)
    logps, lengths = [torch.tensor([x]) for x in (-8.0, -6.0, 0.0, 0.0)], (torch.tensor([4]), torch.tensor([2]))
    _, chosen, rejected = trainer.dpo_loss(*logps, chosen_length=lengths[0], rejected_length=lengths[1])
    assert (chosen.item(), rejected.item()) == (-1.0, -1.5)


def test_a_mix_is_the_weighted_sum(tmp_path):
    def loss(**config):
        trainer = dpo.trainer(
            tiny.exact(tiny.gpt2()), tmp_path, arguments={"ref_model": tiny.exact(tiny.gpt2(seed=1))}, **config
        )
        return trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))

    mixed = loss(loss_type=["sigmoid", "ipo"], loss_weights=[0.3, 2.0])
    torch.testing.assert_close(mixed, 0.3 * loss(loss_type="sigmoid") + 2.0 * loss(loss_type="ipo"), rtol=1e-9, atol=0)


def test_losses_and_metrics_of_a_batch(tmp_path):
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, arguments={"ref_model": tiny.exact(tiny.gpt2(seed=1))})
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch, "eval")
    torch.testing.assert_close(loss, trainer.compute_loss(trainer.model, batch))
    names = {f"rewards/{x}" for x in ("chosen", "rejected", "accuracies", "margins")} | {
        f"{kind}/{side}" for kind in ("logps", "entropy") for side in ("chosen", "rejected")
    }
    assert set(metrics) == {f"eval_{name}" for name in names}
    assert set(trainer.get_batch_loss_metrics(trainer.model, batch)[1]) == names
    scores = trainer.concatenated_forward(trainer.model, batch)
    assert metrics["eval_logps/chosen"] == pytest.approx(float(scores[0].mean()))


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_metrics_are_computed_from_rewards_and_log_probabilities(tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"wins": float(np.mean(prediction.predictions[:, 0] > prediction.predictions[:, 1]))}

    arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)), "eval_dataset": dpo.dataset(7), "compute_metrics": metrics}
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, arguments=arguments, per_device_eval_batch_size=3)
    logged = trainer.evaluate()
    assert seen[0].predictions.shape == (7, 4)
    assert seen[0].label_ids.tolist() == [0] * 7
    assert logged["eval_wins"] == logged["eval_rewards/accuracies"]
    for column, name in enumerate(("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")):
        assert logged[f"eval_{name}"] == pytest.approx(seen[0].predictions[:, column].mean(), rel=1e-9)
    assert trainer.predict(dpo.dataset(3)).predictions.shape == (3, 4)


def test_the_loss_of_an_evaluation_is_the_mean_over_pairs(tmp_path):
    """7 pairs in batches of 3: a mean of batch means would give the last pair three times the weight."""

    def loss(size):
        arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)), "eval_dataset": dpo.dataset(7)}
        trainer = dpo.trainer(
            tiny.exact(tiny.gpt2()), tmp_path, arguments=arguments, per_device_eval_batch_size=size, beta=1.0
        )
        return trainer.evaluate()["eval_loss"]

    assert loss(3) == pytest.approx(loss(7), rel=1e-9)


def peaked(model, token):
    """Returns a model that always predicts one token."""
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().weight[token] = 0
        if model.get_output_embeddings().bias is None:
            model.get_output_embeddings().bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.get_output_embeddings().bias[token] = 50.0
    return model


@pytest.mark.parametrize("build", [lambda seed: tiny.llama(seed), lambda seed: tiny.t5(seed), lambda seed: dpo.bart()])
def test_samples_of_policy_and_reference_go_into_a_table(build, tmp_path):
    a, b = tiny.VOCABULARY["a"], tiny.VOCABULARY["b"]
    arguments = {"ref_model": peaked(build(1), b), "eval_dataset": {"one": dpo.dataset(6)}}
    trainer = dpo.trainer(
        peaked(build(0), a),
        tmp_path,
        arguments=arguments,
        generate_during_eval=True,
        max_new_tokens=3,
        num_eval_samples=4,
        per_device_eval_batch_size=3,
    )
    trainer.tables = Tables()
    trainer.evaluate()
    [(name, columns, rows)] = trainer.tables.added
    assert (name, columns) == ("eval_one_samples", ["prompt", "policy", "reference"])
    assert [row[1:] for row in rows] == [("aaa", "bbb")] * 4
    end = "</s>" if trainer.is_encoder_decoder else ""
    known = [row["prompt"] + end for row in dpo.pairs(6)]
    prompts = [row[0] for row in rows]
    assert set(prompts) <= set(known)
    assert len(set(prompts)) == 4
    trainer.state.global_step = 1
    trainer.evaluate()
    assert [row[0] for row in trainer.tables.added[1][2]] != prompts  # another step logs other prompts


@pytest.mark.filterwarnings("ignore:Sampling takes longer")
def test_a_stop_string_ends_an_answer_of_the_table(tmp_path):
    settings = {"max_new_tokens": 3, "generation_kwargs": {"stop_strings": ["aa"]}}
    model, arguments = peaked(tiny.llama(), tiny.VOCABULARY["a"]), {"eval_dataset": dpo.dataset(3)}
    trainer = dpo.trainer(model, tmp_path, arguments=arguments, generate_during_eval=True, **settings)
    trainer.tables = Tables()
    trainer.evaluate()
    assert [row[1] for row in trainer.tables.added[0][2]] == ["aa"] * 3


def test_without_a_reference_model_the_table_shows_the_policy(tmp_path):
    for config in ({"reference_free": True}, {"precompute_ref_log_probs": True}):
        trainer = dpo.trainer(
            tiny.gpt2(),
            tmp_path,
            arguments={"eval_dataset": dpo.dataset(3)},
            generate_during_eval=True,
            max_new_tokens=2,
            **config,
        )
        trainer.tables = Tables()
        trainer.evaluate()
        assert trainer.tables.added[0][1] == ["prompt", "policy"]
        assert [len(row) for row in trainer.tables.added[0][2]] == [2, 2, 2]


def test_a_precomputed_reference_leaves_its_memory_after_it_has_sampled(tmp_path, monkeypatch):
    arguments = {"ref_model": tiny.gpt2(1), "eval_dataset": dpo.dataset(3)}
    settings = {"precompute_ref_log_probs": True, "generate_during_eval": True, "max_new_tokens": 2}
    trainer, moves = dpo.trainer(tiny.gpt2(), tmp_path, arguments=arguments, **settings), []
    for place in ("evaluation", "data"):
        module = f"trimtab_lm.dpo.{place}.placed"
        monkeypatch.setattr(module, lambda model, device, place=place: moves.append((place, str(device))) or model)
    trainer.tables = Tables()
    trainer.evaluate()
    assert moves == [("evaluation", str(trainer.config.device)), ("data", "cpu")]


def test_samples_of_a_padded_batch(tmp_path):
    trainer = dpo.trainer(
        peaked(tiny.llama(), 6),
        tmp_path,
        generate_during_eval=True,
        generation_kwargs={"do_sample": False},
        arguments={"ref_model": peaked(tiny.llama(), 7)},
        max_new_tokens=2,
    )
    batch = DPODataCollatorWithPadding()([trainer.train_dataset[i] for i in range(3)])
    policy, reference = trainer.generate_from_model_and_ref(trainer.model, batch)
    read = tiny.tokenizer()
    assert policy == [read.decode([6, 6])] * 3
    assert reference == [read.decode([7, 7])] * 3


def test_bart_trains(tmp_path):
    trainer, _ = dpo.trained(dpo.bart(), tmp_path, max_steps=2)
    assert trainer.data_collator.layout == "encoder-decoder"
    assert dpo.logged(trainer, "rewards/margins")[1] > 0


def test_ipo_trains_on_averages(tmp_path):
    arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1))}
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, arguments=arguments, loss_type="ipo", beta=0.5)
    rows = list(trainer.train_dataset)
    batch = trainer.data_collator(rows)
    scores, reference = trainer.concatenated_forward(trainer.model, batch), trainer.compute_reference_log_probs(batch)
    lengths = [
        torch.tensor([sum(label != -100 for label in row[f"{side}_labels"]) for row in rows])
        for side in ("chosen", "rejected")
    ]
    averages = [(scores[i] - reference[i]) / lengths[i] for i in range(2)]
    expected = ((averages[0] - averages[1] - 1) ** 2).mean()
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch), expected, rtol=1e-9, atol=0)
