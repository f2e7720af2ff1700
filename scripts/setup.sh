#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build or update the environment of the engine, the demo and the tests.
#
#   scripts/setup.sh DIR          (make setup VENV=DIR)
#
# PYTHON       a CPython 3.11 to build it with; found by itself when unset
# TORCH_INDEX  an index with +cpu builds of torch, asked in addition to pip's own configuration
#
# A second run does nothing: stamps in DIR hold what was installed. An interrupted build starts over.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:?usage: scripts/setup.sh DIR}
lock=$root/requirements/engine-cpu-py311.txt
torch=$(grep -m1 '^torch==' "$lock")
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: error: $*" >&2; exit 1; }

is_python311() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit(not (sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_python311 "$PYTHON" && { command -v "$PYTHON"; return; }
        die "PYTHON=$PYTHON is not a CPython 3.11 with the venv module"
    fi
    for candidate in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python python3 python; do
        is_python311 "$candidate" && { command -v "$candidate"; return; }
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find --no-python-downloads 3.11 2>/dev/null || true)
        [ -n "$candidate" ] && is_python311 "$candidate" && { printf '%s\n' "$candidate"; return; }
    fi
    die "no CPython 3.11 found. Install one (for instance: apt install python3.11-venv, pyenv install 3.11," \
        "or uv python install 3.11), or name it: make setup PYTHON=path"
}

# The build that pip would install, read from metadata before anything large is downloaded: "cpu" or "cuda".
torch_build() {
    "$venv/bin/python" -m pip install -qq --dry-run --no-deps --ignore-installed --report - "$@" "$torch" |
        "$venv/bin/python" -c '
import json, sys
(item,) = json.load(sys.stdin)["install"]
requires = item["metadata"].get("requires_dist", [])
print("cuda" if any(r.startswith(("nvidia-", "cuda-")) for r in requires) else "cpu")'
}

install_torch() {
    if "$venv/bin/python" -c 'import sys, torch
sys.exit(torch.version.cuda is not None or torch.__version__.partition("+")[0] != sys.argv[1])' \
        "${torch#torch==}" 2>/dev/null; then
        return
    fi
    local index=() build
    [ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")
    build=$(torch_build ${index[@]+"${index[@]}"}) || die "pip finds no $torch; see its message above"
    [ "$build" = cpu ] || die "pip would install a CUDA build of $torch (gigabytes, and of no use here);" \
        "point it at a CPU build: make setup TORCH_INDEX=<url of an index with +cpu wheels>"
    say "installing $torch (CPU build)"
    "$venv/bin/python" -m pip install -qq --no-deps ${index[@]+"${index[@]}"} "$torch"
}

# What is in DIR, and what should be. The key of the packages does not depend on the checkout, so that several
# checkouts can share one environment; the project itself is installed in place and is quick to install again.
packages_key() { { cat "$lock" "$root/scripts/setup.sh"; "$venv/bin/python" -VV; } | sha256sum | cut -c1-32; }
project_key() { { cat "$root/pyproject.toml"; printf '%s\n' "$root"; } | sha256sum | cut -c1-32; }
stamped() { [ "$(cat "$venv/$1" 2>/dev/null)" = "$2" ]; }

if [ -x "$venv/bin/python" ] && [ ! -e "$venv/.building" ] &&
    stamped .packages-key "$(packages_key)" && stamped .project-key "$(project_key)"; then
    exit 0
fi

mkdir -p "$(dirname "$venv")"
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock 9
fi
if [ -e "$venv/.building" ]; then
    say "an earlier build in $venv did not finish; starting over"
    python=$(find_python)
    "$python" -m venv --clear "$venv"
elif [ ! -e "$venv" ]; then
    python=$(find_python)
    say "creating $venv with $("$python" -V)"
    "$python" -m venv "$venv"
elif ! is_python311 "$venv/bin/python"; then
    die "$venv exists and is not an environment of CPython 3.11; remove it, or name another: make setup VENV=dir"
fi
venv=$(cd "$venv" && pwd)

if ! stamped .packages-key "$(packages_key)"; then
    touch "$venv/.building"
    install_torch
    say "installing $(grep -c == "$lock") pinned packages"
    "$venv/bin/python" -m pip install -qq --no-deps -r "$lock"
fi
"$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e "$root"
(cd / && "$venv/bin/python" -c 'from nemo_rl_ext.cpu_wheels import install; install()')
if ! stamped .packages-key "$(packages_key)"; then
    (cd / && HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore -c 'import ray, torch, transformers, vllm' >/dev/null) ||
        die "the packages are installed, but the engine does not import; see the traceback above"
    packages_key >"$venv/.packages-key"
    rm -f "$venv/.building"
fi
project_key >"$venv/.project-key"
say "$venv is ready"
