"""The table of `trl` names: every one can be imported, and the migration page lists it.

After a change of `trl_names`, `python -m tests.lm.legacy.test_trl_names` writes the page's table again.
"""

import importlib
from itertools import groupby
from pathlib import Path

from trimtab_lm.legacy.trl_names import MODULES

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
BEGIN, END = "| `from trl... import` | `from ... import` |\n| --- | --- |\n", "\n## "
PLACES = ["core", "environment", "extras", "extras.dataset_formatting", "models", "trainer.utils", "import_utils"]
PLACES = [f"trl.{place}" for place in [*PLACES, "data_utils", "commands.cli_utils", "env_utils"]] + ["trl"]
"""Modules of TRL, each before modules that also have its names."""


def table() -> str:
    """Returns a row for each pair of an old and a new module; each name is in one row."""
    seen: set[str] = set()
    rows = []
    for old in PLACES:
        new = {name: place for name, place in MODULES[old].items() if name not in seen and not name.startswith("_")}
        seen |= new.keys()
        places = sorted((place.split(":"), name) for name, place in new.items())
        for home, group in groupby(places, lambda row: row[0][0]):
            words = [(name, attribute) for (_, attribute), name in group]
            before = ", ".join(name for name, _ in words)
            after = ", ".join(name if name == there else f"{there} as {name}" for name, there in words)
            rows.append(f"| `{old}`: `{before}` | `{home}`" + ("" if before == after else f": `{after}`") + " |")
    return "\n".join(rows) + "\n"


def test_the_page_on_migration_has_every_name_and_where_it_leads():
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0] == table(), "Run: python -m tests.lm.legacy.test_trl_names"


def test_the_table_leaves_out_no_name_and_every_name_can_be_imported():
    places = {place for names in MODULES.values() for place in names.values()}
    written = table()
    for names in MODULES.values():
        assert all(name in written for name in names if not name.startswith("_"))
    for place in places:
        home, _, attribute = place.partition(":")
        assert hasattr(importlib.import_module(home), attribute), place


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")
