#!/bin/bash
# try_wheel.sh WHEEL PYTHON...: install the wheel into a clean environment of each Python, and run the `ci` preset there.
set -euo pipefail

wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "$0")/../constraints.txt")
shift

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

for python in "$@"; do
    rm -rf venv ci demo
    "$python" -m venv venv
    venv/bin/pip install -q -c "$constraints" "$wheel"
    venv/bin/rlhf init demo demo
    venv/bin/rlhf init ci ci
    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 venv/bin/rlhf run ci
    test -s ci/eval/report.json
    echo "$(venv/bin/python --version): the wheel works"
done
