"""The memory table in the docs is made of the peaks that were measured."""

import json

from tools.memory.__main__ import HAS_KERNELS, MEMORY, PAGE, PEAKS, TASKS, Cell, page, rows


def test_the_page_has_the_peaks_of_the_file():
    text = PAGE.read_text()
    assert page(text, json.loads(PEAKS.read_text())) == text


def test_a_row_says_what_was_measured_what_did_not_fit_and_what_is_missing():
    peaks = {Cell("dpo", 32_000, 512, "ours").key: 3 * 2**20, Cell("dpo", 32_000, 512, "peer").key: "out of memory"}
    (row,) = (
        line for line in page(PAGE.read_text(), peaks).splitlines() if line.startswith("| dpo |") and " 3 " in line
    )
    assert row == f"| dpo | TRL 1.16.0 | 32,000 | 512 | 3 | more than {MEMORY // 2**20:,} | not measured | -, - |"


def test_every_measured_cell_is_in_the_table():
    sides = ("ours", "peer", "kernels")
    keys = {Cell(*row, side).key for row in rows() for side in sides if side != "kernels" or row[0] in HAS_KERNELS}
    assert set(json.loads(PEAKS.read_text())) <= keys
    assert {key.split()[0] for key in keys} == set(TASKS)
