"""Peak memory of a PPO step at a large vocabulary, above the weights, gradients and optimizer state. See README.md."""

import ctypes
import gc
import sys
import threading
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

MIB = 2**20


def resident() -> int:
    """Bytes of this process in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The most memory in use inside the block above what was in use at its start."""

    def __init__(self, device: torch.device):
        self.device, self.above = device, 0

    @contextmanager
    def watched(self) -> Iterator["Peak"]:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            yield self
            self.above = torch.cuda.max_memory_allocated() - base
            return
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        base, highest, is_over = resident(), 0, threading.Event()

        def sample() -> None:
            nonlocal highest
            while not is_over.is_set():
                highest = max(highest, resident())
                time.sleep(0.001)

        thread = threading.Thread(target=sample)
        thread.start()
        yield self
        is_over.set()
        thread.join()
        self.above = highest - base


def model_of(options: Namespace) -> torch.nn.Module:
    tokens = {"vocab_size": options.vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if options.model == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=1024, **tokens))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens))


def main(options: Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    elements = options.batch * options.tokens * options.vocabulary
    print(f"{options.model} on {device}, vocabulary {options.vocabulary},", end=" ")
    print(f"{options.batch} responses of {options.tokens} tokens")
    print(f"one [batch, time, vocab] tensor in float32: {4 * elements / MIB:.0f} MiB")
    for kl_penalty in options.kl_penalty:
        config = PPOConfig(
            batch_size=options.batch,
            mini_batch_size=options.batch,
            ppo_epochs=1,
            kl_penalty=kl_penalty,
            accelerator_kwargs={"cpu": device.type == "cpu"},
        )
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(model_of(options).to(device))
        trainer = PPOTrainer(config, policy, tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=2))

        def step(length: int, trainer: PPOTrainer = trainer) -> None:
            rows = [torch.randint(3, options.vocabulary, (length + 8,)) for _ in range(options.batch)]
            trainer.step([row[:8] for row in rows], [row[8:] for row in rows], [float(i) for i in range(options.batch)])

        step(2)  # makes the gradients' and the optimizer's memory, and loads libraries
        owned = list(trainer.optimizer.param_groups[0]["params"])
        for weight in owned:  # the optimizer drops gradients after its step: have them counted in the baseline
            weight.grad = torch.zeros_like(weight)
        peak = Peak(device)
        with peak.watched():
            step(options.tokens)
        print(f"kl_penalty={kl_penalty}: peak {peak.above / MIB:.0f} MiB above weights, gradients and optimizer state")
        del trainer, policy, owned, step


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kl-penalty", nargs="+", default=["kl", "full"])
    parser.add_argument("--cpu", action="store_true", help="although there is an accelerator")
    sys.exit(main(parser.parse_args()))
