"""The names of TRL 0.7 to 0.11 that trimtab provides, by module, and what to use instead of the others."""

from collections.abc import Mapping

_LM, _DIFFUSION, _SCRIPTS = "trimtab_lm", "trimtab_diffusion", "trimtab_lm.legacy.scripts"
_CORE_FUNCTIONS, _UTIL_FUNCTIONS = "trimtab_lm.legacy.core", "trimtab_lm.legacy.utils"


def _of(module: str, names: str) -> dict[str, str]:
    """Returns `module:name` of each name."""
    return {name: f"{module}:{name}" for name in names.split()}


_MODELS = {
    **_of(
        _LM,
        "AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead PreTrainedModelWrapper "
        "create_reference_model",
    ),
    **_of(_SCRIPTS, "SUPPORTED_ARCHITECTURES setup_chat_format"),
    **_of(_UTIL_FUNCTIONS, "ChatMlSpecialTokens unwrap_model_for_generation"),
    **_of("trimtab_lm.models.reference", "LAYER_PATTERNS"),
    "FORMAT_MAPPING": f"{_UTIL_FUNCTIONS}:CHAT_FORMATS",
    **_of(
        _DIFFUSION,
        "DDPOPipelineOutput DDPOSchedulerOutput DDPOStableDiffusionPipeline DefaultDDPOStableDiffusionPipeline",
    ),
}
_UTILS = {
    **_of(
        _LM,
        "ConstantLengthDataset DataCollatorForCompletionOnlyLM DPODataCollatorWithPadding "
        "RewardDataCollatorWithPadding",
    ),
    **_of("trimtab_common.formulas.kl", "AdaptiveKLController FixedKLController"),
    **_of("trimtab_lm.legacy.ppo_names", "RunningMoments"),
    **_of("trimtab_diffusion.ddpo.names_of_2024", "PerPromptStatTracker"),
    **_of(
        _UTIL_FUNCTIONS,
        "compute_accuracy decode_and_strip_padding disable_dropout_in_model exact_div get_global_statistics "
        "neftune_post_forward_hook pad pad_to_length peft_module_casting_to_bf16",
    ),
    "empty_cache": "accelerate.utils.memory:clear_device_cache",
    **_of(_SCRIPTS, "ModelConfig get_peft_config get_quantization_config get_kbit_device_map"),
    **_of(_SCRIPTS, "SIMPLE_CHAT_TEMPLATE SIMPLE_QUERY_CHAT_TEMPLATE SIMPLE_SFT_CHAT_TEMPLATE"),
}
_TRAINERS = {
    f"{folder}_{part}": _of(package, f"{kind}Config {kind}Trainer")
    for package, folders in (
        (_LM, {"ppo": "PPO", "dpo": "DPO", "sft": "SFT", "reward": "Reward", "iterative_sft": "IterativeSFT"}),
        (_LM, {"grpo": "GRPO", "kto": "KTO"}),
        (_DIFFUSION, {"ddpo": "DDPO", "alignprop": "AlignProp"}),
    )
    for folder, kind in folders.items()
    for part in ("config", "trainer")
}
_CLI = _of(_SCRIPTS, "ScriptArguments TrlParser init_zero_verbose") | {
    f"{kind}ScriptArguments": f"{_SCRIPTS}:ScriptArguments" for kind in ("SFT", "DPO", "Reward")
}
_AVAILABLE = {
    **_of("transformers.utils", "is_bitsandbytes_available is_liger_kernel_available is_peft_available"),
    **_of("transformers.utils", "is_rich_available is_sklearn_available is_torchvision_available"),
    "is_pil_available": "transformers.utils:is_vision_available",
    **_of("accelerate.utils", "is_npu_available is_xpu_available"),
    **_of("transformers.integrations", "is_wandb_available"),
    **_of(_UTIL_FUNCTIONS, "is_diffusers_available is_llmblender_available is_unsloth_available"),
    **_of(_UTIL_FUNCTIONS, "is_transformers_greater_than"),
    **dict.fromkeys(("is_accelerate_greater_20_0", "is_torch_greater_2_0"), f"{_UTIL_FUNCTIONS}:is_current"),
}
_CORE = {
    **_of(_LM, "LengthSampler set_seed"),
    **_of("diffusers.utils.torch_utils", "randn_tensor"),
    **_of(
        _CORE_FUNCTIONS,
        "PPODecorators WANDB_PADDING add_suffix average_torch_dicts build_bert_batch_from_txt clip_by_value "
        "convert_to_scalar entropy_from_logits flatten_dict listify_batch logprobs_from_logits masked_mean masked_var "
        "masked_whiten pad_to_size respond_to_batch stack_dicts stats_to_np top_k_top_p_filtering whiten",
    ),
}
_ENVIRONMENT = _of("trimtab_lm.legacy.environment", "TextEnvironment TextHistory")
_EXTRAS = _of(_LM, "BestOfNSampler")
_ROWS = {
    **_of(_SCRIPTS, "maybe_apply_chat_template maybe_extract_prompt"),
    **_of(_UTIL_FUNCTIONS, "is_conversational"),
    "apply_chat_template": f"{_SCRIPTS}:maybe_apply_chat_template",
    "extract_prompt": f"{_SCRIPTS}:maybe_extract_prompt",
}
_FORMATTING = {
    **_of(_SCRIPTS, "conversations_formatting_function"),
    **_of(_UTIL_FUNCTIONS, "get_formatting_func_from_dataset instructions_formatting_function"),
}
_TRAINER = {name: place for names in _TRAINERS.values() for name, place in names.items()}

MODULES: Mapping[str, Mapping[str, str]] = {
    "trl": {
        **_ROWS,
        "__version__": f"{_SCRIPTS}:TRL_VERSION",
        **_MODELS,
        **_UTILS,
        **_TRAINER,
        **_CLI,
        **_AVAILABLE,
        **_EXTRAS,
        **_ENVIRONMENT,
        **_of(_LM, "set_seed"),
    },
    "trl.core": _CORE,
    "trl.models": _MODELS,
    "trl.models.modeling_base": _MODELS,
    "trl.models.modeling_value_head": _MODELS,
    "trl.models.modeling_sd_base": _MODELS,
    "trl.models.utils": _MODELS,
    "trl.trainer": {**_TRAINER, **_UTILS},
    "trl.trainer.utils": _UTILS,
    "trl.trainer.model_config": _UTILS,
    **{f"trl.trainer.{module}": names for module, names in _TRAINERS.items()},
    "trl.environment": _ENVIRONMENT,
    "trl.environment.base_environment": _ENVIRONMENT,
    "trl.extras": _EXTRAS,
    "trl.extras.best_of_n_sampler": _EXTRAS,
    "trl.extras.dataset_formatting": _FORMATTING,
    "trl.import_utils": _AVAILABLE,
    "trl.data_utils": _ROWS,
    "trl.commands": {},
    "trl.commands.cli_utils": _CLI,
    "trl.scripts": _CLI,
    "trl.scripts.utils": _CLI,
    "trl.env_utils": _of(_SCRIPTS, "strtobool"),
}
"""Where the names of each module lead: `module:attribute`. A module that is not here raises an ImportError."""

_TRAIN_WITH = {
    "ORPO": "use DPOTrainer with loss_type='orpo'",
    "CPO": "use DPOTrainer with loss_type='cpo' or 'simpo'",
    "BCO": "use DPOTrainer",
    "RLOO": "use GRPOTrainer with scale_rewards='rloo'",
    "PPOv2": "use PPOTrainer, which takes a value_model and trains by train()",
    "OnlineDPO": "use GRPOTrainer",
    "XPO": "use GRPOTrainer",
    "NashMD": "use GRPOTrainer",
    "GKD": "use SFTTrainer on the teacher's samples",
}
_JUDGE = "write a reward function"

ADVICE: Mapping[str, str] = {
    **{f"{kind}{part}": advice for kind, advice in _TRAIN_WITH.items() for part in ("Trainer", "Config")},
    "ValueHead": "use trimtab_lm.models.head.ValueHead, which takes the width of the hidden state",
    "FDivergenceType": "leave it out; DPOTrainer has the reverse KL alone",
    "FDivergenceConstants": "leave it out; DPOTrainer has the reverse KL alone",
    "SyncRefModelCallback": "leave it out; the reference does not move",
    "RichProgressCallback": "leave it out; transformers shows the progress",
    "LogCompletionsCallback": "set GRPOConfig(log_completions=True), or DPOConfig(generate_during_eval=True)",
    "WinRateCallback": "score samples with a reward function",
    **dict.fromkeys(("BaseJudge", "BaseRankJudge", "BasePairwiseJudge", "PairRMJudge", "HfPairwiseJudge"), _JUDGE),
    **dict.fromkeys(("OpenAIPairwiseJudge", "RandomRankJudge", "RandomPairwiseJudge"), _JUDGE),
    "auxiliary_modules": "use trimtab_diffusion.rewards",
    "aesthetic_scorer": "use trimtab_diffusion.rewards",
}
"""What to use instead of a name or module that leads nowhere."""
