"""Every argument of configs and trainers of TRL 0.7.10 to 0.11.4, and of 1.16 configs, is known or rejected in words.

old_arguments.json lists them with their defaults, by version and class.
"""

import inspect
import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from transformers import HfArgumentParser

import trimtab_diffusion
import trimtab_lm
from trimtab_lm import DPOConfig, DPOTrainer, GRPOConfig, PPOConfig, RewardConfig, SFTConfig
from trimtab_lm.legacy.translations import DPO_ARGUMENTS, GRPO_ARGUMENTS, REWARD_ARGUMENTS, SFT_ARGUMENTS

OLD = json.loads(Path(__file__).with_name("old_arguments.json").read_text())
CLASSES = [(version, name) for version in OLD for name in OLD[version]]
UNKNOWN_DEFAULTS = ("(required)", "(computed)")
REFUSED = {"PPOTrainer": {"training_data_collator"}}


def kind(name: str) -> type:
    return getattr(trimtab_lm, name, None) or getattr(trimtab_diffusion, name)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Removes the default folder from configs, and resets accelerate, which `use_cpu` leaves on the CPU."""
    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("version", "name"), CLASSES)
def test_every_old_argument_has_its_name_here(version, name):
    known = set(inspect.signature(kind(name)).parameters) | REFUSED.get(name, set())
    assert set(OLD[version][name]) - known == set()


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("version", "name"), [(v, name) for v, name in CLASSES if name.endswith("Config")])
def test_every_old_default_is_taken_in_silence(version, name):
    kind(name)(**{name: value for name, value in OLD[version][name].items() if value not in UNKNOWN_DEFAULTS})


LATER_CASES = {
    "trust_remote_code": (True, {"model_init_kwargs": {"trust_remote_code": True}}),
    "router_aux_loss_coef": (0.01, "set model.config.output_router_logits=True and model.config.router_aux_loss_coef"),
    "pad_to_multiple_of": (8, {}),
}
REWARD_CASES = {
    **LATER_CASES,
    "activation_offloading": (True, "gradient_checkpointing=True"),
    "pad_token": ("<pad>", "processing_class=tokenizer"),
    "eos_token": ("</s>", "processing_class=tokenizer"),
    "chat_template_path": ("model", "processing_class=tokenizer"),
}
DPO_CASES = {
    "max_completion_length": (32, {"max_target_length": 32}),
    "rpo_alpha": (0.5, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "force_use_ref_model": (True, {}),
    "f_divergence_type": ("js_divergence", "reverse KL"),
    "f_alpha_divergence_coef": (0.5, "reverse KL"),
    "sync_ref_model": (True, "ref_model of the next"),
    "ref_model_mixup_alpha": (0.6, "ref_model of the next"),
    "ref_model_sync_steps": (32, "ref_model of the next"),
    **LATER_CASES,
    "activation_offloading": (True, "gradient_checkpointing=True"),
    "pad_token": ("<pad>", "processing_class=tokenizer"),
    "padding_free": (True, {}),
    "precompute_ref_batch_size": (4, "trainer's batches"),
    "ld_alpha": (0.5, "same weight"),
    "use_weighting": (True, "same weight"),
    "discopop_tau": (0.1, "0.05"),
}
SFT_CASES = {
    "max_seq_length": (64, {"max_length": 64}),
    "use_liger": (True, {"use_liger_kernel": True}),
    **REWARD_CASES,
    "padding_free": (True, {}),
    "shuffle_dataset": (True, {}),
    "loss_type": ("dft", "negative log-likelihood"),
}
GRPO_CASES = {
    "generation_batch_size": (128, {"steps_per_generation": 2}),  # 8 prompts with 8 completions each are 64
    "use_transformers_paged": (True, {"rollout_backend": "continuous_batching"}),
    "cache_implementation": ("static", {"generation_kwargs": {"cache_implementation": "static"}}),
    "use_liger_loss": (True, {}),
    "vllm_mode": ("colocate", {"rollout_backend": "transformers"}),
    "vllm_server_base_url": ("http://node:8000", "rollout_backend='vllm_server'"),
    "vllm_server_host": ("node", "rollout_backend='vllm_server'"),
    "vllm_server_port": (8001, "rollout_backend='vllm_server'"),
    "vllm_server_timeout": (60.0, "rollout_backend='vllm_server'"),
    "vllm_gpu_memory_utilization": (0.5, "'gpu_memory_utilization'"),
    "vllm_tensor_parallel_size": (2, "--tensor-parallel-size"),
    "vllm_model_impl": ("transformers", "'model_impl'"),
    "vllm_guided_decoding_regex": ("a+", "generation_kwargs"),
    "ds3_gather_for_generation": (False, "rollout_backend='vllm_server'"),
    "sync_ref_model": (True, "ref_model of the next"),
    "ref_model_mixup_alpha": (0.9, "ref_model of the next"),
    "ref_model_sync_steps": (64, "ref_model of the next"),
    "top_entropy_quantile": (0.2, "every token"),
    "wandb_log_unique_prompts": (True, "table of completions"),
    **LATER_CASES,
    "use_transformers_continuous_batching": (True, {"rollout_backend": "continuous_batching"}),
    "transformers_continuous_batching_config": ({"x": 1}, "rollout_backend_kwargs"),
    "vllm_importance_sampling_correction": (False, "importance_sampling_cap"),
    "vllm_importance_sampling_mode": ("token_truncate", "importance_sampling_cap"),
    "vllm_importance_sampling_clip_max": (2.0, "importance_sampling_cap"),
    "vllm_importance_sampling_clip_min": (0.5, "importance_sampling_cap"),
    "vllm_importance_sampling_cap": (2.0, {"importance_sampling_cap": 2.0}),
    "vllm_enable_sleep_mode": (True, "enable_sleep_mode"),
    "vllm_structured_outputs_regex": ("a", "vllm.SamplingParams"),
    "vllm_group_port": (1234, "unused port"),
    "vllm_max_model_length": (512, "max_model_len"),
    "cast_lm_head_to_fp32": (True, "float32"),
    "num_generations_eval": (2, "num_generations"),
    "multi_objective_aggregation": ("normalize_then_sum", "are added"),
    "max_tool_calling_iterations": (3, "EnvironmentRollout"),
    "entropy_coef": (0.1, "no entropy bonus"),
    "use_adaptive_entropy": (True, "no entropy bonus"),
    "entropy_coef_min": (0.1, "no entropy bonus"),
    "entropy_coef_max": (0.5, "no entropy bonus"),
    "entropy_coef_delta": (0.1, "no entropy bonus"),
    "entropy_target": (0.1, "no entropy bonus"),
    "sapo_temperature_neg": (1.0, "loss_type"),
    "sapo_temperature_pos": (2.0, "loss_type"),
    "vespo_k_pos": (1.0, "loss_type"),
    "vespo_lambda_pos": (1.0, "loss_type"),
    "vespo_k_neg": (1.0, "loss_type"),
    "vespo_lambda_neg": (1.0, "loss_type"),
    "off_policy_mask_threshold": (0.5, "importance_sampling_cap"),
    "log_multimodal": (False, "texts alone"),
    "log_unique_prompts": (True, "table of completions"),
    "log_completions_hub_repo": ("me/run", "W&B"),
}
CASES = {DPOConfig: DPO_CASES, SFTConfig: SFT_CASES, RewardConfig: REWARD_CASES, GRPOConfig: GRPO_CASES}


def test_every_translation_is_tried():
    assert [list(cases) for cases in CASES.values()] == [
        list(table) for table in (DPO_ARGUMENTS, SFT_ARGUMENTS, REWARD_ARGUMENTS, GRPO_ARGUMENTS)
    ]


@pytest.mark.parametrize(
    ("config", "name", "value", "outcome"),
    [(config, name, *case) for config, cases in CASES.items() for name, case in cases.items()],
)
def test_an_old_argument_is_translated_or_refused(config, name, value, outcome):
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=f"{name}={value!r} is not supported: .*{outcome}".replace("+", r"\+")):
            config(**{name: value})
        return
    with pytest.warns(FutureWarning, match=f"{name} is deprecated: "):
        args = config(use_cpu=True, bf16=False, **{name: value})
    assert {field: getattr(args, field) for field in outcome} == outcome
    assert name not in args.to_dict()


def test_rpo_adds_its_loss_to_those_that_are_set():
    with pytest.warns(FutureWarning):
        args = DPOConfig(loss_type=["ipo", "hinge"], loss_weights=[0.2, 0.8], rpo_alpha=2.0)
    assert (args.loss_type, args.loss_weights) == (["ipo", "hinge", "sft"], [0.2, 0.8, 2.0])
    with pytest.raises(ValueError, match=r"rpo_alpha=1.0 and loss_type=\['sft'\]"):
        DPOConfig(loss_type=["sft"], rpo_alpha=1.0)


def test_completions_of_a_generation_are_counted_over_accumulation_and_processes(monkeypatch):
    args = GRPOConfig(use_cpu=True, per_device_train_batch_size=2, num_generations=4, gradient_accumulation_steps=3)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun and accelerate launch set it
    with pytest.warns(FutureWarning):
        args.generation_batch_size = 5 * 48  # 48 is 2 prompts x 4 completions x 3 x 2 processes
    assert args.steps_per_generation == 5
    with pytest.raises(ValueError, match=r"take 48 each: .*counts prompts, not completions: divide yours by num_gen"):
        args.generation_batch_size = 64


def test_a_script_of_trl_0_11_gives_old_arguments_on_its_command_line():
    with pytest.warns(FutureWarning, match="max_seq_length"):
        (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(
            ["--output_dir", "run", "--max_seq_length", "32", "--use_liger", "false"]
        )
    assert args.max_length == 32


def test_the_reference_is_used_beside_adapters(tmp_path):
    args = DPOConfig(str(tmp_path), use_cpu=True, save_strategy="no")
    with pytest.warns(FutureWarning, match="force_use_ref_model is deprecated: leave it out"):
        trainer = DPOTrainer(
            tiny.gpt2(),
            tiny.gpt2(1),
            args,
            processing_class=tiny.tokenizer(),
            peft_config=LoraConfig(r=2, target_modules=["c_attn"]),
            force_use_ref_model=True,
        )
    assert not trainer.reference.is_policy


def test_ppo_refuses_a_second_collator_in_words():
    with pytest.raises(TypeError, match=r"PPOTrainer\(training_data_collator=...\) is not supported: leave it out"):
        tiny.ppo(arguments={"training_data_collator": list})


def test_ppo_tokenizes_in_several_processes(monkeypatch):
    seen, one_process = [], Dataset.map

    def spied(self, *args, **options):
        seen.append(options.get("num_proc"))
        return one_process(self, *args, **options)

    monkeypatch.setattr(Dataset, "map", spied)
    tiny.ppo(arguments={"dataset": Dataset.from_dict({"prompt": ["the film", "a story"] * 4})}, dataset_num_proc=2)
    assert set(seen) == {2}
    assert PPOConfig().dataset_num_proc is None
