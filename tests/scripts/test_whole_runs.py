"""The pipelines in runs/, from a corpus to a model that answers, with tiny sizes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.paths import ROOT

SCRIPTS = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "common.sh")
SIZES = "model.num_hidden_layers=2 model.hidden_size=32"
COMMON = "logger=none seq_len=32 batch_size=8 validation.batches=1 device=cpu"


def pipeline(name: str, out: Path, **env: str) -> str:
    """What a script printed, whose every command succeeded."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(out), "MORE": COMMON, **env}
    done = subprocess.run(
        [str(ROOT / "runs" / name)], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def exported(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no ShellCheck")
def test_the_scripts_have_no_mistake_that_a_shell_would_find_while_it_runs() -> None:
    line = ["shellcheck", "-x", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)


@pytest.mark.grid
def test_a_base_model_is_made_of_a_corpus_and_learns_to_chat(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(Path(json.__file__).parent, corpus, ignore=shutil.ignore_patterns("*.pyc"))
    llama = f"model=llama_tiny {SIZES} model.intermediate_size=64"
    sizes = {"MODEL": llama, "LAYOUT": "pp=2", "VOCAB": "400"}
    text = pipeline("base.sh", tmp_path / "base", CORPUS=str(corpus), STEPS="6", **sizes)
    assert "bits_per_byte" in text and "training complete" in text and "agree" in text
    run = tmp_path / "base" / "run"
    assert (run / "report.html").is_file() and exported(tmp_path / "base" / "hf")
    roles = [("user", "What is 3 plus 4?"), ("assistant", "It is 7.")]
    messages = [{"role": role, "content": content} for role, content in roles]
    (tmp_path / "one.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 200)
    sizes |= {"CHATS": str(tmp_path / "one.jsonl"), "STEPS": "100", "BASE": str(run)}
    sizes["MORE"] = COMMON.replace("seq_len=32", "seq_len=80 optimizer.lr=1e-2")
    text = pipeline("chat.sh", tmp_path / "chat", **sizes)
    assert exported(tmp_path / "chat" / "hf")
    assert "> What is 3 plus 4?\nIt is 7.\n> \n" in text, "the answer has no end"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat" / "hf")
    how = {"add_generation_prompt": True, "return_tensors": "pt"}
    asked = tokenizer.apply_chat_template(messages[:1], **how)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "chat" / "hf")
    ids = model.generate(**asked, max_new_tokens=30, do_sample=False)[0]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids.tolist() == whole[: len(ids)] and ids[-1] == tokenizer.eos_token_id
    again = pipeline("chat.sh", tmp_path / "chat", **sizes)
    assert "nothing to do: the run is at step 100" in again


@pytest.mark.grid
def test_a_swept_mixture_resumes_in_another_layout(tmp_path: Path) -> None:
    model = f"model=moe_tiny {SIZES} model.moe_intermediate_size=64 model.bias_rate=0.0"
    text = pipeline("moe.sh", tmp_path, MODEL=model, STEPS="8", RATES="1e-3,3e-3")
    assert "2 of 2 done" in text and "resuming from step 4" in text
    assert text.count("bits_per_byte") == 2 and exported(tmp_path / "hf")
