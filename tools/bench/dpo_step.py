"""Time of a DPO step against TRL's trainer, where that is installed, on the same pairs. See README.md."""

import importlib.util
import random
import statistics
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trimtab_lm import DPOConfig, DPOTrainer


def model_of(options: Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        vocab_size=options.vocabulary,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def words(options: Namespace) -> PreTrainedTokenizerFast:
    """One token for each word `w<number>`."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, options.vocabulary)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def pairs_of(options: Namespace) -> Dataset:
    draw = random.Random(0)

    def text(shortest: int, longest: int) -> str:
        return " ".join(f"w{draw.randrange(3, options.vocabulary)}" for _ in range(draw.randint(shortest, longest)))

    return Dataset.from_list(
        [
            {
                "prompt": text(*options.prompt),
                "chosen": " " + text(*options.answer),
                "rejected": " " + text(*options.answer),
            }
            for _ in range(options.batch * options.steps)
        ]
    )


def training(options: Namespace, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": options.batch,
        "max_steps": options.steps,
        "max_length": None,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "logging_strategy": "no",
        "bf16": False,
        "learning_rate": 1e-6,
        "gradient_checkpointing": False,
    }


def ours(options: Namespace, folder: str) -> Callable[[], Any]:
    model = model_of(options)
    settings = {"train_dataset": pairs_of(options), "processing_class": words(options)}
    return DPOTrainer(model, model_of(options), DPOConfig(**training(options, folder)), **settings).train


def peers(options: Namespace, folder: str) -> Callable[[], Any]:
    from trl import DPOConfig as PeerConfig
    from trl import DPOTrainer as PeerTrainer

    model, ref_model = model_of(options), model_of(options)
    args = PeerConfig(**training(options, folder))
    settings = {"train_dataset": pairs_of(options), "processing_class": words(options)}
    return PeerTrainer(model=model, ref_model=ref_model, args=args, **settings).train


def seconds(build: Callable[[Namespace, str], Callable[[], Any]], options: Namespace) -> float:
    """Seconds of a step; making the trainer and tokenizing are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        train = build(options, folder)
        start = time.perf_counter()
        train()
        return (time.perf_counter() - start) / options.steps


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=8, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompt", type=int, nargs=2, default=[64, 256], help="tokens, from and to")
    parser.add_argument("--answer", type=int, nargs=2, default=[16, 64], help="tokens, from and to")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sides = {"ours": ours}
    if importlib.util.find_spec("trl") is None:
        print("trl is not installed here: ours is timed alone", file=sys.stderr)
    else:
        sides["trl"] = peers
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.repeats + 1):
        for name, build in sides.items():
            taken = seconds(build, options)
            if turn:  # the first is to warm up
                times[name].append(taken)
    for name, taken in times.items():
        print(f"{name}: {min(taken):.3f} s a step at least, {statistics.median(taken):.3f} in the median")
    if "trl" in times:
        least, middle = (
            min(times["ours"]) / min(times["trl"]),
            statistics.median(times["ours"]) / statistics.median(times["trl"]),
        )
        print(f"ours / trl: {least:.2f} of the least, {middle:.2f} of the median")


if __name__ == "__main__":
    main()
