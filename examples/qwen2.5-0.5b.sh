#!/usr/bin/env bash
# Qwen2.5-0.5B by its hub id: 24 blocks, width 896, no BOS. Weights take 2 GB in float32. Not run by hub id yet.
#
#   examples/qwen2.5-0.5b.sh [MODEL] [OUT] [OPTION ...]
set -euo pipefail
model=${1:-Qwen/Qwen2.5-0.5B} out=${2:-runs/qwen2.5-0.5b}
# Its published initializer range is the config's own, so `init` needs no rule.
exec "$(dirname "$0")/every_probe.sh" "$model" "$out" "${@:3}"
