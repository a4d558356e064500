"""The figures of tools/sizes.py for files that the tests write."""

from pathlib import Path

from tools.sizes import ROOT, duplicate_runs, private_names, sources

STEPS = [f"total = total + weights[{i}]" for i in range(7)]


def function(name: str, body: list[str], parameters: str = "total, weights") -> str:
    return "\n".join([f"def {name}({parameters}):", *(f"    {line}" for line in body), ""])


def write(folder: Path, **sources: str) -> list[Path]:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return sorted(folder.glob("*.py"))


def test_a_run_of_seven_lines_in_two_files_is_one_copy(tmp_path):
    paths = write(tmp_path, a=function("one", STEPS), b=function("two", ["weights = sorted(weights)", *STEPS]))
    assert duplicate_runs(paths, tmp_path) == ["b.py:3 repeats a.py:2"]


def test_a_run_in_three_places_has_two_copies(tmp_path):
    paths = write(tmp_path, a=function("one", STEPS) + function("two", STEPS), b=function("three", STEPS))
    assert len(duplicate_runs(paths, tmp_path)) == 2


def test_five_lines_are_no_run(tmp_path):
    paths = write(tmp_path, a=function("one", STEPS[:5]), b=function("two", STEPS[:5]))
    assert duplicate_runs(paths, tmp_path) == []


def test_signatures_docstrings_imports_and_comments_are_no_code(tmp_path):
    parameters = "\n".join(f"    parameter_{i}=None," for i in range(8))
    text = "\n".join(['"""Documents', *(f"argument {i}" for i in range(8)), '"""'])
    comments = "\n".join(f"# remark {i}" for i in range(8))
    names = "\n".join(f"    name_{i}," for i in range(8))
    source = f"{text}\nfrom json import (\n{names}\n)\n{comments}\n" + function("one", ["pass"], f"\n{parameters}\n")
    paths = write(tmp_path, a=source, b=source)
    assert duplicate_runs(paths, tmp_path) == []


def test_a_folder_with_the_name_of_a_program_is_no_source(tmp_path):
    """make docs creates such a folder for each program's page."""
    (tmp_path / "site" / "ppo.py").mkdir(parents=True)
    write(tmp_path, a="")
    assert sources(tmp_path) == [tmp_path / "a.py"]


def test_private_names_of_other_libraries_are_found_outside_compat(tmp_path):
    source = """
from torch._dynamo import config
from torch.nn import _reduction
from trimtab_common import _ours
class A:
    def _mine(self, module):
        self._kept = module._forward_hooks, getattr(module, "_is_hf", None), module.__class__
    _no_split_modules = property(lambda self: self.module._no_split_modules)
    def _more(self, module):
        return self._kept, self._mine, module._replace()
"""
    (tmp_path / "compat").mkdir()
    write(tmp_path / "compat", b=source)
    found = private_names([*write(tmp_path, a=source), tmp_path / "compat" / "b.py"], tmp_path)
    expected = ["2 _dynamo", "3 _reduction", "7 _forward_hooks", "7 _is_hf", "8 _no_split_modules"]
    assert found == [f"a.py:{place}" for place in expected]


def test_the_packages_use_private_names_in_compat_alone():
    assert private_names(sources(ROOT / "packages"), ROOT) == []
