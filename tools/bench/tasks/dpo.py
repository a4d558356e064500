"""DPO with different weights in the reference, so that the first loss depends on every token of both models."""

from typing import Any

from tools.bench.measuring import Clock, Load, Measurement
from tools.bench.models import PAD, load, tokenizer
from tools.bench.sizes import Size
from tools.bench.tasks.pairs import dataset, needed, pairs_of
from tools.bench.tasks.training import train
from transformers import LlamaForCausalLM


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side. A precomputed reference is ready before the clock starts, on both sides."""
    pairs, clock = pairs_of(size), Clock(size.device)
    policy, reference = (load(LlamaForCausalLM, folder, name, size) for name in ("policy", "reference"))
    clock.watch(policy, reference)
    tokens = needed(pairs[size.rows :], scores_answers=True)
    passes = 3 if settings.get("precompute_ref_log_probs") else 4
    arguments: dict[str, Any] = {}
    if layout := settings.pop("collator", None):
        from trimtab_lm.dpo.collator import PreferencePairCollator

        arguments["data_collator"] = PreferencePairCollator(PAD, layout=layout)
    return train(
        package,
        "DPO",
        size,
        {"max_length": None} | settings,
        Load(tokens.read, "tokens", passes * tokens.forward_flops(size)),
        clock,
        model=policy,
        ref_model=reference,
        train_dataset=dataset(pairs),
        processing_class=tokenizer(size.vocab_size),
        **arguments,
    )
