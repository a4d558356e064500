"""The works to measure: the peer of each, the settings of both sides, and the facts that must be equal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bench.environments import VLLM

OURS = "trimtab"


@dataclass(frozen=True)
class Side:
    """A program and its configuration.

    Attributes:
        environment: `OURS`, a peer (the name of a file in requirements/), or `VLLM`, ours with vLLM installed.
        settings: config fields; `call` has arguments of the timed call, `collator` names the layout of the data
            collator, and `sizes` are fields of `Size` in place of the others.
    """

    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A row of a table.

    Attributes:
        name: name in the table and for --only.
        task: module of tasks/ that runs it.
        other: the peer; in an ablation, ours without the shortcut.
        ours: trimtab's side.
        settings: settings of both sides.
        equal: facts that both sides report, and the relative difference allowed in each.
    """

    name: str
    task: str
    other: Side
    ours: Side = Side(OURS)
    settings: Mapping[str, Any] = field(default_factory=dict)
    equal: Mapping[str, float] = field(default_factory=dict)

    def text(self, side: Side) -> str:
        """Describes a side: its program and its settings."""
        settings = {**self.settings, **side.settings}
        shown = {**settings, **settings.get("call", {}), **settings.get("sizes", {})}
        words = [f"`{name}={_short(value)}`" for name, value in shown.items() if name not in ("call", "phase", "sizes")]
        return " ".join([side.environment.replace("trl-", "TRL "), *words])


def _short(value: object) -> object:
    is_long = isinstance(value, list) and len(value) > 9
    return f"[{value[0]}, ..., {value[-1]}]" if is_long else value


TRL, TRL_PPO, TRL_DDPO = "trl-1.16.0", "trl-0.11.4", "trl-0.23.1"
LOSS = {"first loss": 1e-4}
DOCUMENTS = {"first loss": 1e-4, "tokens read": 0}
SAMPLED = {"sampled": 0}
PIPELINE = {"text encoder's norm": 1e-5}
EPOCH = {**PIPELINE, "updates": 0, **dict.fromkeys(("rows to sample", "rows to train"), 0)}
PRECOMPUTED = {"precompute_ref_log_probs": True}
CONTINUOUS = {"rollout_backend": "continuous_batching"}
# A cache for the work at hand, which trimtab sizes by itself. TRL's default takes half of the main memory.
CACHE = {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 2048}
# Continuous batching does not accept min_new_tokens. One token in 32,000 is EOS, which ends a completion early.
MAY_END = {"generation_kwargs": None}
# TRL sends only the positions that have a loss through the head on CUDA, and all of them elsewhere.
ON_A_GPU = Side(TRL, {"positions": "as on a GPU"})
# As many tokens of prompts as in the rows without these sizes, or fewer; see `Size`.
SHORT = {"sizes": {"median": 40, "longest": 128, "new_tokens": 16}}
LONG = {"sizes": {"median": 640, "longest": 1280, "prompts": 2, "new_tokens": 128}}
LONG_BATCH = {"sizes": {"median": 640, "longest": 1280, "ppo_batch": 8, "ppo_epochs": 2}}
# Each of three passes trains on one of a sample's ten steps.
FEW_STEPS = {"train_timestep_fraction": 0.1, "train_num_inner_epochs": 3}
# TRL's statistics of a caption are those of a group if the program repeats each caption.
EMOJI = {"train_timestep_fraction": 0.6, "train_learning_rate": 3e-4, "sizes": {"base": "emoji", "scored": 64}}
GROUPS = {
    "captions_repeated": 8,
    "per_prompt_stat_tracking": True,
    **dict.fromkeys(("per_prompt_stat_tracking_buffer_size", "per_prompt_stat_tracking_min_count"), 8),
}
ONE_UPDATE = {"train_gradient_accumulation_steps": 2}
AT_ONCE, FOUR = {"call": {"batch_size": 32}}, {"call": {"batch_size": 4}}
GENERATE, STEP, BOTH = ({"phase": phase} for phase in ("generate", "step", "both"))

WORKS = [
    Work("sft", "sft", Side(TRL), equal=DOCUMENTS),
    Work("sft-positions", "sft", ON_A_GPU, equal=DOCUMENTS),
    Work("sft-padding-free", "sft", Side(TRL, {"padding_free": True}), equal=DOCUMENTS),
    # The sides pack rows in different orders, so their first steps have different documents.
    Work(
        "sft-packed",
        "sft",
        Side(TRL),
        settings={"packing": True},
        equal={"first loss": 1e-2, "tokens read": 0},
    ),
    Work("dpo", "dpo", Side(TRL), equal=LOSS),
    Work("dpo-positions", "dpo", ON_A_GPU, equal=LOSS),
    Work("dpo-precomputed", "dpo", Side(TRL), settings=PRECOMPUTED, equal=LOSS),
    Work("reward", "reward", Side(TRL), equal=LOSS),
    Work("grpo", "grpo", Side(TRL), equal=SAMPLED),
    Work("grpo-positions", "grpo", ON_A_GPU, equal=SAMPLED),
    Work("grpo-short", "grpo", ON_A_GPU, settings=SHORT, equal=SAMPLED),
    Work("grpo-long", "grpo", ON_A_GPU, settings=LONG, equal=SAMPLED),
    Work(
        "grpo-continuous-batching",
        "grpo",
        Side(TRL, {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": CACHE}),
        Side(OURS, CONTINUOUS),
        settings=MAY_END,
        equal={"sampled": 0.05},
    ),
    Work("ppo-step", "ppo", Side(TRL_PPO), settings=STEP, equal={"kl": 1e-4, "mean score": 1e-6}),
    Work("ppo-short", "ppo", Side(TRL_PPO), settings=STEP | SHORT, equal={"kl": 1e-4, "mean score": 1e-6}),
    Work("ppo-long", "ppo", Side(TRL_PPO), settings=STEP | LONG_BATCH, equal={"kl": 1e-4, "mean score": 1e-6}),
    Work("ppo-generate", "ppo", Side(TRL_PPO), settings=GENERATE, equal=SAMPLED),
    Work("ppo-generate-at-once", "ppo", Side(TRL_PPO), settings=GENERATE | AT_ONCE, equal=SAMPLED),
    Work("ppo", "ppo", Side(TRL_PPO), settings=BOTH, equal=SAMPLED),
    Work("ppo-at-once", "ppo", Side(TRL_PPO), settings=BOTH | AT_ONCE, equal=SAMPLED),
    Work("ddpo", "ddpo", Side(TRL_DDPO), equal=EPOCH),
    Work("ddpo-one-update", "ddpo", Side(TRL_DDPO), settings=ONE_UPDATE, equal=EPOCH),
    Work(
        "ddpo-to-reward",
        "ddpo_to_reward",
        Side(TRL_DDPO),
        Side(OURS, FEW_STEPS),
        equal=PIPELINE,
    ),
    Work("ddpo-to-reward-few-steps", "ddpo_to_reward", Side(TRL_DDPO), settings=FEW_STEPS, equal=PIPELINE),
    Work(
        "ddpo-to-reward-emoji",
        "ddpo_to_reward",
        Side(TRL_DDPO),
        Side(OURS, {"group_size": 8}),
        settings=EMOJI,
        equal=PIPELINE,
    ),
    Work(
        "ddpo-to-reward-emoji-groups",
        "ddpo_to_reward",
        Side(TRL_DDPO, GROUPS),
        Side(OURS, {"group_size": 8}),
        settings=EMOJI,
        equal=PIPELINE,
    ),
]

FAIR = {
    "SFT": ["sft-positions"],
    "DPO": ["dpo-positions"],
    "reward models": ["reward"],
    "GRPO": ["grpo-short", "grpo-positions", "grpo-long"],
    "PPO's step": ["ppo-short", "ppo-step", "ppo-long"],
    "PPO's sampling": ["ppo-generate-at-once"],
    "DDPO": ["ddpo", "ddpo-one-update"],
}
"""The rows in which the peer computes what it would compute on a GPU, in batches as large as ours."""

ABLATIONS = [
    Work("sft: Trainer", "sft", Side(OURS), Side(OURS, {"loop": "plain"}), equal=DOCUMENTS),
    Work("sft: small batches", "sft", Side(OURS, {"documents": 1}), Side(OURS, {"documents": 10}), equal=DOCUMENTS),
    Work("sft: large batches", "sft", Side(OURS, {"documents": 100}), Side(OURS, {"documents": 10}), equal=DOCUMENTS),
    Work("sft: no padding", "sft", Side(OURS, {"collator": "padded"}), equal=DOCUMENTS),
    Work("dpo: no padding", "dpo", Side(OURS, {"collator": "padded"}), Side(OURS, {"collator": "packed"}), equal=LOSS),
    Work("dpo: prompt once", "dpo", Side(OURS, {"collator": "packed"}), equal=LOSS),
    Work("dpo: precomputed reference", "dpo", Side(OURS), Side(OURS, PRECOMPUTED), equal=LOSS),
    Work(
        "reward: no padding",
        "reward",
        Side(OURS, {"collator": "padded"}),
        Side(OURS, {"collator": "packed"}),
        equal=LOSS,
    ),
    Work("reward: prompt once", "reward", Side(OURS, {"collator": "packed"}), equal=LOSS),
    Work(
        "grpo: prompt sampled from once",
        "grpo",
        Side(OURS, {"rollout_backend_kwargs": {"share_prompts": False}}),
        equal=SAMPLED,
    ),
    Work(
        "grpo: continuous batching",
        "grpo",
        Side(OURS),
        Side(OURS, CONTINUOUS),
        settings=MAY_END,
        equal={"sampled": 0.05},
    ),
    # vLLM does not compile on a CPU.
    Work(
        "grpo: vLLM",
        "grpo",
        Side(
            VLLM,
            {"rollout_backend": "vllm", "rollout_backend_kwargs": {"enforce_eager": True, "skip_tokenizer_init": True}},
        ),
        Side(OURS),
        settings=MAY_END,
        equal={"sampled": 0.05},
    ),
    Work(
        "ppo: sampling loop",
        "ppo",
        Side(OURS, {"call": {**AT_ONCE["call"], "cache_implementation": "dynamic"}}),  # the loop of transformers
        Side(OURS, AT_ONCE),
        settings=GENERATE,
        equal=SAMPLED,
    ),
    Work("ppo: generate at once", "ppo", Side(OURS, FOUR), settings=GENERATE, equal=SAMPLED),
    Work("ddpo: channels last", "ddpo", Side(OURS), Side(OURS, {"train_channels_last": True}), equal=EPOCH),
    Work("ddpo: compiled", "ddpo", Side(OURS), Side(OURS, {"train_compile": "inductor"}), equal=EPOCH),
]
