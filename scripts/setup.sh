#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv: vLLM, the plugin (editable), and what its tests and benchmarks need, all pinned.
# Variables: PYTHON (interpreter to use), TORCH_INDEX (where CPU builds of torch are, Linux),
# VLLM_WHEEL (another vLLM wheel, path or address, macOS).
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

die() {
    echo "set-up: $*" >&2
    exit 1
}

case "$(uname -s)" in
    Linux) platform=linux candidates="python3 python3.11 python3.12 python3.13" newest=13 ;;
    Darwin) platform=macos candidates="python3.12 python3" newest=12 ;;
    *) die "only macOS on Apple silicon and Linux are supported" ;;
esac
# vLLM's macOS wheel is built for one Python version only.
if [ "$platform" = macos ]; then oldest=12 wanted="3.12 (arm64)"; else oldest=11 wanted="3.11 to 3.13"; fi

suits() {
    "$1" - "$oldest" "$newest" "$platform" 2>/dev/null <<'PY'
import platform, sys
oldest, newest, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
version_suits = (3, oldest) <= sys.version_info[:2] <= (3, newest)
sys.exit(not (version_suits and (host == "linux" or platform.machine() == "arm64")))
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-$candidates}; do
        if suits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python $wanted found (tried: ${PYTHON:-$candidates}); install one, or name it: make setup PYTHON=/path/to/python"
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    "$python" -c "import ensurepip, venv" 2>/dev/null ||
        die "$python has no venv module; on Debian: apt install python3-venv"
    "$python" -m venv .venv
fi
suits .venv/bin/python || die ".venv is not of Python $wanted: remove it (make distclean) and try again"

# --no-deps: the lock file is the whole closure. --no-compile: bytecode is made at first import,
# for the few modules that are imported.
install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile "$@"
}

lock=requirements/$platform.txt
echo "set-up: installing $(grep -c == "$lock") pinned packages into .venv (about 1 GB, two minutes)"
if [ "$platform" = linux ]; then
    # Plain indexes carry the CUDA build, so the lock file names the CPU build. Whoever configured
    # pip to find it is asked first, PyTorch's own CPU index second.
    torch=$(sed -n 's|^\(torch==[^ ]*\).*|\1|p' "$lock")
    install "$torch" 2>/dev/null || install --index-url "$TORCH_INDEX" "$torch" ||
        die "$torch is neither where pip is configured to look nor at TORCH_INDEX=$TORCH_INDEX"
fi
install --requirement "$lock"
if [ "$platform" = linux ]; then
    install --no-build-isolation requirements/vllm-alias
elif [ -n "${VLLM_WHEEL:-}" ]; then
    install "$VLLM_WHEEL"
else
    install --requirement requirements/vllm-macos.txt ||
        die "vLLM's macOS wheel is not at the address in requirements/vllm-macos.txt; name another: make setup VLLM_WHEEL=..."
fi
install --no-build-isolation --editable .
