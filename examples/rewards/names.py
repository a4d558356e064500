"""Names of weights in other libraries."""

from collections.abc import Mapping


def translate(name: str, beginnings: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """Returns the name that a weight of another library has in transformers.

    Args:
        name: the weight's name in the other library. A name that contains none of its terms is returned unchanged.
        beginnings: beginnings of names in the other library, each with its replacement. The first that fits is used.
        parts: other strings within names, each with its replacement. All that occur are replaced.
    """
    for theirs, ours in beginnings.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name
