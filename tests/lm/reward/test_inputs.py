"""Models, adapters and arguments that RewardTrainer accepts and loads again, and those that it rejects."""

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from tests.lm import tiny
from tests.lm.reward.run_distributed import D, config, pairs, scorer, trainer
from transformers import AutoModelForSequenceClassification

from trimtab_common.health import TrainingDivergedError
from trimtab_lm.reward import RewardTrainer
from trimtab_lm.reward.collator import RewardDataCollatorWithPadding


def test_a_checkpoint_is_a_classifier_for_transformers(tmp_path):
    data = pairs(4)
    reward_trainer = trainer(
        scorer(pad_token_id=None), tmp_path, {"train_dataset": data}, max_steps=1, save_strategy="steps", save_steps=1
    )
    reward_trainer.train()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-1")
    assert (loaded.config.num_labels, loaded.config.pad_token_id) == (1, tiny.PAD)
    batch = RewardDataCollatorWithPadding(tiny.tokenizer())(list(data))
    with torch.no_grad():
        scores = loaded(input_ids=batch["input_ids_chosen"], attention_mask=batch["attention_mask_chosen"]).logits[:, 0]
    torch.testing.assert_close(
        scores, torch.tensor(reward_trainer.predict(data).predictions[:, 0]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("kind", "head"), [("llama", "score"), ("t5", "classification_head"), ("bert", "classifier")])
def test_adapters_train_with_their_head_and_load(kind: str, head: str, tmp_path):
    targets = {"llama": ["q_proj", "v_proj"], "t5": ["q", "v"], "bert": ["query", "value"]}
    peft_config = LoraConfig(r=2, target_modules=targets[kind])
    arguments = {"train_dataset": pairs(4), "peft_config": peft_config}
    reward_trainer = trainer(scorer(kind), tmp_path, arguments, max_steps=2, learning_rate=0.1, init_reward_head=True)
    before = tiny.weights(reward_trainer.model)
    reward_trainer.train()
    moved = tiny.moved(before, reward_trainer.model)
    assert any(f".{head}.modules_to_save" in name for name in moved)
    assert any("lora_A" in name for name in moved)
    assert all("lora_" in name or ".modules_to_save" in name for name in moved)
    assert (peft_config.modules_to_save, peft_config.task_type) == (None, None)  # the caller's object is unchanged
    scorer(kind).save_pretrained(tmp_path / "base")
    reward_trainer.save_model(tmp_path / "adapter")
    reward_trainer.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    reward_trainer.save_model(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1)
    again = trainer(loaded.get_base_model(), tmp_path).predict(pairs(3))
    torch.testing.assert_close(again.predictions, reward_trainer.predict(pairs(3)).predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adamw_layerwise"])
def test_galore_trains_and_saves(optim: str, tmp_path):
    reward_trainer = trainer(
        scorer("llama"),
        tmp_path,
        {"train_dataset": pairs(4)},
        max_steps=1,
        optim=optim,
        optim_args="rank=2",
        optim_target_modules=["self_attn", "mlp"],
        save_strategy="steps",
        save_steps=1,
        learning_rate=1e-2,
    )
    before = tiny.weights(reward_trainer.model)
    reward_trainer.train()
    assert any("mlp" in name for name in tiny.moved(before, reward_trainer.model))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, reward_trainer.model.model.layers[0].mlp.up_proj.weight
    )


def test_the_arguments_of_2024_train(tmp_path):
    data = pairs(4)
    lengths = [max(len(row["input_ids_chosen"]), len(row["input_ids_rejected"])) for row in data]
    with pytest.warns(FutureWarning) as warned:
        reward_trainer = RewardTrainer(
            model=scorer(),
            args=config(tmp_path, max_steps=1),
            tokenizer=tiny.tokenizer(),
            train_dataset=data,
            max_length=sorted(lengths)[1],
        )
    messages = " ".join(str(one.message) for one in warned)
    assert "processing_class" in messages
    assert "max_length" in messages
    assert len(reward_trainer.train_dataset) == sum(length <= sorted(lengths)[1] for length in lengths) < 4
    reward_trainer.train()
    assert reward_trainer.state.global_step == 1


@pytest.mark.parametrize("labels", [{}, {"num_labels": 1}])
def test_a_model_by_name_gets_one_label(tmp_path, labels):
    tiny.gpt2().save_pretrained(tmp_path / "language model")
    tiny.tokenizer().save_pretrained(tmp_path / "language model")
    args = config(tmp_path, max_steps=1, model_init_kwargs={"torch_dtype": "float64", **labels})
    reward_trainer = RewardTrainer(str(tmp_path / "language model"), args, train_dataset=pairs(2))
    assert reward_trainer.model.config.num_labels == 1
    assert reward_trainer.model.dtype is D
    assert reward_trainer.processing_class.pad_token_id == tiny.PAD
    reward_trainer.train()


def test_model_init_makes_a_new_scorer_for_each_training(tmp_path):
    arguments = {"model_init": lambda: scorer(), "train_dataset": pairs(4)}
    reward_trainer = trainer(None, tmp_path, arguments, max_steps=1, init_reward_head=True)
    first = reward_trainer.model
    reward_trainer.train()
    assert reward_trainer.model is not first
    drawn = trainer(scorer(), tmp_path, init_reward_head=True).model.score.weight
    torch.testing.assert_close(reward_trainer.model.score.weight, drawn, rtol=0, atol=1e-3)
    assert reward_trainer.predict(pairs(3)).predictions.shape == (3, 2)


# Rejected -------------------------------------------------------------------------------------------------------------


def test_a_model_is_needed(tmp_path):
    with pytest.raises(ValueError, match="either a model or model_init"):
        trainer(None, tmp_path)
    with pytest.raises(ValueError, match="processing_class=tokenizer"):
        trainer(None, tmp_path, {"model_init": lambda: scorer(), "processing_class": None})


def test_arguments_of_loading_need_a_name(tmp_path):
    with pytest.raises(ValueError, match="model_init_kwargs"):
        trainer(scorer(), tmp_path, model_init_kwargs={"dtype": "float32"})


def test_adapters_have_to_be_those_of_a_classifier(tmp_path):
    with pytest.raises(ValueError, match=r"CAUSAL_LM.*Use TaskType.SEQ_CLS"):
        trainer(scorer(), tmp_path, {"peft_config": LoraConfig(task_type=TaskType.CAUSAL_LM)})
    with pytest.raises(ValueError, match="virtual tokens"):
        trainer(scorer("llama"), tmp_path, {"peft_config": PromptTuningConfig(num_virtual_tokens=2)})


def test_adapters_without_the_head_are_refused(tmp_path):
    frozen = get_peft_model(scorer("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"modules_to_save: \['score'\]"):
        trainer(frozen, tmp_path)


def test_padding_has_to_differ_from_eos_where_the_model_tells_it_by_its_id(tmp_path):
    with pytest.raises(ValueError, match="finds padding by its id"):
        trainer(scorer("bert"), tmp_path, {"processing_class": tiny.tokenizer(pad_token="</s>")})


def test_a_tokenizer_without_padding_is_copied_and_pads_with_eos(tmp_path):
    tokenizer = tiny.tokenizer(pad_token=None)
    with pytest.warns(UserWarning, match="EOS is also the padding token"):
        reward_trainer = trainer(scorer(), tmp_path, {"processing_class": tokenizer})
    assert reward_trainer.processing_class.pad_token_id == reward_trainer.model.config.pad_token_id == tiny.EOS
    assert tokenizer.pad_token_id is None
    with pytest.raises(ValueError, match="no EOS token"):
        trainer(scorer(), tmp_path, {"processing_class": tiny.tokenizer(pad_token=None, eos_token=None)})


def test_a_head_that_is_not_linear_cannot_be_drawn(tmp_path):
    model = scorer()
    model.score = torch.nn.Sequential(torch.nn.Linear(tiny.WIDTH, 2), torch.nn.LayerNorm(2))
    with pytest.raises(ValueError, match="init_reward_head=True found no linear layer"):
        trainer(model, tmp_path, init_reward_head=True)


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(tmp_path):
    model = scorer()
    torch.nn.init.constant_(model.score.weight, float("nan"))
    before = tiny.weights(model.transformer)
    reward_trainer = trainer(model, tmp_path, {"train_dataset": pairs(4)}, max_steps=1)
    with pytest.raises(TrainingDivergedError, match="step 1"):
        reward_trainer.train()
    assert not tiny.moved(before, reward_trainer.model.transformer)


def test_columns_are_checked_in_every_set(tmp_path):
    bad = Dataset.from_list([{"text": "a"}])
    for arguments in ({"train_dataset": bad}, {"eval_dataset": bad}, {"eval_dataset": {"one": bad}}):
        with pytest.raises(ValueError, match=r"RewardTrainer cannot read a dataset with the columns \['text'\]"):
            trainer(scorer(), tmp_path, arguments)


def test_the_callers_collator_must_give_pairs(tmp_path):
    arguments = {"train_dataset": pairs(2), "data_collator": lambda rows: {"labels": torch.zeros(len(rows))}}
    with pytest.raises(ValueError, match="input_ids_chosen"):
        trainer(scorer(), tmp_path, arguments, max_steps=1).train()
