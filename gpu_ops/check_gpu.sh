#!/bin/sh
# Check and measure the GPU path on a machine that has a card:
#
#     gpu_ops/check_gpu.sh [FOLDER]
#
# The checkout's own .venv is used where there is one, else python3, or what PYTHON names; it needs numpy, protobuf,
# pytest, cuda-core and PyTorch with CUDA. The figures go into FOLDER (build/gpu).
# TOKENBUS_CHECK=tests leaves the benchmark out.
set -eu

cd "$(dirname "$0")/.."
results=${1:-build/gpu}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="contracts:gpu_ops:.${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$results"

# The project's own settings of pytest want plugins that a GPU machine may not have, and these tests do not.
PYTEST="-m pytest -c /dev/null --rootdir . --import-mode=importlib --noconftest -p no:cacheprovider -q -rs"

echo "==> the card"
"$PYTHON" - <<'END'
import sys

try:
    import torch
except ImportError:
    sys.exit("error: PyTorch is not installed here; the tests and the benchmark make their arrays with it")
if not torch.cuda.is_available():
    sys.exit("error: there is no CUDA card here, so nothing was checked and nothing was measured")
print(torch.cuda.get_device_name(), "with PyTorch", torch.__version__)
END

echo "==> tests"
# shellcheck disable=SC2086 - it is several words
"$PYTHON" $PYTEST tests/gpu_ops/test_gpu.py tests/gpu_ops/test_kernels.py

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "==> compute-sanitizer: $tool"
        # shellcheck disable=SC2086
        compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
            "$PYTHON" $PYTEST tests/gpu_ops/test_gpu.py \
            -k "kind_of_logits and 500 or masks_up_to_their_bounds and 1025 or 2-151936 and bfloat16 or end_of_the_floats or faults or several_tokens"
    done
fi

[ "${TOKENBUS_CHECK:-}" = tests ] && exit
echo "==> benchmark"
"$PYTHON" -m benchmarks.gpu_ops --json "$results/gpu-ops.json"
