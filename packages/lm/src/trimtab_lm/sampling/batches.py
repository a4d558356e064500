"""How many completions are sampled at a time, and of which prompts."""

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor
from transformers import GenerationConfig

from trimtab_lm.interface import Model, decoder_config

MIB = 2**20
CPU_ROOM, DEVICE_ROOM = 256 * MIB, 1024 * MIB
"""Bytes for keys, values and scores of the completions that are sampled at a time, of a small model."""
SCORE_BYTES = 32
"""Bytes for each entry of a row's vocabulary while a token is drawn: float32 logits and scores, float64 sums."""


class Automatic(int):
    """A documented number that stands for "as many as fit", unless the caller gives one of their own."""


AS_MANY_AS_FIT = Automatic(4)
"""The default of `batch_size`: as many completions as have room, where TRL documents 4."""


def batches_of(
    prompts: Sequence[Tensor], batch_size: int, num_generations: int, *, is_split: bool
) -> list[tuple[list[int], int]]:
    """Prompts of like length, and how many completions of each to sample.

    Args:
        prompts: rows of token ids, [T] each.
        batch_size: completions at a time, at most.
        num_generations: completions of each prompt.
        is_split: prompts of one batch have one length. PEFT puts a learned prompt before the padding, which would
            otherwise stand inside the text.

    Returns:
        For each batch the numbers of its prompts, the longest first, and the completions of each.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    runs = [list(run) for _, run in groupby(order, key=lambda i: len(prompts[i]) if is_split else 0)]
    repeats = min(num_generations, batch_size)
    size = max(batch_size // num_generations, 1)
    return [
        (chosen, min(repeats, num_generations - done))
        for alike in runs
        for chosen in (alike[start : start + size] for start in range(0, len(alike), size))
        for done in range(0, num_generations, repeats)
    ]


def new_tokens(model: Model, longest: int, config: GenerationConfig) -> int:
    """The most tokens that a completion of a prompt of `longest` tokens may have."""
    is_encoder_decoder = model.config.is_encoder_decoder
    length = config.max_length or longest  # of prompt and completion together, or of an encoder-decoder's completion
    return config.max_new_tokens or (length if is_encoder_decoder else max(length - longest, 0))


def completions_at_a_time(model: Model, tokens: int) -> int:
    """How many completions of a length have room: 256 MiB on a CPU, 1 GiB on a GPU, or half of the model's weights.

    It depends on the model and the length alone, and not on the memory that happens to be free, so that a seed gives
    the same samples again.

    Args:
        model: a transformers model.
        tokens: the length of the longest prompt with its completion, in tokens.

    Returns:
        At least 1.
    """
    config = decoder_config(model)
    width = config.hidden_size
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int):  # grouped-query attention
        width = groups * (getattr(config, "head_dim", None) or width // heads)
    row = 2 * tokens * config.num_hidden_layers * width * model.dtype.itemsize + SCORE_BYTES * config.vocab_size
    weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    room = CPU_ROOM if model.device.type == "cpu" else DEVICE_ROOM
    return max(max(room, weights // 2) // row, 1)
