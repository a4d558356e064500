"""Messages of other libraries that a user of ours can do nothing about, and their exact sources."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

KNOWN = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # peft 0.21 imports bitsandbytes
    "transformers.utils.import_utils": "ImageProcessor` requires torchvision",  # diffusers 0.42 asks for the names
    # Longer rows are cut to the trainer's max_length afterwards, which says how many.
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than",
    "transformers.trainer": "missing keys in the checkpoint model loaded: ['lm_head.weight']",  # tied to the embedding
    # GPT-2 and sixty other models warn of padded rows without a mask. With a causal kernel no token reads the padding.
    "transformers.modeling_utils": "We strongly recommend passing in an `attention_mask`",
}
RENAMED = r"`is_gradient_checkpointing` is deprecated"  # peft 0.21 reads it of transformers 5.24
HEAD = re.compile(r"^(?!Key\b)(?!(?:score|classifier)\.)[\w.]+ *\|", re.MULTILINE)
"""A row of transformers' report on loaded weights that is not about the head of a classifier."""


def silence_known() -> None:
    """Hides the known messages, and no others. A second call changes nothing."""
    for name in KNOWN:
        logging.getLogger(name).addFilter(_is_news)
    warnings.filterwarnings("ignore", message=RENAMED, category=FutureWarning)


def _is_news(record: logging.LogRecord) -> bool:
    return KNOWN[record.name] not in record.getMessage()


@contextmanager
def expecting_new_head() -> Iterator[None]:
    """Hides the report on loaded weights inside the block if all it lists are the weights of a new score head."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_not_of_new_head)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_of_new_head)


def _is_not_of_new_head(record: logging.LogRecord) -> bool:
    report = record.getMessage()
    return "LOAD REPORT" not in report or "MISMATCH" in report or HEAD.search(report) is not None
