"""The constructors of 2024 on trainers with today's parameters: stand-ins record what reaches them."""

import dataclasses
import inspect
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.lm import tiny
from transformers import Trainer, TrainingArguments, default_data_collator

from trimtab_lm.legacy import arguments as legacy
from trimtab_lm.legacy.arguments import SetCheckpointsAside, takes_arguments_of_2024, takes_constructor_of_2024

OPTIMIZERS = (None, None)
COMMON = [
    ("model", None),
    ("args", None),
    ("data_collator", None),
    ("train_dataset", None),
    ("eval_dataset", None),
    ("tokenizer", None),
    ("model_init", None),
    ("compute_metrics", None),
    ("callbacks", None),
    ("optimizers", OPTIMIZERS),
    ("preprocess_logits_for_metrics", None),
]
DOCUMENTED = {
    "Reward": [*COMMON, ("max_length", None), ("peft_config", None)],
    "SFT": [
        *COMMON,
        ("peft_config", None),
        ("dataset_text_field", None),
        ("packing", False),
        ("formatting_func", None),
        ("max_seq_length", None),
        ("infinite", None),
        ("num_of_sequences", 1024),
        ("chars_per_token", 3.6),
        ("dataset_num_proc", None),
        ("dataset_batch_size", 1000),
        ("neftune_noise_alpha", None),
        ("model_init_kwargs", None),
        ("dataset_kwargs", None),
        ("eval_packing", None),
    ],
    "DPO": [
        ("model", None),
        ("ref_model", None),
        ("beta", 0.1),
        ("label_smoothing", 0),
        ("loss_type", "sigmoid"),
        ("args", None),
        ("data_collator", None),
        ("label_pad_token_id", -100),
        ("padding_value", 0),
        ("truncation_mode", "keep_end"),
        ("train_dataset", None),
        ("eval_dataset", None),
        ("tokenizer", None),
        ("model_init", None),
        ("callbacks", None),
        ("optimizers", OPTIMIZERS),
        ("preprocess_logits_for_metrics", None),
        ("max_length", None),
        ("max_prompt_length", None),
        ("max_target_length", None),
        ("peft_config", None),
        ("is_encoder_decoder", None),
        ("disable_dropout", True),
        ("generate_during_eval", False),
        ("compute_metrics", None),
        ("precompute_ref_log_probs", False),
        ("model_init_kwargs", None),
        ("ref_model_init_kwargs", None),
        ("model_adapter_name", None),
        ("ref_adapter_name", None),
        ("dataset_num_proc", None),
        ("reference_free", False),
        ("force_use_ref_model", False),
    ],
    "IterativeSFT": [
        ("model", None),
        ("args", None),
        ("tokenizer", None),
        ("optimizers", OPTIMIZERS),
        ("data_collator", None),
        ("eval_dataset", None),
        ("max_length", None),
        ("truncation_mode", "keep_end"),
        ("preprocess_logits_for_metrics", None),
        ("compute_metrics", None),
        ("optimize_device_cache", False),
    ],
}
"""The constructors in the documentation of 2024, in order."""


def setting(default: Any) -> Any:
    return field(default=default, metadata={"help": "A setting."})


@dataclass
@takes_arguments_of_2024()
class Config(TrainingArguments):
    """Has the fields of all the trainers below; some defaults differ from 2024's."""

    max_length: int | None = setting(1024)
    truncation_mode: str = setting("keep_end")
    model_init_kwargs: dict[str, Any] | None = setting(None)
    optimize_device_cache: bool = setting(False)
    beta: float = setting(0.1)
    label_smoothing: float = setting(0.0)
    loss_type: str = setting("sigmoid")
    label_pad_token_id: int = setting(-100)
    padding_value: int | None = setting(None)
    max_prompt_length: int | None = setting(None)
    max_target_length: int | None = setting(None)
    is_encoder_decoder: bool | None = setting(None)
    disable_dropout: bool = setting(True)
    generate_during_eval: bool = setting(False)
    precompute_ref_log_probs: bool = setting(False)
    reference_free: bool = setting(False)
    force_use_ref_model: bool = setting(False)
    ref_model_init_kwargs: dict[str, Any] | None = setting(None)
    model_adapter_name: str | None = setting(None)
    ref_adapter_name: str | None = setting(None)
    dataset_text_field: str = setting("text")
    packing: bool = setting(False)
    eval_packing: bool | None = setting(None)
    infinite: bool | None = setting(None)
    num_of_sequences: int = setting(1024)
    chars_per_token: float = setting(3.6)
    dataset_num_proc: int | None = setting(None)
    dataset_batch_size: int | None = setting(1000)
    dataset_kwargs: dict[str, Any] | None = setting(None)

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 0:
            raise ValueError(f"beta={self.beta}")


class Recorder(Trainer):
    """Keeps the arguments, and trains nothing."""

    def keep(self, got):
        self.got = {name: value for name, value in got.items() if name not in ("self", "__class__")}
        self.args = got["args"]
        self.added = []

    def add_callback(self, callback):
        self.added.append(callback)


class DPO(Recorder):
    @takes_constructor_of_2024(Config, legacy.DPO)
    def __init__(
        self,
        model=None,
        ref_model=None,
        args=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        model_init=None,
        callbacks=None,
        optimizers=OPTIMIZERS,
        preprocess_logits_for_metrics=None,
        peft_config=None,
        compute_metrics=None,
    ):
        """Takes DPO's arguments."""
        self.keep(locals())


class SFT(Recorder):
    @takes_constructor_of_2024(Config, legacy.SFT)
    def __init__(
        self,
        model,
        args=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        model_init=None,
        compute_metrics=None,
        callbacks=None,
        optimizers=OPTIMIZERS,
        preprocess_logits_for_metrics=None,
        peft_config=None,
        formatting_func=None,
    ):
        self.keep(locals())


class Reward(Recorder):
    @takes_constructor_of_2024(Config, legacy.REWARD)
    def __init__(
        self,
        model=None,
        args=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        model_init=None,
        compute_metrics=None,
        callbacks=None,
        optimizers=OPTIMIZERS,
        preprocess_logits_for_metrics=None,
        peft_config=None,
    ):
        self.keep(locals())


class IterativeSFT(Recorder):
    @takes_constructor_of_2024(Config, legacy.ITERATIVE_SFT)
    def __init__(
        self,
        model=None,
        args=None,
        data_collator=None,
        eval_dataset=None,
        processing_class=None,
        optimizers=OPTIMIZERS,
        preprocess_logits_for_metrics=None,
        compute_metrics=None,
    ):
        self.keep(locals())


class GRPO(Recorder):
    @takes_constructor_of_2024(Config)
    def __init__(self, model, reward_funcs, args=None, *, processing_class=None, **extra):
        self.keep(locals())


TRAINERS = {kind.__name__: kind for kind in (DPO, SFT, Reward, IterativeSFT)}
NEW = {"tokenizer": "processing_class", "max_seq_length": "max_length"}
TOKENIZER = tiny.tokenizer()


def silently(make, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make(*args, **kwargs)


def warned(make, *args, **kwargs):
    with pytest.warns(FutureWarning) as seen:
        result = make(*args, **kwargs)
    assert {warning.filename for warning in seen} == {__file__}
    return result, " ".join(str(warning.message) for warning in seen)


def place(trainer, name):
    """Returns the value of a 2024 argument, wherever it is today."""
    new = NEW.get(name, name)
    return trainer.got[new] if new in trainer.got else getattr(trainer.args, new)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_signature_shows_todays_parameters_and_then_the_documented_ones(name):
    shown = inspect.signature(TRAINERS[name].__init__).parameters
    todays = list(inspect.signature(TRAINERS[name].__init__.__wrapped__).parameters)
    assert list(shown)[: len(todays)] == todays
    assert {old: shown[old].default for old, _ in DOCUMENTED[name]}.items() >= {
        (old, default) for old, default in DOCUMENTED[name] if old != "model"
    }
    assert all(shown[old].kind is inspect.Parameter.KEYWORD_ONLY for old in list(shown)[len(todays) :])
    assert shown.keys() == {*todays, *(old for old, _ in DOCUMENTED[name])}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "old"), [(name, old) for name in TRAINERS for old, _ in DOCUMENTED[name]])
def test_every_documented_argument_reaches_its_place(name, old):
    value = {
        "args": Config(seed=7),
        "tokenizer": TOKENIZER,
        "truncation_mode": "keep_start",
        "loss_type": "ipo",
        "beta": 0.7,
    }.get(old, 3)
    model = {} if old == "model" else {"model": "m"}
    trainer = TRAINERS[name](**model, **{old: value})
    assert place(trainer, old) is value or place(trainer, old) == value


@pytest.mark.parametrize("name", TRAINERS)
def test_documented_order_of_all_positional_arguments(name):
    values = {old: f"{old}!" for old, _ in DOCUMENTED[name]} | {"args": Config(max_length=1024), "tokenizer": TOKENIZER}
    values |= {"beta": 0.7} if name == "DPO" else {}
    trainer, _ = warned(TRAINERS[name], *values.values())
    expected = {old: value for old, value in values.items() if old != "args"}
    assert {old: place(trainer, old) for old in expected} == expected
    with pytest.raises(TypeError, match=f"{name}.. takes {len(values)} positional arguments but {len(values) + 1}"):
        TRAINERS[name](*values.values(), "more")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("DPO", ["m", "ref", Config(), "collator", "train", "eval", TOKENIZER]),
        ("DPO", ["m", None, None, "collator"]),
        ("IterativeSFT", ["m", Config(), default_data_collator, "eval", TOKENIZER]),
        ("IterativeSFT", ["m", None, None, "eval"]),
        ("SFT", ["m", None, "c", "t", "e", TOKENIZER, "init", "metrics", [], OPTIMIZERS, "p", "peft", len]),
        ("Reward", ["m", None, "c", "t", "e", TOKENIZER, "init", "metrics", [], OPTIMIZERS, "p", "peft"]),
    ],
)
def test_todays_order_of_positional_arguments(name, values):
    trainer = silently(TRAINERS[name], *values)
    passed = dict(zip(trainer.got, values, strict=False))
    assert {key: trainer.got[key] for key in passed if key != "args"} == {
        key: value for key, value in passed.items() if key != "args"
    }


def test_2024_order_where_it_leaves_todays():
    dpo, said = warned(DPO, "m", "ref", 0.3, 0.2, "ipo", Config(seed=7))
    assert (dpo.args.beta, dpo.args.label_smoothing, dpo.args.loss_type, dpo.args.seed) == (0.3, 0.2, "ipo", 7)
    assert "write args=Config(beta=..., label_smoothing=..., loss_type=...)" in said
    values = ["m", None, "c", "t", "e", None, None, None, None, OPTIMIZERS, None]
    sft, _ = warned(SFT, *values, "peft", "body", True, len)
    assert (sft.args.dataset_text_field, sft.args.packing, sft.got["formatting_func"]) == ("body", True, len)
    reward, _ = warned(Reward, *values, 64)
    assert reward.args.max_length == 64
    iterative, said = warned(IterativeSFT, "m", Config(), TOKENIZER)
    assert iterative.got["processing_class"] is TOKENIZER
    assert iterative.got["data_collator"] is None
    assert "write processing_class" in said


def test_arguments_move_to_a_copy_of_the_config():
    args = Config(seed=7)
    trainer, said = warned(SFT, "m", args, max_seq_length=64, packing=True)
    assert (trainer.args.max_length, trainer.args.packing, trainer.args.seed) == (64, True, 7)
    assert (args.max_length, args.packing) == (1024, False)
    assert "SFT(packing=..., max_seq_length=...) is deprecated" in said
    assert "write args=Config(packing=..., max_length=...)" in said


def test_todays_arguments_pass_untouched_and_in_silence():
    args = Config(beta=0.5)
    trainer = silently(DPO, "m", args=args, processing_class=TOKENIZER)
    assert trainer.args is args
    assert trainer.got["processing_class"] is TOKENIZER
    assert silently(DPO, "m").args.output_dir == "trainer_output"


def test_plain_training_arguments_become_the_config():
    args = TrainingArguments(seed=7)
    trainer, said = warned(DPO, "m", args=args, beta=0.5)
    assert (type(trainer.args), trainer.args.seed, trainer.args.beta) == (Config, 7, 0.5)
    assert "args is a TrainingArguments: write Config" in said
    with pytest.raises(TypeError, match="args is a str"):
        DPO("m", args="folder")


def test_a_value_of_the_constructor_may_not_contradict_the_config():
    with pytest.raises(ValueError, match=r"beta, on the constructor, and Config.beta are both.*0\.1 and 0\.5"):
        DPO("m", args=Config(beta=0.5), beta=0.1)
    with pytest.raises(ValueError, match="neftune_noise_alpha"):
        SFT("m", args=TrainingArguments(neftune_noise_alpha=5.0), neftune_noise_alpha=3.0)
    assert warned(DPO, "m", args=Config(beta=0.5), beta=0.5)[0].args.beta == 0.5


def test_the_configs_own_check_sees_what_moved():
    with pytest.raises(ValueError, match="beta=-1"):
        DPO("m", beta=-1)


def test_none_as_the_old_default_leaves_todays_default():
    trainer = silently(SFT, "m", max_seq_length=None, tokenizer=None, dataset_text_field=None)
    assert (trainer.args.max_length, trainer.args.dataset_text_field) == (1024, "text")
    trainer, _ = warned(SFT, "m", dataset_batch_size=None)  # documented: the whole dataset at once
    assert trainer.args.dataset_batch_size is None


def test_tokenizer_and_another_processing_class():
    with pytest.raises(ValueError, match="DPO got tokenizer and another processing_class"):
        DPO("m", tokenizer=TOKENIZER, processing_class="other")
    trainer, _ = warned(DPO, "m", tokenizer=TOKENIZER, processing_class=TOKENIZER)
    assert trainer.got["processing_class"] is TOKENIZER


def test_a_trainer_without_a_past_takes_tokenizer_and_plain_arguments():
    trainer, _ = warned(GRPO, "m", [len], TrainingArguments(seed=7), tokenizer=TOKENIZER, more=1)
    assert (type(trainer.args), trainer.args.seed) == (Config, 7)
    assert (trainer.got["processing_class"], trainer.got["extra"]) == (TOKENIZER, {"more": 1})
    assert list(inspect.signature(GRPO.__init__).parameters)[-2:] == ["tokenizer", "extra"]


def test_unknown_and_doubled_arguments_are_pythons_type_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        DPO("m", betta=0.5)
    with pytest.raises(TypeError, match=r"DPO\(\) got multiple values for argument 'ref_model'"):
        DPO("m", "ref", ref_model="other")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        SFT()


def test_an_old_name_needs_a_field_to_go_to():
    with pytest.raises(TypeError, match="TrainingArguments has no field for max_length of the old constructor"):

        class Homeless:
            @takes_constructor_of_2024(TrainingArguments, legacy.REWARD)
            def __init__(
                self,
                model=None,
                args=None,
                processing_class=None,
                data_collator=None,
                train_dataset=None,
                eval_dataset=None,
                model_init=None,
                compute_metrics=None,
                callbacks=None,
                optimizers=None,
                preprocess_logits_for_metrics=None,
                peft_config=None,
            ):
                """Lacks max_length."""


def test_the_warning_of_a_subclass_points_at_its_call():
    class Mine(DPO):
        def __init__(self, model):
            super().__init__(model, beta=0.5)

    with pytest.warns(FutureWarning) as seen:
        Mine("m")
    lines, start = inspect.getsourcelines(Mine.__init__)
    assert [(warning.filename, warning.lineno) for warning in seen] == [(__file__, start + len(lines) - 1)]


def test_decorated_constructor_keeps_its_name_and_text():
    assert (DPO.__init__.__name__, DPO.__init__.__doc__) == ("__init__", "Takes DPO's arguments.")


def test_overwrite_output_dir_sets_the_callback():
    assert DPO("m", args=Config(overwrite_output_dir=True)).added == [SetCheckpointsAside]
    assert DPO("m").added == []


def test_overwrite_output_dir_in_a_real_training(tmp_path):
    class Real(Trainer):
        @takes_constructor_of_2024(Config)
        def __init__(self, model, args=None, train_dataset=None, processing_class=None):
            super().__init__(model, args, train_dataset=train_dataset, processing_class=processing_class)

    (tmp_path / "checkpoint-99").mkdir()
    args = Config(output_dir=str(tmp_path), overwrite_output_dir=True, max_steps=1, save_total_limit=1, use_cpu=True)
    row = {"input_ids": [4, 5], "labels": [4, 5]}
    Real(tiny.gpt2(), args, train_dataset=[row]).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_replaced-1-checkpoint-99", "checkpoint-1"]
    longer = dataclasses.replace(args, max_steps=2)
    Real(tiny.gpt2(), longer, train_dataset=[row]).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_replaced-1-checkpoint-99", "checkpoint-2"]
