"""Compiles the pretend accelerator with g++ (half a minute), unless this source is compiled for this torch already."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("pretend.cpp")


def compiled() -> Path:
    """Returns where the library for this source and this torch belongs."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    return ROOT / ".cache" / "pretend" / f"pretend-{version}.so"


def build() -> Path:
    """Returns the library, compiled if it is not there.

    Raises:
        SystemExit: there is no g++, or it fails.
    """
    target = compiled()
    if target.exists():
        return target
    if not shutil.which("g++"):
        sys.exit("The pretend accelerator needs a compiler: install g++ (on Debian: apt-get install g++).")
    target.parent.mkdir(parents=True, exist_ok=True)
    (folder,) = library_paths()
    partial = target.with_suffix(f".{os.getpid()}")
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", str(SOURCE), "-o", str(partial)]
    command += [word for path in include_paths() for word in ("-isystem", path)]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch", "-ltorch_cpu", "-lc10"]
    print(f"compiling the pretend accelerator for torch {torch.__version__} (half a minute)", flush=True)
    if subprocess.run(command).returncode:
        sys.exit(f"g++ could not compile {SOURCE} for torch {torch.__version__}; its messages stand above.")
    partial.rename(target)
    return target


if __name__ == "__main__":
    build()
