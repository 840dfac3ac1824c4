#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates .venv with vLLM and the plugin (editable), all pinned. --dev adds what tests and
# benchmarks need, and the kernel interpreter (editable). --check only checks whether this
# machine is supported. Variables: PYTHON (interpreter to use), TORCH_INDEX (index of torch's CPU
# builds, Linux), VLLM_SDIST (a copy of vLLM's source distribution). install.sh sets PLUGIN
# (the plugin's wheel, instead of the clone) and AGAIN (the command that calls this script).
# Runs under bash 3.2, as macOS has.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
UV_INSTALLER=https://astral.sh/uv/install.sh
AGAIN=${AGAIN:-make setup}

say() { echo "set-up: $*"; }

die() {
    echo "set-up: $*" >&2
    exit 1
}

# The lock file for macOS is resolved for one Python version only. Sizes are measured.
case "$(uname -s)" in
    Linux) platform=linux candidates="python3 python3.11 python3.12 python3.13" oldest=11 newest=13
        wanted="3.11 to 3.13" specified=">=3.11,<3.14" size="0.5 GB to fetch, 1.8 GB in place" ;;
    Darwin) platform=macos candidates="python3.12 python3 /opt/homebrew/bin/python3.12" oldest=12 newest=12
        wanted="3.12 (arm64)" specified=3.12 size="0.4 GB to fetch, 1.2 GB in place" ;;
    *) die "only macOS on Apple silicon and Linux are supported" ;;
esac

# macOS: sets `release`, or reports why this Mac cannot run MLX. macOS 26 reports itself as 16 to a
# Python linked against an older SDK, unless the variable is set (python/cpython#135675).
check_mac() {
    export SYSTEM_VERSION_COMPAT=0
    if [ "$(uname -m)" != arm64 ]; then
        [ "$(sysctl -n hw.optional.arm64 2>/dev/null || true)" = 1 ] ||
            die "this Mac has an Intel processor; MLX needs Apple silicon"
        die "this terminal runs under Rosetta, as for an Intel Mac. In the Finder, untick \"Open using Rosetta\" in the terminal application's Get Info and open it again; or run: arch -arm64 $AGAIN"
    fi
    release=$(sw_vers -productVersion)
    [ "${release%%.*}" -ge 14 ] || die "this is macOS $release; MLX needs 14 or newer"
    [ -n "${PLUGIN:-}" ] || xcode-select -p >/dev/null 2>&1 ||
        say "git and make come with: xcode-select --install"
}

suits() {
    "$1" - "$oldest" "$newest" "$platform" 2>/dev/null <<'PY'
import platform, sys
oldest, newest, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
version_suits = (3, oldest) <= sys.version_info[:2] <= (3, newest)
sys.exit(not (version_suits and (host == "linux" or platform.machine() == "arm64")))
PY
}

# uv's installer puts it into ~/.local/bin, which is on the PATH of new terminals only.
find_uv() {
    command -v uv || command -v "$HOME/.local/bin/uv" || true
}

no_python() {
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python $wanted"
    die "no Python $wanted here (tried: uv $candidates). These two commands get one and use it:

    curl -LsSf $UV_INSTALLER | sh
    $AGAIN

Or install one yourself (macOS: brew install python@3.12; Debian: apt install python3-venv) and name it: export PYTHON=/path/to/python; $AGAIN"
}

make_environment() {
    local candidate
    if [ -z "${PYTHON:-}" ] && [ -n "$uv" ]; then
        say "creating .venv with uv"
        # Includes pip for installing more packages.
        if "$uv" venv --quiet --allow-existing --seed --python "$specified" .venv; then return; fi
        say "uv has no Python $wanted; looking for an installed one"
    fi
    for candidate in ${PYTHON:-$candidates}; do
        # On a Mac without Apple's tools it opens a window that offers them; with them it is 3.9.
        case "$platform:$(command -v "$candidate")" in macos:/usr/bin/python3) continue ;; esac
        if suits "$candidate"; then
            "$candidate" -c "import ensurepip, venv" 2>/dev/null ||
                die "$candidate has no venv module; on Debian: apt install python3-venv"
            say "creating .venv with $candidate"
            "$candidate" -m venv .venv
            return
        fi
    done
    no_python
}

# --no-deps: a lock file is complete. No bytecode, which installers would compile on one core for
# all modules; see make_bytecode. Linux uses pip, which may be configured to find CPU
# builds.
install() {
    if [ "$platform" = macos ] && [ -n "$uv" ]; then
        "$uv" pip install --python .venv/bin/python --no-deps "$@"
    elif [ -t 1 ]; then
        pip_install "$@"
    else
        pip_install "$@" | counted
    fi
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile "$@"
}

# Filters pip's output: every twentieth package, large ones, and the start of unpacking.
counted() {
    awk '/^Collecting/ && ++count % 20 == 0 { print "    " count " packages" }
         /^ +Downloading .* MB\)$/ && substr($3, 2) + 0 >= 10 {
             sub(".*/", "", $2)
             print "    " $2, $3, $4
         }
         /^Installing collected/ && count >= 20 { print "    unpacking" }
         { fflush() }'
}

# Sets `vllm`, the wheel to install, in a temporary folder.
make_vllm() {
    say "vLLM"
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    vllm=$(.venv/bin/python scripts/vllm_wheel.py "$wheels") ||
        die "cannot download vLLM. With a copy of the file pinned in requirements/vllm.txt: export VLLM_SDIST=...; $AGAIN"
}

install_users() {
    local lock=requirements/$platform.txt vllm made
    made=.venv/.vllm-$(cat requirements/vllm.txt scripts/vllm_wheel.py | cksum | cut -d " " -f 1)
    [ -e "$made" ] || make_vllm # first, because it may fail
    if [ "$platform" = linux ]; then
        # Plain indexes carry the CUDA build, so the lock file names the CPU build. Try pip's
        # configured indexes first, then PyTorch's CPU index.
        local torch
        torch=$(sed -n 's|^\(torch==[^ ]*\).*|\1|p' "$lock")
        say "$torch"
        install "$torch" 2>/dev/null || install --index-url "$TORCH_INDEX" "$torch" ||
            die "$torch is neither in pip's configured indexes nor at TORCH_INDEX=$TORCH_INDEX"
    fi
    say "$(grep -c == "$lock") pinned packages, $size"
    install --require-hashes --requirement "$lock"
    say "vLLM and this plugin"
    if [ ! -e "$made" ]; then
        install --force-reinstall "$vllm" # a different wheel of the same version may be installed
        rm -f .venv/.vllm-*
        touch "$made"
    fi
    if [ -n "${PLUGIN:-}" ]; then
        install --no-index "$PLUGIN"
    else
        install --no-build-isolation --editable .
    fi
}

# MLX's wheel for macOS 26 is built for 26.2, and installers cannot tell (ml-explore/mlx#4525).
replace_mlx() {
    local folder
    folder=$(mktemp -d)
    say "macOS $release: MLX's wheels for macOS 15 in place of those for 26, which need 26.2"
    awk '/^[^ ]/ { wanted = /^mlx(-metal)?==/ } wanted' requirements/macos.txt >"$folder/mlx.txt"
    .venv/bin/python -m pip download --quiet --no-deps --only-binary :all: \
        --platform macosx_15_0_arm64 --dest "$folder" \
        --require-hashes --requirement "$folder/mlx.txt"
    install --force-reinstall "$folder"/*.whl
    rm -r "$folder"
}

# MLX's wheels for macOS 15 and older lack the kernels for the matrix units of M5 and newer. uv caches
# what it knows of a Python, so it may have missed the release.
check_mlx() {
    has_older_mlx || return 0
    say "macOS $release: MLX's wheels for macOS 26 in place of older ones"
    awk '/^[^ ]/ { wanted = /^mlx(-metal)?==/ } wanted' requirements/macos.txt >.venv/mlx.txt
    pip_install --force-reinstall --require-hashes --requirement .venv/mlx.txt || true
    rm .venv/mlx.txt
    if has_older_mlx; then
        say "MLX's wheel is still the one for an older macOS: on an M5 or newer, prompts are 2 to 3 times slower. \`vllm-metal doctor\` prints what to do"
    fi
}

has_older_mlx() {
    grep -qs "macosx_1[0-9]_" .venv/lib/python3*/site-packages/mlx_metal-*.dist-info/WHEEL
}

# A start imports 5,700 modules, most of these packages: compile them here on all cores, because a
# first start would use one.
make_bytecode() {
    local package
    say "bytecode"
    set --
    for package in torch vllm transformers scipy openai sympy networkx numpy; do
        set -- "$@" .venv/lib/python3*/site-packages/"$package"
    done
    .venv/bin/python -m compileall -q -j 0 -x '/(tests?|testing)/|/models/' "$@" >/dev/null || true
}

uv=$(find_uv)
if [ "$platform" = macos ]; then check_mac; fi
[ "${1:-}" != --check ] || exit 0
[ -x .venv/bin/python ] || make_environment
suits .venv/bin/python ||
    die ".venv is not of Python $wanted: remove it (rm -r .venv) and try again"
if [ "${1:-}" = --dev ]; then
    say "what tests and benchmarks need ($(grep -c == "requirements/$platform-dev.txt") packages, 0.5 GB to fetch, 1.2 GB in place)"
    install --require-hashes --requirement "requirements/$platform-dev.txt"
    say "the kernel interpreter"
    install --no-build-isolation --editable interpreter
else
    install_users
    case "${release:-}" in
        26.0 | 26.0.* | 26.1 | 26.1.*) replace_mlx ;;
        2[6-9]* | [3-9]?*) check_mlx ;;
    esac
    make_bytecode
fi
