"""GRPO on conversations with a tool: a small model learns to ask a calculator instead of guessing.

The policy writes `<<47*85=`, as in GSM8K, reads `3995>>` and writes the answer. A supervised warm-up shows it how, but
most demonstrations answer by heart. Then right answers are rewarded, and nothing else.

    python examples/tool_use.py             # a few minutes on two cores; --help lists every setting
    python examples/tool_use.py --smoke     # two small steps of each kind
"""

import ast
import random
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trimtab_common.config import parse_config
from trimtab_lm import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, set_seed
from trimtab_lm.environments import EnvironmentRollout, ToolEnvironment
from trimtab_lm.environments.tools import Call
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

COMMON = {"output_dir": "runs/examples/tool_use", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
SETTINGS = COMMON | {"max_steps": 120, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 10}
SMOKE = {"max_steps": 2, "logging_steps": 1, "num_generations": 4}
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class RunConfig:
    """The settings that GRPOConfig does not have."""

    smoke: bool = field(default=False, metadata={"help": "Two small steps of each kind, to see that it runs."})


def calculator(expression: str) -> str:
    """The product of two whole numbers. The expression is parsed, and never run as code."""
    match ast.parse(expression, mode="eval").body:
        case ast.BinOp(ast.Constant(int(left)), ast.Mult(), ast.Constant(int(right))):
            return f"{left * right}>>"
    raise ValueError("write two whole numbers with * between them")


def calls(text: str) -> list[Call]:
    return [Call("calculator", {"expression": expression}) for expression in re.findall("<<(.*?)=", text)]


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text.rpartition(">>")[2] == right) for text, right in zip(completions, answer, strict=True)]


def main(run: RunConfig, config: GRPOConfig) -> None:
    """Warms up, trains on some products and evaluates on others."""
    set_seed(config.seed)
    pairs = [(f"{a}*{b}=", str(a * b)) for a in range(10, 100) for b in range(10, 100)]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in random.sample(pairs, len(pairs))]
    for row in rows:
        row["completion"] = (f"<<{row['prompt']}</s>{row['answer']}>>" if random.random() < 0.3 else "") + row["answer"]
    test, train = Dataset.from_list(rows[:64]), Dataset.from_list(rows[64:])
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).with_name("stories"))
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(tokenizer), initializer_range=0.1))
    warm_up = SFTConfig(**COMMON, max_steps=2 if run.smoke else 300, per_device_train_batch_size=64, learning_rate=5e-3)
    SFTTrainer(model, args=warm_up, train_dataset=train, processing_class=tokenizer).train()
    backend = TransformersRollout(SamplingSettings(max_completion_length=12), tokenizer, batch_size=128)
    environment = partial(ToolEnvironment, [calculator], parse=calls)
    talk = EnvironmentRollout(backend, environment, tokenizer, max_completion_length=48, max_turns=3)
    trainer = GRPOTrainer(model, correct, config, train, test, tokenizer, rollout=talk)
    before = trainer.evaluate()["eval_reward"]
    trainer.train(config.resume_from_checkpoint)
    print(f"accuracy on {len(test)} held-out products: {before:.3f} -> {trainer.evaluate()['eval_reward']:.3f}")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, GRPOConfig, description=__doc__, recipe=recipe))
