"""A run directory that somebody else made names nothing: whatever its files say, no code of theirs
runs, no file outside of it is opened or written, and nothing is connected to."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers
import yaml

from support import forged, watched
from support.commands import SCRIPTS
from support.forged import Forge, environment, tree, watch
from titanlike.core.checkpoint.storage import STATE
from titanlike.core.config import received
from titanlike.core.config.keys import Paths
from titanlike.core.config.schema import VARIANTS, Config
from titanlike.formats.tokenizer import write_tokenizer

# In texts: OUT is a folder outside of the run, with what a forged value could mean there; RUN is the
# run's own. What is said of a form must be in the answer of the commands that read it; None = it is
# as if it were not there, and the job starts without it.
ASKED = "names what is not its own, and nothing of that was used: "
CONFIG: list[tuple[dict[str, Any], str | None]] = [
    ({"run_dir": "OUT/written"}, None),
    ({"precision": {"name": "fp32", "of_another_version": 1}}, None),
    ({"logger": {"name": "wandb", "project": "a", "mode": "online", "entity": "theirs"}}, None),
    ({"hardware": {"name": "run", "path": "OUT"}}, None),
    ({"defaults": [{"model": "theirs"}]}, None),
    ({"hydra": {"searchpath": ["file://OUT/conf"]}}, None),
    ({"hydra": {"callbacks": {"a": {"_target_": "theirs.Callback"}}}}, None),
    ({"hydra": {"run": {"dir": "OUT/w"}, "job": {"env_set": {"PYTHONPATH": "OUT"}}}}, None),
    ({"evaluate": {"tasks": ["a"], "task_files": ["OUT"], "every": 1}}, None),
    ({"launch": {"max_restarts": 5}, "compile": True}, None),
    ({"checkpoint": {"resume": "URL", "start_from": "URL"}}, None),
    ({"checkpoint": {"start_from": "hf:OUT/hf", "export": "hf", "keep": 1}}, None),
    ({"profile": {"name": "trace", "steps": [1, 2], "ranks": []}, "sample": {"every": 1}}, None),
    ({"theirs": {"_target_": "theirs.Model"}}, None),
    ({"data": {"name": "${evaluate.device}"}}, "has an interpolation"),
    ({"data": {"name": "text", "path": "${oc.env:HOME}"}}, "has an interpolation"),
    ({"model": {"name": "${seed_name}"}, "seed_name": "theirs.Model"}, "has an interpolation"),
    ({"model": {"name": "llama", "rope": {"${a}": 1}}}, "has an interpolation"),
    ({"checkpoint": {"folder": "${run_dir}/x"}}, "has an interpolation"),
    ({"data": {"name": "hydra.utils.instantiate", "config": {"_target_": "torch.load"}}}, ASKED),
    ({"data": {"name": "torch.load", "f": "OUT/x.pt", "weights_only": False}}, ASKED),
    ({"data": {"name": "theirs.rows"}}, "imports theirs.rows (data.name)"),
    ({"loss": {"name": "theirs.loss"}}, "imports theirs.loss (loss.name)"),
    ({"optimizer": {"name": "theirs.Opt"}}, "imports theirs.Opt (optimizer.name)"),
    ({"lr": {"name": "theirs.lr"}}, "imports theirs.lr (lr.name)"),
    ({"schedule": {"name": "theirs.order"}}, "imports theirs.order (schedule.name)"),
    ({"model": {"name": "theirs.Model"}}, "imports theirs.Model (model.name)"),
    ({"model": {"name": "os.system", "command": "touch OUT/ran"}}, "imports os.system"),
    ({"model": {"name": "torch.hub.load", "repo_or_dir": "a/b"}}, "imports torch.hub.load"),
    ({"model": {"name": "hf", "path": "OUT/hf"}}, "model.path=OUT/hf"),
    ({"model": {"name": "hf", "path": "someone/model"}}, "model.path=someone/model"),
    ({"data": {"name": "text", "path": "OUT/text.txt"}}, "data.path=OUT/text.txt"),
    ({"data": {"name": "text", "path": "text.txt"}}, "data.path=text.txt"),
    ({"data": {"name": "text", "path": "RUN/link/text.txt"}}, "data.path=RUN/link/text.txt"),
    ({"data": {"name": "text", "path": "RUN/inner"}}, "data.path=RUN/inner"),
    ({"data": {"name": "text", "path": "RUN/../outside/text.txt"}}, ASKED),
    ({"data": {"name": "text", "path": "~root/text.txt"}}, "data.path='~root/text.txt'"),
    ({"data": {"name": "text", "path": "a\0b"}}, ASKED),
    ({"data": {"name": "text", "path": "a (b)"}}, ASKED),
    ({"data": {"name": "text", "tokenizer": "OUT/tokenizer.json"}}, "data.tokenizer=OUT/token"),
    ({"data": {"name": "text", "cache": "OUT/cache"}}, "data.cache=OUT/cache"),
    ({"data": {"name": "tokens", "path": ["OUT/t.bin"], "vocab_size": 9}}, "data.path=[OUT/t.bin]"),
    ({"data": {"name": "hf", "path": "someone/dataset"}}, "data.path=someone/dataset"),
    ({"data": {"name": "hf", "path": "URL"}}, "data.path=URL"),
    (
        {"validation": {"data": {"name": "theirs.rows"}}},
        "imports theirs.rows (validation.data.name)",
    ),
    (
        {"validation": {"data": {"a": {"name": "theirs.rows"}}}},
        "theirs.rows (validation.data.a.name)",
    ),
    ({"validation": {"data": {"path": "OUT/text.txt"}}}, "validation.data={path:OUT/text.txt}"),
    ({"metrics": {"own": {"a": "theirs.metric"}}}, None),
    (
        {"data": {"name": "chat", "path": "OUT/c.jsonl", "template": "OUT/t.jinja"}},
        "data.template=",
    ),
    (
        {"data": {"name": "mixture", "sources": {"a": {"path": "OUT", "weight": 1}}}},
        "data.sources=",
    ),
    ({"schedule": {"name": "csv", "path": "OUT/order.csv"}}, "schedule.path=OUT/order.csv"),
    ({"checkpoint": {"folder": "OUT/checkpoints"}}, "checkpoint.folder=OUT/checkpoints"),
    ({"checkpoint": {"folder": "URL"}}, "checkpoint.folder=URL"),
    ({"checkpoint": {"folder": "reference::file://OUT/evil.json"}}, "checkpoint.folder=reference"),
    ({"checkpoint": {"folder": "filecache::URL"}}, "checkpoint.folder=filecache"),
    ({"checkpoint": {"folder": "s3://bucket/a"}}, "checkpoint.folder=s3://bucket/a"),
    ({"model": "llama", "pp": "two"}, "model=llama: a choice must be given"),
]
TEXTS = {
    "a tag of Python's": "a: !!python/object/apply:os.system ['touch OUT/ran']\n",
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
    "nested": "[" * 30_000,
    "large": "a: " + "x" * 2_000_000,
    "a list": "[1, 2]",
}
STATES: list[tuple[dict[str, Any], str | None]] = [
    ({"config.model": {"name": "theirs.Model"}, "model": {"name": "theirs.Model"}}, "heirs.Model"),
    ({"model.name": ["llama"]}, "is damaged"),
    ({"model.name": {}}, "is damaged"),
    ({"model": {}}, "is damaged"),
    ({"model.name": "torch.load", "model.f": "OUT/x.pt"}, "torch.load"),
    ({"model": [1]}, "is damaged"),
    ({"model": {"name": "hf", "path": "OUT/hf"}}, "model.path=OUT/hf"),
    ({"model": {"name": "hf", "path": "someone/model"}}, "model.path=someone/model"),
    ({"config.data.tokenizer": "OUT/tokenizer.json"}, "data.tokenizer=OUT/tokenizer.json"),
    ({"config.data.tokenizer": "tokenizer.json"}, "data.tokenizer=tokenizer.json"),
    (
        {"config.data": {"name": "chat", "path": "x", "template": "OUT/t.jinja"}},
        "data.template=OUT",
    ),
    ({"config.data": {"name": "tokens", "path": "OUT/tokens"}}, "data.path=OUT/tokens"),
    ({"config.data": {"name": "tokens", "path": "RUN/tokens"}}, ""),  # whose index names others
    ({"config.data": {"name": "mixture", "sources": {"a": {"path": "OUT"}}}}, "data.sources="),
    ({"config.data": {"name": "mixture", "sources": {"a": 1}}}, ""),
    ({"config.data": {"name": "theirs.rows"}}, ""),
    ({"run_dir": "OUT/written", "config.run_dir": "OUT/written"}, ""),
    ({"same": [1]}, "is damaged"),
    ({"layout.pp": "2"}, "is damaged"),
    ({"config": {"model": "llama"}}, ""),
    ({"config.checkpoint.folder": "URL", "config.logger": {"name": "wandb"}}, ""),
]
TIMELINES: list[tuple[dict[str, Any], str | None]] = [
    ({"config.model": {"name": "theirs.Model"}}, "no plan: "),
    ({"config.optimizer": {"name": "theirs.Opt"}}, "no plan: "),
    ({"config.loss": {"name": "theirs.loss"}}, "no plan: "),
    ({"config.data": {"name": "theirs.rows"}}, "no plan: "),
    ({"config.data.tokenizer": "OUT/tokenizer.json"}, "no plan: "),
    ({"config.hardware": {"name": "run", "path": "OUT"}}, ""),
    ({"config.model": {"name": "hf", "path": "OUT/hf"}}, "no plan: "),
    ({"config.run_dir": "OUT"}, ""),
    ({"config": [1]}, ""),
    ({"config.model.num_hidden_layers": 10**7}, ""),
    ({"config.pp": 10**7}, ""),
    ({"config.batch_size": 10**15}, ""),
    ({"order": [["F0"] * 10**6] * 2}, ""),
]


trained_run, outside, forge = forged.trained_run, forged.outside, forged.forge


def jobs_on(run: Path) -> Iterator[list[str]]:
    yield ["evaluate", str(run), "evaluate.batches=1"]


def looks_at(run: Path) -> Iterator[list[str]]:
    """Commands that read a run, but for those that compute for seconds."""
    for command in ("list", "show", "verify"):
        yield ["checkpoint", command, str(run)]
    yield ["checkpoint", "digest", str(run), str(run)]
    yield ["generate", str(run), "--prompt", "def", "--tokens", "1"]
    yield ["export", str(run), f"{run}/../{run.name}-out"]


@pytest.mark.slow
def test_files_and_modules_named_by_a_received_config_are_not_opened(forge: Forge) -> None:
    forms = [(forge.config(change), said) for change, said in CONFIG]
    for name, text in TEXTS.items():
        run = forge.run()
        (run / "config.yaml").write_text(forge.filled(text, run))
        forms.append((run, "is no config of a run" if name == "a list" else "is damaged"))
    for replaced in (os.mkfifo, lambda path: Path(path).symlink_to(forge.outside / "t.bin")):
        run = forge.run()
        (run / "config.yaml").unlink()
        replaced(run / "config.yaml")
        forms.append((run, "config.yaml"))
    commands = [(said, run, words) for run, said in forms for words in jobs_on(run)]
    commands += [(None, run, ["checkpoint", "list", str(run)]) for run, _ in forms]
    for (said, run, words), end in zip(
        commands, watch(forge, [words for _, _, words in commands]), strict=True
    ):
        if words[0] == "checkpoint":
            assert end["code"] == 0 and "step-00000001" in end["text"]
        elif said is None:
            [child] = end["children"]
            plain = yaml.safe_load(child["config"])
            assert plain["checkpoint"]["folder"] is None
            assert [w for w in child["words"] if "run_dir=" in w] == [f"run_dir='{run}'"]
        else:
            assert end["code"] == 2 and end["children"] == [], end
            assert forge.filled(said, run) in end["text"], end
            assert len(end["text"].splitlines()) == 1


# keys of what is read whose texts are never opened: names and patterns
PLAIN = {
    "data.text_key",
    "data.ids_key",
    "data.messages_key",
    "data.split",
    "data.subset",
    "data.revision",
}
PLAIN |= {"precision.skip", "activation_checkpoint.save", "split.points", "optimizer.adamw"}
PLAIN |= {"model.tp_plan", "optimizer.groups"}


def test_every_string_of_a_received_file_is_classified() -> None:
    """A new key is to be put into one of the two."""

    def texts(hint: Any) -> bool:
        inner = typing.get_args(hint)
        if typing.get_origin(hint) is Literal:
            return False
        return hint in (str, Any) or hint is Paths or any(map(texts, inner))

    found = set[str]()
    for group, hint in typing.get_type_hints(Config).items():
        if group in received.NOT_READ and group != "hardware":
            continue
        kinds = [*VARIANTS.get(group, {}).values(), *(typing.get_args(hint) or [hint])]
        for kind in filter(dataclasses.is_dataclass, kinds):
            hints = typing.get_type_hints(kind)
            keys = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
            read = received.PARTS_READ.get(group, keys)
            found |= {f"{group}.{k}" for k in read if k not in ("name", "args") and texts(keys[k])}
        assert dataclasses.is_dataclass(kinds[0]) or not texts(hint), group
    places = {f"{group}.{key}" for group, keys in received.PLACES.items() for key in keys}
    assert found - {"hardware.title"} == (places | PLAIN) - {"model.path"}


@pytest.mark.slow
def test_evaluating_a_received_run_opens_nothing_else(forge: Forge) -> None:
    """Each process watched, in a working directory with modules that would stand for libraries."""
    change: dict[str, Any] = {}
    for one, said in CONFIG:
        change |= one if said is None else {}
    run, home = forge.config(change), forge.tmp_path / "home"
    env = environment(home)
    more, log = watched.watch_children(forge.outside, forge.tmp_path / "runs", home)
    before = tree(forge.outside)
    programs = [str(SCRIPTS / "titanlike")], [sys.executable, "-m", "titanlike"]
    for command in ([*program, *words] for program in programs for words in jobs_on(run)):
        told = {"capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(command, cwd=forge.outside, env=env | more, **told)
        assert done.returncode == 0 and done.stdout, done.stderr
    breaches = log.read_text().splitlines() if log.exists() else []
    assert {*breaches} <= {f"os.listdir {forge.outside}"}  # where Python itself looks for -m
    assert tree(forge.outside) == before and (run / "perplexity" / "result.json").exists()


@pytest.mark.slow
def test_files_named_by_a_received_checkpoint_are_not_opened(forge: Forge) -> None:
    file = f"checkpoints/step-00000001/{STATE}"
    forms = [(forge.json(file, change), said) for change, said in STATES]
    commands = [(said, run, words) for run, said in forms for words in looks_at(run)]
    ends = watch(forge, [words for _, _, words in commands])
    for (said, run, words), end in zip(commands, ends, strict=True):
        if words[0] == "generate":
            assert forge.filled(said, run) in end["text"] and (not said or end["code"] == 2), end


FOLDERS_OF_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"_attn_implementation": "someone/kernel"}),
    ("config.json", {"attn_implementation": "someone/kernel:a"}),
    ("config.json", {"_experts_implementation": "someone/kernel"}),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "theirs.Model"}}),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "someone/code--theirs.Model"}}),
    ("config.json", {"_name_or_path": "OUT", "transformers_version": "OUT"}),
    ("config.json", {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}),
    ("config.json", {"quantization_config": {"quant_method": "theirs"}}),
    ("config.json", {"quantization_config": {"quant_method": "quark", "file": "OUT"}}),
    ("adapter_config.json", {"base_model_name_or_path": "OUT", "peft_type": "LORA"}),
    ("tokenizer_config.json", {"tokenizer_file": "OUT/tokenizer.json"}),
    ("tokenizer_config.json", {"vocab_file": "OUT/t.bin", "merges_file": "OUT/t.bin"}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}}),
    ("tokenizer_config.json", {"tokenizer_class": "theirs.Tokenizer"}),
    ("tokenizer_config.json", {"name_or_path": "someone/model", "chat_template": "{{ OUT }}"}),
    ("generation_config.json", {"custom_generate": "someone/code", "eos_token_id": 1}),
    ("model.safetensors.index.json", {"weight_map": {"a": "OUT/t.bin"}}),
]


@pytest.mark.slow
def test_files_named_by_a_received_transformers_folder_are_not_opened(forge: Forge) -> None:
    source, commands = forge.tmp_path / "source", []
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(source)
    write_tokenizer("bytes", source)
    for number, (name, change) in enumerate(FOLDERS_OF_OTHERS):
        folder = forge.tmp_path / "runs" / f"hf-{number}"
        shutil.copytree(source, folder)
        path = folder / name
        plain = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(plain | forge.filled(change, folder)))
        commands.append(["generate", str(folder), "--prompt", "def", "--tokens", "1"])
    assert {0} < {end["code"] for end in watch(forge, commands)} <= {0, 2}


@pytest.mark.slow
def test_received_timelines_and_links_open_nothing_else(forge: Forge) -> None:
    commands, said = [], []
    for change, text in TIMELINES:
        run = forge.json("timeline.json", change)
        commands += [["timeline", str(run)], ["report", str(run)]]
        said += [text, text]
    links: dict[str, Callable[[Path], Path]] = {
        "is a link, and": lambda run: run / "perplexity",
        "is a link, and ": lambda run: run / "perplexity" / "logs" / "rank0.log",
        "checkpoint.folder=OUT/checkpoints": lambda run: run / "checkpoints",
    }
    for text, place in links.items():
        run = forge.run()
        link = place(run)
        shutil.rmtree(link, ignore_errors=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(forge.outside / ("t.bin" if link.suffix else "checkpoints"))
        commands += jobs_on(run)
        said.append(text)
    for text, end in zip(said, watch(forge, commands), strict=True):
        assert forge.filled(text, Path()) in end["text"], end
