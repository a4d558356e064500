"""Known messages of other libraries are hidden, and no others."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from trimtab_common.compat.noise import KNOWN, RENAMED, expecting_new_head, silence_known

REPORT = "LlamaForSequenceClassification LOAD REPORT from: base\nKey          | Status  | \n-------------+---------+-\n"


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The messages that pass the filters of other libraries' loggers, which do not propagate."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    for name in KNOWN:
        logging.getLogger(name).addHandler(handler)
    yield messages
    for name in KNOWN:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_message_is_hidden_and_another_of_its_logger_is_not(name: str, heard: list[str]):
    silence_known()
    logging.getLogger(name).warning("before %s after", KNOWN[name])
    assert not heard
    logging.getLogger(name).warning("The disk is full.")
    assert heard == ["The disk is full."]


def test_a_renamed_attribute_is_hidden_and_another_warning_is_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_known()
        warnings.warn(f"{RENAMED} and will be removed in v6.", FutureWarning, stacklevel=1)
        warnings.warn("`another` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["`another` is deprecated"]


@pytest.mark.parametrize(
    ("rows", "is_shown"),
    [
        ("score.weight | MISSING | \n", False),
        ("classifier.dense.bias | MISSING | \nclassifier.dense.weight | MISSING | \n", False),
        ("score.weight | MISSING | \nmodel.layers.0.mlp.down_proj.weight | MISSING | \n", True),
        ("score.weight | MISMATCH | Reinit due to size mismatch\n", True),
    ],
)
def test_weights_missing_outside_a_new_head_are_reported(rows: str, is_shown: bool, heard: list[str]):
    with expecting_new_head():
        logging.getLogger("transformers.modeling_utils").warning(REPORT + rows)
    assert bool(heard) == is_shown
    heard.clear()
    logging.getLogger("transformers.modeling_utils").warning(REPORT + rows)
    assert heard
