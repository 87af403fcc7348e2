# shellcheck shell=bash
# What the scripts of this folder share; sourced by them, in the checkout's folder.
# Variables that they take from the environment: OUT (where all is written), LAYOUT (overrides: mesh and
# schedule), MODEL (overrides: sizes), STEPS, HARDWARE (that is planned for), MORE (any overrides).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

titanlike() {
    printf '\n$ titanlike %s\n' "$*"
    python -m titanlike "$@"
}

# a corpus that every machine has, where none is named: the sources of Python's standard library
standard_library() { python -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])"; }

train_tokenizer() { # CORPUS FOLDER SIZE
    [ -f "$2/tokenizer.json" ] || python - "$@" <<'PYTHON'
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

corpus, folder, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
files = sorted(str(p) for p in corpus.rglob("*") if p.suffix in (".txt", ".py", ".md", ".jsonl"))
tokenizer = ByteLevelBPETokenizer()
tokenizer.train(files[:2000], vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
folder.mkdir(parents=True, exist_ok=True)
tokenizer.save(str(folder / "tokenizer.json"))
print(f"{folder}/tokenizer.json: {tokenizer.get_vocab_size()} tokens from {len(files[:2000])} files")
PYTHON
}
