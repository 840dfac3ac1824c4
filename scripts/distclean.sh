#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Removes .venv, and from the user's cache folder what this project keeps there; says what. A folder
# that VLLM_METAL_CACHE names is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

remove() {
    echo "removing $1 ($(du -sh "$1" | cut -f 1))"
    rm -rf "$1"
}

python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" metal_kernels/cache.py | while IFS= read -r folder; do
    remove "$folder"
    rmdir "$(dirname "$folder")" 2>/dev/null || true # if nothing else lies there
done
if [ -d .venv ]; then remove .venv; fi
