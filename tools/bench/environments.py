"""The environments under .bench/: one for each file in requirements/ (trimtab and its peers), and one for vLLM."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench"
REQUIREMENTS = Path(__file__).parent / "requirements"
VLLM = "trimtab-vllm"


def python_of(name: str) -> str:
    """Returns an environment's interpreter; creates the environment if it is missing or its requirements have changed.

    The Makefile creates vLLM's environment, which the tests also use.
    """
    if name == VLLM:
        subprocess.run(["make", ".venv-vllm/.installed"], cwd=ROOT, check=True, stdout=sys.stderr)
        return str(ROOT / ".venv-vllm/bin/python")
    wanted, folder = (REQUIREMENTS / f"{name}.txt"), FOLDER / name
    python, installed = folder / "bin/python", folder / "installed.txt"
    if not (installed.exists() and installed.read_text() == wanted.read_text()):
        print(f"installing {name} into {folder.relative_to(ROOT)} (a few minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", wanted], cwd=ROOT, check=True)
        shutil.copy(wanted, installed)
    return str(python)
