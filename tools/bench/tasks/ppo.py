"""PPO with a value head and different weights in the reference: sampling, the step alone, or both."""

import importlib
from typing import Any

import torch
from tools.bench.measuring import Clock, Load, Measurement, Tokens, total
from tools.bench.models import load, set_value_head, tokenizer
from tools.bench.sizes import Size, token_ids
from torch import Tensor
from transformers import AutoModelForCausalLM

Rows = list[Tensor]


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side. `settings["phase"]` says what: generate, step, or both."""
    phase, call = settings.pop("phase"), settings.pop("call", {})
    clock, facts = Clock(size.device), dict[str, float]()
    trainer = trainer_of(package, size, settings, folder, clock)
    tokens = dict.fromkeys(("min_new_tokens", "max_new_tokens"), size.ppo_new_tokens)
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, **tokens, **call}
    (queries, answers), sampled = texts(size), list[Rows]()

    def generate() -> Rows:
        responses: Rows = trainer.generate(queries, return_prompt=False, **sampling)
        facts["sampled"] = float(sum(map(len, responses)))
        sampled.append(responses)
        return responses

    def learn(responses: Rows) -> None:
        stats = trainer.step(queries, responses, [torch.tensor(float(len(row) % 5)) for row in responses])
        if phase == "step":  # both sides get the same responses, and their models are equal before the first update
            facts.setdefault("kl", float(stats["objective/kl"]))
            facts.setdefault("mean score", float(stats["ppo/mean_scores"]))

    torch.manual_seed(0)
    timed = {"generate": generate, "step": lambda: learn(answers), "both": lambda: learn(generate())}[phase]
    steps = size.steps if phase == "generate" else size.ppo_steps
    clock.time(timed, steps)
    timed_answers = [answers] * steps if phase == "step" else sampled[1:]  # the first step is the warm-up
    return clock.measurement(size, needed(size, phase, queries, timed_answers), {**clock.read, **facts})


def trainer_of(package: str, size: Size, settings: dict[str, Any], folder: str, clock: Clock) -> Any:
    """Returns a PPOTrainer with the policy and the reference in the folder."""
    module = importlib.import_module(package)
    models = []
    for name in ("policy", "reference"):
        base = load(AutoModelForCausalLM, folder, name, size)
        clock.watch(base)
        model = module.AutoModelForCausalLMWithValueHead.from_pretrained(base)
        set_value_head(model.v_head.summary)
        models.append(model)
    sizes = {"batch_size": size.ppo_batch, "mini_batch_size": size.ppo_minibatch, "ppo_epochs": size.ppo_epochs}
    accelerator = {"mixed_precision": "bf16" if size.device == "cuda" else "no", "cpu": size.device == "cpu"}
    config = module.PPOConfig(**sizes, learning_rate=1e-5, accelerator_kwargs=accelerator, **settings)
    return module.PPOTrainer(config, *models, tokenizer=tokenizer(size.vocab_size))


def texts(size: Size) -> tuple[Rows, Rows]:
    """Returns queries, and answers half as long."""
    rows = [torch.tensor(row, device=size.device) for row in token_ids(size, size.ppo_batch, seed=30)]
    return [row[: max(2 * len(row) // 3, 1)] for row in rows], [row[2 * len(row) // 3 :] for row in rows]


def needed(size: Size, phase: str, queries: Rows, answers: list[Rows]) -> Load:
    """Returns the load: one pass to sample; one pass of each model to score; three passes per epoch to train.

    Args:
        size: sizes of the work.
        phase: what the process measures.
        queries: queries of each step.
        answers: answers of the timed steps.
    """
    pairs = [(query, len(row)) for rows in answers for query, row in zip(queries, rows, strict=True)]
    read = total(Tokens.of(len(query), [length], scored=length) for query, length in pairs)
    passes = (phase != "step") + (phase != "generate") * (2 + 3 * size.ppo_epochs)
    units = read.read if phase == "step" else sum(length for _, length in pairs)
    return Load(units, "tokens", passes * read.forward_flops(size))
