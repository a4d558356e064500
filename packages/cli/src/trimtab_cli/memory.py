"""Training memory on each GPU, per engine: `trimtab memory --model ID_OR_CONFIG --gpus 8`.

Weights, gradients and optimizer states are counted from the model itself, which is built without memory. Copies of
weights and activations are estimates.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from trimtab_common.config import Count, CountFromZero, parse_config, setting
from trimtab_lm.compat.models import undivided
from trimtab_lm.models.loading import AutoModel

GIB = 2**30
COMPUTE_BYTES = 2
"""Of a weight or activation as the GPU computes with it: bfloat16."""
GATHERED_LAYERS = 2
"""Layers whose sharded weights are gathered at a time: the one that runs and the one after it."""
LAYER_ACTIVATIONS = 34
"""Bytes that a layer keeps for backward, per token and hidden unit, in 16 bits.

Korthikanti et al. 2022, arXiv:2205.05198, Eq. 1, without the attention scores, which flash attention does not store.
"""


@dataclass
class MemoryConfig:
    """What is trained, and on how many GPUs."""

    model: str = setting("Hub id, folder, or configuration file (json) of a language model.")
    gpus: Count = setting("GPUs that share the training.", default=8)
    weights: Literal["float32", "bfloat16"] = setting(
        "Type in which the weights are loaded. With float32 the GPUs compute in bfloat16 (bf16=True).",
        default="float32",
    )
    lora_rank: CountFromZero = setting("Train adapters of this rank on all linear layers. 0: all weights.", default=0)
    reference: bool = setting("Hold a frozen copy as the reference; adapters need none.", default=False)
    critic: bool = setting("Train a second model of this size as PPO's separate critic.", default=False)
    tokens: Count = setting("Tokens of a micro-batch on one GPU.", default=8192)
    checkpointing: bool = setting("Compute activations again in backward (activation checkpointing).", default=True)


class ModelSize(NamedTuple):
    """The settings that training memory depends on.

    Attributes:
        parameters: numbers that the model has; a tied weight counts once.
        trainable: the trained ones.
        largest_layer: parameters of the largest part that is gathered at once: a layer, the embedding or the head.
        layers: the layers of the decoder, and of the encoder if there is one.
        hidden_size: width of a layer.
    """

    parameters: int
    trainable: int
    largest_layer: int
    layers: int
    hidden_size: int


class Engine(NamedTuple):
    """Bytes per parameter, before they are divided among GPUs.

    Attributes:
        frozen: weight of a parameter that does not train.
        weights: weight of one that trains.
        gradients: its gradient, and the buffer in which that is summed over GPUs.
        optimizer: AdamW's two moments of it, and its float32 weight where `weights` is another.
        divided: "weights", "gradients", "optimizer": those of which each GPU holds a share.
    """

    frozen: int
    weights: int
    gradients: int
    optimizer: int
    divided: frozenset[str] = frozenset()


def engines(config: MemoryConfig) -> dict[str, Engine]:
    """The engines by name.

    DDP sums gradients in buckets beside them. DeepSpeed's ZeRO, with bf16 on, keeps bfloat16 weights for forward and
    float32 ones for the optimizer, in whatever type they are loaded. PEFT's adapters are float32.
    """
    loaded = getattr(torch, config.weights).itemsize
    width = torch.float32.itemsize if config.lora_rank else loaded
    everything = frozenset({"weights", "gradients", "optimizer"})
    return {
        "one GPU": Engine(loaded, width, width, 2 * width),
        "DDP": Engine(loaded, width, 2 * width, 2 * width),
        "ZeRO-2": Engine(2, 2, 2, 12, everything - {"weights"}),
        "ZeRO-3": Engine(2, 2, 2, 12, everything),
        "FSDP2": Engine(loaded, width, width, 2 * width, everything),
    }


class Memory(NamedTuple):
    """Bytes on each GPU.

    Attributes:
        weights: the weights of the model that trains.
        gradients: the gradients of its parameters.
        optimizer: its states.
        reference: a frozen copy of the model.
        critic: a second model that trains.
        copies: bfloat16 weights to compute with: of all layers where autocast casts float32 weights, of
            `GATHERED_LAYERS` where the GPUs hold shares.
        activations: that a micro-batch keeps for backward.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    critic: float
    copies: float
    activations: float

    @property
    def total(self) -> float:
        """All of it. Free memory beside it is needed for generation's cache and for what the allocator wastes."""
        return sum(self)


def size_of(config: PreTrainedConfig, lora_rank: int = 0) -> ModelSize:
    """The size of a model with this configuration, which is built on torch's meta device.

    Args:
        config: the config of a causal or encoder-decoder language model.
        lora_rank: the rank of adapters on all linear layers, which train alone; 0: no adapters.
    """
    kind: AutoModel = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        base = cast(PreTrainedModel, kind.from_config(config))
        if lora_rank:  # which puts the adapters into the model
            get_peft_model(base, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    blocks = set(undivided(base) or ())  # which transformers does not split, and engines gather one by one
    layers = [module for module in base.modules() if type(module).__name__ in blocks]
    heads = filter(None, (base.get_input_embeddings(), base.get_output_embeddings()))
    return ModelSize(
        parameters=base.num_parameters(),
        trainable=base.num_parameters(only_trainable=True),
        largest_layer=max(sum(weight.numel() for weight in part.parameters()) for part in [*layers, *heads]),
        layers=len(layers),
        hidden_size=config.get_text_config().hidden_size,
    )


def memory(size: ModelSize, engine: Engine, config: MemoryConfig) -> Memory:
    """Bytes on each GPU for training with AdamW.

    Args:
        size: the model's size.
        engine: one of `engines`.
        config: how the model is trained.
    """
    share = {name: config.gpus if name in engine.divided else 1 for name in ("weights", "gradients", "optimizer")}
    frozen = size.parameters - size.trainable
    weights = (engine.frozen * frozen + engine.weights * size.trainable) / share["weights"]
    gradients = engine.gradients * size.trainable / share["gradients"]
    optimizer = engine.optimizer * size.trainable / share["optimizer"]
    copies = size.parameters if engine.frozen > COMPUTE_BYTES else 0
    if "weights" in engine.divided:
        copies = GATHERED_LAYERS * size.largest_layer
    kept = COMPUTE_BYTES * size.layers + LAYER_ACTIVATIONS if config.checkpointing else LAYER_ACTIVATIONS * size.layers
    return Memory(
        weights,
        gradients,
        optimizer,
        reference=weights if config.reference and not config.lora_rank else 0,
        critic=weights + gradients + optimizer if config.critic else 0,
        copies=COMPUTE_BYTES * copies,
        activations=config.tokens * size.hidden_size * kept,
    )


def main(argv: Sequence[str]) -> int:
    """Print the table of the model that the words of the command line name; the exit status."""
    (config,) = parse_config(MemoryConfig, argv=argv, description=__doc__, program="trimtab memory")
    try:
        size = size_of(AutoConfig.from_pretrained(config.model), config.lora_rank)
    except (OSError, ValueError) as error:
        print(f"trimtab memory: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    rows = [["engine", *Memory._fields, "total"]]
    for name, engine in engines(config).items():
        if (name == "one GPU") == (config.gpus == 1):
            parts = memory(size, engine, config)
            rows.append([name, *(f"{part / GIB:.1f}" for part in (*parts, parts.total))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"{config.model} on {config.gpus} GPUs, GiB on each:")
    for name, *cells in rows:
        print(name.ljust(widths[0]), *(cell.rjust(width + 1) for cell, width in zip(cells, widths[1:], strict=True)))
    return 0
