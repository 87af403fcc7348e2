#!/usr/bin/env bash
# A base model from a folder of text to a folder for transformers: corpus, tokenizer, plan, check, verify, train,
# evaluate, export, generate. The same command again resumes what is left.
#
#   runs/base.sh                                           # Python's sources, four ranks of this machine
#   CORPUS=/data/web VOCAB=32000 LAYOUT="pp=4 dp=2 schedule=zbvzerobubble" STEPS=20000 runs/base.sh
source "$(dirname "$0")/common.sh"
OUT=${OUT:-outputs/base}
CORPUS=${CORPUS:-$(standard_library)/email}
read -ra layout <<< "${LAYOUT:-pp=2 dp=2 schedule=1f1b}"
read -ra model <<< "${MODEL:-model=llama_tiny model.hidden_size=192 model.intermediate_size=512}"
read -ra more <<< "${MORE:-}"
steps=${STEPS:-300}

# 1. the corpus as token ids, by a tokenizer of its own
train_tokenizer "$CORPUS" "$OUT/tokenizer" "${VOCAB:-2048}"
titanlike tokenize "$CORPUS" "$OUT/tokens" --tokenizer "$OUT/tokenizer/tokenizer.json"
config=("${model[@]}" "${layout[@]}" data=tokens "data.path=$OUT/tokens" "steps=$steps" "${more[@]}")

# 2. what it will cost, whether the config is right, and whether this layout computes what one process does
titanlike plan "${config[@]}" "hardware=${HARDWARE:-cpu}" --picture "$OUT/plan.svg"
titanlike --check "${config[@]}" "run_dir=$OUT/run"
titanlike verify "${config[@]}" verify.steps=2 "run_dir=$OUT/run"

# 3. training; two steps are recorded as a timeline
titanlike "${config[@]}" timeline=true "run_dir=$OUT/run"
titanlike timeline "$OUT/run" --trust-code  # its tokens are outside of it
titanlike report "$OUT/run" --trust-code

# 4. the model: perplexity, a folder for transformers, text
titanlike evaluate "$OUT/run" --trust-code  # its data are outside of it
[ -d "$OUT/hf" ] || titanlike export "$OUT/run" "$OUT/hf" --trust-code
titanlike generate "$OUT/hf" --prompt "def main" --prompt "import" --tokens 40 temperature=0.8
