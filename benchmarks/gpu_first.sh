#!/usr/bin/env bash
# The first minutes on a machine with a GPU, which may have no network, and nothing but torch, Triton, pytest, its xdist and timeout:
# correctness, by our checks and the tests of kernels, then speed. Results are files in the folder OUT, which is created.
#
#   OUT=folder bash benchmarks/gpu_first.sh [SECONDS]             checks, tests, then speed: 555 seconds
#   OUT=folder bash benchmarks/gpu_first.sh SECONDS server,tuning then these sections of gpu.py, server first
#
# Wheels of .whl/ are installed before, into a folder of their own, for what the machine lacks (python3 -m pip download --no-deps
# --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64
# --platform manylinux2014_x86_64 -d .whl llguidance msgspec protobuf; llguidance is what `tokens` and `model` want, `server` all).
set -uo pipefail
OUT=$(realpath -m "$OUT")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
limit=${1:-555} sections=${2:-}
mkdir -p build "$OUT"
ln -sfn .. build/penstock
mkdir -p build/penstock-0.dist-info # the launcher tells its version
printf 'Metadata-Version: 2.1\nName: penstock\nVersion: 0\n' >build/penstock-0.dist-info/METADATA
site=${TMPDIR:-/tmp}/penstock-site
export PYTHONPATH=$PWD/build:$site PYTHONUNBUFFERED=1
if compgen -G '.whl/*.whl' >/dev/null && [ ! -d "$site" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
fi

# Runs some sections for so many seconds. What they say goes to a file, and Python ends them a little before `timeout` does.
sections() {
    timeout -k 5 "$2" python3 benchmarks/gpu.py --only "$1" --minutes "$(python3 -c "print(max(20, $2 - 25) / 60)")" \
        --json "$OUT/$3.json" --markdown "$OUT/$3.md" >"$OUT/$3.log" 2>&1
}

if [ -n "$sections" ]; then
    for section in ${sections//,/ }; do
        left=$((limit - SECONDS))
        [ "$section" = server ] && [ $left -gt 105 ] && left=105
        sections "$section" $left "$section"
        tail -c 5000 "$OUT/$section.log"
    done
    exit
fi
(nvidia-smi; nproc; df -h /tmp /dev/shm; python3 -m pip list) >"$OUT/machine.log" 2>&1
sections correctness $((limit / 3)) right &
mapfile -t tests < <(grep -lE 'DEVICE|cuda' tests/kernels/test_*.py | grep -vE 'sanitizer|compile')
timeout --foreground -s INT -k 15 $((limit * 3 / 10)) python3 -m pytest -p no:cacheprovider -p xdist -n 7 -o filterwarnings=default \
    --tb=short -rfE --timeout 90 "${tests[@]}" >"$OUT/tests.log" 2>&1
wait # nothing is measured beside them
sections attention,operations,tokens,model $((limit - SECONDS)) speed
tail -n 40 "$OUT/tests.log" | cut -c1-160 | tail -c 3000
grep -aE '^(WRONG|goals)|took|ended|Error' "$OUT/right.log" | cut -c1-220 | tail -c 2500
tail -c 6000 "$OUT/speed.log"
