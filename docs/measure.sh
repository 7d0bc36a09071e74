#!/usr/bin/env bash
# Measures the tables of docs/results.md that need one GPU again:
#
#   docs/measure.sh OUT PART...        what each part's commands print goes to OUT/NAME.txt, their JSON line to OUT/NAME.json
#
#   part       minutes   what it measures
#   tests            7   all tests marked gpu, but the next
#   exchange       0.5   schedules exchanged while serving
#   link           0.5   KV pages between the GPU and the store's memory
#   few              1   1, 8 and 64 requests at once
#   tune             9   schedules for the loads below, into OUT/schedules; the parts after it serve with them
#   runs             6   512/512 and 1024/512 with these schedules, and with none, then operator by operator
#   sharegpt         1   lengths drawn from the CSV that LENGTHS names
#   drift            8   decodes from 10 to 90 % of a batch, steady and served
#   ablation         6   non-overlap, nano-batches only, overlap, in turns
#   whole            7   the same as whole runs of 512/512
#   profile          3   operators alone and beside each other
#   sanitizer        5   compute-sanitizer over small runs
#
# A command that takes much longer than it should is stopped. The exit status counts the commands that failed.
# MODEL: a model folder (default: LLaMA-3-8B's shapes, written to OUT/model). NANOFLOW, PYTHON: what runs (.venv's).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 2 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
PYTHON=${PYTHON:-.venv/bin/python}
NANOFLOW=${NANOFLOW:-.venv/bin/nanoflow}
OUT=$1
MODEL=${MODEL:-$OUT/model}
failed=0
mkdir -p "$OUT"

if [ ! -e "$MODEL/config.json" ]; then
    mkdir -p "$MODEL"
    cat > "$MODEL/config.json" <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
 "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
 "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
 "tie_word_embeddings": false, "attention_bias": false, "hidden_act": "silu", "bos_token_id": 128000,
 "eos_token_id": 128001, "dtype": "bfloat16"}
JSON
fi

# measure NAME SECONDS COMMAND...: at most so long; what it prints is kept and its end shown.
measure() {
    local name=$1 seconds=$2 status=0 start=$SECONDS
    shift 2
    printf '== %s: %s\n' "$name" "$*"
    timeout --kill-after=10 "$seconds" "$@" > "$OUT/$name.out" 2> "$OUT/$name.err" || status=$?
    cat "$OUT/$name.err" "$OUT/$name.out" > "$OUT/$name.txt"
    grep '^{' "$OUT/$name.out" | tail -n 1 > "$OUT/$name.json" || rm "$OUT/$name.json"
    rm "$OUT/$name.out" "$OUT/$name.err"
    grep -v '^{' "$OUT/$name.txt" | tail -n 40 | cut -c 1-240
    printf -- '-- %s: exit status %s, %s s\n' "$name" "$status" $((SECONDS - start))
    [ "$status" = 0 ] || failed=$((failed + 1))
}

shapes=("$MODEL" --device cuda --load-format dummy --max-model-len 8192)
load() { printf -- '--input-len %s --output-len %s --num-prompts %s' "$@"; }
gpu_tests() { measure "$1" "$2" "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider "${@:3}"; }
throughput() { measure "$1" "$2" "$NANOFLOW" bench throughput "${shapes[@]}" "${@:3}"; }
tune() { measure "$1" "$2" "$NANOFLOW" tune "${shapes[@]}" --out "$OUT/schedules" "${@:3}"; }

run_part() {
    case $1 in
    tests) gpu_tests tests 590 -k 'not waits' ;;
    exchange) gpu_tests exchange 120 -s -k waits tests/worker/test_cuda_schedules.py ;;
    link) measure link 90 "$NANOFLOW" bench offload link ;;
    few)
        for num in 1 8 64; do throughput "few-$num" 90 $(load 512 128 $num); done ;;
    tune)
        tune tune-768 240 --batch-sizes 2048 --decode-shares 0.3,0.4,0.485,0.515 --mean-contexts 768
        tune tune-1280 150 --batch-sizes 2048 --decode-shares 0.33 --mean-contexts 1280
        tune tune-1024 150 --batch-sizes 1280 --num-decodes 853 --mean-contexts 1024 ;;
    runs)
        throughput 512-512-schedules 120 $(load 512 512 2048) --schedules "$OUT/schedules"
        throughput 512-512 200 $(load 512 512 2048) --breakdown
        throughput 1024-512-schedules 120 $(load 1024 512 1536) --schedules "$OUT/schedules"
        throughput 1024-512 200 $(load 1024 512 1536) --breakdown ;;
    sharegpt)
        throughput sharegpt 120 --lengths-file "${LENGTHS:?names no CSV of prompt and output tokens}" --num-prompts 3000 \
            --max-num-batched-tokens 4224 --max-num-seqs 3072 ;;
    drift)
        measure tune-384 240 "$NANOFLOW" tune "${shapes[@]}" --max-num-seqs 2048 --out "$OUT/schedules-384" \
            --batch-sizes 2048 --decode-shares 0.1,0.3,0.5,0.7,0.9 --mean-contexts 384
        for how in '' --served; do
            measure "drift$how" 290 "$NANOFLOW" bench drift "${shapes[@]}" --max-num-seqs 2048 --repeats 2 \
                --schedules "$OUT/schedules-384" $how
        done ;;
    ablation)
        measure ablation 500 "$NANOFLOW" bench ablation "${shapes[@]}" --repeats 3 --schedules "$OUT/schedules" \
            --attention-sms 48,64,80 --plot "$OUT/ablation.png" --traces "$OUT/traces" ;;
    whole)
        measure whole 500 "$NANOFLOW" bench ablation "${shapes[@]}" --repeats 3 --schedules "$OUT/schedules" \
            --whole-runs --loads 512/512x2048 --attention-sms 64 --nano-batch-counts 2 ;;
    profile) measure profile 240 "$NANOFLOW" profile "$MODEL" --load-format dummy --output "$OUT/h200.json" --max-seconds 165 ;;
    sanitizer)
        for tool in memcheck racecheck synccheck; do
            measure "$tool" 250 compute-sanitizer --tool "$tool" "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider \
                tests/worker/test_cuda_executor.py
        done ;;
    *) printf 'no part %s: see the head of this file\n' "$1" >&2; exit 2 ;;
    esac
}

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2> /dev/null || true
for part in "${@:2}"; do run_part "$part"; done
exit "$failed"
