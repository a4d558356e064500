"""The settings of the pipeline's program, train.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.assets import Split
from experiments.run_folders import from_recipe
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe.yaml")


@dataclass(frozen=True)
class RunConfig:
    """The settings of the stages before and around PPO; PPO's own are in PPOConfig."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of posts and summaries: texts prompt and completion, splits train and "
            "test (or validation). None: openings of sentences in children's books, and their ends."
        },
    )
    preferences: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder of comparisons that people made: texts prompt, chosen and rejected, splits "
            "train and test (or validation). None: answers of the fine-tuned model, compared by gold."
        },
    )
    gold: str = field(
        default="minilm",
        metadata={
            "help": "What compares answers, and judges them at the end. minilm: the score of experiments/gold.py, "
            "of prompt and answer; or the hub id or folder of a reward model."
        },
    )
    label_temperature: float = field(
        default=0.5, metadata={"help": "Noise of the labels, in units of the gold score. 0: none."}
    )
    kl_coefs: tuple[float, ...] = field(
        default=(0.2, 0.05, 0.0),
        metadata={"help": "Fixed KL coefficients; PPO trains one policy with each. They replace init_kl_coef."},
    )
    eval_split: Split = field(
        default="test", metadata={"help": "Openings to judge by, if dataset is None: test, or tune to choose settings."}
    )
    max_length: int = field(default=256, metadata={"help": "Tokens of a prompt with an answer at most."})
    max_new_tokens: int = field(default=20, metadata={"help": "Tokens of an answer at most."})
    sft_steps: int = field(
        default=0, metadata={"help": "Optimizer steps of fine-tuning. 0: the model is one that is fine-tuned already."}
    )
    sft_batch_size: int = field(default=2, metadata={"help": "Rows of max_length tokens in each step."})
    sft_learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of fine-tuning (cosine)."})
    comparisons: tuple[int, ...] = field(
        default=(512,), metadata={"help": "Comparisons per reward model; PPO uses the reward model of the most."}
    )
    eval_comparisons: int = field(default=64, metadata={"help": "Other comparisons, for the accuracy."})
    reward_epochs: float = field(default=1.0, metadata={"help": "Passes over the comparisons."})
    reward_batch_size: int = field(default=4, metadata={"help": "Comparisons in an optimizer step."})
    reward_learning_rate: float = field(default=1e-4, metadata={"help": "Highest learning rate of reward models."})
    best_of: tuple[int, ...] = field(default=(4, 8), metadata={"help": "n of best-of-n, the baseline."})
    eval_prompts: int = field(default=48, metadata={"help": "Held-out prompts of the evaluation."})
    samples: int = field(default=6, metadata={"help": "How many of them the report shows."})
    resume: bool = field(default=False, metadata={"help": "Continue in output_dir after the last finished stage."})
    keep_models: bool = field(default=False, metadata={"help": "Leave the stages' models and data in output_dir."})

    def __post_init__(self) -> None:
        if not self.comparisons or min(self.comparisons) < 1:
            raise ValueError(f"comparisons={self.comparisons} has to be one number, 1 or more, or several.")
        if not self.kl_coefs or min(self.kl_coefs) < 0:
            raise ValueError(f"kl_coefs={self.kl_coefs} has to be one number, 0 or more, or several.")
        if not self.best_of or min(self.best_of) < 1:
            raise ValueError(f"best_of={self.best_of} has to be one number, 1 or more, or several.")
        if self.preferences is not None and self.gold == "minilm":
            raise ValueError(
                f"preferences={self.preferences!r} come from people, but gold='minilm' judges by another score at "
                "the end. Set gold to the hub id or folder of a reward model of such preferences."
            )


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)
