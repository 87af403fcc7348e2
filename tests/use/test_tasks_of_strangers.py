"""Tasks of lm-evaluation-harness on a run, or a folder of transformers, that somebody else made: its
files name no code, file or server that the harness uses; nor does a task that lies in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from support import forged
from support.cells import GRID, slow
from support.forged import Forge, watched_ends
from titanlike.core.checkpoint.storage import STATE
from titanlike.formats.tokenizer import write_tokenizer

pytest.importorskip("lm_eval")
trained_run, outside, forge = forged.trained_run, forged.outside, forged.forge

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
# what would be read where lm_eval looked for tasks, or datasets for a card, in the run or beside it
STRANGE = (
    CHOICE
    + """process_docs: !function theirs.rows
metadata: {{pretrained: OUT/hf, trust_remote_code: true}}
"""
)
# what the libraries do by themselves: is there IPv6, and a tokenizer's temporary folder
OWN = (
    "socket.bind (('::1', 0),)",
    *(f"{verb} /tmp/tmp" for verb in ("open", "os.mkdir", "os.rmdir")),
)
OWN += ("os.remove tokenizer",)
STATES: list[dict[str, Any]] = [
    {},
    {"config.evaluate": {"tasks": ["strange"], "task_files": ["OUT", "RUN"], "every": 1}},
    {"config.data.tokenizer": "RUN/theirs"},
    {"config.data.tokenizer": "OUT/tokenizer.json"},
    {"config.model": {"name": "theirs.Model"}, "model": {"name": "theirs.Model"}},
]
TOKENIZERS: list[dict[str, Any]] = [
    {"tokenizer_class": "theirs.Tokenizer"},
    {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}, "tokenizer_file": "OUT/t.bin"},
    {"name_or_path": "someone/model", "vocab_file": "OUT/t.bin", "chat_template": "{{ OUT }}"},
]


def write_tasks(folder: Path, text: str, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text('{"q": "def"}\n{"q": "class"}\n')
    (folder / f"{name}.yaml").write_text(text.format(name=name, folder=folder))
    return folder


@pytest.mark.parametrize("kind", slow("run", "tokenizer", "transformers", marks=GRID))
def test_tasks_on_a_received_folder_use_nothing_that_it_names(
    kind: str, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a task's own data are the user's to fetch
    tasks = write_tasks(forge.tmp_path / "tasks", CHOICE, "choice")
    folders = [forge.json(f"checkpoints/step-00000001/{STATE}", change) for change in STATES]
    if kind == "run":
        folders = folders[:2] + folders[3:]
    elif kind == "tokenizer":
        folders = [forge.json(f"checkpoints/step-00000001/{STATE}", STATES[2]) for _ in TOKENIZERS]
    else:
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
        source = forge.tmp_path / "source"
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(source)
        write_tokenizer("bytes", source)
        folders = [forge.tmp_path / "runs" / f"hf-{n}" for n in range(len(TOKENIZERS))]
        for folder in folders:
            shutil.copytree(source, folder)
    for number, folder in enumerate(folders):
        write_tasks(folder, forge.filled(STRANGE, folder), "strange")
        write_tasks(folder, forge.filled(STRANGE, folder), "choice")
        if kind != "run":
            place = folder if kind == "transformers" else folder / "theirs"
            place.mkdir(exist_ok=True)
            if kind == "tokenizer":
                write_tokenizer("bytes", place)
            path = place / "tokenizer_config.json"
            plain = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(plain | forge.filled(TOKENIZERS[number], folder)))
    words = ["--tasks", "choice", "--task-files", str(tasks)]
    strange = ["evaluate", str(folders[0]), "--tasks", "strange"]
    *ends, unknown = watched_ends(
        forge, [*(["evaluate", str(f), *words] for f in folders), strange]
    )
    for end in ends:
        said = [text for text in end["breaches"] if not text.startswith(OWN)]
        assert said == [] and end["children"] == [], end
        assert "Traceback" not in end["text"], end
    assert any("choice  acc  " in end["text"] for end in ends), ends
    assert "has no such task" in unknown["text"]
