"""torch's newest recorded release is the pinned one, and a newer release gives a warning."""

from pathlib import Path

from packaging.version import Version
from tools import newest

ROOT = Path(__file__).resolve().parents[2]


def test_the_record_names_what_is_watched_and_the_pinned_torch():
    recorded, pinned = (path.read_text().split() for path in (newest.RECORD, ROOT / "constraints.txt"))
    assert set(newest.WATCHED) <= {line.partition("==")[0] for line in recorded}
    assert [line for line in recorded if line.startswith("torch==")] == [
        line for line in pinned if line.startswith("torch==")
    ]


def test_a_release_of_tomorrow_is_a_warning_and_a_missing_index_is_said(monkeypatch, capsys):
    releases = {"peft": Version("99.0"), "datasets": None}
    monkeypatch.setattr(newest, "newest_release", lambda name: releases.get(name, Version("0.1")))
    newest.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pip finds no releases of datasets")
    assert lines[1].startswith("WARNING: peft 99.0 is out")
    assert len(lines) == 2
