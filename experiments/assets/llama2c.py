"""Reads llama2.c files as transformers' Llama and its tokenizer."""

import struct
from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.assets.registry import AssetError, cache_dir

BYTE_PIECES = range(3, 259)  # ids of the 256 bytes that a Llama vocabulary falls back to


def convert_llama2c(data: bytes) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Reads model and tokenizer from a llama2.c checkpoint (`export.py`, version 0) followed by its tokenizer.bin.

    llama2.c's data files for browsers are such concatenations. The header determines where the checkpoint ends.
    """
    config, state, end = read_llama2c_checkpoint(data)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=not config.tie_word_embeddings)
    tokenizer = llama2c_tokenizer(read_llama2c_pieces(data[end:], config.vocab_size), config.max_position_embeddings)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model, tokenizer


def read_llama2c_checkpoint(data: bytes) -> tuple[LlamaConfig, dict[str, Tensor], int]:
    """Reads the checkpoint at the start of `data`: configuration, weights for transformers, and length in bytes."""
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    shared, vocab = vocab > 0, abs(vocab)
    head = dim // heads
    offset = struct.calcsize("<7i")

    def take(*shape: int) -> Tensor:
        nonlocal offset
        count = torch.Size(shape).numel()
        if offset + 4 * count > len(data):
            raise AssetError(
                f"the checkpoint stops after {len(data)} bytes, in the middle of a tensor of shape {shape}: it was cut "
                f"short or is not a llama2.c file of version 0. Delete {cache_dir()} and run again."
            )
        tensor = torch.frombuffer(bytearray(data[offset : offset + 4 * count]), dtype=torch.float32)
        offset += 4 * count
        return tensor.reshape(shape)

    def halves(weight: Tensor, num_heads: int) -> Tensor:
        # llama2.c rotates neighbouring dimensions of a head; transformers rotates its first half with its second.
        return weight.reshape(num_heads, head // 2, 2, dim).transpose(1, 2).reshape(num_heads * head, dim)

    embedding = take(vocab, dim)
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, heads * head, dim),
        "self_attn.k_proj": take(layers, kv_heads * head, dim),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, heads * head),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    norm = take(dim)
    take(2, context, head // 2)  # tables of cosines and sines, which transformers computes
    state = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    state["lm_head.weight"] = embedding if shared else take(vocab, dim)
    for name, weights in stacked.items():
        for layer, weight in enumerate(weights):
            if name.endswith("q_proj"):
                weight = halves(weight, heads)
            elif name.endswith("k_proj"):
                weight = halves(weight, kv_heads)
            state[f"model.layers.{layer}.{name}.weight"] = weight.clone()
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shared,
        bos_token_id=1,
        eos_token_id=[1, 2],
        pad_token_id=0,
        dtype="float32",
    )
    return config, state, offset


def read_llama2c_pieces(data: bytes, vocab_size: int) -> list[tuple[bytes, float]]:
    """Reads pieces and their scores, by id, from a llama2.c tokenizer.bin."""
    pieces: list[tuple[bytes, float]] = []
    offset = 4  # past the length of the longest piece
    for _ in range(vocab_size):
        score, length = struct.unpack_from("<fi", data, offset)
        pieces.append((data[offset + 8 : offset + 8 + length], score))
        offset += 8 + length
    return pieces


def llama2c_tokenizer(pieces: Sequence[tuple[bytes, float]], max_length: int) -> PreTrainedTokenizerFast:
    """Builds Llama's tokenizer from scored pieces: it merges the best-scored pair first and falls back to bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i - BYTE_PIECES.start:02X}>" for i in BYTE_PIECES)]
    names += [piece.decode().replace(" ", "▁") for piece, _ in pieces[len(names) :]]
    ids = {name: i for i, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    # Runs of spaces have equal scores. Longer left parts come first, to merge from the left as llama2.c does.
    ranked: list[tuple[float, int, int]] = []
    for i in range(BYTE_PIECES.stop, len(names)):
        for cut in range(1, len(names[i])):
            if names[i][:cut] in ids and names[i][cut:] in ids:
                ranked.append((-pieces[i][1], -cut, i))
    for _, cut, i in sorted(ranked):
        merges.append((names[i][:-cut], names[i][-cut:]))
    core = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        # With byte fallback no text contains <unk>. As the pad token it cannot be mistaken for the end of a story.
        pad_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
