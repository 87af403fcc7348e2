"""Tasks of lm-evaluation-harness: of a run, and of its export, what the harness' own model of
transformers (HFLM) finds with the exported folder."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.exported import GPT2, LLAMA, trained
from support.tokenizers import TEXTS, write_tokenizer
from titanlike.core.config.groups.data import TextData
from titanlike.hf.hf_export import export
from titanlike.use import generation_commands as commands
from titanlike.use.generate import load_model

pytest.importorskip("lm_eval")
CPU = torch.device("cpu")

ROWS = [
    {"q": "def wrap(text, width):", "c": ["return", "the module", "x"], "a": 0},
    {"q": "    if not self", "c": [".width", " is None:", "s"], "a": 1},
    {"q": "".join(TEXTS[20:28]), "c": ["A", "B", "C"], "a": 2},
    {"q": "größe 日本 🙂", "c": ["e", "the text is wrapped", "n"], "a": 1},
]
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{c}}"
doc_to_target: "{{a}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TASKS = {
    "choices": f"{CHOICES}doc_to_text: '{{{{q}}}}'",
    "spaces": f"{CHOICES}doc_to_text: 'Q: {{{{q}}}}  '\ntarget_delimiter: ''",
    "letters": f"{CHOICES}doc_to_text: '{{{{q}}}} Answer:'\ndoc_to_choice: ['A', 'B', 'C']",
    "shots": f"{CHOICES}doc_to_text: '{{{{q}}}}'\nnum_fewshot: 2\nfewshot_split: test",
    "alone": f"{CHOICES}doc_to_text: ''\ntarget_delimiter: ''",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}} {{c | join(' ')}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{c[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    for name, task in TASKS.items():
        text = f"task: {name}\ndataset_path: json\n{data}{task}\n"
        (folder / f"{name}.yaml").write_text(text)
    return folder


def hflm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness' own. It imports accelerate, of which a loaded model needs nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with monkeypatch.context() as patch:
        if importlib.util.find_spec("accelerate") is None:
            names = ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size")
            for module in ("accelerate", "accelerate.utils"):
                made = ModuleType(module)
                vars(made).update(dict.fromkeys([*names, "get_max_memory"]))
                patch.setitem(sys.modules, module, made)
        from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=2)


def asked(model: Any, tasks: Path) -> dict[str, Any]:
    """Each task's numbers, and what the model answered to each request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(tasks)])
    found = simple_evaluate(model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
    answers = {
        task: [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in found["samples"].items()
    }
    return {"numbers": found["results"], "answers": answers}


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in flat(value[key])]
    return [x for one in value for x in flat(one)] if isinstance(value, (list, tuple)) else [value]


KINDS = ("bytes", "byte-level", "byte-begin", "metaspace-first", "sentencepiece-bpe-fallback")
KINDS += ("byte-alone", "byte-padding", "metaspace-always", "unigram", "word-piece")
KINDS += ("sentencepiece-bpe-alone",)


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_tasks_have_the_scores_of_the_harness_own_model(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Choices (also after a space, of one token, after nothing), whole texts, and written ones;
    texts longer than the model, and tokenizers that add a beginning."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    from titanlike.use.harness import HarnessModel

    (tmp_path / "text.txt").write_text("\n".join(TEXTS[:400]))
    tokenizer = write_tokenizer(kind, tmp_path / "given")
    paths = {"path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")}
    data = TextData(**paths, tokenizer=tokenizer)
    model = GPT2 if kind == "byte-level" else LLAMA
    run = trained(tmp_path / "run", model, steps=3, seq_len=32, data=data)
    export(run.run_dir, str(tmp_path / "out"))
    tasks = write_tasks(tmp_path / "tasks")
    right = asked(hflm(tmp_path / "out", monkeypatch), tasks)
    for location in (run.run_dir, str(tmp_path / "out")):
        mine = asked(HarnessModel(load_model(location, CPU, torch.float32), batch=3), tasks)
        for task in TASKS:
            for what in ("answers", "numbers"):
                pairs = zip(flat(mine[what][task]), flat(right[what][task]), strict=True)
                for found, expected in pairs:
                    same = found == expected or found == pytest.approx(expected, rel=1e-4)
                    assert same, (location, task, found, expected)
    if kind != "bytes":
        return
    words = [run.run_dir, "--task-files", str(tasks), "--batch", "2", "--tasks"]
    assert commands.evaluate_main([*words, ",".join(TASKS)]) == 0, capsys.readouterr().err
    [file] = (tmp_path / "run" / "checkpoints").glob("*.evaluations.json")
    [written] = json.loads(file.read_text())
    for task in TASKS:
        for name, expected in right["numbers"][task].items():
            if isinstance(expected, float) and "stderr" not in name:
                found = written["results"][task][name.removesuffix(",none")]
                assert found == pytest.approx(expected, rel=1e-4), (task, name)
    assert commands.evaluate_main([*words, "no_such"]) == 2
    assert "no such task" in capsys.readouterr().err
