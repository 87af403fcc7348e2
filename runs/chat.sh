#!/usr/bin/env bash
# A base model that learns to answer: conversations, warm start, train, evaluate, export, chat.
#
#   runs/base.sh && runs/chat.sh                                   # small sums, asked and answered
#   BASE=/runs/llama CHATS=/data/chats TOKENIZER=/models/tokenizer LAYOUT="pp=2 dp=4" runs/chat.sh
source "$(dirname "$0")/common.sh"
OUT=${OUT:-outputs/chat}
BASE=${BASE:-outputs/base/run}
CHATS=${CHATS:-$OUT/chats}
tokenizer=${TOKENIZER:-$(dirname "$BASE")/tokenizer}
read -ra layout <<< "${LAYOUT:-pp=2 schedule=1f1b}"
read -ra model <<< "${MODEL:-model=llama_tiny model.hidden_size=192 model.intermediate_size=512}"
read -ra more <<< "${MORE:-}"
steps=${STEPS:-300}

# 1. conversations: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]} a line
mkdir -p "$OUT"
[ -e "$CHATS" ] || python - "$CHATS" <<'PYTHON'
import json
import random
import sys
from pathlib import Path

draw = random.Random(0).randrange
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
with open(folder / "sums.jsonl", "w") as file:
    for _ in range(5_000):
        a, b = draw(20), draw(20)
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        roles = [("user", question), ("assistant", answer)]
        messages = [{"role": role, "content": text} for role, text in roles]
        file.write(json.dumps({"messages": messages}) + "\n")
PYTHON

# 2. the base model goes on with them; answers alone have a loss
config=("${model[@]}" "${layout[@]}" data=chat "data.path=$CHATS" "data.tokenizer=$tokenizer")
config+=("checkpoint.start_from=$BASE" "steps=$steps" optimizer.lr=1e-3 "${more[@]}")
titanlike --check "${config[@]}" "run_dir=$OUT/run"
titanlike "${config[@]}" "run_dir=$OUT/run"
titanlike report "$OUT/run" "$BASE" --out "$OUT/both.html"

# 3. the loss of its answers, the folder for transformers with its chat template, and a conversation
titanlike evaluate "$OUT/run" --trust-code  # its data are outside of it
[ -d "$OUT/hf" ] || titanlike export "$OUT/run" "$OUT/hf" --trust-code
titanlike generate "$OUT/run" --trust-code --chat --prompt "What is 3 plus 4?" --tokens 30 temperature=0 < /dev/null
