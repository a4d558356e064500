"""Figures that every report uses: curves with seeds, grids of images, and a page that holds them all."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import matplotlib
import numpy as np
from PIL import Image

from trimtab_common.images import Picture, to_pil

matplotlib.use("Agg")  # files only: the machine may have no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

PAGE = "report.html"
# With this policy the browser loads nothing but the file itself.
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
html { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
p, figcaption { max-width: 48em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #8884; padding: 0.3em 0.6em; text-align: left; vertical-align: top; white-space: pre-wrap; }
figure { margin: 1em 0; }
.panels { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0.5em; }
.panels img { flex: 1 1 16em; min-width: 0; }
img { max-width: 100%; }
</style>
"""

Curve = tuple[Sequence[float], Sequence[float]]  # xs [N], ys [N]


# Curves ----------------------------------------------------------------------------------------------------------


def median_and_quartiles(values: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes median, lower and upper quartile over the seeds, by linear interpolation: [S, ...] -> three of [...]."""
    lower, median, upper = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75), axis=0)
    return median, lower, upper


def on_common_x(seeds: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates the curves of S seeds at common xs.

    The xs of all seeds within the range that every seed covers, including both ends. A seed without
    a value at an x is interpolated linearly between its neighbours. No curve is extrapolated.

    Returns:
        xs [N] and ys [S, N].

    Raises:
        ValueError: There is no seed, a curve is malformed, or no range is common to all seeds.
    """
    pairs = [(np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)) for xs, ys in seeds]
    if not pairs:
        raise ValueError("got no seed; at least one curve is needed. Leave out the label without runs.")
    for xs, ys in pairs:
        if xs.ndim != 1 or xs.shape != ys.shape or not len(xs):
            raise ValueError(
                f"got xs of shape {xs.shape} and ys of shape {ys.shape}; both must be [N], with N at least 1. "
                "Take x and y from the same rows of the history."
            )
        if not np.isfinite(xs).all() or (np.diff(xs) <= 0).any():
            raise ValueError(
                f"got xs {xs.tolist()}; finite, strictly increasing numbers are needed. "
                "Where a resumed run wrote a row twice, keep the later one; then sort the rows."
            )
    first, last = max(xs[0] for xs, _ in pairs), min(xs[-1] for xs, _ in pairs)
    if first > last:
        ranges = ", ".join(f"{xs[0]:g} to {xs[-1]:g}" for xs, _ in pairs)
        raise ValueError(
            f"got seeds with x from {ranges}; a range that all seeds cover is needed. Leave out a seed that stopped "
            "early, or give it a separate label."
        )
    every = np.unique(np.concatenate([xs for xs, _ in pairs]))
    common = every[(every >= first) & (every <= last)]
    return common, np.stack([np.interp(common, xs, ys) for xs, ys in pairs])


def panels(headings: Sequence[str], *, height: float = 3.6, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each heading, in reading order, two in a row, with letters where there are several.

    Args:
        headings: Of the panels, at least one.
        height: Of a row, in inches. A row is 9 inches wide, so that text of 9 points stays legible at 900 pixels.
        options: Of matplotlib's subplots, such as sharey.
    """
    across = min(2, len(headings))
    down = -(-len(headings) // across)
    size = 4.5 * across, height * down
    plot, grid = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False, **options)
    axes: list[Axes] = list(grid.flat)
    for surplus in axes[len(headings) :]:
        surplus.remove()
    for letter, axis, heading in zip(ascii_lowercase, axes, headings, strict=False):
        axis.set_title(f"({letter}) {heading}" if across > 1 else heading, fontsize=10)
    return plot, axes[: len(headings)]


def curves(axis: Axes, runs: Mapping[str, Sequence[Curve]]) -> None:
    """Plots for each label the median over its seeds, and a band from the lower to the upper quartile.

    Args:
        axis: Where to plot.
        runs: label -> a curve (xs [N], ys [N]) for each seed; N and xs may differ between seeds.
    """
    for label, seeds in runs.items():
        xs, ys = on_common_x(seeds)
        median, lower, upper = median_and_quartiles(ys)
        name = label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)"
        (line,) = axis.plot(xs, median, label=name, marker="o" if len(xs) < 15 else None, markersize=4)
        if len(seeds) > 1:
            axis.fill_between(xs, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


# Pictures --------------------------------------------------------------------------------------------------------


def tiled(pictures: Sequence[Picture], *, columns: int = 4, gap: int = 1) -> Image.Image:
    """Tiles B images of the same size, `columns` in a row, with `gap` white pixels between them.

    Args:
        pictures: [B, 3, H, W], or a sequence of images that `to_pil` takes.
        columns: Images per row.
        gap: In pixels.
    """
    tiles = [to_pil(picture) for picture in pictures]
    if len(sizes := {tile.size for tile in tiles}) != 1:
        raise ValueError(
            f"got {len(tiles)} pictures of sizes {sorted(sizes)}; at least one is needed, and all of one size. "
            "Resize them to the same width and height."
        )
    width, height = (side + gap for side in tiles[0].size)
    sheet = Image.new("RGB", (columns * width - gap, -(-len(tiles) // columns) * height - gap), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * width, i // columns * height))
    return sheet


# Pages -----------------------------------------------------------------------------------------------------------


def table(columns: Mapping[str, Sequence[object]]) -> str:
    """Returns an HTML table, with every text escaped.

    Args:
        columns: heading -> cells [N].

    Raises:
        ValueError: The columns differ in length.
    """
    if len({len(cells) for cells in columns.values()}) > 1:
        lengths = {heading: len(cells) for heading, cells in columns.items()}
        raise ValueError(f"got columns of lengths {lengths}; all columns need the same length. Fill the short ones.")
    lines = [_row("th", list(columns)), *(_row("td", cells) for cells in zip(*columns.values(), strict=True))]
    return "\n".join(["<table>", *lines, "</table>"])


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def file_of(figure: Figure, form: Literal["png", "pdf"]) -> bytes:
    """Returns the content of a PNG or PDF file of the figure; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=130, metadata={"CreationDate": None} if form == "pdf" else None)
    return buffer.getvalue()


def panels_of(figure: Figure, picture: bytes) -> list[bytes]:
    """Cuts the PNG of a figure into a PNG of each panel, which a narrow page can stack.

    Args:
        figure: The figure, which is drawn.
        picture: Its PNG.

    Returns:
        The panels in reading order; the picture itself where panels share a legend or a title, or stand in no grid.
    """
    cells = [axis.get_subplotspec() for axis in figure.axes]
    if len(cells) < 2 or None in cells or figure.legends or figure.get_suptitle():
        return [picture]
    rows: dict[int, list[Bbox]] = {}
    for cell, axis in zip(cells, figure.axes, strict=True):
        if cell is not None and (box := axis.get_tightbbox()):
            rows.setdefault(cell.rowspan.start, []).append(box)
    whole = Image.open(io.BytesIO(picture))
    ordered = [sorted(rows[number], key=lambda box: box.x0) for number in sorted(rows)]
    lines = [
        (min(box.y0 for box in upper) + max(box.y1 for box in lower)) / 2 / figure.bbox.height
        for upper, lower in pairwise(ordered)
    ]
    heights = [round((1 - share) * whole.height) for share in (1, *lines, 0)]
    cut = []
    for boxes, (top, bottom) in zip(ordered, pairwise(heights), strict=True):
        between = [(left.x1 + right.x0) / 2 / figure.bbox.width for left, right in pairwise(boxes)]
        for start, end in pairwise(round(share * whole.width) for share in (0, *between, 1)):
            buffer = io.BytesIO()
            whole.crop((start, top, end, bottom)).save(buffer, "PNG")
            cut.append(buffer.getvalue())
    return cut


def page(
    title: str,
    texts: Sequence[str],
    judged: Mapping[str, Sequence[object]],
    pictures: Mapping[str, Sequence[bytes]],
    captions: Mapping[str, str],
    samples: Mapping[str, Sequence[object]],
    config: Mapping[str, Any],
) -> str:
    """Returns the HTML of `write_page`, with each figure as the bytes of PNG files, its panels."""
    parts = [
        f"{HEAD}<title>{escape(title)}</title>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in texts),
        *([table(judged)] if judged else []),
    ]
    for name, panels in pictures.items():
        sources = [f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}" for data in panels]
        images = "".join(f'<img alt="{escape(name)}" src="{source}">' for source in sources)
        shown = f'<div class="panels">{images}</div>' if len(panels) > 1 else images
        parts.append(f"<figure>{shown}<figcaption>{escape(captions[name])}</figcaption></figure>")
    if samples:
        parts.append("<h2>Samples</h2>\n" + table(samples))
    settings = table({"name": list(config), "value": list(config.values())})
    parts.append(f"<details><summary>Configuration</summary>\n{settings}\n</details>\n</body>\n</html>\n")
    return "\n".join(parts)


def write_page(
    folder: Path,
    title: str,
    texts: Sequence[str],
    judged: Mapping[str, Sequence[object]],
    figures: Mapping[str, Figure],
    captions: Mapping[str, str],
    samples: Mapping[str, Sequence[object]],
    config: Mapping[str, Any],
) -> Path:
    """Writes report.html, which needs no other file, and <name>.png and .pdf for each figure; closes the figures.

    Args:
        folder: Where the files go.
        title: The title of the page.
        texts: Paragraphs under the title, such as the paper's claim.
        judged: The table of verdicts: heading -> cells [N]; {} for none.
        figures: name -> figure. The name becomes the file's name; it may have letters, digits, - and _.
        captions: name -> what the figure shows.
        samples: heading -> cells [N], such as prompt, before and after; {} for none.
        config: name -> value, as from `to_flat_dict`.

    Returns:
        The path of report.html.
    """
    for name in figures:
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(
                f"got a figure called {name!r}; a name of letters, digits, - and _ is needed, because it names a file. "
                "Put other text into the figure's title."
            )
    pictures = {name: file_of(figure, "png") for name, figure in figures.items()}
    panels = {name: panels_of(figures[name], data) for name, data in pictures.items()}
    text = page(title, texts, judged, panels, captions, samples, config)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
        (folder / f"{name}.pdf").write_bytes(file_of(figures[name], "pdf"))
        plt.close(figures[name])
    path = folder / PAGE
    path.write_text(text, encoding="utf-8")
    return path
