#!/usr/bin/env bash
# The two models of "Lost in the Middle at Birth" (arXiv 2603.10123) by their hub ids: the Jacobian norm by position with fresh and
# with pretrained weights, the theory at initialization, and the paper's sentences judged on them. Not run by hub id yet.
#
#   examples/chowdhury-pair.sh [OUT] [OPTION ...]     options of every command, as --device cuda
#
# MODELS names others in their place, PROMPTS (16) and LENGTH (1024, GPT-2's longest) say how much is measured.
set -euo pipefail
out=${1:-runs/chowdhury-pair} headwater=${HEADWATER:-headwater}
read -ra models <<<"${MODELS:-openai-community/gpt2 Qwen/Qwen2-0.5B}"
for model in "${models[@]}"; do  # one folder a model, so that a run that was stopped goes on with the next
    name=${model##*/}
    "$headwater" jacobian "$model" --prompts "${PROMPTS:-16}" --length "${LENGTH:-1024}" --seeds 2 --out "$out/jacobian/$name" "${@:2}"
    "$headwater" theory "$model" --prompts 1 --length "${LENGTH:-1024}" --seeds 2 --out "$out/theory/$name" "${@:2}"
done
"$headwater" report --out "$out"
