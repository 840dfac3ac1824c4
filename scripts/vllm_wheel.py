# SPDX-License-Identifier: Apache-2.0
"""Builds a platform-independent wheel of vLLM from its source distribution.

    python vllm_wheel.py FOLDER

writes the wheel into FOLDER, reproducibly, and prints its path. It only needs Python and pip, which
downloads the source distribution (47 MB) from its configured index. VLLM_SDIST names a local copy
of the file instead. requirements/vllm.txt pins the version and the hash, which a copy must match;
`--pin` names another such file.

The plugin uses none of vLLM's compiled parts, so nothing is built: the wheel holds vLLM's Python
and data files, for Python 3 on any platform. Its version ends in `+metal`. It requires what vLLM's
requirements/common.txt lists, so neither a build of torch nor CUDA's packages.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile, ZipInfo

LOCAL_VERSION = "metal"
TAG = "py3-none-any"
# Requirements that become an extra: vLLM imports them only when needed.
OPTIONAL = {"opencv-python-headless": "video"}  # 61 MB, to decode videos
_WHEEL = f"""\
Wheel-Version: 1.0
Generator: vllm-metal vllm_wheel.py
Root-Is-Purelib: true
Tag: {TAG}
"""
# pip asks a source distribution's build backend for its requirements before it keeps the file. This
# replaces vLLM's backend, which would need torch and a compiler; no code of the file runs.
_BACKEND = """\
import pathlib


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    info = pathlib.Path(metadata_directory, "vllm.dist-info")
    info.mkdir()
    (info / "METADATA").write_bytes(pathlib.Path("PKG-INFO").read_bytes())
    return info.name
"""


class WheelError(Exception):
    """The wheel cannot be built; the message has the reason."""


@dataclass(frozen=True)
class Pin:
    """The pinned source distribution: a requirements file for pip, and its contents."""

    file: Path
    version: str
    sha256: str

    @classmethod
    def read(cls, file: Path) -> Pin:
        """Raises OSError or WheelError if the file pins no vLLM."""
        line = re.search(r"^vllm==(\S+) --hash=sha256:([0-9a-f]{64})$", file.read_text(), re.M)
        if line is None:
            raise WheelError(f"{file} does not pin vLLM and its hash")
        return cls(file, line[1], line[2])


def download(pin: Pin, folder: Path) -> Path:
    """Downloads the source distribution with pip's configuration (index, proxy, certificates).

    Raises:
        WheelError: pip failed and has printed the reason.
    """
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "vllm", "--no-build-isolation", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(pin.file)]
    env = os.environ | {"PYTHONPATH": str(backend.parent)}
    if subprocess.run(command, env=env, stdout=sys.stderr).returncode:
        raise WheelError(f"pip does not get vLLM {pin.version}'s source distribution")
    return folder / f"vllm-{pin.version}.tar.gz"


def make(source: Path, folder: Path, pin: Pin) -> Path:
    """Writes the wheel of the source distribution into `folder`; returns its path.

    Raises:
        WheelError: `source` does not have the pinned hash.
    """
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != pin.sha256:
        raise WheelError(f"{source} has the SHA-256 {found}, not the pinned {pin.sha256}")
    version = f"{pin.version}+{LOCAL_VERSION}"
    info = f"vllm-{version}.dist-info"
    made = folder / f"vllm-{version}-{TAG}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    # Uncompressed: another zlib would give other bytes, and the file stays on this machine.
    with ZipFile(made, "w") as wheel:

        def add(name: str, content: bytes, mode: int = 0o644) -> None:
            member = ZipInfo(name)
            member.external_attr = (0o100000 | mode) << 16
            wheel.writestr(member, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.writerow((name, f"sha256={digest.decode()}", len(content)))

        about = {}
        for name, content, mode in _files(source):
            if name.startswith("vllm/"):
                add(name, content, mode & 0o755)
            else:
                about[name] = content
        add(f"{info}/METADATA", _metadata(about, version))
        add(f"{info}/WHEEL", _WHEEL.encode())
        add(f"{info}/entry_points.txt", about["vllm.egg-info/entry_points.txt"])
        add(f"{info}/licenses/LICENSE", about["LICENSE"])
        rows.writerow((f"{info}/RECORD", "", ""))
        wheel.writestr(ZipInfo(f"{info}/RECORD"), record.getvalue())
    return made


def _files(source: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yields names, contents and modes of the wheel's files."""
    kept = ("vllm/", "PKG-INFO", "LICENSE", "requirements/common.txt", "vllm.egg-info/entry_points")
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(kept):
                file = archive.extractfile(member)
                assert file is not None  # None only for directories and the like
                yield name, file.read(), member.mode


def _metadata(about: dict[str, bytes], version: str) -> bytes:
    """Returns PKG-INFO with only the requirements listed in requirements/common.txt."""
    common = {_name(line) for line in about["requirements/common.txt"].decode().splitlines()}
    head, _, description = about["PKG-INFO"].decode().partition("\n\n")
    lines = []
    for line in head.splitlines():
        field, _, value = line.partition(": ")
        if field == "Version":
            line = f"Version: {version}"
        elif field == "Requires-Dist" and "extra ==" not in value:
            name = _name(value)
            if name not in common:
                continue
            if name in OPTIONAL:
                line += f'; extra == "{OPTIONAL[name]}"'
        lines.append(line)
    return "\n".join([*lines, "", description]).encode()


def _name(requirement: str) -> str:
    """Returns the package name of a requirement; empty for a comment."""
    found = re.match(r"[\w.-]*", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def main() -> int:
    described, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=described, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = Path(__file__).resolve().parents[1] / "requirements" / "vllm.txt"
    parser.add_argument("--pin", type=Path, default=beside, metavar="FILE")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        pin = Pin.read(args.pin)
        args.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            source = os.environ.get("VLLM_SDIST") or download(pin, Path(work))
            print("vllm_wheel: making the wheel", file=sys.stderr)
            print(make(Path(source), args.folder, pin))
    except (WheelError, OSError) as error:
        print(f"vllm_wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
