"""The lowest versions that pyproject.toml allows of the libraries that read files of others: nothing
in such a file runs code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT

READERS = ("pyyaml", "jinja2", "fsspec", "tokenizers", "pyarrow", "datasets", "sentencepiece")
READERS += ("safetensors",)
# each writes a file as somebody else could, and reads it as titanlike does; RAN appears if code ran
CASES = r"""
import importlib.metadata as metadata, json, os, pickle, sys
from pathlib import Path
import fsspec, jinja2, pyarrow as pa, pyarrow.parquet as pq, yaml
folder, ran = Path(sys.argv[1]), Path(sys.argv[1], "ran")
for pin in sys.argv[2:]:
    name, _, version = pin.partition("==")
    assert metadata.version(name).startswith(version), (name, metadata.version(name), version)
class Evil:
    def __reduce__(self):
        return os.system, (f"touch {ran}-pickle",)
def told(function, *given):
    try:
        return function(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def checked(what):
    found = [path.name for path in folder.iterdir() if path.name.startswith("ran")]
    assert not found, (what, found)
from titanlike.core.config.groups.data import HFData
from titanlike.formats import hf_dataset, text
from titanlike.formats.chat_template import ChatTemplate
from titanlike.formats.tokenizer import ByteTokenizer
command = f"touch {ran}-jinja"
gen = {"key": "{{ cycler.__init__.__globals__.os.system('" + command + "') }}x", "url": "x"}
gen |= {"offset": "0", "length": "1", "dimensions": {"i": {"stop": 1}}}
refs = {"version": 1, "templates": {}, "gen": [gen], "refs": {"x.txt": "hello"}}
(folder / "r.json").write_text(json.dumps(refs))
chain = f"reference://x.txt::file://{folder}/r.json"
told(lambda: fsspec.open(chain).open().read())
told(lambda: fsspec.filesystem("reference", fo=str(folder / "r.json"), simple_templates=False).ls(""))
checked("fsspec")
(folder / "ds").mkdir()
(folder / "ds" / "a.txt").write_text("hello")
card = f"---\nconfigs:\n- {{config_name: default, data_files: '{chain}'}}\n---\n"
(folder / "ds" / "README.md").write_text(card)
assert "none of the data files" in told(lambda: [*hf_dataset.texts(HFData(path=str(folder / "ds")))])
(folder / "ds" / "README.md").unlink()
assert [*hf_dataset.texts(HFData(path=str(folder / "ds")))] == ["hello"]
checked("a card")
run = "__globals__['__builtins__']['__import__']('os').system('" + command + "')"
for source in (
    "{{ cycler.__init__." + run + " }}",
    "{{ (''|attr('format_map')).__self__.__class__.__mro__ }}",
    "{% set f = 'a{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ('{0.__class__.__init__}'|attr('format'))(messages) }}",
    "{{ messages|map('attr', '__init__')|list }}" + "{{ messages.__init__." + run + " }}",
    "{{ (messages|map(attribute='__class__')|first).__base__." + run + " }}",
):
    text_of = told(lambda: ChatTemplate(source, ByteTokenizer()).render([{"role": "user", "content": "a"}]))
    assert "<class" not in text_of and "object at" not in text_of, text_of
checked("a template")
for source in ("!!python/object/apply:os.system ['touch x']", "!!python/name:os.system"):
    assert "constructor" in told(yaml.safe_load, source)
pickled = {b"ARROW:extension:name": b"arrow.py_extension_type"}
pickled |= {b"ARROW:extension:metadata": pickle.dumps(Evil())}
field = pa.field("text", pa.string(), metadata=pickled)
table = pa.Table.from_arrays([pa.array(["hello"])], schema=pa.schema([field]))
pq.write_table(table, folder / "a.parquet")
with pa.OSFile(str(folder / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
    writer.write_table(table)
for name in ("a.parquet", "a.arrow"):
    assert [*text.documents([folder / name], "text")] == ["hello"]
    assert [*hf_dataset.texts(HFData(path=str(folder / name)))] == ["hello"]
checked("Arrow")
print("whole")
"""


def lowest() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", line.replace(" ", "")) for line in lines)
    return {match[1]: match[2] for match in bounds if match and match[1] in READERS}


@pytest.mark.slow
def test_no_file_runs_code_in_the_lowest_versions(tmp_path: Path) -> None:
    pins = lowest()
    assert pins.keys() == {*READERS}, "each has a lower bound"
    target, work = tmp_path / "lowest", tmp_path / "work"
    words = [f"{name}=={version}" for name, version in pins.items()]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    done = subprocess.run([*install, *words], env=environment, capture_output=True, timeout=300)
    if done.returncode:
        pytest.skip(f"cannot install: {done.stderr.decode()[-300:]}")
    work.mkdir()
    environment |= {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CASES, str(work), *(f"{n}=={v}" for n, v in pins.items())]
    options = {"env": environment | {"HOME": str(work)}, "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=200)
    assert done.stdout.endswith("whole\n"), done.stderr[-2000:]
