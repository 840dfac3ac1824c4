#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs or updates vllm-metal for one user, with one line:
#
#     curl -LsSf ADDRESS/install.sh | sh
#
# Each version gets a folder below ~/.local/share/vllm-metal/versions; `current` points to the one
# in use. A version that does not start never becomes current. Options, after `sh -s --`:
# --rollback    go back to the previous version
# --uninstall   remove everything, and list what is left
# Needs curl, tar and bash. Never asks a package index for vllm-metal, because PyPI has another
# project of that name. The functions use only what dash and bash 3.2 share.
# shellcheck shell=dash
set -eu
umask 022 # whatever the user's umask: nobody else may write to programs

# The release to install: the https address of a copy of dist/ (see `make dist`), or a folder.
# VLLM_METAL_SOURCE overrides it. Empty: this script's folder.
ADDRESS=
UV_INSTALLER=https://astral.sh/uv/install.sh

say() { echo "install: $*"; }

die() {
    echo "install: $*" >&2
    exit 1
}

tilde() { case "$1" in "$HOME"/*) echo "~${1#"$HOME"}" ;; *) echo "$1" ;; esac; }

# $work holds downloads; $unfinished is a version that has not been tested yet.
begin() {
    mkdir -p "$root/versions"
    # Creating a link is atomic. It names the process that holds the lock.
    if ! ln -s $$ "$root/lock" 2>/dev/null; then
        holder=$(readlink "$root/lock" || true)
        if kill -0 "$holder" 2>/dev/null; then
            die "process $holder is already installing vllm-metal; if it is not: rm $root/lock"
        fi
        ln -sf $$ "$root/lock" # its process was killed
    fi
    unfinished=
    work=$(mktemp -d)
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    remove_others
    # The plugin waits for it on Linux, where this vLLM cannot start on another platform.
    if [ "$(uname -s)" = Linux ]; then
        VLLM_METAL_DEVICE=cpu
        export VLLM_METAL_DEVICE
    fi
}

clean_up() {
    rm -rf "$work" ${unfinished:+"$unfinished"}
    rm -f "$root/lock"
    # Leave nothing behind if nothing was ever installed.
    rmdir "$root/versions" "$root" 2>/dev/null || true
}

# Prints the version that a link names, or nothing.
version_of() { basename "$(readlink "$root/$1" || true)"; }

# Removes versions that are neither current nor the previous one, such as those of killed runs.
remove_others() {
    rm -f "$root"/.current.* "$root"/.previous.*
    for folder in "$root"/versions/*; do
        case "${folder##*/}" in
            '*' | "$(version_of current)" | "$(version_of previous)") ;;
            *) rm -rf "$folder" ;;
        esac
    done
}

# LINK VERSION: atomic, so that there always is a current version. mv has no option for it that both
# systems support; $proven is a version with a working Python.
point() {
    ln -s "versions/$2" "$root/.$1.$$"
    "$root/versions/$proven/.venv/bin/python" -c 'import os, sys; os.replace(*sys.argv[1:])' \
        "$root/.$1.$$" "$root/$1"
}

find_source() {
    source=${VLLM_METAL_SOURCE:-$ADDRESS}
    # A script piped into a shell has no folder.
    if [ -z "$source" ] && [ "${0##*/}" = install.sh ]; then source=$(dirname "$0"); fi
    case "$source" in
        https://* | http://localhost[:/]* | http://127.0.0.1[:/]*)
            again="sh -c 'curl -LsSf $source/install.sh | sh'" ;;
        *://*) die "the source $source is not an https address" ;;
        *)
            [ -f "$source/SHA256SUMS" ] ||
                die "no release in the folder '$source' (SHA256SUMS is missing): make one with \`make dist\`, or name its folder or address: export VLLM_METAL_SOURCE=..."
            source=$(cd "$source" && pwd)
            again="VLLM_METAL_SOURCE=$source sh $source/install.sh" ;;
    esac
}

# ADDRESS FILE: a redirection may not lead from https to another scheme.
download() {
    curl -LsSf --retry 3 --connect-timeout 20 --proto "=${1%%:*}" -o "$2" "$1"
}

fetch() {
    case "$source" in
        *://*) download "$source/$1" "$work/$1" ;;
        *) cp "$source/$1" "$work/$1" ;;
    esac || die "cannot download $source/$1"
}

# Prints the file name in SHA256SUMS with this prefix and suffix.
listed() { sed -n "s/^[0-9a-f]\{64\} [ *]\($1[A-Za-z0-9.+_]*$2\)\$/\1/p" "$work/SHA256SUMS"; }

# Sets `wheel`, `archive` and `version`.
read_sums() {
    fetch SHA256SUMS
    wheel=$(listed vllm_metal- -py3-none-any.whl)
    archive=$(listed vllm_metal- .tar.gz)
    version=${wheel#vllm_metal-}
    version=${version%-py3-none-any.whl}
    if [ -z "$version" ] || [ "$archive" != "vllm_metal-$version.tar.gz" ]; then
        die "$source/SHA256SUMS does not list one wheel and its source archive"
    fi
}

fetch_release() {
    fetch "$wheel"
    fetch "$archive"
    grep -F -e "$wheel" -e "$archive" "$work/SHA256SUMS" >"$work/wanted"
    if command -v sha256sum >/dev/null; then set -- sha256sum; else set -- shasum -a 256; fi
    (cd "$work" && "$@" -c wanted >"$work/sums" 2>&1) ||
        die "$source: a file is not the one that SHA256SUMS lists; try again: $again"
}

# A missing uv, and what it downloads, goes into our folder.
find_uv() {
    if [ ! -x "$root/uv/uv" ]; then
        if command -v uv >/dev/null || [ -x "$HOME/.local/bin/uv" ]; then return; fi
        say "downloading uv, which provides Python"
        if ! download "$UV_INSTALLER" "$work/uv.sh" ||
            ! UV_UNMANAGED_INSTALL="$root/uv" sh "$work/uv.sh" >"$work/uv.log" 2>&1; then
            rm -rf "$root/uv"
            say "cannot download uv from $UV_INSTALLER; looking for Python"
            return
        fi
    fi
    PATH=$root/uv:$PATH
    UV_PYTHON_INSTALL_DIR=$root/python
    UV_CACHE_DIR=$root/cache
    export PATH UV_PYTHON_INSTALL_DIR UV_CACHE_DIR
}

# Whether a version's programs and MLX start.
works() {
    "$1/.venv/bin/vllm-metal" --version &&
        "$1/.venv/bin/python" -c 'import mlx_lm, vllm_metal.platform.metal_platform' &&
        "$1/.venv/bin/vllm" --version
} >"$work/tried" 2>&1

set_up() {
    AGAIN=$again PLUGIN=$work/$wheel bash "$unfinished/scripts/setup.sh" "$@" ||
        die "version $version is not installed${before:+; $before still serves}"
}

# Builds $unfinished completely: a folder with what the source archive has besides the package.
make_version() {
    number=1
    while [ -e "$root/versions/$version-$number" ]; do number=$((number + 1)); done
    unfinished=$root/versions/$version-$number
    mkdir "$unfinished"
    for part in scripts requirements deploy examples; do set -- "$@" "vllm_metal-$version/$part"; done
    tar -xzf "$work/$archive" -C "$work" "$@"
    mv "$work/vllm_metal-$version"/* "$unfinished"
    cp "$work/SHA256SUMS" "$unfinished"
    set_up --check
    find_uv
    say "version $version, into $(tilde "$unfinished")"
    set_up
    say "testing it"
    works "$unfinished" || {
        cat "$work/tried" >&2
        die "version $version does not start on this machine${before:+; $before still serves}"
    }
}

install_newest() {
    find_source
    begin
    read_sums
    before=$(version_of current)
    if [ -n "$before" ] && cmp -s "$work/SHA256SUMS" "$root/current/SHA256SUMS" &&
        works "$root/current"; then
        say "version $version is already installed, and the newest at $source"
    else
        fetch_release
        [ -z "$before" ] || say "$before stays current until $version is tested"
        make_version
        proven=${unfinished##*/}
        unfinished=
        [ -z "$before" ] || point previous "$before"
        point current "$proven"
        remove_others
    fi
    for name in vllm-metal vllm; do link_command "$name"; done
    say_how_to_serve
}

# Links the commands into ~/.local/bin. Keeps other programs of the same name.
link_command() {
    ours=$root/current/.venv/bin/$1
    mkdir -p "$bin"
    if [ "$(readlink "$bin/$1" || true)" = "$ours" ]; then
        :
    elif [ -e "$bin/$1" ] || [ -L "$bin/$1" ]; then
        say "$(tilde "$bin/$1") is another program; keeping it. Ours is $(tilde "$ours")"
        return
    else
        ln -s "$ours" "$bin/$1"
    fi
    first=$(PATH=$users_path command -v "$1" || true)
    case "$first" in
        "" | "$bin/$1") ;;
        *) say "your PATH has another $1 before ours: $first. Ours is $(tilde "$bin/$1")" ;;
    esac
}

say_how_to_serve() {
    echo
    say "vllm-metal $(basename "$(readlink "$root/current")") is in $(tilde "$root")"
    say "PyPI has another project named vllm-metal; pip install and uv never update this one"
    say "to update, run the same line again; to go back or remove it:"
    echo "    sh $(tilde "$root")/current/scripts/install.sh --rollback (or --uninstall)"
    case ":$users_path:" in
        *":$bin:"*) ;;
        *)
            say "your PATH lacks $(tilde "$bin"). For this terminal and for later ones:"
            # shellcheck disable=SC2016 # for the user's shell to expand
            echo '    export PATH="$HOME/.local/bin:$PATH"'
            case "${SHELL:-}" in
                */zsh) profile="$HOME/.zprofile" ;;
                */fish) profile= ;;
                */bash) profile="$HOME/.bash_profile" && [ -e "$profile" ] || profile="$HOME/.profile" ;;
                *) profile="$HOME/.profile" ;;
            esac
            # shellcheck disable=SC2016
            if [ -n "$profile" ]; then
                echo '    echo '\''export PATH="$HOME/.local/bin:$PATH"'\'" >>$(tilde "$profile")"
            else
                echo "    fish_add_path ~/.local/bin"
            fi ;;
    esac
    suggest
}

# The answer of `vllm-metal fit` for this machine.
suggest() {
    if [ "$(uname -s)" = Linux ]; then
        say "on Linux, once in a terminal: export VLLM_METAL_DEVICE=cpu"
        # shellcheck disable=SC2016 # for the user's shell to expand
        say 'a small model without a download: vllm serve $(vllm-metal model)'
    fi
    if answer=$("$root/current/.venv/bin/vllm-metal" fit 2>"$work/fit"); then
        say "to download and serve a model that fits this machine:"
        echo "$answer" | sed -n 's/^ *\(vllm serve .*\)/    \1/p' | head -n 1
    else
        cat "$work/fit" >&2
        say "\`vllm-metal fit MODEL\` prints what a model needs; \`vllm serve MODEL\` serves it"
    fi
}

roll_back() {
    begin
    before=$(version_of current) back=$(version_of previous)
    if [ -z "$back" ] || [ "$back" = "$before" ]; then
        die "there is no version before ${before:-this one}: one is kept at an update"
    fi
    works "$root/previous" || die "$back does not start any more; keeping $before"
    proven=$back
    point current "$back"
    point previous "$before"
    say "$back is current now; --rollback again returns to $before"
}

uninstall() {
    [ -d "$root" ] || say "$(tilde "$root") does not exist"
    for name in vllm-metal vllm; do
        if [ "$(readlink "$bin/$name" || true)" = "$root/current/.venv/bin/$name" ]; then
            say "removing $(tilde "$bin/$name")"
            rm "$bin/$name"
        fi
    done
    if [ -d "$root" ]; then
        say "removing $(tilde "$root") ($(du -sh "$root" | cut -f 1)): all versions, and their Python and uv if they were fetched"
        rm -rf "$root"
    fi
    # Remove empty folders that may have been made for it.
    rmdir "$bin" "$HOME/.local/share" "$HOME/.local" 2>/dev/null || true
    for left in \
        ".cache/huggingface=models from the hub, which other programs share" \
        ".cache/vllm-metal=what vllm-metal keeps: converted models, results of checks" \
        "Library/Caches/vllm-metal=what vllm-metal keeps: converted models, results of checks" \
        ".cache/vllm=what vLLM remembers of models" \
        ".config/vllm=vLLM's usage statistics" \
        ".cache/uv=uv's packages" ".local/share/uv=uv's Pythons" \
        ".cache/pip=pip's packages" "Library/Caches/pip=pip's packages"; do
        [ ! -e "$HOME/${left%%=*}" ] || say "left: ~/${left%%=*} (${left#*=})"
    done
}

main() {
    [ -n "${HOME:-}" ] || die "HOME is not set. Set it to the folder to install into"
    root=$HOME/.local/share/vllm-metal bin=$HOME/.local/bin
    users_path=$PATH
    PATH=$PATH:/usr/sbin:/sbin # sysctl on macOS
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV # may be set by developers
    case "${1:-}" in
        "") install_newest ;;
        --rollback) roll_back ;;
        --uninstall) uninstall ;;
        *) die "unknown option $1; the options are --rollback and --uninstall" ;;
    esac
}

# A truncated script does nothing, because this line is missing. If the script is piped, it is
# standard input itself, so child processes get none.
main "$@" </dev/null
