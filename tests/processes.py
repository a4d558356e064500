"""Two processes that train together, as torchrun starts them, gloo between them and one thread each."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def results_of_two(module: str, folder: Path) -> list[dict[str, Any]]:
    """Run `python -m module folder` in two processes; what each saved as folder/<rank>.pt."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", module]
    done = subprocess.run(
        [*launch, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
