"""Fine-tuning in steps: rows used as given, whole windows, statistics, saving and resuming."""

import itertools
import json
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_common.sealing import CheckpointError
from trimtab_lm.iterative_sft import IterativeSFTConfig, IterativeSFTTrainer

ROWS = tiny.rows(5, 3, 7)
RUN = "trimtab_lm.iterative_sft.run"


def exact():
    return tiny.exact(tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def trainer(model=None, tmp_path="unused", arguments=None, **config) -> IterativeSFTTrainer:
    settings = {
        "optim": "sgd",
        "learning_rate": 1e-2,
        "max_steps": 100,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    args = IterativeSFTConfig(str(tmp_path), use_cpu=True, **settings | config)
    return IterativeSFTTrainer(
        exact() if model is None else model, args, processing_class=tiny.tokenizer(), **(arguments or {})
    )


def ids(text: str) -> list[int]:
    return [tiny.EOS if character == "$" else tiny.VOCABULARY[character] for character in text]


def tensors(*texts: str) -> list[torch.Tensor]:
    return [torch.tensor(ids(text)) for text in texts]


def same(one: IterativeSFTTrainer, other: IterativeSFTTrainer) -> None:
    for name, value in tiny.weights(one.model).items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_the_documented_step_needs_no_labels():
    sft = trainer()
    before = tiny.weights(sft.model)
    stats = sft.step(input_ids=ROWS, attention_mask=[torch.ones_like(row) for row in ROWS])
    assert tiny.moved(before, sft.model)
    nll = [-tiny.taken_of(exact(), row[:1], row[1:]) for row in ROWS[:2]]
    assert stats["num_tokens"] == sum(len(row) - 1 for row in ROWS)
    assert stats["global_step"] == 3  # 5 rows, 2 at a time, the last one alone: none is dropped
    assert set(stats) == {"loss", "grad_norm", "learning_rate", "epoch", "global_step", "num_tokens"}
    first = trainer(per_device_train_batch_size=2).step(ROWS[:2])
    assert first["loss"] == pytest.approx(float(torch.cat(nll).mean()), rel=1e-9)


def test_one_step_is_one_update_however_it_is_split():
    whole, split = trainer(per_device_train_batch_size=8), trainer(gradient_accumulation_steps=4)
    assert whole.step(ROWS)["loss"] == pytest.approx(split.step(ROWS)["loss"], rel=1e-9)
    assert (whole.state.global_step, split.state.global_step) == (1, 1)
    same(whole, split)


@pytest.mark.parametrize("counted", [(1, 1, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1)])
def test_labels_are_honoured(counted):
    row = torch.tensor([5, 6, 7, 8, 9])
    mask = torch.tensor([0, *counted], dtype=torch.bool)
    stats = trainer().step([row], labels=[torch.where(mask, row, -100)])
    nll = -tiny.taken_of(exact(), row[:1], row[1:])[mask[1:]]
    assert stats["loss"] == pytest.approx(float(nll.mean()), rel=1e-9)
    assert stats["num_tokens"] == sum(counted)


def test_padding_is_left_out():
    padded = torch.tensor([tiny.PAD, 5, 6, 7, tiny.PAD])
    one = trainer().step([padded], [torch.tensor([0, 1, 1, 1, 0])])
    other = trainer().step([padded[1:4]])
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


@pytest.mark.parametrize(("mode", "kept"), [("keep_end", slice(-3, None)), ("keep_start", slice(None, 3))])
def test_tokens_are_cut_and_no_row_is_lost(mode: str, kept: slice):
    rows = tiny.rows(4, 5, 7, seed=3)
    one, other = (trainer(per_device_train_batch_size=4, max_length=n, truncation_mode=mode) for n in (3, None))
    with pytest.warns(UserWarning, match=f"cut {sum(map(len, rows)) - 12} tokens of 4 rows"):
        stats = one.step(rows)
    assert stats["num_tokens"] == 8
    assert stats["loss"] == pytest.approx(other.step([row[kept] for row in rows])["loss"], rel=1e-9)
    same(one, other)


def test_texts_end_and_their_labels_are_a_part_of_them():
    one, other = trainer(), trainer()
    assert one.step(texts=["abc", "de"])["loss"] == pytest.approx(other.step(tensors("abc$", "de$"))["loss"], rel=1e-9)
    one, other, third = trainer(), trainer(), trainer()
    labels = [torch.tensor([-100, -100, *ids("c$")]), torch.tensor([-100, *ids("e$")])]
    stats = one.step(texts=["abc", "de"], texts_labels=["c", "e"])
    assert stats["loss"] == pytest.approx(other.step(tensors("abc$", "de$"), labels=labels)["loss"], rel=1e-9)
    middle = [torch.tensor([-100, *ids("b"), -100, -100])]
    stats = third.step(texts=["abc"], texts_labels=["b"])
    assert stats["loss"] == pytest.approx(trainer().step(tensors("abc$"), labels=middle)["loss"], rel=1e-9)


def test_an_encoder_decoder_model_learns_targets_and_not_its_input():
    def build():
        return tiny.exact(tiny.t5(initializer_factor=1.0, dropout_rate=0.0))

    one, other = trainer(build()), trainer(build())
    by_text = one.step(texts=["abc", "de"], texts_labels=["xy", "z"])
    by_ids = other.step(tensors("abc$", "de$"), labels=tensors("xy$", "z$"))
    assert by_text["loss"] == pytest.approx(by_ids["loss"], rel=1e-9)
    model = build().eval()
    nll = 0.0
    for source, target in (("abc$", "xy$"), ("de$", "z$")):
        logits = model(input_ids=tensors(source)[0][None], labels=tensors(target)[0][None]).logits[0]
        nll += float(-logits.log_softmax(-1).gather(1, tensors(target)[0][:, None]).sum())
    assert by_text["loss"] == pytest.approx(nll / 5, rel=1e-9)
    with pytest.raises(ValueError, match="texts_labels"):
        trainer(build()).step(texts=["abc"])
    with pytest.raises(ValueError, match="labels"):
        trainer(build()).step(tensors("abc$"))


def test_it_learns_and_a_flipped_loss_does_not():
    class Flipped(IterativeSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return -super().compute_loss(*args, **kwargs)

    losses = []
    for kind in (IterativeSFTTrainer, Flipped):
        args = IterativeSFTConfig("unused", use_cpu=True, learning_rate=3e-3, save_strategy="no", max_steps=60)
        sft = kind(tiny.gpt2(), args, processing_class=tiny.tokenizer())
        losses.append([sft.step(texts=["abcab"] * 4, texts_labels=["cab"] * 4)["loss"] for _ in range(60)][-1])
    assert losses[0] < 0.5 < losses[1]


def test_the_order_of_rows_moves_no_global_random_number():
    state = torch.get_rng_state()
    sft = trainer()
    torch.set_rng_state(state)
    sft.step(ROWS)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_end_of_the_schedule_ends_training():
    sft = trainer(max_steps=1, lr_scheduler_type="linear")
    sft.step(ROWS[:1])
    with pytest.raises(ValueError, match="max_steps=1"):
        sft.step(ROWS[:1])


def test_the_end_of_the_schedule_ends_a_call_in_its_middle():
    """Beyond its end a cosine rises again."""
    sft = trainer(max_steps=2, lr_scheduler_type="cosine")
    with pytest.warns(UserWarning, match="max_steps=2 ends this call of step: 2 of its 3 optimizer steps are taken"):
        stats = sft.step(ROWS)
    assert (stats["global_step"], stats["learning_rate"]) == (2, pytest.approx(5e-3))
    with pytest.raises(ValueError, match="max_steps=2"):
        sft.step(ROWS)


def test_without_max_steps_the_learning_rate_is_constant_and_it_is_said():
    sft = trainer(max_steps=-1, lr_scheduler_type="linear")
    with pytest.warns(UserWarning, match="max_steps is not set"):
        assert [sft.step(ROWS[:1])["learning_rate"] for _ in range(3)] == [1e-2] * 3


def test_evaluation_logging_and_saving_go_by_optimizer_steps(tmp_path):
    data = Dataset.from_dict({"text": ["abc", "de"]})
    sft = trainer(
        tmp_path=tmp_path,
        arguments={"eval_dataset": data},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
    )
    sft.step(ROWS)
    sft.step(ROWS)
    logs = sft.state.log_history
    assert [log["step"] for log in logs if "loss" in log] == [1, 2, 3, 4, 5, 6]
    assert [log["step"] for log in logs if "eval_loss" in log] == [2, 4, 6]
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (2, 4, 6)]
    nll = [-tiny.taken_of(sft.model, row[:1], row[1:]) for row in tensors("abc$", "de$")]
    assert sft.evaluate()["eval_loss"] == pytest.approx(float(torch.cat(nll).mean()), rel=1e-9)


def test_tokens_are_counted_and_the_start_is_evaluated_where_the_settings_ask_for_it(tmp_path):
    data = {"eval_dataset": Dataset.from_dict({"text": ["abc", "de"]})}
    counted = {"include_num_input_tokens_seen": "non_padding", "eval_on_start": True, "per_device_train_batch_size": 5}
    saved = {"save_strategy": "steps", "save_steps": 2}
    sft, read = trainer(tmp_path=tmp_path, arguments=data, **counted, **saved), sum(map(len, ROWS))
    sft.step(ROWS)
    sft.step(ROWS)
    start, *logs = sft.state.log_history
    assert (start["step"], "eval_loss" in start) == (0, True)
    assert [log["num_input_tokens_seen"] for log in logs] == [read, 2 * read]
    resumed = trainer(tmp_path=tmp_path, arguments=data, **counted, **saved)
    resumed.train(resume_from_checkpoint=True)
    resumed.step(ROWS)
    assert resumed.state.num_input_tokens_seen == 3 * read


@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_resumed_trainer_goes_on_as_if_nothing_had_happened(after: int, tmp_path):
    """Bitwise with dropout, within a call of step (after 2 and 4, with 3 updates per call) and between calls (3)."""

    def build(folder):
        settings = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
        return trainer(tiny.gpt2(), tmp_path / folder, max_steps=9, **settings)

    calls = [tiny.rows(5, 3, 7, seed=seed) for seed in range(3)]
    whole = build("a")
    expected = [whole.step(rows)["loss"] for rows in calls]
    again = build("b")
    torch.rand(3)  # other code draws random numbers
    again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{after}"))
    first = again.progress.calls
    assert first == (after + 2) // 3  # it has finished the call of the checkpoint
    losses = [again.step(rows)["loss"] for rows in calls[first:]]
    assert losses == expected[first:]
    assert again.state.global_step == 9
    for name, value in tiny.weights(whole.model).items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_step_refuses_to_load_a_best_model_at_its_end(tmp_path):
    config = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    arguments = {"eval_dataset": Dataset.from_dict({"text": ["abc"]})}
    sft = trainer(tmp_path=tmp_path, arguments=arguments, load_best_model_at_end=True, **config)
    with pytest.raises(ValueError, match=r"load_best_model_at_end=True: training by step\(...\) has no end"):
        sft.step(ROWS)


@pytest.mark.parametrize("name", ["logging_strategy", "save_strategy"])
def test_step_refuses_strategies_of_epochs(name: str, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}='epoch': training by step\(...\) has no epochs"):
        trainer(tmp_path=tmp_path, **{name: "epoch"}).step(ROWS)


@pytest.mark.parametrize("name", ["default", "other"])
def test_an_adapter_of_any_name_resumes(name: str, tmp_path):
    def build():
        config = LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
        model = get_peft_model(tiny.gpt2(), config, adapter_name=name)
        return trainer(model, tmp_path, save_strategy="steps", save_steps=3)

    one = build()
    one.step(ROWS)
    again = build()
    again.train(resume_from_checkpoint=True)
    for weight, value in tiny.weights(one.model).items():
        assert torch.equal(value, again.model.state_dict()[weight]), weight


def test_train_without_data_only_resumes(tmp_path):
    sft = trainer(tmp_path=tmp_path)
    with pytest.raises(ValueError, match="train_dataset"):
        sft.train()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        sft.train(resume_from_checkpoint=True)
    sft.step(ROWS)
    with pytest.raises(ValueError, match="already"):
        sft.train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(TypeError, match="model_path"):
        sft.train(model_path="x")


def test_train_goes_through_a_data_set(tmp_path):
    sft = trainer(
        arguments={"train_dataset": Dataset.from_dict({"text": ["abc", "de"]})}, tmp_path=tmp_path, max_steps=3
    )
    assert sft.train().global_step == 3


def test_a_data_set_is_cut_with_one_warning():
    data = Dataset.from_dict({"text": ["abcdef", "abc", "abcdefghi"]})
    with pytest.warns(UserWarning, match="max_length=4") as warned:
        sft = trainer(arguments={"train_dataset": data}, max_length=4)
    assert sft.train_dataset["input_ids"] == [ids("def$"), ids("abc$"), ids("ghi$")]
    (cut,) = [str(warning.message) for warning in warned if "max_length=4" in str(warning.message)]
    assert cut.startswith("max_length=4: cut 9 tokens from 2 of 3 rows.")


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.t5])
def test_tools_and_template_settings_of_a_row_reach_the_chat_template(make):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ mark }}{{ tools[0].name }}{% for each in messages %}{{ each.content }}{% endfor %}"
    columns = {"chat_template_kwargs": [{"mark": "m"}], "tools": [[{"name": "t"}]]}
    columns |= {name: [[{"role": "user", "content": name}]] for name in ("prompt", "completion")}
    args = IterativeSFTConfig("unused", use_cpu=True, save_strategy="no")
    sft = IterativeSFTTrainer(make(), args, processing_class=tokenizer, train_dataset=Dataset.from_dict(columns))
    (row,) = sft.train_dataset
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True).startswith("mtprompt")


def test_models_are_saved_and_pushed_as_transformers_does(tmp_path, monkeypatch):
    sft = trainer(tmp_path=tmp_path)
    sft.step(ROWS)
    sft.save_model()
    again = type(sft.model).from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight.float(), sft.model.lm_head.weight.float())
    assert not (tmp_path / "iterative_sft.json").exists()
    pushed = {}

    class Api:
        def create_repo(self, name, **settings):
            return type("Url", (), {"repo_id": name})()

        def upload_folder(self, **settings):
            pushed.update(settings)

    monkeypatch.setattr("transformers.trainer.hf_api", lambda *args, **kwargs: Api())
    sft.args.hub_model_id = "someone/model"
    sft.push_to_hub("done", token="secret")
    assert (pushed["repo_id"], pushed["commit_message"]) == ("someone/model", "done")


def test_2024s_constructor_and_a_model_by_name(tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", max_steps=2)
    with pytest.warns(FutureWarning, match="tokenizer"):
        sft = IterativeSFTTrainer(exact(), args, tiny.tokenizer(), max_length=4)
    assert sft.args.max_length == 4
    sft.step(texts=["abc"])
    exact().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    settings = {"max_length": 8, "model_init_kwargs": {"torch_dtype": "float64"}, "save_strategy": "no", "max_steps": 1}
    named = IterativeSFTTrainer(str(tmp_path / "model"), IterativeSFTConfig(str(tmp_path), use_cpu=True, **settings))
    assert named.model.dtype == torch.float64
    assert named.step(texts=["abc"])["num_tokens"] == 3


def test_device_memory_is_given_back_on_request(monkeypatch):
    calls = []
    monkeypatch.setattr(f"{RUN}.clear_device_cache", lambda garbage_collection: calls.append(1))
    for asked in (False, True):
        trainer(optimize_device_cache=asked).step(ROWS[:1])
    assert calls == [1]


BAD = {
    "nothing": ({}, "neither input_ids nor texts"),
    "no rows": ({"input_ids": []}, "at least one row"),
    "one tensor": ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "a list"),
    "labels of another length": ({"input_ids": tensors("abc"), "labels": tensors("ab")}, "as many"),
    "fewer labels": ({"input_ids": tensors("abc", "de"), "labels": tensors("abc")}, "one for each row"),
    "a mask of another length": ({"input_ids": tensors("abc"), "attention_mask": [torch.ones(2)]}, "one place"),
    "nothing counts": ({"input_ids": tensors("abc"), "labels": [torch.full((3,), -100)]}, "no token that counts"),
    "an empty text": ({"texts": ["abc", ""]}, r"texts\[1\]"),
    "an empty label": ({"texts": ["abc"], "texts_labels": [""]}, r"texts_labels\[0\] is empty"),
    "texts beside tensors": (
        {"texts": ["abc"], "input_ids": tensors("abc"), "labels": tensors("abc")},
        "got input_ids and labels beside texts",
    ),
    "labels of texts": ({"input_ids": tensors("abc"), "texts_labels": ["c"]}, "got texts_labels without texts"),
    "a foreign label": ({"texts": ["abc"], "texts_labels": ["x"]}, "no part of"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_learnt_are_refused(name: str):
    rows, message = BAD[name]
    sft = trainer()
    before = tiny.weights(sft.model)
    with pytest.raises(ValueError, match=message):
        sft.step(**rows)
    assert not tiny.moved(before, sft.model)


ABC = tensors("abc")[0]
LAST = len(tiny.VOCABULARY)
BAD_IDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "floats": ({"input_ids": [ABC, ABC + 0.5]}, TypeError, r"input_ids\[1\] must be .* got a torch.float32 tensor"),
    "truth values": ({"input_ids": [ABC > 0]}, TypeError, r"input_ids\[0\] must be .* got a torch.bool tensor"),
    "a list": ({"input_ids": [[5, 6]]}, TypeError, r"input_ids\[0\] must be .* got list"),
    "a text": ({"input_ids": ["abc"]}, TypeError, r"input_ids\[0\] is a text"),
    "2-D rows": ({"input_ids": [ABC[None]]}, TypeError, r"input_ids\[0\] must be a 1-D tensor"),
    "none": ({"input_ids": [ABC, ABC[:0].float()]}, ValueError, r"input_ids\[1\] is empty"),
    "negative": ({"input_ids": [ABC, -ABC]}, ValueError, r"input_ids\[1\] holds token ids from -"),
    "out of the vocabulary": ({"input_ids": [ABC * 0 + LAST]}, ValueError, f"vocabulary has 0 to {LAST - 1}"),
    "labels out of it": ({"input_ids": [ABC], "labels": [ABC * 0 + LAST]}, ValueError, r"labels\[0\] holds token ids"),
    "negative labels": (
        {"input_ids": [ABC], "labels": [ABC * 0 - 1]},
        ValueError,
        r"labels\[0\] holds token ids from -1",
    ),
    "float labels": ({"input_ids": [ABC], "labels": [ABC / 1]}, TypeError, r"labels\[0\] must be"),
    "other labels": (
        {"input_ids": [ABC], "labels": [ABC.flip(0)]},
        ValueError,
        r"labels\[0\]\[0\] is \d+ and input_ids\[0\]\[",
    ),
    "a mask of weights": ({"input_ids": [ABC], "attention_mask": [ABC * 0 + 0.5]}, ValueError, "must hold 1"),
    "a mask of zeros": (
        {"input_ids": [ABC], "attention_mask": [ABC * 0]},
        ValueError,
        r"attention_mask\[0\] must hold",
    ),
    "a mask of two rows": ({"input_ids": [ABC], "attention_mask": [ABC[None] > 0]}, ValueError, r"shape \[1, 3\], its"),
    "a mask as a list": (
        {"input_ids": [ABC], "attention_mask": [[1, 1, 1]]},
        TypeError,
        r"attention_mask\[0\] must be",
    ),
}


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_ids_are_checked_as_those_of_ppo(kind: str):
    sft = trainer(getattr(tiny, kind)())
    before = tiny.weights(sft.model)
    for name, (rows, error, message) in BAD_IDS.items():
        if kind == "t5" and name == "other labels":  # labels are the targets
            continue
        if kind == "t5":
            rows = {"labels": [ABC] * len(rows["input_ids"])} | rows
        with pytest.raises(error, match=message):
            sft.step(**rows)
    assert not tiny.moved(before, sft.model)
    padded = {"attention_mask": [torch.tensor([0, 1, 1])], "labels": [torch.cat([torch.tensor([-100]), ABC[1:]])]}
    assert sft.step([ABC.int()], **padded)["num_tokens"] == (1 if kind == "gpt2" else 2)


def test_ids_reach_to_the_end_of_a_longer_embedding_and_texts_end_there():
    longer, shorter = tiny.gpt2(), tiny.gpt2()
    longer.resize_token_embeddings(LAST + 8)
    shorter.resize_token_embeddings(LAST - 8)
    trainer(longer).step([ABC * 0 + LAST + 7])
    with pytest.raises(ValueError, match=rf"texts\[0\] holds token ids from .*0 to {LAST - 9}\."):
        trainer(shorter).step(texts=["xyz"])
    adapted = trainer(tiny.gpt2(), arguments={"peft_config": LoraConfig(target_modules=["wte", "c_attn"])})
    with pytest.raises(ValueError, match=f"vocabulary has 0 to {LAST - 1}"):
        adapted.step([ABC * 0 + LAST])


@pytest.mark.parametrize("settings", [{"truncation_mode": "middle"}, {"max_length": 1}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        IterativeSFTConfig("unused", use_cpu=True, **settings)


@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_call_that_fails_leaves_nothing_to_the_next_one(fails_at: int):
    """It fails with a gradient: in the first update, or in the second one."""
    failing, fresh = trainer(gradient_accumulation_steps=2), trainer(gradient_accumulation_steps=2)
    whole, count = failing.training_step, itertools.count(1)

    def training_step(*arguments):
        loss = whole(*arguments)
        if next(count) == fails_at:
            raise ZeroDivisionError
        return loss

    failing.training_step = training_step
    with pytest.raises(ZeroDivisionError):
        failing.step(ROWS)
    assert (failing.progress.calls, failing.progress.updates) == (0, 0)
    fresh.model.load_state_dict(tiny.weights(failing.model))
    numbers = [[one.step(ROWS)[name] for name in ("loss", "num_tokens", "epoch")] for one in (failing, fresh)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)
    logged = [[log["loss"] for log in one.state.log_history[-2:]] for one in (failing, fresh)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-9)
    same(failing, fresh)


@pytest.mark.parametrize("name", ["warmup_steps", "logging_steps", "eval_steps", "save_steps"])
def test_a_part_of_max_steps_is_refused_without_max_steps(name: str):
    sft = trainer(**{"max_steps": -1, name: 0.25})
    with pytest.raises(ValueError, match=f"{name}=0.25 .* Set max_steps"):
        sft.step(ROWS)
    trainer(**{"max_steps": 12, name: 0.25}).step(ROWS)


def test_an_evaluation_at_the_start_moves_no_random_number_of_training():
    data = {"eval_dataset": Dataset.from_dict({"text": ["abc", "de"]})}
    with_one, without = (trainer(tiny.gpt2(), arguments=data, eval_on_start=flag) for flag in (True, False))
    losses = []
    for sft in (with_one, without):
        torch.manual_seed(1)
        losses.append(sft.step(ROWS)["loss"])  # with dropout
    assert losses[0] == losses[1]


def test_layers_to_checkpoint_are_chosen_as_in_transformers():
    layers = {"every_n_layers": 2, "offload": False, "use_reentrant": False}
    sft = trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs=layers)
    sft.step(ROWS)
    assert [block.gradient_checkpointing for block in sft.model.transformer.h] == [True, False]
    plain = trainer()
    plain.step(ROWS)
    same(sft, plain)


def test_liger_changes_the_model_that_trains(monkeypatch):
    changed = []
    monkeypatch.setattr(f"{RUN}.apply_liger_kernel", lambda model, config: changed.append((model, config)))
    sft = trainer()
    sft.args.use_liger_kernel, sft.args.liger_kernel_config = True, {"rope": True}  # which need a GPU
    sft.step(ROWS)
    assert changed == [(sft.model, {"rope": True})]


def test_a_checkpoint_says_how_far_the_caller_has_come(tmp_path):
    sft = trainer(tmp_path=tmp_path, save_strategy="steps", save_steps=1)
    sft.step(ROWS)
    read = [json.loads((tmp_path / f"checkpoint-{i}" / "iterative_sft.json").read_text()) for i in (1, 2, 3)]
    assert read == [{"calls": 0, "updates": 1}, {"calls": 0, "updates": 2}, {"calls": 1, "updates": 0}]


def test_a_checkpoint_in_the_middle_of_a_call_holds_the_calls_rows(tmp_path):
    straight = trainer(tmp_path=tmp_path, save_strategy="steps", save_steps=1)
    straight.step(ROWS)
    resumed = trainer(tmp_path=tmp_path)
    resumed.train(str(tmp_path / "checkpoint-2"))  # another loop would sample other rows for the rest of this call
    assert (resumed.progress.calls, resumed.progress.updates) == (1, 0)
    same(straight, resumed)
    straight.step(ROWS[:3])
    resumed.step(ROWS[:3])
    same(straight, resumed)


def test_a_call_that_max_steps_ends_is_not_finished_when_a_run_resumes(tmp_path):
    trainer(tmp_path=tmp_path, save_strategy="steps", save_steps=1).step(ROWS)
    resumed = trainer(tmp_path=tmp_path, max_steps=2)
    resumed.train(str(tmp_path / "checkpoint-2"))
    assert resumed.progress.updates == 2
