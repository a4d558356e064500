"""Runs a trainer in each of two processes; on request, the disk is full during one save."""

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.processes import process_of_many
from tools.chaos import works
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab_common.sealing import checkpoints

SHORT = {"ppo": {"steps": 4, "save_steps": 1}, "sft": {"max_steps": 4, "save_steps": 1}}


def main(name: str, folder: Path, *, is_full: bool) -> None:
    """Trains, and prints how many saves failed in this process."""
    root, other = folder / "checkpoints", folder / "other"
    refused: list[str] = []

    def fill(*_: Any) -> None:
        if is_full and os.environ["RANK"] == "0" and len(checkpoints(root)) == 2 and not (refused or other.exists()):
            other.write_bytes(b"x" * (shutil.disk_usage(folder).free - 20_000))

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "is not saved" in str(message):
            refused.append(str(message))
            other.unlink(missing_ok=True)

    with process_of_many():
        warnings.resetwarnings()
        warnings.showwarning = note
        register_optimizer_step_pre_hook(fill)
        works.run(name, folder, "none", on_save_error="warn", **SHORT[name])
    print(f"refused {len(refused)}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), is_full=sys.argv[3] == "full")
