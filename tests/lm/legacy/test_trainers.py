"""Every documented argument of 2024 on the real trainers: constructs, warns with the new spelling, and trains."""

import dataclasses
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from tests.marks import slow_but
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments

from trimtab_common.config import parse_config
from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.grpo import GRPOConfig
from trimtab_lm.iterative_sft import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.legacy import arguments as legacy
from trimtab_lm.reward import RewardConfig, RewardTrainer
from trimtab_lm.sft import SFTConfig, SFTTrainer

TEXTS = Dataset.from_dict({"text": ["hello world.", "abc."], "story": ["xyz.", "a tale."]})
PAIRS = Dataset.from_dict({"prompt": ["ab", "cd"], "chosen": [" yes.", " sure."], "rejected": [" no.", " never."]})


def tokenized_pairs() -> Dataset:
    rows = tiny.rows(4, 3, 6)
    columns = {"chosen": rows[:2], "rejected": rows[2:]}
    return Dataset.from_dict(
        {f"input_ids_{name}": [ids.tolist() for ids in rows] for name, rows in columns.items()}
        | {f"attention_mask_{name}": [[1] * len(ids) for ids in rows] for name, rows in columns.items()}
    )


def plain(tmp_path, **settings) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        save_strategy="no",
        max_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )


def optimizers(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def saved(tmp_path, model) -> str:
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def two_adapters(model):
    from peft import get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"]), adapter_name="own")
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["c_attn"]))
    return model


# Config: names that transformers 5 dropped -------------------------------------------------------------------------

TRANSLATED = {
    "evaluation_strategy": "steps",
    "per_gpu_train_batch_size": 2,
    "per_gpu_eval_batch_size": 2,
    "no_cuda": True,
    "push_to_hub_token": "secret",
    "push_to_hub_model_id": "model",
    "push_to_hub_organization": "us",
    "warmup_ratio": 0.5,
    "logging_dir": "logs",
    "use_mps_device": True,
    "group_by_length": True,
    "adafactor": True,
    "include_inputs_for_metrics": True,
    "include_tokens_per_second": True,
    "fsdp_min_num_params": 10,
    "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    "dispatch_batches": False,
    "split_batches": True,
}
GONE = {
    "save_safetensors": False,
    "jit_mode_eval": True,
    "use_ipex": True,
    "fp16_opt_level": "O2",
    "half_precision_backend": "apex",
    "fp16_backend": "apex",
    "tpu_num_cores": 8,
    "tpu_metrics_debug": True,
    "past_index": 0,
    "use_legacy_prediction_loop": True,
    "mp_parameters": "x",
    "torchdynamo": "inductor",
    "ray_scope": "all",
}
CONFIGS = [SFTConfig, RewardConfig, DPOConfig, IterativeSFTConfig]


def test_every_name_is_in_one_of_the_lists():
    assert {*TRANSLATED, *GONE} == set(legacy.ARGUMENTS)


@pytest.mark.parametrize("name", slow_but(TRANSLATED, "evaluation_strategy", "no_cuda", "split_batches"))
def test_a_name_of_2024_on_the_config_trains(name: str, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "unset")
    with pytest.warns(FutureWarning, match=name):
        args = SFTConfig(str(tmp_path), use_cpu=True, save_strategy="no", max_steps=1, **{name: TRANSLATED[name]})
    SFTTrainer(tiny.gpt2(), args, train_dataset=TEXTS, eval_dataset=TEXTS, processing_class=tiny.tokenizer()).train()


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_name_whose_meaning_is_gone_says_what_to_use(kind, name: str, tmp_path):
    with pytest.raises(ValueError, match=name):
        kind(str(tmp_path), use_cpu=True, **{name: GONE[name]})


def test_overwrite_output_dir_sets_old_checkpoints_aside(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    args = SFTConfig(str(tmp_path), use_cpu=True, max_steps=1, overwrite_output_dir=True)
    SFTTrainer(tiny.gpt2(), args, train_dataset=TEXTS, processing_class=tiny.tokenizer()).train()
    names = {folder.name for folder in tmp_path.glob("*checkpoint-*")}
    assert "checkpoint-1" in names
    assert "checkpoint-7" not in names
    assert len(names) == 2


@pytest.mark.parametrize("kind", [*CONFIGS, GRPOConfig])
def test_both_parsers_make_every_config(kind, tmp_path):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--warmup_ratio", "0.5", "--report_to", "none"]
    with pytest.warns(FutureWarning, match="warmup_ratio"):
        (by_transformers,) = HfArgumentParser(kind).parse_args_into_dataclasses([*flags, "--no_cuda", "False"])
    with pytest.warns(FutureWarning, match="warmup_ratio"):
        (ours,) = parse_config(
            kind, argv=[f"{name}={value}" for name, value in zip(flags[::2], flags[1::2], strict=True)]
        )
    unlike = {"logging_steps"}  # transformers 5 takes a float; ours is documented as such
    for field in dataclasses.fields(kind):
        if field.name not in unlike and not field.name.startswith("_"):
            assert getattr(ours, field.name) == getattr(by_transformers, field.name), field.name
    assert (ours.warmup_steps, ours.report_to) == (0.5, [])


# Constructors ------------------------------------------------------------------------------------------------------


def trains(trainer) -> None:
    before = tiny.weights(trainer.model)
    trainer.train()
    assert tiny.moved(before, trainer.model)


SFT = {
    "tokenizer": None,
    "dataset_text_field": "story",
    "packing": True,
    "max_seq_length": 16,
    "num_of_sequences": 4,
    "chars_per_token": 1.0,
    "infinite": True,
    "dataset_num_proc": 1,
    "dataset_batch_size": 1,
    "neftune_noise_alpha": 5.0,
    "dataset_kwargs": {"add_special_tokens": False},
    "model_init_kwargs": {"torch_dtype": "float64"},
    "eval_packing": True,
}


@pytest.mark.parametrize("name", slow_but(SFT, *(name for name in SFT if name != "infinite")))
def test_sft(name: str, tmp_path):
    model = saved(tmp_path, tiny.gpt2()) if name == "model_init_kwargs" else tiny.gpt2()
    arguments = {"tokenizer": tiny.tokenizer(), **({} if name == "tokenizer" else {name: SFT[name]})}
    if name in ("infinite", "num_of_sequences", "chars_per_token"):
        arguments["packing"] = True
    with pytest.warns(FutureWarning, match=name):
        trainer = SFTTrainer(model, args=plain(tmp_path), train_dataset=TEXTS, **arguments)
    trains(trainer)
    if name != "tokenizer":
        assert getattr(trainer.args, legacy.NEW_NAMES.get(name, name)) == SFT[name]


def test_sft_by_position(tmp_path):
    def first_column(row):
        return row["text"]

    positional = [
        tiny.gpt2(),
        plain(tmp_path),
        None,
        TEXTS,
        TEXTS,
        tiny.tokenizer(),
        None,
        None,
        [TrainerCallback()],
        (None, None),
        None,
        None,
        "text",
        True,
        first_column,
        16,
    ]
    with pytest.warns(FutureWarning):
        trainer = SFTTrainer(*positional)
    assert (trainer.args.packing, trainer.args.max_length, trainer.formatting_func) == (True, 16, first_column)
    trains(trainer)


DPO = {
    "tokenizer": None,
    "beta": 0.3,
    "label_smoothing": 0.1,
    "loss_type": "kto",
    "label_pad_token_id": -1,
    "padding_value": 1,
    "truncation_mode": "keep_start",
    "max_length": 12,
    "max_prompt_length": 1,
    "max_target_length": 4,
    "is_encoder_decoder": False,
    "disable_dropout": False,
    "generate_during_eval": True,
    "precompute_ref_log_probs": True,
    "model_init_kwargs": {"torch_dtype": "float64"},
    "ref_model_init_kwargs": {"torch_dtype": "float64"},
    "model_adapter_name": "own",
    "ref_adapter_name": "ref",
    "dataset_num_proc": 1,
    "reference_free": True,
}


@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str, tmp_path):
    model, ref_model = tiny.gpt2(), None
    arguments = {"tokenizer": tiny.tokenizer(), **({} if name == "tokenizer" else {name: DPO[name]})}
    if name == "max_target_length":
        model = tiny.t5(initializer_factor=1.0)
    elif name == "model_init_kwargs":
        model = saved(tmp_path, model)
    elif name == "ref_model_init_kwargs":
        ref_model = saved(tmp_path, tiny.gpt2(1))
    elif name.endswith("adapter_name"):
        model = two_adapters(model)
        arguments |= {"model_adapter_name": "own", "ref_adapter_name": "ref"}
    with pytest.warns(FutureWarning, match=name):
        trainer = DPOTrainer(
            model, ref_model, args=plain(tmp_path, learning_rate=0.1), train_dataset=PAIRS, **arguments
        )
    trains(trainer)
    if name != "tokenizer":
        assert getattr(trainer.args, name) == DPO[name]


def test_dpo_by_position(tmp_path):
    with pytest.warns(FutureWarning):
        trainer = DPOTrainer(
            tiny.gpt2(),
            tiny.gpt2(1),
            0.2,
            0.0,
            "hinge",
            plain(tmp_path, learning_rate=0.1),
            None,
            -100,
            0,
            "keep_end",
            PAIRS,
            PAIRS,
            tiny.tokenizer(),
        )
    assert (trainer.args.beta, trainer.args.loss_type) == (0.2, "hinge")
    trains(trainer)


def test_reward(tmp_path):
    args = RewardConfig(str(tmp_path), use_cpu=True, save_strategy="no", max_steps=1, max_length=8)
    with pytest.warns(FutureWarning, match="tokenizer"):
        trainer = RewardTrainer(
            model=tiny.scorer(), args=args, tokenizer=tiny.tokenizer(), train_dataset=tokenized_pairs()
        )
    trains(trainer)


@pytest.mark.parametrize("by_position", [False, True])
def test_reward_with_plain_arguments(by_position: bool, tmp_path):
    order = [tiny.scorer(), plain(tmp_path), None, tokenized_pairs(), None, tiny.tokenizer()]
    named = {"model": order[0], "args": order[1], "train_dataset": order[3], "tokenizer": order[5], "max_length": 5}
    arguments = ([*order, None, None, None, (None, None), None, 5], {}) if by_position else ([], named)
    with pytest.warns(FutureWarning):
        trainer = RewardTrainer(*arguments[0], **arguments[1])
    assert trainer.args.max_length == 5
    trains(trainer)


ITERATIVE = {"max_length": 4, "truncation_mode": "keep_start", "optimize_device_cache": True}


@pytest.mark.parametrize("name", [*ITERATIVE, "by position"])
def test_iterative_sft(name: str, tmp_path):
    model, args = tiny.gpt2(), plain(tmp_path, learning_rate=0.1)
    before = tiny.weights(model)
    arguments: tuple = ([], {"model": model, "args": args, "tokenizer": tiny.tokenizer(), name: ITERATIVE.get(name)})
    if name == "by position":
        arguments = ([model, args, tiny.tokenizer(), optimizers(model)], {})
    with pytest.warns(FutureWarning, match="tokenizer"):
        trainer = IterativeSFTTrainer(*arguments[0], **arguments[1])
    trainer.step(texts=["abc"])
    assert tiny.moved(before, model)
    if name in ITERATIVE:
        assert getattr(trainer.args, name) == ITERATIVE[name]


def test_every_constructor_argument_of_2024_is_seen_here():
    shared = set(legacy.REWARD) - {"max_length"} | {"ref_model", "formatting_func", "force_use_ref_model"}
    for seen, signature in ((SFT, legacy.SFT), (DPO, legacy.DPO), (ITERATIVE, legacy.ITERATIVE_SFT)):
        assert set(signature) - shared <= set(seen)


def test_todays_arguments_give_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        args = SFTConfig(str(tmp_path), use_cpu=True, save_strategy="no", max_steps=1)
        SFTTrainer(tiny.gpt2(), args, train_dataset=TEXTS, processing_class=tiny.tokenizer()).train()
        DPOTrainer(
            tiny.gpt2(),
            None,
            DPOConfig(str(tmp_path), use_cpu=True, max_steps=1),
            train_dataset=PAIRS,
            processing_class=tiny.tokenizer(),
        ).train()
