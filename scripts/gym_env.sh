#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build or update the separate environment of NeMo-Gym. Gym's pins conflict with the engine's, and it needs a newer
# Python, so it never shares the environment of `make setup`.
#
#   scripts/gym_env.sh            (make gym)
#
# GYM_VENV    where it goes; default .venv-gym in the checkout
# GYM_PYTHON  a CPython >= 3.12 to build it with; found by itself when unset
#
# A second run does nothing: a stamp holds what was installed. An interrupted build starts over.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${GYM_VENV:-$root/.venv-gym}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
lock=$root/requirements/gym-py312.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "gym: $*"; }
die() { printf '%s\n' "gym: error: $*" >&2; exit 1; }

# 3.12 comes first because the lock was made with it; the pinned wheels also exist for 3.13
is_suitable() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit(not (sys.implementation.name == "cpython" and (3, 12) <= sys.version_info[:2] <= (3, 13)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${GYM_PYTHON:-}" ]; then
        is_suitable "$GYM_PYTHON" && { command -v "$GYM_PYTHON"; return; }
        die "GYM_PYTHON=$GYM_PYTHON is not a CPython 3.12 or 3.13 with the venv module"
    fi
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python \
        python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python python3 python; do
        is_suitable "$candidate" && { command -v "$candidate"; return; }
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find --no-python-downloads '>=3.12,<3.14' 2>/dev/null || true)
        [ -n "$candidate" ] && is_suitable "$candidate" && { printf '%s\n' "$candidate"; return; }
    fi
    die "NeMo-Gym needs CPython 3.12 or 3.13 and none was found. Install one (for instance: apt install" \
        "python3.12-venv, pyenv install 3.12, or uv python install 3.12), or name it: make gym GYM_PYTHON=path"
}

key() { { cat "$lock" "$root/scripts/gym_env.sh"; "$venv/bin/python" -VV; } | sha256sum | cut -c1-32; }
is_current() { [ -x "$venv/bin/python" ] && [ ! -e "$venv/.building" ] && [ "$(cat "$venv/.key" 2>/dev/null)" = "$(key)" ]; }

# Gym wants one environment per server and would build each with uv. One environment serves them all: where Gym looks
# for a server's own (uv_venv_dir, with skip_venv_if_present), it finds a link to this one.
link_servers() {
    local packages server
    packages=$("$venv/bin/python" -c 'import nemo_gym; print(nemo_gym.PARENT_DIR)')
    for server in "$root"/gym_resources/re*/*/ "$packages"/responses_api_models/vllm_model/ \
        "$packages"/responses_api_models/openai_model/ "$packages"/responses_api_agents/simple_agent/; do
        server=${server%/}
        mkdir -p "$venv/gym-servers/$(basename "$(dirname "$server")")/$(basename "$server")"
        ln -sfn "$venv" "$venv/gym-servers/$(basename "$(dirname "$server")")/$(basename "$server")/.venv"
    done
}

if is_current; then
    link_servers
    say "$venv is up to date"
    exit 0
fi

mkdir -p "$(dirname "$venv")"
if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock 9
fi
if [ -e "$venv/.building" ] || { [ -e "$venv" ] && ! is_current; }; then
    { [ -e "$venv/.key" ] || [ -e "$venv/.building" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ]; } ||
        die "$venv exists and was not made by this script; remove it, or name another: make gym GYM_VENV=dir"
    say "rebuilding $venv: an earlier build did not finish, or the lock has changed"
fi
if ! is_current; then
    python=$(find_python)
    say "creating $venv with $("$python" -V); about 1.5 GB and a few minutes"
    "$python" -m venv --clear "$venv"
    touch "$venv/.building"
    "$venv/bin/python" -m pip install -qq --no-deps -r "$lock"
    (cd / && "$venv/bin/python" -W ignore -c 'import nemo_gym.base_resources_server, cv2, decord, scipy') ||
        die "the packages are installed, but NeMo-Gym does not import; see the traceback above"
    key >"$venv/.key"
    rm -f "$venv/.building"
fi
link_servers
say "$venv is ready; how to use it: docs/gym.md"
