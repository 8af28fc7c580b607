#!/bin/sh
# What only a GPU can show: run on a machine that has one (two, for NCCL between GPUs).
# Prints a table, and a line "result: ..." at its end. Exit status: 0 all rows are good,
# 1 some are not, 77 there is no GPU here and nothing was run. Takes at most 8 minutes.
#
# Arguments: a part of a row's name, to run those rows only.
# PYTHON  interpreter with vllm-kvd[cuda] and a torch that knows CUDA (default: python3)
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PYTHONPATH=. timeout 470 "$PYTHON" -m tests.gpu.run "$@"
status=$?
if [ "$status" -eq 124 ]; then
    echo "result: not within 470 s" >&2
    exit 1
fi
exit "$status"
