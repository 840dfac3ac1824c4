#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Removes .venv and this project's folders in the user's cache folder, and prints them. Keeps a folder
# that VLLM_METAL_CACHE names.
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
    rmdir "$(dirname "$folder")" 2>/dev/null || true # if it is empty
done
if [ -d .venv ]; then remove .venv; fi
