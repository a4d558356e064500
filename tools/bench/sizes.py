"""How large the benchmarks are: plain numbers, which the driver reads without torch."""

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
    """The sizes of all works.

    Attributes:
        device: "cpu" (float32, one thread) or "cuda" (bfloat16).
        steps: timed steps of a process, after one that warms up.
        llama: fields of the LlamaConfig.
        unet_widths: channels of the U-Net's blocks; none for the sizes of Stable Diffusion 1.5.
        latent: width of a latent image.
        rows: documents or pairs of a step.
        median: tokens of a row in the median. Of a pair's row two thirds are the prompt.
        longest: tokens of a row at most, and of a packed row.
        prompts, group, new_tokens: GRPO's prompts of a step, completions of each, and tokens of a completion.
        ppo_steps: timed steps of PPO with updates, of which each is many.
        ppo_batch, ppo_minibatch, ppo_epochs, ppo_new_tokens: PPO's.
        images, denoising_steps: DDPO's images of an epoch, in two batches, and their steps.
        scored, reward: images of an epoch of DDPO that runs until a mean reward, and that reward in kB.
        matmul: width of the square matrices that measure the machine's rate.
        pair: the number of the pair of processes, from 0, by which works that depend on luck choose their seeds.
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
    scored: int = 128
    reward: float = 0.83
    matmul: int = 2048
    pair: int = 0


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
    reward=0.7,
    matmul=256,
)
SIZES = {
    "cpu": Size(),
    "cuda": Size("cuda", llama=LLAMA_1B, unet_widths=(), latent=64, median=1024, longest=4096, matmul=8192),
    "smoke-cpu": TINY,
    "smoke-cuda": replace(TINY, device="cuda"),
}


def row_lengths(size: Size, count: int, *, seed: int) -> list[int]:
    """Tokens of so many rows: log-normal around the median, from an eighth of it to `longest`."""
    draw = random.Random(seed)
    lengths = (int(draw.lognormvariate(0, 0.6) * size.median) for _ in range(count))
    return [min(max(length, size.median // 8), size.longest) for length in lengths]


def token_ids(size: Size, count: int, *, seed: int) -> list[list[int]]:
    """Rows of random token ids of those lengths; ids 0 to 2 are padding, BOS and EOS."""
    draw = random.Random(seed + 1)
    vocabulary = int(size.llama["vocab_size"])
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in row_lengths(size, count, seed=seed)]
