"""A checkpoint as a folder for transformers: the same model there, of any layout, without its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from support.cells import cells, slow
from support.exported import GPT2, LLAMA, MOE, trained, with_args
from support.hf_tiny import folder_of, model_of
from support.saved_runs import a_run, checkpoint, train_all
from titanlike.checkpoint.dcp_storage import StorageWriter
from titanlike.checkpoint.hf_export import export, main
from titanlike.checkpoint.resume import run_identity
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import MODEL
from titanlike.checkpoint.tensor_rows import TensorRows
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config, Model, TextData
from titanlike.data.tokenizer import ByteTokenizer
from titanlike.job.check import _export_problem, problems
from titanlike.models.hf_config import FAMILIES
from titanlike.models.registry import build_model, resolve_model

CLOSE = 1e-5


def ours(config: Config) -> nn.Module:
    """The model of a run's checkpoint, in this process."""
    rows = TensorRows.open("RUN", config.run_dir)
    model = build_model(resolve_model(config), "cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in parameters:
            parameters[name].copy_(rows.whole(MODEL + name))
    return model.eval()


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def some_ids(vocab: int = 64) -> Tensor:
    return torch.randint(3, vocab, (2, 16), generator=torch.Generator().manual_seed(0))


def assert_same_logits(config: Config, folder: Path) -> None:
    with torch.no_grad():
        here, there = ours(config)(some_ids()), theirs(folder)(some_ids()).logits
    assert (here - there).abs().max() < CLOSE and here.std() > 0.1


def tensors(folder: Path) -> dict[str, bytes]:
    """Name -> dtype, shape and bytes of every tensor in a folder's files."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_tensor(name)
                about = f"{one.dtype} {tuple(one.shape)} ".encode()
                found[name] = about + one.flatten().view(torch.uint8).numpy().tobytes()
    return found


LAYOUTS = cells(
    {
        "llama-tied-tp2": (with_args(LLAMA, tied=True), {"tp": 2, "dp": 2}),
        "gpt2-pp2": (with_args(GPT2, tied=True), {"pp": 2}),
    },
    {
        "llama": (LLAMA, {}),
        "llama-pp2-dp2": (LLAMA, {"pp": 2, "dp": 2}),
        "llama-tp2-pp2": (LLAMA, {"tp": 2, "pp": 2}),
        "llama-tied-dp4": (with_args(LLAMA, tied=True), {"dp": 4}),
        "moe-ep2": (with_args(MOE, balance_loss=0.01), {"dp": 2, "ep": 2}),
        "qwen3-moe-pp2": (with_args(MOE, qk_norm=True, head_dim=16, tied=True), {"pp": 2}),
        "qwen3-moe-raw": (with_args(MOE, qk_norm=True, renormalize=False), {"dp": 2}),
        "gpt2-untied-tp2": (with_args(GPT2, tied=False), {"tp": 2, "dp": 2}),
    },
)


@pytest.mark.parametrize("case", LAYOUTS)
def test_transformers_computes_the_same_logits_as_the_run(case: Any, tmp_path: Path) -> None:
    model, layout = case
    config = trained(tmp_path / "run", model, **layout)
    export(config.run_dir, str(tmp_path / "out"), shard_bytes=20_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert_same_logits(config, tmp_path / "out")
    tied = model.args.get("tied", False)
    assert any("lm_head" in name for name in tensors(tmp_path / "out")) == (not tied)


QUICK = ("qwen3", "mixtral")
REST = slow(*(family for family in FAMILIES if family not in QUICK))


@pytest.mark.parametrize("family", [*QUICK, *REST])
def test_a_folder_of_transformers_comes_back_to_the_last_bit(family: str, tmp_path: Path) -> None:
    """Folder, a run that changes nothing, folder: names, dtypes and bytes are the same."""
    folder_of(family, tmp_path / "in").to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    (tmp_path / "bf16" / "tokenizer.json").write_text("{}")
    config = a_run(tmp_path / "run", pp=2 if family in QUICK else 1, steps=1, last=True, every=0)
    config = replace(config, model=Model("hf", {"path": str(tmp_path / "bf16")}))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    assert train_all(config) == [""]
    assert main([config.run_dir, str(tmp_path / "out")]) == 0
    before, after = tensors(tmp_path / "bf16"), tensors(tmp_path / "out")
    assert after == before
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with torch.no_grad():
        logits = [theirs(tmp_path / name)(some_ids()).logits for name in ("bf16", "out")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", ["mixtral", *slow("gemma2", "qwen3", "gpt_neox", "phi3")])
def test_a_family_from_scratch_is_written_in_the_form_that_transformers_writes(
    family: str, tmp_path: Path
) -> None:
    config = trained(tmp_path / "run", model_of(family), dp=2)
    export(config.run_dir, str(tmp_path / "out"))
    model = theirs(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path / "out") == tensors(tmp_path / "again")
    saved = TensorRows.open("RUN", config.run_dir)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.whole(MODEL + name)), name


def test_the_tokenizer_of_a_run_goes_with_it_also_that_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def größe():\n\treturn 'é'\n" * 300)
    data = TextData(path=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"))
    config = trained(tmp_path / "run", LLAMA, data=data)
    export(config.run_dir, str(tmp_path / "out"), dtype="bf16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def größe(x):\n\treturn 'é' # <|endoftext|> no"
    assert tokenizer("def größe('é')")["input_ids"] == ByteTokenizer().encode("def größe('é')")
    assert tokenizer.decode(ByteTokenizer().encode(text)) == text
    assert tokenizer.eos_token_id == ByteTokenizer.boundary
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["dtype"], settings["eos_token_id"]) == ("bfloat16", ByteTokenizer.boundary)
    assert settings["vocab_size"] == ByteTokenizer.vocab_size


def test_a_run_exports_itself_at_its_end_and_from_a_url(tmp_path: Path) -> None:
    config = trained(tmp_path / "run", LLAMA, export="hf", model_only="bf16")
    said: list[str] = []
    files = fsspec.filesystem("memory")
    files.put(f"{config.run_dir}/checkpoints/", "/export/", recursive=True)
    export("memory://export", str(tmp_path / "out"), "bf16", say=said.append)
    assert tensors(Path(config.run_dir) / "hf-00000001") == tensors(tmp_path / "out")
    assert "bfloat16" in said[-1] and "memory://export" in said[-1]


def test_what_cannot_be_exported_is_told_before_the_run(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run", steps=1, last=False, export="hf")
    assert any("checkpoint.last=true" in str(one) for one in problems(config))
    settings = replace(config.checkpoint, last=True)
    routed = replace(config, model=with_args(MOE, bias_rate=0.01, qk_norm=True))
    told = str(_export_problem(routed))
    assert "model.bias_rate=0.01: transformers' qwen3_moe has no such thing" in told
    own = replace(config, model=Model("support.models.Own"), checkpoint=settings)
    assert "transformers has no support.models.Own" in str(_export_problem(own))


def test_damage_is_found_while_it_is_read_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained(tmp_path / "run", LLAMA, dp=2)
    file = next(checkpoint(Path(config.run_dir), 1).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    rows = TensorRows.open("RUN", config.run_dir)
    infos = rows._metadata.storage_data.items()
    place = next(
        i for n, i in infos if n.fqn == "model.norm.weight" and i.relative_path == file.name
    )
    data[place.offset + place.length // 2] ^= 1
    file.write_bytes(bytes(data))
    assert main([config.run_dir, str(tmp_path / "out")]) == 2
    assert "damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), str(tmp_path / "new")]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err


PEAK = """
import resource, sys
from titanlike.checkpoint.hf_export import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_exporting_takes_the_memory_of_some_rows(tmp_path: Path) -> None:
    """Of a model with an embedding of 256 MiB in one piece: a seventh of it at most."""
    sizes = {"vocab_size": 2**18, "dim": 256, "layers": 1, "ffn_dim": 64, "heads": 4, "kv_heads": 2}
    config = replace(a_run(tmp_path / "run"), model=Model("llama", sizes | {"tied": True}))
    model = build_model(config.model, "cpu")
    tensors = {MODEL + name: one.detach() for name, one in model.named_parameters()}
    state = {"step": 1, "progress": {}, "val_loss": None, "sequences": 1}
    state |= {"same": run_identity(config), "config": to_plain(config)}
    state |= {"model": to_plain(config.model)}
    folder = Storage(tmp_path / "step-00000001")
    dcp.save(tensors, storage_writer=StorageWriter(folder, state, lambda _: None), no_dist=True)
    words = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "out")]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(ended.stdout.split()[-1]) * 1024 < 2**28 / 4, ended.stdout
