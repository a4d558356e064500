"""A reward model trained on preference pairs."""

from typing import Any

from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.models import PAD, load, tokenizer
from tools.bench.sizes import Size
from tools.bench.tasks.pairs import dataset, needed, pairs_of
from tools.bench.tasks.training import train
from transformers import LlamaForSequenceClassification


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side."""
    pairs, clock = pairs_of(size), Clock(size.device)
    model = load(LlamaForSequenceClassification, folder, "reward", size)
    clock.watch(model)
    tokens = needed(pairs[size.rows :], scores_answers=False)
    arguments: dict[str, Any] = {}
    if layout := settings.pop("collator", None):
        from trimtab_lm.reward.collator import PairCollator

        arguments["data_collator"] = PairCollator(PAD, layout)
    return train(
        package,
        "Reward",
        size,
        {"max_length": None, "disable_dropout": True} | settings,
        Load(tokens.read, "tokens", 3 * tokens.forward_flops(size)),
        clock,
        model=model,
        train_dataset=dataset(pairs),
        processing_class=tokenizer(size.vocab_size),
        **arguments,
    )
