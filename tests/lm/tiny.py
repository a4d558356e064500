"""Models with a few thousand weights and a tokenizer with one token per character, built in code."""

import string
from types import MethodType
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
)

PAD, BOS, EOS, UNK = range(4)
CHARACTERS = string.ascii_lowercase + " ."
SPECIAL = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": UNK}
VOCABULARY = SPECIAL | {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
TOKENS = {
    "vocab_size": len(VOCABULARY),
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
WIDTH = 16


def tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """One token per character; text to ids and back is exact. special: other special tokens, such as pad_token=None."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def seeded(kind: Any, config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).to(dtype)


def gpt2(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    return seeded(GPT2LMHeadModel, GPT2Config(**sizes | TOKENS | settings), seed, dtype)


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.3,
    }
    return seeded(LlamaForCausalLM, LlamaConfig(**sizes | TOKENS | settings), seed, dtype)


def t5(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    sizes = {
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "initializer_factor": 4.0,
        "decoder_start_token_id": PAD,
    }
    return seeded(T5ForConditionalGeneration, T5Config(**sizes | TOKENS | settings), seed, dtype)


def exact(model: Any) -> Any:
    """Returns the model fully in float64: transformers' RMS norms otherwise compute, and round, in float32."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        size = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(size + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
            module.forward = MethodType(norm, module)
    return model.double()


def scorer(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a sequence classifier with one label."""
    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 64, "num_labels": 1}
    return seeded(GPT2ForSequenceClassification, GPT2Config(**sizes | TOKENS), seed, dtype)


def with_value_head(model: Any, seed: int = 0, **options: Any) -> Any:
    kind = AutoModelForSeq2SeqLMWithValueHead if model.config.is_encoder_decoder else AutoModelForCausalLMWithValueHead
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_pretrained(model, **options)


def policy(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Returns a GPT-2 with a value head."""
    return with_value_head(gpt2(seed, dtype, **settings), seed)


def ppo(
    model: Any = None, kind: type[PPOTrainer] = PPOTrainer, arguments: dict[str, Any] | None = None, **config: Any
) -> Any:
    """Returns a trainer with four responses and one update a step. arguments: PPOTrainer's; config: PPOConfig's."""
    sizes = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "learning_rate": 1e-3}
    model = policy() if model is None else model
    return kind(PPOConfig(**sizes | config), model, **{"tokenizer": tokenizer(), **(arguments or {})})


def rows(count: int, shortest: int, longest: int, seed: int = 0) -> list[torch.Tensor]:
    """Returns rows of ordinary tokens, with lengths from `shortest` to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(len(SPECIAL), len(VOCABULARY), (length,), generator=generator) for length in lengths]


def batch(count: int = 4, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Returns queries, responses and scores."""
    scores = torch.randn(count, generator=torch.Generator().manual_seed(seed + 2))
    return rows(count, 2, 5, seed), rows(count, 3, 7, seed + 1), list(scores)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a copy of all weights."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def moved(before: dict[str, torch.Tensor], module: torch.nn.Module) -> dict[str, float]:
    """Returns the largest change of any element in each weight that changed."""
    gaps = {name: float((value - before[name]).abs().max()) for name, value in module.state_dict().items()}
    return {name: gap for name, gap in gaps.items() if gap > 0}


def logprobs_by_gradient(model: torch.nn.Module) -> dict[bool, torch.Tensor]:
    """Returns a dict that gets the first log-probabilities the model computes with gradients, and without."""
    found: dict[bool, torch.Tensor] = {}

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        found.setdefault(torch.is_grad_enabled(), output.logprobs.detach())

    model.register_forward_hook(keep)
    return found


def logprobs_of(model: Any, query: torch.Tensor, response: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Returns [R, V], log-probabilities at each response token, from a plain forward pass of a causal model."""
    training, _ = model.training, model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.cat([query, response])[None]).logits[0]
    model.train(training)
    return (logits[len(query) - 1 : -1].to(logits.dtype) / temperature).log_softmax(-1)


def taken_of(model: Any, query: torch.Tensor, response: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Returns [R], the log-probabilities of the response's own tokens."""
    return logprobs_of(model, query, response, temperature).gather(1, response[:, None])[:, 0]


def places_of(
    inputs: dict[str, torch.Tensor], queries: list[torch.Tensor], responses: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns `source` and `targets` of the responses in padded model inputs, as `lay_out` has them."""
    is_decoder = "decoder_input_ids" in inputs
    is_read = inputs["decoder_attention_mask" if is_decoder else "attention_mask"]
    source = []
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        start = 0 if is_decoder else len(query) - 1
        source.append(i * is_read.shape[1] + is_read[i].nonzero()[start : start + len(response), 0])
    return {"source": torch.cat(source), "targets": torch.cat(responses)}
