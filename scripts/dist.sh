#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes dist/, a flat release folder: wheel, source archive, install.sh, and SHA256SUMS of them.
# install.sh installs from that folder or from the address of a copy. Variables:
# ADDRESS (of the copy; written into dist/install.sh), PYTHON (an interpreter with hatchling).
set -euo pipefail
cd "$(dirname "$0")/.."

clone=$PWD
python=${PYTHON:-$clone/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The extra `interpreter` is a folder of the clone. It is not released, and its line would leak the
# clone's path on this machine into the release.
cp -R .gitignore pyproject.toml README.md CHANGELOG.md LICENSE vllm_metal metal_kernels \
    requirements scripts deploy examples "$work"
sed '/^interpreter = /d' pyproject.toml >"$work/pyproject.toml"

sed "s|^ADDRESS=.*|ADDRESS=${ADDRESS:-}|" scripts/install.sh >"$work/scripts/install.sh"

rm -rf dist
mkdir dist
(cd "$work" && "$python" -m hatchling build --directory "$clone/dist" >log 2>&1) || {
    cat "$work/log" >&2
    exit 1
}
cp "$work/scripts/install.sh" dist
cd dist
if command -v sha256sum >/dev/null; then sum="sha256sum"; else sum="shasum -a 256"; fi
$sum -- *.whl *.tar.gz install.sh >SHA256SUMS
cat SHA256SUMS
