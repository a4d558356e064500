"""Real models and real text for the experiments, out of ordinary Python and Node packages.

Every function downloads once, checks a SHA-256, keeps the result under ``~/.cache/trimtab`` (or ``$TRIMTAB_CACHE``)
and returns at once on later calls. What it returns is a plain transformers folder, a dataset or a list of strings, so
that an experiment never learns where its model or its text came from.

`python -m experiments.assets` fetches everything ahead of time, or only what is named after it.
"""

from experiments.assets.data import imdb_reviews, openings, preferences, sentence_openings, state_of_the_union
from experiments.assets.llama2c import convert_llama2c
from experiments.assets.models import convert_gguf, sentence_encoder, smollm2_135m_instruct, stories15m
from experiments.assets.registry import AssetError, Package

__all__ = [
    "AssetError",
    "Package",
    "convert_gguf",
    "convert_llama2c",
    "imdb_reviews",
    "openings",
    "preferences",
    "sentence_encoder",
    "sentence_openings",
    "smollm2_135m_instruct",
    "state_of_the_union",
    "stories15m",
]
