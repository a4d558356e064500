"""The parts that need a GPU: their record, and a run of each at its smallest size on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from tools.gpu import __main__ as gpu
from tools.gpu.models import Size
from tools.gpu.parts import PARTS, Part, finite

CPU = Size("cpu", is_small=True)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every part pass, and returns the names of those that a run starts."""
    started: list[str] = []

    def attempt(name: str, size: Size) -> dict[str, Any]:
        started.append(name)
        return {"result": "passed", "seconds": 3.0, "peak_gib": 1.5, "figures": {"last loss": 0.25}}

    monkeypatch.setattr(gpu, "attempt", attempt)
    return started


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tools.gpu", "--device", "cpu", *arguments])
    return gpu.main()


def test_a_second_run_at_the_same_commit_starts_only_what_the_record_lacks(monkeypatch, attempts, tmp_path):
    file = tmp_path / "record.json"
    assert run(monkeypatch, "--record", str(file)) == 0
    assert attempts == list(PARTS)
    record = json.loads(file.read_text())
    del record["dpo"]
    record["ppo"]["commit"] = "another"
    file.write_text(json.dumps(record))
    attempts.clear()
    run(monkeypatch, "--record", str(file))
    assert attempts == ["dpo", "ppo"]
    run(monkeypatch, "--record", str(file), "--parts", "sft")  # a part requested by name runs again
    assert attempts == ["dpo", "ppo", "sft"]


def test_the_page_has_a_row_for_each_part(monkeypatch, attempts, tmp_path):
    run(monkeypatch, "--record", str(tmp_path / "record.json"), "--parts", "sft", "vllm")
    rows = [line for line in (tmp_path / "record.md").read_text().splitlines() if line.startswith("| `")]
    cells = {row.split("|")[1].strip(" `"): row.split("|")[3].strip() for row in rows}
    assert cells == dict.fromkeys(PARTS, "not run") | {"sft": "passed", "vllm": "passed"}
    assert "| passed | 3 | 1.5 | last loss 0.25 |" in "".join(rows)


def test_what_is_written_above_the_table_stays(monkeypatch, attempts, tmp_path):
    (tmp_path / "record.md").write_text(f"# Ours\n\nA story.\n\n{gpu.BEGIN}\n\nan older table\n")
    run(monkeypatch, "--record", str(tmp_path / "record.json"), "--parts", "sft")
    page = (tmp_path / "record.md").read_text()
    assert page.startswith(f"# Ours\n\nA story.\n\n{gpu.BEGIN}\n")
    assert "an older table" not in page


def test_a_part_that_fails_is_recorded_with_its_last_line_and_fails_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(PARTS, "sft", Part("divides by zero", lambda size: {"figure": 1 / 0}))
    monkeypatch.setattr(gpu, "LIMIT", 0.01)  # a part's process does not see the replacement
    assert run(monkeypatch, "--record", str(tmp_path / "record.json"), "--parts", "sft") == 1
    assert json.loads((tmp_path / "record.json").read_text())["sft"]["result"].startswith("failed: it took longer")


def test_a_part_without_its_package_or_a_gpu_says_so():
    assert Part("", lambda size: {}, ("no_such_package",)).missing(CPU) == "no_such_package is not installed"
    assert Part("", lambda size: {}, needs_gpu=True).missing(CPU) == "it needs a GPU"
    assert Part("", lambda size: {}).missing(CPU) is None


def test_a_figure_that_is_not_finite_fails_its_part():
    with pytest.raises(ArithmeticError, match="last loss is not finite"):
        finite({"first loss": 1.0, "last loss": float("nan")})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.missing(CPU) is None])
def test_a_part_runs_at_its_smallest_size_on_a_cpu(name: str, monkeypatch, tmp_path: Path):
    assert run(monkeypatch, "--record", str(tmp_path / "record.json"), "--parts", name) == 0
    assert json.loads((tmp_path / "record.json").read_text())[name]["result"] == "passed"
