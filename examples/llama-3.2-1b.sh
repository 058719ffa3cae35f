#!/usr/bin/env bash
# Llama-3.2-1B by its hub id (gated: log in first): 16 blocks, width 2048, BOS first. Weights take 5 GB in float32; --dtype bfloat16
# halves that and rounds every number to three digits. Not run at this size yet.
#
#   examples/llama-3.2-1b.sh [MODEL] [OUT] [OPTION ...]
set -euo pipefail
model=${1:-meta-llama/Llama-3.2-1B} out=${2:-runs/llama-3.2-1b}
# Nobody published what it was initialized from: `init` is drawn from the config's number, and results say so.
exec "$(dirname "$0")/every_probe.sh" "$model" "$out" "${@:3}"
