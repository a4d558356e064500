"""GRPOConfig: what it accepts, rejects and explains."""

import dataclasses

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from trimtab_common.config import parse_config
from trimtab_lm.grpo import GRPOConfig


def config(**settings):
    return GRPOConfig(output_dir="out", **settings)


def test_the_names_that_users_know_have_the_papers_defaults():
    defaults = config()
    assert (defaults.num_generations, defaults.max_completion_length, defaults.temperature) == (8, 256, 1.0)
    assert (defaults.beta, defaults.num_iterations, defaults.steps_per_generation, defaults.epsilon) == (0.0, 1, 1, 0.2)
    assert (defaults.loss_type, defaults.scale_rewards, defaults.importance_sampling_level) == (
        "dapo",
        "group",
        "token",
    )
    assert defaults.clip == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert config(epsilon_high=0.28, delta=2.0).clip == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 2.0}


@pytest.mark.parametrize(("parts", "accumulation"), [(3, 3), (2, 1), (8, 4)])
def test_a_step_has_whole_groups(parts, accumulation):
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    with pytest.raises(ValueError, match=f"group_parts={parts} must divide num_generations=8, and {accumulation}"):
        config(group_parts=parts, **sizes)


def test_sampling_settings_reach_the_sampler():
    chosen = {
        "max_completion_length": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
    }
    sampling = config(**chosen, generation_kwargs={"typical_p": 0.5}).sampling()
    assert {name: getattr(sampling, name) for name in chosen} == chosen
    assert sampling.generation_kwargs == {"typical_p": 0.5}


@pytest.mark.parametrize(("written", "meant"), [(True, "group"), (False, "none"), ("batch", "batch"), ("rloo", "rloo")])
def test_scale_rewards_takes_the_bools_of_old(written, meant, tmp_path):
    assert config(scale_rewards=written).scale_rewards == meant
    (file := tmp_path / "grpo.yaml").write_text(yaml.safe_dump({"output_dir": "out", "scale_rewards": written}))
    (by_us,) = parse_config(GRPOConfig, argv=["--config", str(file)])
    (by_transformers,) = HfArgumentParser(GRPOConfig).parse_yaml_file(str(file))
    (by_flag,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--scale_rewards", str(written)]
    )
    assert by_us.scale_rewards == by_transformers.scale_rewards == by_flag.scale_rewards == meant


def test_use_vllm_is_a_backend():
    assert config(use_vllm=True).rollout_backend == "vllm"
    with pytest.warns(FutureWarning, match="vllm_mode is deprecated"):
        assert config(use_vllm=True, vllm_mode="colocate").rollout_backend == "vllm"
    with pytest.raises(ValueError, match=r"vllm_mode='server' is not supported.*write rollout_backend='vllm_server'"):
        config(use_vllm=True, vllm_mode="server")
    with pytest.warns(FutureWarning, match="vllm_mode is deprecated"):
        assert config(use_vllm=True, vllm_mode="server", rollout_backend="vllm_server").use_vllm
    with pytest.raises(ValueError, match="leave one of them out"):
        config(use_vllm=True, rollout_backend="continuous_batching")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: a completion is measured against the others"),
        ({"num_iterations": 0}, "num_iterations=0"),
        ({"steps_per_generation": 0}, "steps_per_generation=0"),
        ({"max_prompt_length": 0}, "max_prompt_length=0 must be a whole number of at least 1"),
        ({"max_completion_length": 0}, "max_completion_length=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"epsilon_high": -1.0}, "epsilon_high=-1.0"),
        ({"delta": 1.2}, r"delta=1.2 is not above 1 \+ epsilon_high = 1.2"),
        ({"loss_type": "sapo"}, "loss_type='sapo' is unknown. Use one of grpo, bnpo, dr_grpo, dapo, cispo"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta=2.0 has no meaning for cispo"),
        (
            {"scale_rewards": "std"},
            r"scale_rewards='std' is unknown. Use one of group, batch, none, rloo, reinforce\+\+, raw",
        ),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word' is unknown"),
        ({"rollout_backend": "sglang"}, "rollout_backend='sglang' is unknown"),
        ({"train_sampling_strategy": "group_by_length"}, "Use 'random' or 'sequential'"),
        ({"neftune_noise_alpha": 5.0}, "Set disable_dropout=False"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_every_own_field_explains_itself():
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    added = [field for field in dataclasses.fields(GRPOConfig) if field.name not in inherited]
    assert len(added) > 25
    assert all(field.metadata.get("help") for field in added)


def test_both_parsers_read_it():
    words = [
        "--output_dir",
        "out",
        "--num_generations",
        "4",
        "--scale_rewards",
        "batch",
        "--epsilon_high",
        "0.28",
        "--loss_type",
        "grpo",
        "--max_prompt_length",
        "12",
    ]
    (by_transformers,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    flags = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    (by_us,) = parse_config(GRPOConfig, argv=[*flags, "--scale_rewards=False", "--reward_weights=[1, 0.5]"])
    assert (by_transformers.scale_rewards, by_us.scale_rewards) == ("batch", "none")
    for parsed in (by_transformers, by_us):
        assert (parsed.num_generations, parsed.epsilon_high, parsed.max_prompt_length) == (4, 0.28, 12)
    assert by_us.reward_weights == [1.0, 0.5]
