"""The sizes of the benchmarks: plain numbers, which the driver reads without importing torch."""

import random
from dataclasses import dataclass, field, replace

LLAMA_11M = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LLAMA_TINY = LLAMA_11M | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
# The sizes of Llama 3.2 1B.
LLAMA_1B = LLAMA_11M | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Size:
    """The sizes that all works share.

    Attributes:
        device: "cpu" (float32, one thread) or "cuda" (bfloat16).
        steps: number of timed steps in a process, after the warm-up.
        llama: arguments of the LlamaConfig.
        unet_widths: channels of the U-Net's blocks; empty for Stable Diffusion 1.5's.
        latent: width of a latent image in pixels.
        rows: documents or pairs per step.
        median: median tokens per row. Two thirds of a pair's row are the prompt.
        longest: maximum tokens per row, packed rows included.
        prompts, group, new_tokens: GRPO's prompts per step, completions per prompt, and tokens per completion.
        ppo_steps: timed steps of PPO with updates; fewer than `steps`, because each has many updates.
        ppo_batch, ppo_minibatch, ppo_epochs, ppo_new_tokens: PPO's batch, minibatch, epochs and tokens per response.
        images, denoising_steps: DDPO's images per epoch, in two batches, and denoising steps per image.
        base, scored, goals: for DDPO until a mean reward: the pipeline, images per epoch, and each pipeline's reward.
        samples: images of each caption of the emoji by the base model; gains are counted from their mean reward.
        matmul: width of the square matrices that measure the machine's rate.
        pair: number of this pair of processes, from 0; works that depend on luck choose their seeds by it.
    """

    device: str = "cpu"
    steps: int = 3
    llama: dict[str, int | bool] = field(default_factory=lambda: LLAMA_11M)
    unet_widths: tuple[int, ...] = (32, 64, 128, 128)
    latent: int = 16
    rows: int = 8
    median: int = 159
    longest: int = 512
    prompts: int = 4
    group: int = 8
    new_tokens: int = 64
    ppo_steps: int = 1
    ppo_batch: int = 32
    ppo_minibatch: int = 4
    ppo_epochs: int = 4
    ppo_new_tokens: int = 32
    images: int = 8
    denoising_steps: int = 8
    base: str = "shapes"
    scored: int = 128
    goals: dict[str, float] = field(default_factory=lambda: {"shapes": 0.83, "emoji": 0.032})
    samples: int = 16
    matmul: int = 2048
    pair: int = 0

    @property
    def vocab_size(self) -> int:
        """The language models' vocabulary, in tokens."""
        return int(self.llama["vocab_size"])


TINY = Size(
    steps=1,
    llama=LLAMA_TINY,
    unet_widths=(16, 16, 32, 32),
    latent=8,
    rows=2,
    median=20,
    longest=48,
    prompts=2,
    group=2,
    new_tokens=4,
    ppo_batch=4,
    ppo_minibatch=2,
    ppo_epochs=1,
    ppo_new_tokens=4,
    images=2,
    denoising_steps=2,
    scored=8,
    goals={"shapes": 0.7, "emoji": -0.5},
    samples=1,
    matmul=256,
)
SIZES = {
    "cpu": Size(),
    "cuda": Size("cuda", llama=LLAMA_1B, unet_widths=(), latent=64, median=1024, longest=4096, matmul=8192),
    "smoke-cpu": TINY,
    "smoke-cuda": replace(TINY, device="cuda"),
}


def row_lengths(size: Size, count: int, *, seed: int) -> list[int]:
    """Returns `count` row lengths in tokens: log-normal around the median, from an eighth of it to `longest`."""
    draw = random.Random(seed)
    lengths = (int(draw.lognormvariate(0, 0.6) * size.median) for _ in range(count))
    return [min(max(length, size.median // 8), size.longest) for length in lengths]


def token_ids(size: Size, count: int, *, seed: int) -> list[list[int]]:
    """Returns rows of random token ids with those lengths; ids 0 to 2 are padding, BOS and EOS."""
    draw = random.Random(seed + 1)
    vocabulary = size.vocab_size
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in row_lengths(size, count, seed=seed)]
