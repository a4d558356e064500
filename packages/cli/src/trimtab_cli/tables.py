"""Tables on the screen."""

from collections.abc import Iterable, Sequence

GIB = 2**30


def print_gib(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> None:
    """Prints rows of bytes in GiB, with their total.

    Args:
        columns: names, that of the rows' names first.
        rows: the name of each, and its numbers.
    """
    cells = [[*columns, "total"]]
    cells += [[name, *(f"{part / GIB:.1f}" for part in (*parts, sum(parts)))] for name, parts in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *others in cells:
        print(name.ljust(widths[0]), *(cell.rjust(width + 1) for cell, width in zip(others, widths[1:], strict=True)))
