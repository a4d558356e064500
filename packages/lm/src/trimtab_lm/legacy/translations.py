"""Arguments of old configs that trimtab's configs lack, and how each is translated.

`ARGUMENTS` holds the arguments that transformers 5 dropped from TrainingArguments. The other tables hold arguments of
TRL 0.9 to 0.11, 0.21 and 1.16 that no config of trimtab has.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy

Translate: TypeAlias = Callable[[TrainingArguments, str, Any], None]
"""translate(config, name, value): sets the present field of a config from a dropped argument and its value."""


class Argument(NamedTuple):
    """An argument of an old config.

    Args:
        advice: what to write instead, for the warning or the error.
        translate: sets the new field; None if every value but the default is an error.
    """

    annotation: object
    default: object
    advice: str
    translate: Translate | None = None


def defaults_of(kind: type[TrainingArguments]) -> dict[str, Any]:
    """Returns the default of each field of a config class."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def conflict(old: str, new: str, value: object, present: object) -> str:
    """Returns the message about an old and a new spelling with different values. It does not show tokens."""
    shown = "" if "token" in new else f": {value!r} and {present!r}"
    return f"{old} and {new} are both given and differ{shown}. Give {new} alone."


def _set(config: TrainingArguments, old: str, new: str, value: object) -> None:
    """Sets the field `new` to the value of the argument `old`, unless it has a third value."""
    present = getattr(config, new)
    if present not in (defaults_of(type(config))[new], value):
        raise ValueError(conflict(old, new, value, present))
    setattr(config, new, value)


def _renamed(annotation: object, default: object, new: str, constant: object = None) -> Argument:
    """The field `new` has replaced the argument. It takes the value, or for a flag the constant."""

    def translate(config: TrainingArguments, old: str, value: object) -> None:
        _set(config, old, new, value if constant is None else constant)

    advice = f"write {new}" if constant is None else f"write {new}={constant!r}"
    return Argument(annotation, default, advice, translate)


def _entry(annotation: object, default: object, holder: str, key: str, **also: str) -> Argument:
    """The entry `key` of the dict field `holder` has replaced the argument; `also` are entries that it needs."""

    def translate(config: TrainingArguments, old: str, value: object) -> None:
        present = getattr(config, holder)
        if isinstance(present, str):
            raise ValueError(f"{old} cannot be set inside {holder}={present!r}: write {key!r} there and omit {old}.")
        if isinstance(present, AcceleratorConfig):
            unset = AcceleratorConfig().to_dict()
            present = {name: entry for name, entry in present.to_dict().items() if entry != unset[name]}
        entries = {name.removeprefix("fsdp_"): entry for name, entry in (present or {}).items()}
        for name, entry in {key: value, **also}.items():
            if entries.setdefault(name, entry) != entry:
                raise ValueError(conflict(old, f"{holder}[{name!r}]", entry, entries[name]))
        setattr(config, holder, entries)

    entries = ", ".join([f"{key!r}: ...", *(f"{name!r}: {entry!r}" for name, entry in also.items())])
    return Argument(annotation, default, f"write {holder}={{{entries}}}", translate)


def _set_warmup(config: TrainingArguments, old: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"warmup_ratio={ratio} is no part of all steps. Use a number from 0 to 1.")
    # warmup_steps=1.0 would mean one step. The next smaller float means all steps.
    _set(config, old, "warmup_steps", min(ratio, math.nextafter(1.0, 0.0)))


def _add_inputs(config: TrainingArguments, old: str, value: bool) -> None:
    config.include_for_metrics = list(dict.fromkeys([*config.include_for_metrics, "inputs"]))


def _count_tokens(config: TrainingArguments, old: str, value: bool) -> None:
    if config.include_num_input_tokens_seen in (False, "no"):  # both ways of counting give the rate
        config.include_num_input_tokens_seen = "all"


def _set_logging_dir(config: TrainingArguments, old: str, folder: object) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder)


def _set_repository(config: Any, old: str, value: str) -> None:
    """Joins the two dropped arguments, which are fields of `config` here, into one name."""
    name = config.push_to_hub_model_id or Path(config.output_dir or "trainer_output").name
    owner = config.push_to_hub_organization
    _set(config, old, "hub_model_id", f"{owner}/{name}" if owner else name)


def _no_change(config: TrainingArguments, old: str, value: object) -> None:
    """Trimtab always does what the argument asks for."""


def _add_sft_loss(config: Any, old: str, alpha: float) -> None:
    """Adds the loss of RPO to the losses of a DPOConfig."""
    losses = config.loss_type or "sigmoid"  # HfArgumentParser leaves None
    names = [losses] if isinstance(losses, str) else list(losses)
    if "sft" in names:
        raise ValueError(f"rpo_alpha={alpha} and loss_type={names} both add the loss sft. Give loss_weights alone.")
    config.loss_weights = [*(config.loss_weights or [1.0] * len(names)), alpha]
    config.loss_type = [*names, "sft"]


def _split_generation(config: Any, old: str, completions: int) -> None:
    """Sets the optimizer steps that one call of generation provides for, from its completions over all processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    prompts = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
    step = prompts * config.num_generations // config.group_parts
    if completions % step:
        raise ValueError(
            f"generation_batch_size={completions} completions are no whole number of optimizer steps, which take "
            f"{step} each: per_device_train_batch_size {config.per_device_train_batch_size} x num_generations "
            f"{config.num_generations} x gradient_accumulation_steps {config.gradient_accumulation_steps} x "
            f"{processes} processes. Here per_device_train_batch_size counts prompts, not completions: divide yours by "
            "num_generations."
        )
    _set(config, old, "steps_per_generation", completions // step)


_SERVER = "write rollout_backend='vllm_server', rollout_backend_kwargs={'servers': ['http://host:8000']}"


def _in_process(config: Any, old: str, mode: str) -> None:
    """Refuses the mode of a server: `use_vllm=True` samples in this process. Without use_vllm a mode has no effect."""
    if config.use_vllm and mode != "colocate" and config.rollout_backend != "vllm_server":
        raise ValueError(
            f"vllm_mode={mode!r} is not supported: use_vllm=True samples with an engine in this process. For a server "
            f"{_SERVER}; for the engine in this process leave vllm_mode out."
        )


ARGUMENTS: dict[str, Argument] = {
    "evaluation_strategy": _renamed(IntervalStrategy | str, "no", "eval_strategy"),
    "per_gpu_train_batch_size": _renamed(int | None, None, "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed(int | None, None, "per_device_eval_batch_size"),
    "no_cuda": _renamed(bool, False, "use_cpu"),
    "push_to_hub_token": _renamed(str | None, None, "hub_token"),
    "group_by_length": _renamed(bool, False, "train_sampling_strategy", "group_by_length"),
    "adafactor": _renamed(bool, False, "optim", "adafactor"),
    "fsdp_min_num_params": _entry(int, 0, "fsdp_config", "min_num_params", auto_wrap_policy="SIZE_BASED_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": _entry(
        str | None, None, "fsdp_config", "transformer_layer_cls_to_wrap", auto_wrap_policy="TRANSFORMER_BASED_WRAP"
    ),
    "dispatch_batches": _entry(bool | None, None, "accelerator_config", "dispatch_batches"),
    "split_batches": _entry(bool | None, False, "accelerator_config", "split_batches"),
    "push_to_hub_model_id": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "push_to_hub_organization": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "warmup_ratio": Argument(float, 0.0, "write warmup_steps, which below 1 is a ratio", _set_warmup),
    "logging_dir": Argument(
        str | None, None, "set the environment variable TENSORBOARD_LOGGING_DIR (this run does)", _set_logging_dir
    ),
    "use_mps_device": Argument(bool, False, "leave it out, MPS is used where there is one", _no_change),
    "include_inputs_for_metrics": Argument(bool, False, "write include_for_metrics=['inputs']", _add_inputs),
    "include_tokens_per_second": Argument(bool | None, False, "write include_num_input_tokens_seen", _count_tokens),
    "save_safetensors": Argument(bool | None, True, "leave it out, weights are always saved as safetensors"),
    "jit_mode_eval": Argument(bool, False, "leave it out; torch_compile=True is what makes evaluation faster"),
    "use_ipex": Argument(bool, False, "leave it out; PyTorch itself optimizes for Intel processors"),
    "fp16_opt_level": Argument(str, "O1", "leave it out and write fp16=True or bf16=True; Apex is not supported"),
    "half_precision_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "fp16_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "tpu_num_cores": Argument(int | None, None, "leave it out; accelerate launch starts one process per core"),
    "tpu_metrics_debug": Argument(bool, False, "write debug='tpu_metrics_debug'"),
    "past_index": Argument(int, -1, "leave it out; no hidden state is carried from batch to batch"),
    "use_legacy_prediction_loop": Argument(bool, False, "leave it out; there is one prediction loop"),
    "mp_parameters": Argument(str, "", "leave it out; SageMaker's launcher sets the environment"),
    "torchdynamo": Argument(str | None, None, "write torch_compile_backend"),
    "ray_scope": Argument(str | None, "last", "set the environment variable RAY_SCOPE"),
}
"""Arguments of TrainingArguments, by name."""

_FIXED_REFERENCE = (
    "leave it out; the reference stays as it is at construction. To move it, train in rounds, and pass the policy of "
    "one round as ref_model of the next"
)
_OTHER_DIVERGENCE = "leave it out; implicit rewards always use the reverse KL"

_LAID_OUT = "leave it out; rows are laid out without padding wherever the model allows it"
_OF_TOKENIZER = "set it on the tokenizer, and pass processing_class=tokenizer"
_CORRECTED = "write importance_sampling_cap, which truncates the ratio of trainer and sampler per token"
_NO_ENTROPY = "leave it out; the losses have no entropy bonus"
_OF_ROUTER = "set model.config.output_router_logits=True and model.config.router_aux_loss_coef"
_OTHER_LOSSES = "leave it out; see loss_type for the losses that there are"

LATER_ARGUMENTS: dict[str, Argument] = {
    "trust_remote_code": _entry(bool, False, "model_init_kwargs", "trust_remote_code"),
    "router_aux_loss_coef": Argument(float | None, None, _OF_ROUTER),
    "pad_to_multiple_of": Argument(int | str | None, "auto", _LAID_OUT, _no_change),
}
"""Arguments of SFTConfig, DPOConfig, KTOConfig, RewardConfig and GRPOConfig in TRL 1.16, by name."""

_OFFLOADING = Argument(bool, False, "leave it out, or write gradient_checkpointing=True")

REWARD_ARGUMENTS: dict[str, Argument] = {
    **LATER_ARGUMENTS,
    "activation_offloading": _OFFLOADING,
    "pad_token": Argument(str | None, None, _OF_TOKENIZER),
    "eos_token": Argument(str | None, None, _OF_TOKENIZER),
    "chat_template_path": Argument(str | None, None, _OF_TOKENIZER),
}
"""Arguments of RewardConfig in TRL 1.16, by name."""

DPO_ARGUMENTS: dict[str, Argument] = {
    "max_completion_length": _renamed(int | None, None, "max_target_length"),
    "rpo_alpha": Argument(
        float | None, None, "write loss_type=['sigmoid', 'sft'], loss_weights=[1, alpha]", _add_sft_loss
    ),
    "force_use_ref_model": Argument(bool, False, "leave it out; a ref_model is used, with adapters too", _no_change),
    "f_divergence_type": Argument(str, "reverse_kl", _OTHER_DIVERGENCE),
    "f_alpha_divergence_coef": Argument(float, 1.0, _OTHER_DIVERGENCE),
    "sync_ref_model": Argument(bool, False, _FIXED_REFERENCE),
    "ref_model_mixup_alpha": Argument(float, 0.9, _FIXED_REFERENCE),
    "ref_model_sync_steps": Argument(int, 64, _FIXED_REFERENCE),
    **LATER_ARGUMENTS,
    "activation_offloading": _OFFLOADING,
    "pad_token": Argument(str | None, None, _OF_TOKENIZER),
    "padding_free": Argument(bool, False, _LAID_OUT, _no_change),
    "precompute_ref_batch_size": Argument(int | None, None, "leave it out; the reference reads the trainer's batches"),
    "ld_alpha": Argument(float | None, None, "leave it out; every token of an answer has the same weight"),
    "use_weighting": Argument(bool, False, "leave it out; every pair has the same weight"),
    "discopop_tau": Argument(float, 0.05, "leave it out; the temperature of discopop is always 0.05, as in the paper"),
}
"""Arguments of DPOConfig in TRL 0.9 to 0.11 and in 1.16, by name."""

KTO_ARGUMENTS: dict[str, Argument] = {
    "max_completion_length": Argument(int | None, None, "write max_length, of prompt and completion together"),
    "label_pad_token_id": Argument(int, -100, "leave it out; rows are not padded by labels", _no_change),
    "padding_value": Argument(int | None, None, "leave it out; padding is masked by its place", _no_change),
    "is_encoder_decoder": Argument(bool | None, None, "leave it out; it is read off the model", _no_change),
    "generate_during_eval": Argument(bool, False, "leave it out; trimtab chat shows answers of the model"),
    "precompute_ref_log_probs": Argument(
        bool,
        False,
        "leave it out; each epoch pairs a prompt with other rows' completions, so none can be precomputed",
    ),
    "precompute_ref_batch_size": Argument(int | None, None, "leave it out; the reference reads the trainer's batches"),
    "sync_ref_model": Argument(bool, False, _FIXED_REFERENCE),
    "ref_model_mixup_alpha": Argument(float, 0.6, _FIXED_REFERENCE),
    "ref_model_sync_steps": Argument(int, 512, _FIXED_REFERENCE),
    **LATER_ARGUMENTS,
    "activation_offloading": _OFFLOADING,
}
"""Arguments of KTOConfig in TRL 0.8 to 0.11 and in 1.16, by name."""

SFT_ARGUMENTS: dict[str, Argument] = {
    "max_seq_length": _renamed(int | None, None, "max_length"),
    "use_liger": _renamed(bool, False, "use_liger_kernel"),
    **REWARD_ARGUMENTS,
    "padding_free": Argument(bool, False, _LAID_OUT, _no_change),
    "shuffle_dataset": Argument(bool, False, "leave it out; every epoch takes the rows in a new order", _no_change),
    "loss_type": Argument(str, "nll", "leave it out; the loss is the mean negative log-likelihood of a token"),
}
"""Arguments of SFTConfig in TRL 0.9 to 0.11 and in 1.16, by name."""

GRPO_ARGUMENTS: dict[str, Argument] = {
    "generation_batch_size": Argument(
        int | None,
        None,
        "write steps_per_generation, the optimizer steps that one call of generation provides for",
        _split_generation,
    ),
    "use_transformers_paged": _renamed(bool, False, "rollout_backend", "continuous_batching"),
    "cache_implementation": _entry(str | None, None, "generation_kwargs", "cache_implementation"),
    "use_liger_loss": Argument(bool, False, "leave it out; the logits are never held in full", _no_change),
    "vllm_mode": Argument(
        str | None, None, "write rollout_backend='vllm', whose engine is in this process", _in_process
    ),
    "vllm_server_base_url": Argument(str | None, None, _SERVER),
    "vllm_server_host": Argument(str, "0.0.0.0", _SERVER),
    "vllm_server_port": Argument(int, 8000, _SERVER),
    "vllm_server_timeout": Argument(float, 240.0, _SERVER),
    "vllm_gpu_memory_utilization": Argument(
        float, 0.3, "write rollout_backend='vllm', rollout_backend_kwargs={'gpu_memory_utilization': ...}"
    ),
    "vllm_tensor_parallel_size": Argument(
        int, 1, "write rollout_backend='vllm_server', and start the server with --tensor-parallel-size"
    ),
    "vllm_model_impl": Argument(
        str, "vllm", "write rollout_backend='vllm', rollout_backend_kwargs={'model_impl': ...}"
    ),
    "vllm_guided_decoding_regex": Argument(
        str | None, None, "write generation_kwargs, which has the settings of vllm.SamplingParams"
    ),
    "ds3_gather_for_generation": Argument(bool, True, "leave it out, or sample with rollout_backend='vllm_server'"),
    "sync_ref_model": Argument(bool, False, _FIXED_REFERENCE),
    "ref_model_mixup_alpha": Argument(float, 0.6, _FIXED_REFERENCE),
    "ref_model_sync_steps": Argument(int, 512, _FIXED_REFERENCE),
    "top_entropy_quantile": Argument(float, 1.0, "leave it out; every token of a completion is learnt from"),
    "wandb_log_unique_prompts": Argument(bool | None, False, "leave it out; the table of completions has every row"),
    **LATER_ARGUMENTS,
    "use_transformers_continuous_batching": _renamed(bool, False, "rollout_backend", "continuous_batching"),
    "transformers_continuous_batching_config": Argument(
        dict[str, object] | str | None, None, "write rollout_backend='continuous_batching' and rollout_backend_kwargs"
    ),
    "vllm_importance_sampling_correction": Argument(bool, True, _CORRECTED),
    "vllm_importance_sampling_mode": Argument(str, "sequence_mask", _CORRECTED),
    "vllm_importance_sampling_clip_max": Argument(float, 3.0, _CORRECTED),
    "vllm_importance_sampling_clip_min": Argument(float | None, None, _CORRECTED),
    "vllm_importance_sampling_cap": _renamed(float | None, None, "importance_sampling_cap"),
    "vllm_enable_sleep_mode": Argument(bool, False, "write rollout_backend_kwargs={'enable_sleep_mode': True}"),
    "vllm_structured_outputs_regex": Argument(
        str | None, None, "write generation_kwargs, which has the settings of vllm.SamplingParams"
    ),
    "vllm_group_port": Argument(int, 51216, "leave it out; an unused port is taken"),
    "vllm_max_model_length": Argument(int | None, None, "write rollout_backend_kwargs={'max_model_len': ...}"),
    "cast_lm_head_to_fp32": Argument(
        bool, False, "leave it out; logits are scored in float32, by the head in its own type"
    ),
    "num_generations_eval": Argument(int | None, None, "leave it out; an evaluation has num_generations, too"),
    "multi_objective_aggregation": Argument(str, "sum_then_normalize", "leave it out; the weighted rewards are added"),
    "max_tool_calling_iterations": Argument(int | None, None, "write rollout=EnvironmentRollout(..., max_turns=...)"),
    "entropy_coef": Argument(float, 0.0, _NO_ENTROPY),
    "use_adaptive_entropy": Argument(bool, False, _NO_ENTROPY),
    "entropy_coef_min": Argument(float, 0.0, _NO_ENTROPY),
    "entropy_coef_max": Argument(float, 1.0, _NO_ENTROPY),
    "entropy_coef_delta": Argument(float, 0.005, _NO_ENTROPY),
    "entropy_target": Argument(float, 0.2, _NO_ENTROPY),
    "sapo_temperature_neg": Argument(float, 1.05, _OTHER_LOSSES),
    "sapo_temperature_pos": Argument(float, 1.0, _OTHER_LOSSES),
    "vespo_k_pos": Argument(float, 2.0, _OTHER_LOSSES),
    "vespo_lambda_pos": Argument(float, 3.0, _OTHER_LOSSES),
    "vespo_k_neg": Argument(float, 3.0, _OTHER_LOSSES),
    "vespo_lambda_neg": Argument(float, 2.0, _OTHER_LOSSES),
    "off_policy_mask_threshold": Argument(float | None, None, "leave it out, or write importance_sampling_cap"),
    "log_multimodal": Argument(bool, True, "leave it out; the table has texts alone"),
    "log_unique_prompts": Argument(bool, False, "leave it out; the table of completions has every row"),
    "log_completions_hub_repo": Argument(str | None, None, "leave it out; W&B and TensorBoard get the table"),
}
"""Arguments of GRPOConfig in TRL 0.21 and in 1.16, by name."""
