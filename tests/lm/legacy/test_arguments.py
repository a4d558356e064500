"""Names of TrainingArguments in 2024 on a config: each is translated, or rejected with the replacement."""

import dataclasses
import json
import math
import os
import sys
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from accelerate.state import AcceleratorState
from tests.lm import tiny
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerControl

from trimtab_common.config import parse_config
from trimtab_lm.hf.config import CHECKPOINTING, checkpointing_of
from trimtab_lm.legacy.arguments import ARGUMENTS, SetCheckpointsAside, config_from, takes_arguments_of_2024

DOCUMENTED = {
    "overwrite_output_dir": False,
    "evaluation_strategy": "no",
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "warmup_ratio": 0.0,
    "logging_dir": None,
    "save_safetensors": True,
    "no_cuda": False,
    "use_mps_device": False,
    "jit_mode_eval": False,
    "use_ipex": False,
    "fp16_opt_level": "O1",
    "half_precision_backend": "auto",
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "past_index": -1,
    "fsdp_min_num_params": 0,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "adafactor": False,
    "group_by_length": False,
    "use_legacy_prediction_loop": False,
    "include_inputs_for_metrics": False,
    "fp16_backend": "auto",
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": None,
    "mp_parameters": "",
    "torchdynamo": None,
    "ray_scope": "last",
    "dispatch_batches": None,
    "split_batches": False,
    "include_tokens_per_second": False,
}
"""Names in the documentation of 2024 that have no field in transformers 5, with their defaults."""


@dataclass
@takes_arguments_of_2024()
class Config(TrainingArguments):
    """Like the documented RewardConfig, has defaults that transformers 5 would reject or warn about."""

    report_to: None | str | list[str] = field(  # noqa: RUF036 (HfArgumentParser needs this order)
        default=None, metadata={"help": "Trackers."}
    )
    fsdp: str | None = field(default="", metadata={"help": "FSDP."})
    bf16: bool | None = field(default=None, metadata={"help": "Mixed precision."})
    hub_private_repo: bool | None = field(default=False, metadata={"help": "Private."})
    include_num_input_tokens_seen: str | bool = field(default=False, metadata={"help": "Count."})
    gradient_checkpointing: bool | None = field(default=True, metadata={"help": "Less memory."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens."})
    truncation_mode: str = field(default="keep_end", metadata={"help": "Which end to keep."})


@dataclass
@takes_arguments_of_2024()
class Checked(TrainingArguments):
    """Checks its fields itself, before and after transformers does."""

    def __post_init__(self):
        self.before = str(getattr(self.eval_strategy, "value", self.eval_strategy))
        super().__post_init__()
        self.steps = self.get_warmup_steps(1000)


@dataclass
class Own(Checked):
    """A user's subclass."""

    extra: int = 0

    def __post_init__(self):
        self.extra += 1
        super().__post_init__()


@pytest.fixture(autouse=True)
def tensorboard_variable(monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")


@pytest.fixture(autouse=True)
def state():
    """Resets accelerate, which TrainingArguments of `use_cpu` leave on the CPU."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def silently(make, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make(*args, **kwargs)


def translated(kind=Config, **settings):
    with pytest.warns(FutureWarning):
        return kind(**settings)


def test_every_documented_name_is_a_field_with_its_documented_default():
    fields = {f.name: f.default for f in dataclasses.fields(Config)}
    assert {name: fields[name] for name in DOCUMENTED} == DOCUMENTED
    assert DOCUMENTED.keys() - {"overwrite_output_dir"} == ARGUMENTS.keys()
    assert not DOCUMENTED.keys() & {f.name for f in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("kind", [Config, Checked, Own])
def test_every_documented_default_is_taken_without_a_word(kind):
    config = silently(kind, **DOCUMENTED)
    assert {name: getattr(config, name) for name in DOCUMENTED} == DOCUMENTED


ALIASES = [
    ({"evaluation_strategy": "steps"}, "eval_strategy", "steps"),
    ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
    ({"per_gpu_eval_batch_size": 3}, "per_device_eval_batch_size", 3),
    ({"warmup_ratio": 0.25}, "warmup_steps", 0.25),
    ({"no_cuda": True}, "use_cpu", True),
    ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
    ({"adafactor": True}, "optim", "adafactor"),
    ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
    ({"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]}, "include_for_metrics", ["loss", "inputs"]),
    ({"include_tokens_per_second": True}, "include_num_input_tokens_seen", "all"),
    (
        {"include_tokens_per_second": True, "include_num_input_tokens_seen": "non_padding"},
        "include_num_input_tokens_seen",
        "non_padding",
    ),
    ({"push_to_hub_token": "secret"}, "hub_token", "secret"),
    ({"push_to_hub_model_id": "name"}, "hub_model_id", "name"),
    ({"push_to_hub_model_id": "name", "push_to_hub_organization": "owner"}, "hub_model_id", "owner/name"),
    ({"push_to_hub_organization": "owner", "output_dir": "runs/name"}, "hub_model_id", "owner/name"),
    ({"use_mps_device": True}, "use_cpu", False),
    ({"fsdp_min_num_params": 100}, "fsdp_config", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_config": {"fsdp_version": 2}},
        "fsdp_config",
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Block", "version": 2},
    ),
]


@pytest.mark.parametrize(("old", "new", "value"), ALIASES)
def test_an_old_name_sets_the_new_one_and_names_it_in_the_warning(old, new, value):
    with pytest.warns(FutureWarning) as seen:
        config = Config(**old)
    assert getattr(config, new) == value
    messages = [str(warning.message) for warning in seen]
    past = [name for name in old if name in ARGUMENTS]
    assert all(message.startswith(name) for message, name in zip(sorted(messages), sorted(past), strict=True))
    assert "use_mps_device" in old or new in messages[0]
    assert {warning.filename for warning in seen} == {__file__}
    assert {name: getattr(config, name) for name in ARGUMENTS} == {name: DOCUMENTED[name] for name in ARGUMENTS}


@pytest.mark.parametrize(("old", "new", "value"), ALIASES)
def test_copies_and_rebuilds_keep_the_setting_and_do_not_warn(old, new, value):
    config = translated(**old)
    assert getattr(silently(dataclasses.replace, config, learning_rate=1.0), new) == value
    assert getattr(silently(Config, **config.to_dict() | {"hub_token": config.hub_token}), new) == value


@pytest.mark.parametrize(("name", "value"), [("split_batches", True), ("dispatch_batches", False)])
def test_batch_arguments_become_entries_of_accelerator_config(name, value):
    config = translated(**{name: value}, accelerator_config={"even_batches": False})
    assert getattr(config.accelerator_config, name) is value
    assert config.accelerator_config.even_batches is False
    with pytest.warns(FutureWarning):
        copied = dataclasses.replace(silently(Config), **{name: value})
    assert getattr(copied.accelerator_config, name) is value


def test_warmup_ratio_counts_steps_as_in_2024():
    assert translated(warmup_ratio=0.1).get_warmup_steps(1001) == math.ceil(1001 * 0.1)
    assert translated(warmup_ratio=1.0).get_warmup_steps(1001) == 1001
    with pytest.raises(ValueError, match=r"warmup_ratio=1\.5"):
        Config(warmup_ratio=1.5)


def test_logging_dir_is_where_tensorboard_writes(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    config = translated(
        output_dir=str(tmp_path / "out"),
        logging_dir=str(tmp_path / "logs"),
        report_to="tensorboard",
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        use_cpu=True,
    )
    row = {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([4, 5])}
    Trainer(tiny.gpt2(), config, train_dataset=[row]).train()
    assert list((tmp_path / "logs").glob("events.*"))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "logs")


def test_tokens_per_second_are_logged(tmp_path):
    config = translated(
        output_dir=str(tmp_path),
        include_tokens_per_second=True,
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        use_cpu=True,
    )
    row = {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([4, 5])}
    trainer = Trainer(tiny.gpt2(), config, train_dataset=[row])
    trainer.train()
    assert trainer.state.log_history[0]["train_tokens_per_second"] > 0
    assert trainer.state.log_history[1]["num_input_tokens_seen"] == 4


GONE = {
    "save_safetensors": (False, "always saved as safetensors"),
    "jit_mode_eval": (True, "torch_compile=True"),
    "use_ipex": (True, "PyTorch itself"),
    "fp16_opt_level": ("O2", "fp16=True"),
    "half_precision_backend": ("apex", "PyTorch's own"),
    "fp16_backend": ("amp", "PyTorch's own"),
    "tpu_num_cores": (8, "accelerate launch"),
    "tpu_metrics_debug": (True, "debug='tpu_metrics_debug'"),
    "past_index": (2, "leave it out"),
    "use_legacy_prediction_loop": (True, "one prediction loop"),
    "mp_parameters": ("x=1", "SageMaker"),
    "torchdynamo": ("inductor", "torch_compile_backend"),
    "ray_scope": ("all", "RAY_SCOPE"),
}


@pytest.mark.parametrize("name", GONE)
def test_a_name_without_meaning_says_what_to_do(name):
    value, advice = GONE[name]
    with pytest.raises(ValueError, match=f"{name}=.*{advice}"):
        Config(**{name: value})


def test_every_name_is_translated_or_refused():
    assert {name for old, _, _ in ALIASES for name in old if name in ARGUMENTS} | GONE.keys() == ARGUMENTS.keys() - {
        "split_batches",
        "dispatch_batches",
        "logging_dir",
    }


@pytest.mark.parametrize(
    "both",
    [
        {"evaluation_strategy": "steps", "eval_strategy": "epoch"},
        {"warmup_ratio": 0.1, "warmup_steps": 5},
        {"adafactor": True, "optim": "sgd"},
        {"split_batches": True, "accelerator_config": {"split_batches": False}},
        {"fsdp_min_num_params": 1, "fsdp_transformer_layer_cls_to_wrap": "Block"},
        {"push_to_hub_model_id": "name", "hub_model_id": "owner/name"},
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_and_a_new_spelling_that_differ_are_an_error(both):
    with pytest.raises(ValueError, match="both given and differ"):
        Config(**both)


def test_an_old_and_a_new_spelling_may_agree():
    assert translated(evaluation_strategy="steps", eval_strategy="steps").eval_strategy == "steps"


def test_a_token_is_shown_neither_by_an_error_nor_by_the_config():
    with pytest.raises(ValueError, match="hub_token") as caught:
        Config(push_to_hub_token="secret", hub_token="other")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(translated(push_to_hub_token="secret"))


def test_fsdp_names_beside_a_file_say_where_to_write_them():
    with pytest.raises(ValueError, match=r"fsdp\.json.*'min_num_params'"):
        Config(fsdp_min_num_params=1, fsdp_config="fsdp.json")


def test_documented_values_that_transformers_5_refuses():
    config = silently(Config)
    assert (config.report_to, config.fsdp, config.bf16, config.hub_private_repo) == ([], None, False, False)
    assert config.include_num_input_tokens_seen == "no"
    assert config.gradient_checkpointing is True
    assert checkpointing_of(config) == (True, None)
    assert checkpointing_of(silently(Config, gradient_checkpointing=False)) == (False, None)
    assert silently(Config, **{CHECKPOINTING: False}).gradient_checkpointing is False
    kwargs = {"use_reentrant": False}
    assert checkpointing_of(silently(Config, gradient_checkpointing_kwargs=kwargs)) == (True, kwargs)


def test_old_names_do_not_fill_the_record_of_a_run():
    recorded = translated(no_cuda=True).to_dict()
    assert not recorded.keys() & ARGUMENTS.keys()
    assert recorded["use_cpu"] is True


@pytest.mark.parametrize("kind", [Checked, Own])
def test_a_config_with_its_own_checks_sees_translated_values(kind):
    here = sys._getframe().f_lineno + 2
    with pytest.warns(FutureWarning) as seen:
        config = kind(evaluation_strategy="epoch", warmup_ratio=0.5)
    assert (config.before, config.steps) == ("epoch", 500)
    assert {(warning.filename, warning.lineno) for warning in seen} == {(__file__, here)}


WORDS = [
    "--evaluation_strategy=steps",
    "--no_cuda",
    "--per_gpu_train_batch_size=3",
    "--warmup_ratio=0.5",
    "--dispatch_batches=False",
    "--overwrite_output_dir",
]


@pytest.mark.parametrize(
    "parse",
    [
        lambda words: HfArgumentParser(Config).parse_args_into_dataclasses(words),
        lambda words: parse_config(Config, argv=words),
    ],
)
def test_old_names_on_the_command_line(parse):
    with pytest.warns(FutureWarning):
        (config,) = parse(WORDS)
    assert (config.eval_strategy, config.use_cpu, config.per_device_train_batch_size) == ("steps", True, 3)
    assert (config.warmup_steps, config.accelerator_config.dispatch_batches) == (0.5, False)
    assert config.overwrite_output_dir is True


def test_both_parsers_show_every_old_name(capsys):
    with pytest.raises(SystemExit):
        parse_config(Config, argv=["--help-all"])
    for text in (HfArgumentParser(Config).format_help(), capsys.readouterr().out):
        assert [name for name in DOCUMENTED if f"--{name} " not in text] == []
        assert text.count("Deprecated: write eval_strategy.") == 1


# ---- overwrite_output_dir ----


def begin(folder, step=0, **settings):
    config = Config(output_dir=str(folder), **settings)
    SetCheckpointsAside().on_train_begin(config, TrainerState(global_step=step), TrainerControl())
    return sorted(path.name for path in folder.iterdir())


def test_a_training_that_starts_anew_sets_checkpoints_aside_and_deletes_nothing(tmp_path):
    for name in ("checkpoint-5", "checkpoint-best", "_replaced-1-checkpoint-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5" / "weights").write_text("w")
    (tmp_path / "checkpoint-7").write_text("a file")
    assert begin(tmp_path, step=3) == ["_replaced-1-checkpoint-5", "checkpoint-5", "checkpoint-7", "checkpoint-best"]
    assert begin(tmp_path) == [
        "_replaced-1-checkpoint-5",
        "_replaced-2-checkpoint-5",
        "checkpoint-7",
        "checkpoint-best",
    ]
    assert (tmp_path / "_replaced-2-checkpoint-5" / "weights").read_text() == "w"


# ---- config_from ----

SETTINGS = {
    "output_dir": "somewhere",
    "per_device_train_batch_size": 3,
    "learning_rate": 0.5,
    "warmup_steps": 0.25,
    "report_to": ["tensorboard"],
    "eval_strategy": "steps",
    "eval_steps": 7,
    "save_strategy": "steps",
    "save_steps": 14,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "debug": "underflow_overflow",
    "accelerator_config": {"split_batches": True, "even_batches": False},
    CHECKPOINTING: True,
    f"{CHECKPOINTING}_kwargs": {"use_reentrant": False},
    "optim": "sgd",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "include_num_input_tokens_seen": True,
    "use_cpu": True,
    "hub_token": "secret",
    "hub_strategy": "end",
    "logging_steps": 5.0,
    "disable_tqdm": True,
    "seed": 7,
    "include_for_metrics": ["inputs"],
    "label_names": ["labels"],
    "optim_target_modules": ["attn"],
    "torch_compile": False,
    "dataloader_num_workers": 2,
    "dataloader_prefetch_factor": 4,
    "neftune_noise_alpha": 5.0,
    "fsdp_config": {"min_num_params": 5},
    "ddp_timeout": 60,
    "full_determinism": False,
    "bf16": True,
}


def comparable(args):
    shared = [f.name for f in dataclasses.fields(TrainingArguments)]
    return {name: getattr(args, name) for name in shared} | {"batch": args.train_batch_size, "device": args.device}


@pytest.mark.parametrize("settings", [SETTINGS, {"output_dir": "x"}, {"report_to": "none", "use_cpu": True}])
def test_a_plain_training_arguments_becomes_a_config_with_the_same_settings(settings):
    args = TrainingArguments(**settings)
    before = json.dumps(args.to_dict(), default=str)
    config = silently(config_from, args, Config)
    assert type(config) is Config
    assert comparable(config) == comparable(args)
    assert config.mixed_precision == args.mixed_precision
    assert (config.max_length, config.truncation_mode) == (None, "keep_end")
    assert json.dumps(args.to_dict(), default=str) == before


def test_every_setting_of_the_test_above_reaches_the_config():
    config = silently(config_from, TrainingArguments(**SETTINGS), Config)
    for name in SETTINGS.keys() - {"accelerator_config", "debug", "include_num_input_tokens_seen"}:
        assert getattr(config, name) == SETTINGS[name], name
    assert config.debug == ["underflow_overflow"]
    assert config.include_num_input_tokens_seen == "all"
    assert (config.accelerator_config.split_batches, config.accelerator_config.even_batches) == (True, False)


def test_containers_are_not_shared_with_the_callers_arguments():
    args = TrainingArguments(lr_scheduler_kwargs={"a": 1})
    config_from(args, Config).lr_scheduler_kwargs["a"] = 2
    assert args.lr_scheduler_kwargs == {"a": 1}


def test_number_of_gpus_that_a_script_set_is_kept():
    args = TrainingArguments()
    args._n_gpu = 3
    assert config_from(args, Config).train_batch_size == 3 * args.per_device_train_batch_size


def test_a_config_is_returned_as_it_is_and_copied_for_changes():
    config = Own(extra=3)
    assert config_from(config, Checked) is config
    changed = config_from(config, Checked, seed=5)
    assert (type(changed), changed.seed, config.seed) == (Own, 5, 42)


def test_no_arguments_give_the_defaults():
    assert silently(config_from, None, Config).output_dir == "trainer_output"
    assert config_from(None, Config, max_length=7).max_length == 7


def test_arguments_of_another_kind():
    assert config_from(Seq2SeqTrainingArguments(seed=7), Config).seed == 7
    with pytest.raises(ValueError, match="sets predict_with_generate, which Config does not have"):
        config_from(Seq2SeqTrainingArguments(predict_with_generate=True), Config)
    with pytest.raises(TypeError, match="args is a str; a Config or None"):
        config_from("folder", Config)
