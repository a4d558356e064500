import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.figures import (
    curves,
    file_of,
    median_and_quartiles,
    on_common_x,
    panels,
    panels_of,
    plt,
    table,
    tiled,
    write_page,
)

JUDGED = {"verdict": ["reproduced"], "claim": ["reward rises"]}


@pytest.fixture
def axis():
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


# Curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], (7.0, 7.0, 7.0)),
        ([1.0, 0.0], (0.5, 0.25, 0.75)),
        ([30.0, 10.0, 20.0], (20.0, 15.0, 25.0)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (3.0, 2.0, 4.0)),
    ],
)
def test_quartiles_of_a_few_numbers(values: list[float], expected: tuple[float, float, float]):
    np.testing.assert_allclose(median_and_quartiles(values), expected)


def test_quartiles_are_taken_over_the_seeds_and_not_over_the_steps():
    median, lower, upper = median_and_quartiles([[0, 100], [1, 200], [2, 300]])
    np.testing.assert_allclose(median, [1, 200])
    np.testing.assert_allclose(lower, [0.5, 150])
    np.testing.assert_allclose(upper, [1.5, 250])


def test_straight_lines_stay_what_they_are_over_the_x_of_all_seeds():
    seeds = [([0, 4, 10], [0, 8, 20]), ([1, 3, 8], [-1, -3, -8])]  # y = 2x and y = -x
    xs, ys = on_common_x(seeds)
    np.testing.assert_allclose(xs, [1, 3, 4, 8])  # both have values from 1 to 8
    np.testing.assert_allclose(ys, [2 * xs, -xs])


def test_seeds_with_the_same_x_are_left_alone():
    xs, ys = on_common_x([([1, 2, 3], [5, 1, 4]), ([1, 2, 3], [0, 9, 0])])
    np.testing.assert_array_equal(xs, [1, 2, 3])
    np.testing.assert_array_equal(ys, [[5, 1, 4], [0, 9, 0]])


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([], "no seed"),
        ([([], [])], r"shape \(0,\)"),
        ([([1, 2], [1])], r"\(2,\) and ys of shape \(1,\)"),
        ([([1, 3, 2], [0, 0, 0])], "strictly increasing"),
        ([([1, 1], [0, 0])], "strictly increasing"),
        ([([1, float("nan")], [0, 0])], "finite"),
        ([([0, 1], [0, 0]), ([2, 3], [0, 0])], "0 to 1, 2 to 3"),
    ],
)
def test_seeds_that_cannot_be_put_together_are_refused(seeds: list, words: str):
    with pytest.raises(ValueError, match=words):
        on_common_x(seeds)


def test_curves_draw_the_median_and_the_band_between_the_quartiles(axis):
    seeds = [([0, 2], [0, 2]), ([0, 1, 2], [10, 11, 12]), ([0, 2, 3], [4, 6, 99])]  # x + 0, x + 10 and x + 4
    curves(axis, {"PPO": seeds, "DPO": [([0, 5], [1, 1])]})
    ppo, dpo = axis.lines
    np.testing.assert_allclose(ppo.get_xydata(), [[0, 4], [1, 5], [2, 6]])
    np.testing.assert_allclose(dpo.get_xydata(), [[0, 1], [5, 1]])
    (band,) = axis.collections  # a single seed has no band
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (0.0, 7.0), (1.0, 8.0), (2.0, 9.0)}
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["PPO (3 seeds)", "DPO"]


# Pictures --------------------------------------------------------------------------------------------------------


def test_tiles_lie_row_by_row_with_white_between():
    shades = [0, 50, 100, 150, 200]
    sheet = np.asarray(tiled([np.full((3, 2, 4), shade, np.uint8) for shade in shades], columns=3, gap=2))
    assert sheet.shape == (2 * 4 - 2, 3 * 6 - 2, 3)
    assert sheet[::4, ::6, 0].tolist() == [[0, 50, 100], [150, 200, 255]]
    assert (sheet[2:4] == 255).all()
    assert (sheet[:, 4:6] == 255).all()


@pytest.mark.parametrize("pictures", [[], [np.zeros((3, 4, 4), np.uint8), np.zeros((3, 4, 5), np.uint8)]])
def test_no_picture_and_pictures_of_several_sizes_are_refused(pictures: list):
    with pytest.raises(ValueError, match="all of one size"):
        tiled(pictures)


# Pages -----------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """Collects a page's tags, their attributes and the texts between them."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


NASTY = '<script src="https://example.org/x.js">&\'</script>'


def nasty_page(folder: Path) -> str:
    """Writes a page with NASTY in place of every text."""
    figure, axis = plt.subplots()
    curves(axis, {"a": [([0, 1], [0, 1])]})
    judged = {f"claim {NASTY}": [f"expected {NASTY}", "rises"], "obtained": [f"obtained {NASTY}", "0.4"]}
    path = write_page(
        folder,
        f"title {NASTY}",
        [f"paper {NASTY}"],
        judged,
        {"reward-kl_1": figure},
        {"reward-kl_1": f"caption {NASTY}"},
        {"prompt": ["one", "two"], f"after {NASTY}": [f"text {NASTY}", "a\nb"]},
        {f"name {NASTY}": f"value {NASTY}", "beta": 0.1},
    )
    assert path == folder / "report.html"
    assert not plt.fignum_exists(figure.number)
    return path.read_text(encoding="utf-8")


def test_a_page_needs_no_other_file_and_runs_nothing(tmp_path: Path):
    seen = Seen(nasty_page(tmp_path / "new" / "folder"))
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "a"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("href", "srcset", "style")]
    sources = [value for name, value in seen.attributes if name == "src"]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert not [value for _, value in seen.attributes if re.search("https?://", value)]
    styles = "".join(
        re.findall("<style>.*?</style>", (tmp_path / "new/folder/report.html").read_text("utf-8"), re.DOTALL)
    )
    assert "{" in styles
    assert not re.search("url|@import|http", styles)
    (policy,) = [value for name, value in seen.attributes if name == "content" and "default-src" in value]
    assert "default-src 'none'" in policy


def test_a_page_shows_every_text_as_it_came(tmp_path: Path):
    source = nasty_page(tmp_path)
    assert "<script" not in source
    texts = Seen(source).texts
    for word in ("title", "paper", "claim", "expected", "obtained", "caption", "after", "text", "name", "value"):
        assert f"{word} {NASTY}" in texts, word
    assert {"rises", "0.4", "prompt", "a\nb", "beta", "0.1"} <= set(texts)


def test_the_figure_in_the_page_is_the_png_beside_it(tmp_path: Path):
    (data,) = re.findall('base64,([^"]+)', nasty_page(tmp_path))
    content = base64.b64decode(data, validate=True)
    assert content == (tmp_path / "reward-kl_1.png").read_bytes()
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()  # decodes it, checksums included
        assert picture.format == "PNG"
        assert len(np.unique(np.asarray(picture.convert("L")))) > 2


def test_a_row_of_panels_is_cut_between_them():
    plot, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
    for axis, color in zip(axes, ("red", "lime", "blue"), strict=True):
        axis.set_facecolor(color)
    panels = [Image.open(io.BytesIO(data)).convert("RGB") for data in panels_of(plot, file_of(plot, "png"))]
    pure = [{(255, 0, 0), (0, 255, 0), (0, 0, 255)} & set(panel.get_flattened_data()) for panel in panels]
    assert pure == [{(255, 0, 0)}, {(0, 255, 0)}, {(0, 0, 255)}]
    assert sum(panel.width for panel in panels) == 9 * 130
    plt.close(plot)


def test_a_grid_of_panels_is_cut_in_reading_order():
    plot, axes = panels(["one", "two", "three"])
    for axis, color in zip(axes, ("red", "lime", "blue"), strict=True):
        axis.set_facecolor(color)
    cut = [Image.open(io.BytesIO(data)).convert("RGB") for data in panels_of(plot, file_of(plot, "png"))]
    pure = [{(255, 0, 0), (0, 255, 0), (0, 0, 255)} & set(panel.get_flattened_data()) for panel in cut]
    assert pure == [{(255, 0, 0)}, {(0, 255, 0)}, {(0, 0, 255)}]
    assert cut[0].height + cut[2].height == round(2 * 3.6 * 130)
    plt.close(plot)


def test_panels_with_a_title_or_a_legend_of_their_own_stay_together():
    for common in (lambda plot: plot.suptitle("all"), lambda plot: plot.legend(["a"])):
        plot, axes = panels(["one", "two"])
        axes[0].plot([0, 1])
        common(plot)
        whole = file_of(plot, "png")
        assert panels_of(plot, whole) == [whole]
        plt.close(plot)


@pytest.mark.parametrize(
    ("headings", "titles", "inches"),
    [
        (["a"], ["a"], (4.5, 3.6)),
        (["a", "b"], ["(a) a", "(b) b"], (9, 3.6)),
        (["x", "y", "z"], ["(a) x", "(b) y", "(c) z"], (9, 7.2)),
    ],
)
def test_two_panels_stand_in_a_row_and_have_letters(headings: list[str], titles: list[str], inches: tuple):
    plot, axes = panels(headings)
    assert [axis.get_title() for axis in axes] == titles
    assert len(plot.axes) == len(headings)
    assert tuple(plot.get_size_inches()) == inches
    plt.close(plot)


def test_a_figure_has_a_pdf_whose_bytes_are_the_same_each_time(tmp_path: Path):
    nasty_page(tmp_path / "one")
    nasty_page(tmp_path / "two")
    first, second = ((tmp_path / name / "reward-kl_1.pdf").read_bytes() for name in ("one", "two"))
    assert first.startswith(b"%PDF")
    assert first == second


@pytest.mark.parametrize("name", ["a b", "../up", "a/b", "a.png", ""])
def test_a_figure_is_called_like_a_file_of_the_folder(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match="letters, digits"):
        write_page(tmp_path / "page", "", [], JUDGED, {name: plt.figure()}, {name: ""}, {}, {})
    plt.close("all")
    assert not (tmp_path / "page").exists()


def test_a_page_without_samples_does_not_speak_of_them(tmp_path: Path):
    path = write_page(tmp_path, "t", ["c"], JUDGED, {}, {}, {}, {})
    assert "Samples" not in path.read_text("utf-8")


def test_a_table_wants_as_many_cells_in_each_column():
    with pytest.raises(ValueError, match="'after': 1"):
        table({"prompt": ["a", "b"], "after": ["c"]})
