#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build or update the environment that runs NeMo-RL's code without a GPU, and run tests/nemo_rl in it.
#
#   scripts/nemo_rl_env.sh DIR    (make test-nemo-rl NEMO_RL=DIR)   DIR: a checkout of NeMo-RL
#
# NEMO_RL_VENV    where the environment goes; default .venv-nemo-rl in the checkout
# NEMO_RL_PYTHON  a CPython 3.13 to build it with; found by itself when unset
# ENGINE_PYTHON   python of an environment with vLLM; default .venv in the checkout, built if it is not there
# GYM_VENV        environment of NeMo-Gym; default .venv-gym in the checkout, built if it is not there
# ARGS            further arguments of pytest
#
# The checkout is read from a copy, because importing it and running its tests write into the tree. A second run does
# not install anything: a stamp holds what was installed. An interrupted build starts over.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
say() { printf '%s\n' "nemo-rl: $*"; }
die() { printf '%s\n' "nemo-rl: error: $*" >&2; exit 1; }

checkout=${1:-}
[ -n "$checkout" ] || die "name a checkout of NeMo-RL: make test-nemo-rl NEMO_RL=/path/to/RL (git clone" \
    "https://github.com/NVIDIA-NeMo/RL; docs/nemo_rl.md names the commit that the hooks were written against)"
[ -f "$checkout/nemo_rl/environments/nemo_gym.py" ] || die "$checkout is not a checkout of NeMo-RL: it has no" \
    "nemo_rl/environments/nemo_gym.py"
checkout=$(cd "$checkout" && pwd)
venv=${NEMO_RL_VENV:-$root/.venv-nemo-rl}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
lock=$root/requirements/nemo-rl-py313.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1

is_suitable() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit(not (sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 13)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${NEMO_RL_PYTHON:-}" ]; then
        is_suitable "$NEMO_RL_PYTHON" && { command -v "$NEMO_RL_PYTHON"; return; }
        die "NEMO_RL_PYTHON=$NEMO_RL_PYTHON is not a CPython 3.13 with the venv module"
    fi
    for candidate in python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python python3 python; do
        is_suitable "$candidate" && { command -v "$candidate"; return; }
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find --no-python-downloads 3.13 2>/dev/null || true)
        [ -n "$candidate" ] && is_suitable "$candidate" && { printf '%s\n' "$candidate"; return; }
    fi
    die "NeMo-RL needs CPython 3.13 and none was found. Install one (for instance: apt install python3.13-venv," \
        "pyenv install 3.13, or uv python install 3.13), or name it: make test-nemo-rl NEMO_RL_PYTHON=path"
}

key() { { cat "$lock"; "$venv/bin/python" -VV; } | sha256sum | cut -c1-32; }
is_current() { [ -x "$venv/bin/python" ] && [ ! -e "$venv/.building" ] && [ "$(cat "$venv/.key" 2>/dev/null)" = "$(key)" ]; }

if ! is_current; then
    mkdir -p "$(dirname "$venv")"
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock 9
    fi
fi
if ! is_current; then
    if [ -e "$venv" ]; then
        { [ -e "$venv/.key" ] || [ -e "$venv/.building" ] || [ -z "$(ls -A "$venv" 2>/dev/null)" ]; } ||
            die "$venv exists and was not made by this script; remove it, or name another: NEMO_RL_VENV=dir"
        say "rebuilding $venv: an earlier build did not finish, or the lock has changed"
    fi
    python=$(find_python)
    say "creating $venv with $("$python" -V); about 6 GB (torch comes with its CUDA libraries) and some minutes"
    "$python" -m venv --clear "$venv"
    touch "$venv/.building"
    "$venv/bin/python" -m pip install -qq --no-deps -r "$lock"
    key >"$venv/.key"
    rm -f "$venv/.building"
fi

# Some tests run a real engine, and NeMo-Gym's own servers, each in an environment of its own.
if [ -z "${ENGINE_PYTHON:-}" ] && [ ! -x "$root/.venv/bin/python" ]; then
    say "building the engine's environment in $root/.venv (ENGINE_PYTHON=path names another)"
    "$root/scripts/setup.sh" "$root/.venv"
fi
if [ -z "${GYM_VENV:-}" ] && [ ! -x "$root/.venv-gym/bin/gym" ]; then
    say "building NeMo-Gym's environment in $root/.venv-gym (GYM_VENV=dir names another)"
    "$root/scripts/gym_env.sh"
fi

copy=$(mktemp -d "${TMPDIR:-/tmp}/nemo-rl.XXXXXX")
trap 'rm -rf "$copy"' EXIT
(cd "$checkout" && tar -cf - --exclude=.git --exclude=3rdparty --exclude='.venv*' .) | tar -xf - -C "$copy"
mkdir -p "$copy/hf/modules"
# A clone with its history: the probe is run over it, too.
[ -z "${NEMO_RL_CLONE:-}" ] && [ -e "$checkout/.git" ] && export NEMO_RL_CLONE="$checkout"
say "running tests/nemo_rl against $checkout"
cd "$root"
# shellcheck disable=SC2086  # ARGS is a list of words
PYTHONPATH="$root:$copy" NO_VCS_VERSION=1 HF_HUB_OFFLINE=1 HF_HOME="$copy/hf" HF_MODULES_CACHE="$copy/hf/modules" \
    WANDB_MODE=offline RAY_AUTH_MODE=disabled OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NEMO_RL="$copy" \
    "$venv/bin/python" -m pytest tests/nemo_rl -m nemo_rl -p no:cacheprovider -W ignore ${ARGS:-}
