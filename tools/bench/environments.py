"""The peers' environments under .bench/, one for each file in peers/."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench"
PEERS = Path(__file__).parent / "peers"


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made where it is absent or its file in peers/ has changed."""
    wanted, folder = (PEERS / f"{peer}.txt"), FOLDER / peer
    python, installed = folder / "bin/python", folder / "installed.txt"
    if not (installed.exists() and installed.read_text() == wanted.read_text()):
        print(f"installing {peer} into {folder.relative_to(ROOT)} (a few minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", wanted], check=True)
        shutil.copy(wanted, installed)
    return str(python)
