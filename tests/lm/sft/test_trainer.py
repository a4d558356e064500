"""Supervised fine-tuning: the same loss however rows are batched, and the features of transformers' Trainer."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tests.lm import tiny
from tests.marks import slow_but
from transformers import DataCollatorForLanguageModeling, TrainerCallback

from trimtab_common.health import TrainingDivergedError
from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.legacy.completion_collator import DataCollatorForCompletionOnlyLM
from trimtab_lm.sft import ConstantLengthDataset, SFTConfig, SFTTrainer

TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words.", "tiny.", "end."]
PAIRS = {"prompt": [text[:2] for text in TEXTS], "completion": [text[2:] for text in TEXTS]}


def trainer(model, tmp_path, columns=None, *, kind=SFTTrainer, arguments=None, **config) -> SFTTrainer:
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = SFTConfig(str(tmp_path), use_cpu=True, **settings | config)
    arguments = {"train_dataset": Dataset.from_dict(columns or {"text": TEXTS}), **(arguments or {})}
    return kind(model, args, processing_class=tiny.tokenizer(), **arguments)


def trained(model, tmp_path, columns=None, **options) -> tuple[SFTTrainer, dict[str, torch.Tensor]]:
    sft = trainer(model, tmp_path, columns, **options)
    sft.train()
    return sft, tiny.weights(sft.model)


def assert_equal_weights(one, other, rtol=1e-9):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=rtol * float(value.abs().max()))


def exact(build):
    """Returns a model without dropout, in float64."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if build is tiny.gpt2 else {}
    return tiny.exact(build(**rates))


def test_rows_that_come_with_padding_are_trained_without_it(tmp_path):
    rows = tiny.tokenizer()(TEXTS, padding=True)
    assert rows["input_ids"][-1][-1] == tiny.PAD
    columns = {name: rows[name] for name in ("input_ids", "attention_mask")}
    _, expected = trained(exact(tiny.gpt2), tmp_path, columns)
    _, as_they_are = trained(exact(tiny.gpt2), tmp_path, columns, dataset_kwargs={"skip_prepare_dataset": True})
    assert_equal_weights(expected, as_they_are)


@pytest.mark.parametrize("build", slow_but([tiny.gpt2, tiny.llama], tiny.gpt2))
def test_rows_packed_or_padded_or_accumulated_are_one_update(build, tmp_path):
    _, expected = trained(exact(build), tmp_path, arguments={"data_collator": DocumentCollator(0, layout="padded")})
    _, padding_free = trained(exact(build), tmp_path)
    _, packed = trained(exact(build), tmp_path, packing=True, max_length=40)
    _, accumulated = trained(exact(build), tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    for other in (padding_free, packed, accumulated):
        assert_equal_weights(expected, other)


def test_an_encoder_decoder_model_accumulates_to_one_update(tmp_path):
    def build():
        return tiny.exact(tiny.t5(initializer_factor=1.0, dropout_rate=0.0))

    _, expected = trained(build(), tmp_path, PAIRS)
    _, accumulated = trained(build(), tmp_path, PAIRS, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_equal_weights(expected, accumulated)


def test_the_update_is_that_of_the_models_own_loss(tmp_path):
    """Compares with one manual SGD step on transformers' cross-entropy of padded rows."""
    sft, weights = trained(exact(tiny.gpt2), tmp_path, max_grad_norm=0.0)
    model = exact(tiny.gpt2).train()
    batch = DocumentCollator(0, layout="padded")(list(sft.train_dataset))
    model(**batch).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-2 * parameter.grad
    assert_equal_weights(weights, tiny.weights(model), rtol=1e-6)  # transformers computes its loss in float32


def loss_of(model, text: str) -> float:
    ids = torch.tensor([[tiny.VOCABULARY[c] for c in text] + [tiny.EOS]])
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


@pytest.mark.slow
def test_it_learns_and_a_flipped_or_unmasked_loss_does_not(tmp_path):
    columns = {"prompt": ["ab"] * 8, "completion": ["cab"] * 8}
    config = {"max_steps": 60, "optim": "adamw_torch", "learning_rate": 3e-3}

    class Flipped(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return -super().compute_loss(*args, **kwargs)

    class Unmasked(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, {**inputs, "labels": inputs["input_ids"].flip(-1)}, *args, **kwargs)

    losses = {}
    for kind in (SFTTrainer, Flipped, Unmasked):
        sft, _ = trained(tiny.gpt2(), tmp_path, columns, kind=kind, **config)
        losses[kind] = sft.evaluate(Dataset.from_dict(columns))["eval_loss"] if kind is SFTTrainer else None
        losses[kind] = (
            losses[kind]
            or SFTTrainer.evaluate(trainer(sft.model, tmp_path, columns), Dataset.from_dict(columns))["eval_loss"]
        )
    assert losses[SFTTrainer] < 0.5 < min(losses[Flipped], losses[Unmasked])


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_whose_rows_have_no_answer_has_loss_0_and_moves_no_weight(build, smoothing, tmp_path):
    collator = DataCollatorForCompletionOnlyLM("w", tokenizer=tiny.tokenizer())
    options = {"arguments": {"data_collator": collator}, "per_device_train_batch_size": 1}
    before = tiny.weights(build())
    with pytest.warns(UserWarning, match="no answer"):
        sft, after = trained(build(), tmp_path, {"text": ["abc."]}, label_smoothing_factor=smoothing, **options)
    assert sft.state.log_history[0]["loss"] == 0.0
    assert sft.state.log_history[0]["grad_norm"] == 0.0
    assert_equal_weights(before, after, rtol=0.0)


def test_a_row_without_an_answer_changes_nothing_for_the_others(tmp_path):
    collator = DataCollatorForCompletionOnlyLM("w", tokenizer=tiny.tokenizer())
    options = {
        "arguments": {"data_collator": collator},
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
    }
    _, expected = trained(exact(tiny.gpt2), tmp_path, {"text": ["hello world."]}, **options)
    rows = {"text": ["abc.", "hello world."]}
    with pytest.warns(UserWarning, match="no answer"):
        _, accumulated = trained(exact(tiny.gpt2), tmp_path, rows, gradient_accumulation_steps=2, **options)
    assert_equal_weights(expected, accumulated)


def test_the_loss_of_an_evaluation_weighs_tokens(tmp_path):
    model = exact(tiny.gpt2)
    columns = {"text": ["ab", "a longer text.", "x"]}
    sft = trainer(model, tmp_path, per_device_eval_batch_size=1, arguments={"eval_dataset": Dataset.from_dict(columns)})
    lengths = [len(text) for text in columns["text"]]  # tokens predicted by another
    expected = sum(loss_of(model, text) * n for text, n in zip(columns["text"], lengths, strict=True)) / sum(lengths)
    assert sft.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_of_packed_rows_counts_every_token(tmp_path):
    """A batch of two packed rows holds more than two documents."""
    data = {"arguments": {"eval_dataset": Dataset.from_dict({"text": TEXTS[:7]})}, "per_device_eval_batch_size": 2}
    expected = trainer(exact(tiny.gpt2), tmp_path, **data).evaluate()["eval_loss"]
    packed = trainer(exact(tiny.gpt2), tmp_path, packing=True, max_length=32, **data).evaluate()["eval_loss"]
    assert packed == pytest.approx(expected, rel=1e-9)


def test_metrics_see_the_logits_of_each_row(tmp_path):
    model = tiny.gpt2()
    seen = {}

    def accuracy(prediction):
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        seen["shape"] = prediction.predictions.shape
        return {"accuracy": hits[prediction.label_ids[:, 1:] != -100].mean()}

    data = Dataset.from_dict({"text": TEXTS})
    sft = trainer(
        model, tmp_path, arguments={"eval_dataset": {"one": data, "two": data.select([1])}, "compute_metrics": accuracy}
    )
    metrics = sft.evaluate()
    assert {"eval_one_accuracy", "eval_two_accuracy"} <= set(metrics)
    assert seen["shape"] == (1, 5, len(tiny.VOCABULARY))
    prediction = sft.predict(data)
    assert prediction.predictions.shape[0] == len(TEXTS)
    ids = torch.tensor([[tiny.VOCABULARY[c] for c in "abc."] + [tiny.EOS]])
    plain = model.eval()(input_ids=ids).logits[0].detach().numpy()
    torch.testing.assert_close(torch.tensor(prediction.predictions[1, :5]), torch.tensor(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["best_fit", "constant_length"])
def test_compute_metrics_gets_a_row_for_each_row_of_packed_data(strategy: str, tmp_path):
    seen = {}

    def count(prediction):
        seen["rows"], seen["tokens"] = len(prediction.label_ids), int((prediction.label_ids != -100).sum())
        return {}

    arguments = {"eval_dataset": Dataset.from_dict({"text": TEXTS}), "compute_metrics": count}
    settings = {"packing": True, "packing_strategy": strategy, "max_length": 40, "per_device_eval_batch_size": 2}
    sft = trainer(tiny.gpt2(), tmp_path, arguments=arguments, **settings)
    sft.evaluate()
    assert seen == {"rows": len(TEXTS), "tokens": sum(map(len, TEXTS))}  # EOS, and not the first
    assert len(sft.train_dataset) < len(TEXTS)


def test_a_stream_trains(tmp_path):
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    for packing in (False, True):
        sft, _ = trained(tiny.gpt2(), tmp_path, arguments={"train_dataset": stream}, packing=packing, max_length=40)
        assert sft.state.global_step == 1


@pytest.mark.parametrize("infinite", [False, True])
def test_rows_of_constant_length_train(infinite: bool, tmp_path):
    settings = {"packing": True, "packing_strategy": "constant_length", "max_length": 16, "num_of_sequences": 2}
    sft, _ = trained(tiny.gpt2(), tmp_path, infinite=infinite, chars_per_token=1.0, **settings)
    assert isinstance(sft.train_dataset, ConstantLengthDataset if infinite else Dataset)
    assert sft.state.global_step == 1
    arguments = {
        "train_dataset": ConstantLengthDataset(tiny.tokenizer(), [{"text": t} for t in TEXTS], "text", seq_length=16)
    }
    assert trained(tiny.gpt2(), tmp_path, arguments=arguments)[0].state.global_step == 1


def test_an_evaluation_ends_if_training_repeats_its_data(tmp_path):
    settings = {"packing": True, "packing_strategy": "constant_length", "max_length": 16, "infinite": True}
    sft = trainer(tiny.gpt2(), tmp_path, arguments={"eval_dataset": Dataset.from_dict({"text": TEXTS})}, **settings)
    other = sft.get_eval_dataloader(Dataset.from_dict({"text": TEXTS[:1]}))
    assert (len(sft.eval_dataset), len(other)) == (6, 1)
    assert sft.evaluate()["eval_loss"] > 0


def test_the_completion_collator_learns_answers_alone(tmp_path):
    collator = DataCollatorForCompletionOnlyLM("w", tokenizer=tiny.tokenizer())
    columns = {"text": ["hello world.", "a word."]}
    model = exact(tiny.gpt2)
    sft = trainer(
        model, tmp_path, columns, arguments={"data_collator": collator, "eval_dataset": Dataset.from_dict(columns)}
    )
    counted = 0.0
    for text in columns["text"]:
        ids = torch.tensor([tiny.VOCABULARY[c] for c in text] + [tiny.EOS])
        after = text.index("w") + 1
        counted += float(-tiny.taken_of(model, ids[:after], ids[after:]).sum())
    assert sft.evaluate()["eval_loss"] == pytest.approx(counted / (len("orld.") + len("ord.") + 2), rel=1e-9)


def test_transformers_own_collator_works(tmp_path):
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    assert trained(tiny.gpt2(), tmp_path, arguments={"data_collator": collator})[0].state.global_step == 1


def test_losses_of_whole_logits_are_transformers_own(tmp_path):
    """Tests a user's loss, and label smoothing: half the mean of -log p over the vocabulary, half the token's own."""

    def half_smoothed(outputs, labels, num_items_in_batch=None):
        logp = outputs.logits[:, :-1].log_softmax(-1)[labels[:, 1:] != -100]
        taken = logp.gather(1, labels[:, 1:][labels[:, 1:] != -100][:, None])
        return -(taken.sum() + logp.mean(-1).sum()) / 2 / num_items_in_batch

    by_hand, _ = trained(exact(tiny.gpt2), tmp_path, arguments={"compute_loss_func": half_smoothed})
    smoothed, _ = trained(exact(tiny.gpt2), tmp_path, label_smoothing_factor=0.5, per_device_train_batch_size=8)
    plain, _ = trained(exact(tiny.gpt2), tmp_path)
    losses = [sft.state.log_history[0]["loss"] for sft in (by_hand, smoothed, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_a_loss_that_is_not_finite_moves_nothing(tmp_path):
    model = tiny.gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    before = tiny.weights(model)
    with pytest.raises(TrainingDivergedError, match="step 1"):
        trainer(model, tmp_path).train()
    torch.testing.assert_close(tiny.weights(model), before, equal_nan=True, rtol=0, atol=0)


def test_the_callers_objects_are_left_alone(tmp_path):
    tokenizer, data = tiny.tokenizer(pad_token=None), Dataset.from_dict({"text": TEXTS})
    args = SFTConfig(str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no")
    before = args.to_dict()
    SFTTrainer(tiny.gpt2(), args, train_dataset=data, processing_class=tokenizer).train()
    assert args.to_dict() == before
    assert (tokenizer.pad_token, data.column_names) == (None, ["text"])


def test_models_come_by_name_by_function_or_with_adapters(tmp_path):
    tiny.gpt2().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    args = SFTConfig(
        str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", model_init_kwargs={"torch_dtype": "float64"}
    )
    data = Dataset.from_dict({"text": TEXTS})
    named = SFTTrainer(str(tmp_path / "model"), args, train_dataset=data)
    assert named.model.dtype == torch.float64
    named.train()
    with pytest.raises(ValueError, match="model_init_kwargs"):
        SFTTrainer(tiny.gpt2(), args, train_dataset=data, processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match="processing_class"):
        SFTTrainer(tiny.gpt2(), SFTConfig(str(tmp_path), use_cpu=True), train_dataset=data)

    arguments = {"model_init": lambda: tiny.gpt2(), "peft_config": LoraConfig(r=2, target_modules=["c_attn"])}
    sft, _ = trained(None, tmp_path, arguments=arguments)
    trained_weights = {name: weight for name, weight in sft.model.named_parameters() if weight.requires_grad}
    assert all("lora" in name for name in trained_weights)
    assert any(weight.any() for name, weight in trained_weights.items() if "lora_B" in name)


def test_the_callers_class_of_optimizer_trains_with_its_arguments(tmp_path):
    before = tiny.weights(exact(tiny.gpt2))
    sft, _ = trained(exact(tiny.gpt2), tmp_path, arguments={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.0})})
    assert tiny.moved(before, sft.model) == {}


def test_train_hands_ignore_keys_for_eval_to_its_evaluations(tmp_path):
    seen = []

    class Noting(SFTTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            seen.append(ignore_keys)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    data = {"eval_dataset": Dataset.from_dict({"text": TEXTS[:2]})}
    sft = trainer(tiny.gpt2(), tmp_path, kind=Noting, arguments=data, eval_strategy="steps", eval_steps=1)
    sft.train(ignore_keys_for_eval=["past_key_values"])
    assert seen == [["past_key_values"]]


def test_quantized_weights_are_prepared(tmp_path, monkeypatch):
    """A real 4-bit model needs a GPU, so this checks that PEFT's preparation is called with the checkpointing."""
    from trimtab_lm.hf import models as training

    calls = []
    monkeypatch.setattr(training, "prepare_model_for_kbit_training", lambda model, **kw: calls.append(kw) or model)
    model = tiny.gpt2()
    model.is_loaded_in_4bit = True
    peft_config = LoraConfig(r=2, target_modules=["c_attn"])
    training.with_adapters(model, peft_config, SFTConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=True))
    assert calls == [{"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}]


@pytest.mark.parametrize("with_adapters", [False, True])
def test_gradient_checkpointing_changes_no_number(with_adapters: bool, tmp_path):
    def run(**config):
        torch.manual_seed(0)
        arguments = {"peft_config": LoraConfig(r=2, target_modules=["c_attn"])} if with_adapters else {}
        return trained(exact(tiny.gpt2), tmp_path, arguments=arguments, **config)[1]

    assert_equal_weights(run(), run(gradient_checkpointing=True))


@pytest.mark.slow
def test_neftune_adds_noise_in_training_alone(tmp_path):
    plain, _ = trained(exact(tiny.gpt2), tmp_path)
    noisy, _ = trained(exact(tiny.gpt2), tmp_path, neftune_noise_alpha=5.0)
    assert noisy.state.log_history[0]["loss"] != plain.state.log_history[0]["loss"]
    data = Dataset.from_dict({"text": TEXTS})
    assert noisy.evaluate(data)["eval_loss"] == noisy.evaluate(data)["eval_loss"]


def test_callbacks_see_every_event(tmp_path):
    events = []

    class Listener(TrainerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda *args, **kwargs: events.append(name)
            return super().__getattribute__(name)

    arguments = {"callbacks": [Listener()], "eval_dataset": Dataset.from_dict({"text": TEXTS})}
    config = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trained(
        tiny.gpt2(),
        tmp_path,
        arguments=arguments,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        **config,
    )
    expected = {
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_substep_end",
        "on_step_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_log",
        "on_evaluate",
        "on_prediction_step",
        "on_save",
        "on_epoch_end",
        "on_train_end",
    }
    assert expected <= set(events)


def test_hooks_of_a_subclass_are_called(tmp_path):
    class Custom(SFTTrainer):
        def get_train_dataloader(self):
            self.asked_for_data = True
            return super().get_train_dataloader()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    plain, _ = trained(exact(tiny.gpt2), tmp_path)
    sft, _ = trained(exact(tiny.gpt2), tmp_path, kind=Custom)
    assert sft.asked_for_data
    assert sft.state.log_history[0]["loss"] == pytest.approx(2 * plain.state.log_history[0]["loss"], rel=1e-9)
