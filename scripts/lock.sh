#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the lock files: requirements/PLATFORM.txt for serving, and
# requirements/PLATFORM-dev.txt with what tests and benchmarks add. Run it on Linux, in the
# developers' environment. Keeps existing pins that still fit; delete a file to renew all of it.
# Pins have the hashes of all their files, which set-up requires, except torch on Linux,
# whose CPU build may come from several indexes.
#
# lock.sh --check macos writes nothing, and fails if the files would change: a pin without a wheel
# for the platform, an unmet requirement, an unused pin.
# lock.sh --check linux checks whether its files, resolved for x86 and Python 3.11, also fit the other
# processors and Pythons: each pin has a wheel there, and nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/uv ] || {
    echo "lock: uv is not in .venv: make setup-dev" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A copy of the clone that uv can read without a build: only hatchling knows {root:uri}, the clone's
# address.
mkdir "$work/clone"
sed "s|{root:uri}|file://$work/clone|" pyproject.toml >"$work/clone/pyproject.toml"
ln -s "$PWD/.venv" "$PWD/requirements" "$PWD/interpreter" "$work/clone"
# vLLM's wheel is on no index, so set-up builds it: resolve its requirements, but not vLLM itself.
wheel=$(.venv/bin/python scripts/vllm_wheel.py "$work")
echo "vllm @ file://$wheel" >"$work/clone/vllm.in"

compile() (
    cd "$work/clone"
    .venv/bin/uv pip compile --quiet --no-config --no-python-downloads \
        --custom-compile-command "make lock" --annotation-style line --no-emit-package vllm \
        --excludes requirements/excludes.txt --only-binary :all: pyproject.toml vllm.in "$@"
)

TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
GLIBC=manylinux_2_35 # as MLX's wheels

compile_linux() {
    # The CPU build of torch: from PyTorch's index, or where UV_FIND_LINKS points.
    local torch_index=()
    if [ -z "${UV_FIND_LINKS:-}" ]; then
        torch_index=(--index "$TORCH_INDEX" --index-strategy unsafe-best-match)
    fi
    compile --python-version 3.11 --python-platform "x86_64-$GLIBC" \
        "${torch_index[@]}" requirements/linux.in "$@"
}

compile_macos() {
    MACOSX_DEPLOYMENT_TARGET=14.0 compile --python-version 3.12 \
        --python-platform aarch64-apple-darwin --no-annotate "$@"
}

# FILE: drops the hashes of torch's CPU build.
trust_torch() {
    awk '/^torch==.*[+]cpu/ { sub(/ \\$/, ""); print; hashes = 1; next }
         hashes && /--hash/ { next }
         { hashes = 0; print }' "$1" >"$work/trusting"
    cp "$work/trusting" "$1"
}

# PLATFORM FOLDER: writes both files into the folder, starting from those already there.
lock() {
    local users=$2/$1.txt developers=$2/$1-dev.txt all=$work/$1-all.txt
    touch "$users" "$developers"
    "compile_$1" --generate-hashes --extra gguf --extra embedded --extra chat --group build \
        --output-file "$users"
    trust_torch "$users"
    cat "$users" "$developers" >"$all"
    # The interpreter's requirements, but not the interpreter, which set-up installs from the clone.
    "compile_$1" --generate-hashes --all-extras --no-emit-package vllm-metal-interpreter --group build --group dev \
        --constraints "$users" --output-file "$all"
    {
        echo "# What developers need besides $1.txt. This file was written by: make lock"
        awk 'NR == FNR { users[$1]; next }
             /^[^ ]/ { added = !($1 in users) }
             NF && added' "$users" "$all"
    } >"$work/$1-dev.txt"
    mv "$work/$1-dev.txt" "$developers"
}

check_macos() {
    local name status=0
    mkdir "$work/fresh"
    for name in macos.txt macos-dev.txt; do cp "requirements/$name" "$work/fresh/"; done
    lock macos "$work/fresh"
    for name in macos.txt macos-dev.txt; do
        # Without hashes, because a version may have got more files since it was pinned.
        if diff -U 0 <(pin_lines "requirements/$name") <(pin_lines "$work/fresh/$name") \
            >"$work/changes"; then
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

# Prints the files' pins, one per line.
pin_lines() {
    sed -n 's/^\([^#= ]*==[^ ]*\).*/\1/p' "$@"
}

# Prints the files' pins, sorted, without torch, whose CPU build is on another index.
pins() {
    pin_lines "$@" | grep -v '^torch==' | sort
}

# FOLDER FILES OPTIONS: resolves the project's requirements against all pins of the files, using
# only those pins.
check_pins() {
    local folder=$1 files=$2
    shift 2
    # shellcheck disable=SC2086 # split into words on purpose
    pins $files >"$folder/pins.txt"
    echo torch >"$folder/torch.txt"
    compile --no-header --no-annotate --excludes "$folder/torch.txt" --group build "$@" \
        requirements/linux.in "$folder/pins.txt" --output-file "$folder/all.txt" >/dev/null ||
        return 1
    pins "$folder/all.txt" >"$folder/resolved.txt"
    diff -U 0 "$folder/pins.txt" "$folder/resolved.txt" >"$folder/changes"
}

# OPTIONS: whether torch's CPU build has a wheel there.
check_torch() {
    local from=(--index-url "$TORCH_INDEX")
    if [ -n "${UV_FIND_LINKS:-}" ]; then from=(--no-index); fi
    sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/linux.txt |
        .venv/bin/uv pip compile --quiet --no-config --no-python-downloads --no-deps \
            --only-binary :all: "${from[@]}" "$@" - >/dev/null
}

# MACHINE PYTHON TORCH: fails if the files do not fit.
check_target() {
    local there="Linux on $1, Python $2" folder=$work/$1-$2
    local users=requirements/linux.txt developers=requirements/linux-dev.txt
    local target=(--python-version "$2" --python-platform "$1-$GLIBC")
    mkdir "$folder"
    if check_pins "$folder" "$users" --extra gguf --extra embedded --extra chat "${target[@]}" &&
        check_pins "$folder" "$users $developers" --all-extras --group dev \
            --no-emit-package vllm-metal-interpreter "${target[@]}" &&
        { [ "$3" = 0 ] || check_torch "${target[@]}"; }; then
        echo "$users, linux-dev.txt: $there: none in conflict"
    else
        echo "$users or linux-dev.txt does not serve $there:" >&2
        grep -s '^[-+][^-+]' "$folder/changes" >&2 || true
        return 1
    fi
}

check_linux() {
    local machine python job status=0 torch=1 jobs=()
    if [ -z "${UV_FIND_LINKS:-}" ] &&
        ! curl --head --silent --location --max-time 20 --output /dev/null "$TORCH_INDEX/torch/"; then
        echo "torch is not checked: TORCH_INDEX=$TORCH_INDEX cannot be reached" >&2
        torch=0
    fi
    for machine in x86_64 aarch64; do
        for python in 3.11 3.12 3.13; do
            check_target "$machine" "$python" $torch &
            jobs+=($!)
        done
    done
    for job in "${jobs[@]}"; do wait "$job" || status=1; done
    return $status
}

if [ "${1:-}" = --check ]; then
    shift
    for platform in "$@"; do "check_$platform"; done
else
    for platform in linux macos; do lock "$platform" requirements; done
fi
