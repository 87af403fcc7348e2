#!/usr/bin/env bash
# A mixture of experts on two corpora by weights: the learning rate by a sweep, a run that is stopped and resumed
# in another layout, evaluation of each corpus, export.
#
#   runs/moe.sh
#   WEB=/data/web CODE=/data/code LAYOUT="pp=2 dp=4 ep=4" THEN="dp=8 ep=8" STEPS=20000 runs/moe.sh
source "$(dirname "$0")/common.sh"
OUT=${OUT:-outputs/moe}
WEB=${WEB:-$(standard_library)/email}
CODE=${CODE:-$(standard_library)/json}
read -ra layout <<< "${LAYOUT:-dp=2 ep=2}"
read -ra second <<< "${THEN:-pp=2 dp=1}"
read -ra model <<< "${MODEL:-model=moe_tiny model.bias_rate=0.0 model.balance_loss=0.01}"
read -ra more <<< "${MORE:-}"
steps=${STEPS:-200}
rates=${RATES:-1e-3,3e-3}
config=("${model[@]}" data=mixture lr=constant "${more[@]}")
config+=("data.sources={web:{path:$WEB,weight:0.7},code:{path:$CODE,weight:0.3}}")

# 1. the layouts of as many devices, by what they would cost
titanlike plan search "gpus=${DEVICES:-2}" "${config[@]}" "hardware=${HARDWARE:-cpu}" --top 3

# 2. short runs with each learning rate; the table at the end has the loss of each
titanlike -m "${config[@]}" "${layout[@]}" "optimizer.lr=$rates" "steps=$((steps / 4))" \
    sweep.resume=true checkpoint.last=false "run_dir=$OUT/sweep"
lr=$(python - "$OUT/sweep" <<'PYTHON'
import json
import sys
from pathlib import Path

results = [json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("*/result.json")]
best = min((r for r in results if r["value"] is not None), key=lambda r: r["value"])
print(next(o.split("=")[1] for o in best["overrides"] if o.startswith("optimizer.lr=")))
PYTHON
)

# 3. half of the run in one layout, the rest in another: the losses are those of one run
titanlike "${config[@]}" "${layout[@]}" "optimizer.lr=$lr" "steps=$((steps / 2))" "run_dir=$OUT/run"
titanlike "${config[@]}" "${second[@]}" "optimizer.lr=$lr" "steps=$steps" "run_dir=$OUT/run"
titanlike report "$OUT/run"

# 4. perplexity of each corpus, and the folder for transformers
for corpus in "$WEB" "$CODE"; do
    titanlike evaluate "$OUT/run" data=text "data.path=$corpus"
done
[ -d "$OUT/hf" ] || titanlike export "$OUT/run" "$OUT/hf" --trust-code  # its tokenizer is outside of it
titanlike generate "$OUT/run" --trust-code --prompt "import" --tokens 30 temperature=0.8
