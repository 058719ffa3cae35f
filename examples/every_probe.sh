#!/usr/bin/env bash
# Every probe on one model, into one folder to share. The cases beside this file call it with their settings.
#
#   examples/every_probe.sh MODEL OUT [OPTION ...]     options of every command, as --device cuda or --dtype bfloat16
#
# PROMPTS (16), LENGTH (256) and MANY (256; prompts of leakage and bos-swap, whose intervals want hundreds) say how much is
# measured, TEXT=FILE on what text, RULE (config) what fresh weights are drawn from. A run that was stopped resumes with the
# same command.
set -euo pipefail
model=$1 out=$2
shift 2
prompts=${PROMPTS:-16} length=${LENGTH:-256} many=${MANY:-256} rule=${RULE:-config}
headwater=${HEADWATER:-headwater} text=(${TEXT:+--text "$TEXT"})

measure() {  # PROBE [OPTION ...]
    local probe=$1
    shift
    "$headwater" "$probe" "$model" --out "$out/$probe" --length "$length" ${text[@]+"${text[@]}"} "$@"
}
# The cheap ones first, so that there is something to look at soon.
measure sinks --prompts "$prompts" "$@"
measure trajectory --prompts "$prompts" "$@"
measure leakage --prompts "$many" "$@"
measure jacobian --prompts "$prompts" --seeds 1 --initialization "$rule" "$@"
measure bos-swap --prompts "$many" "$@"
"$headwater" inspect "$model" --out "$out/inspect" --initialization "$rule" \
    --prompt "The capital of France is Paris. The capital of Italy is" "$@"
apart=()  # theory takes blocks apart, which transformers' modules alone allow
while (($#)); do
    case $1 in
        --backend) shift 2 ;;
        --backend=*) shift ;;
        *) apart+=("$1") && shift ;;
    esac
done
measure theory --prompts 1 --seeds 1 --initialization "$rule" ${apart[@]+"${apart[@]}"}
"$headwater" report --out "$out"  # one page from what is there: index.html
echo "share $out: results (*.nc), figures, tables and index.html"
