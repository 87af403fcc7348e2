"""A checkpoint as a folder for transformers: the same model, a few rows in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from support.cells import GRID, cells, slow
from support.exported import GPT2, LLAMA, MOE, byte_text, ours, trained, with_args
from support.families import deepseek, gpt_oss
from support.hf_tiny import folder_of, model_of
from support.saved_runs import a_run, checkpoint, train_all
from titanlike.core.checkpoint.integrity import MODEL, open_header
from titanlike.core.checkpoint.reader import ShardReader
from titanlike.core.checkpoint.storage import DamagedCheckpoint, Storage
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.formats.tokenizer import ByteTokenizer
from titanlike.hf.hf_config import FAMILIES
from titanlike.hf.hf_export import export, main
from titanlike.run.checks import _export_problem, problems

CLOSE = 1e-5


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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of bytes that exports itself at its end."""
    folder = tmp_path_factory.mktemp("llama")
    data = byte_text(folder / "text")
    return trained(folder / "run", LLAMA, data=data, dp=2, export="hf", model_only="bf16")


@pytest.mark.slow
def test_a_run_exports_its_model_at_its_end_and_from_a_url(llama: Config, tmp_path: Path) -> None:
    """With its tokenizer, also that of bytes."""
    export(llama.run_dir, str(tmp_path / "out"))
    assert_same_logits(llama, tmp_path / "out")
    assert any("lm_head" in name for name in tensors(tmp_path / "out"))
    said: list[str] = []
    files = fsspec.filesystem("memory")
    files.put(f"{llama.run_dir}/checkpoints/", "/export/", recursive=True)
    export("memory://export", str(tmp_path / "bf16"), "bf16", say=said.append)
    assert tensors(Path(llama.run_dir) / "hf-00000001") == tensors(tmp_path / "bf16")
    assert "bfloat16" in said[-1] and "memory://export" in said[-1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bf16")
    text = "def größe(x):\n\treturn 'é' # <|endoftext|> no"
    assert tokenizer("def größe('é')")["input_ids"] == ByteTokenizer().encode("def größe('é')")
    assert tokenizer.decode(ByteTokenizer().encode(text)) == text
    assert tokenizer.eos_token_id == ByteTokenizer.boundary
    settings = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert (settings["dtype"], settings["eos_token_id"]) == ("bfloat16", ByteTokenizer.boundary)
    assert settings["vocab_size"] == ByteTokenizer.vocab_size


def test_export_holds_one_file_and_one_tensor_in_memory(
    llama: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(llama.run_dir, str(tmp_path / "at once"))
    read: list[tuple[StorageWeakRef, int]] = []
    in_memory: list[int] = []
    whole = ShardReader.whole

    def watched(reader: ShardReader, name: str) -> Tensor:
        tensor = whole(reader, name)
        read.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        in_memory.append(sum(size for storage, size in read if not storage.expired()))
        return tensor

    monkeypatch.setattr(ShardReader, "whole", watched)
    most = 40_000
    export(llama.run_dir, str(tmp_path / "out"), shard_bytes=most)
    assert tensors(tmp_path / "out") == tensors(tmp_path / "at once")
    largest, total = max(size for _, size in read), sum(size for _, size in read)
    assert most / 2 < max(in_memory) <= most + largest < 0.7 * total


def test_export_detects_damage_and_leaves_no_folder(
    llama: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama.run_dir, tmp_path / "run")
    folder = checkpoint(tmp_path / "run", 1)
    name = "model.model.embed_tokens.weight"
    piece = open_header(Storage(folder)).pieces([name])[name][-1]
    file = folder / piece.file
    data = bytearray(file.read_bytes())
    data[piece.begin + piece.bytes // 2] ^= 1
    file.write_bytes(bytes(data))
    assert main([str(file.parent), str(tmp_path / "out")]) == 2
    assert "damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    rows = ShardReader.open("RUN", str(folder)).rows("model.model.embed_tokens.weight", 2**11)
    with pytest.raises(DamagedCheckpoint):  # also of what reads a few rows at a time
        deque(rows, maxlen=0)


def test_export_does_not_overwrite_an_existing_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), str(tmp_path / "new")]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err


def test_a_model_that_cannot_be_exported_is_refused_before_the_run(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run", steps=1, last=False, export="hf")
    assert any("checkpoint.last=true" in str(one) for one in problems(config))
    settings = replace(config.checkpoint, last=True)
    routed = replace(config, model=with_args(MOE, bias_rate=0.01, qk_norm=True))
    told = str(_export_problem(routed))
    assert "model.bias_rate=0.01: transformers' qwen3_moe has no such thing" in told
    own = replace(config, model=Model("support.models.Own"), checkpoint=settings)
    assert "transformers has no support.models.Own" in str(_export_problem(own))


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1,
    "mscale_all_dim": 0.5,
}
LAYOUTS = cells(
    {"gpt2-pp2": (with_args(GPT2, tie_word_embeddings=True), {"pp": 2})},
    {
        "llama-tied-tp2": (with_args(LLAMA, tie_word_embeddings=True), {"tp": 2, "dp": 2}),
        "deepseek-v3-pp2-ep2": (deepseek(rope_scaling=YARN), {"pp": 2, "dp": 2, "ep": 2}),
        "gpt-oss-tp2": (gpt_oss(), {"tp": 2}),
        "moe-ep2": (with_args(MOE, balance_loss=0.01), {"dp": 2, "ep": 2}),
        "qwen3-moe-pp2": (
            with_args(MOE, qk_norm=True, head_dim=16, tie_word_embeddings=True),
            {"pp": 2},
        ),
    },
    {"qwen3-moe-raw": (with_args(MOE, qk_norm=True, norm_topk_prob=False), {"dp": 2})},
)


@pytest.mark.parametrize("case", LAYOUTS)
def test_transformers_computes_the_same_logits_as_the_run(case: Any, tmp_path: Path) -> None:
    model, layout = case
    config = trained(tmp_path / "run", model, **layout)
    export(config.run_dir, str(tmp_path / "out"), shard_bytes=20_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert_same_logits(config, tmp_path / "out")
    tied = model.args.get("tie_word_embeddings", False)
    assert any("lm_head" in name for name in tensors(tmp_path / "out")) == (not tied)


DEFAULT, CHOSEN = ("mixtral",), ("qwen3", "gemma2", "phi3")
REST = (family for family in FAMILIES if family not in DEFAULT + CHOSEN)


@pytest.mark.parametrize("family", [*DEFAULT, *slow(*CHOSEN), *slow(*REST, marks=GRID)])
def test_a_transformers_folder_round_trips_bitwise(family: str, tmp_path: Path) -> None:
    """Folder, a run that changes nothing, folder: names, dtypes and bytes are the same."""
    folder_of(family, tmp_path / "in").to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    (tmp_path / "bf16" / "tokenizer.json").write_text("{}")
    pp = 2 if family in CHOSEN else 1
    config = a_run(tmp_path / "run", pp=pp, steps=1, last=True, every=0)
    config = replace(config, model=Model("hf", {"path": str(tmp_path / "bf16")}))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    assert train_all(config) == [""]
    words = [config.run_dir, str(tmp_path / "out")]
    assert main(words) == 2  # whoever wrote the run names that folder
    assert main([*words, f"model.path={tmp_path / 'bf16'}"]) == 0
    assert tensors(tmp_path / "out") == tensors(tmp_path / "bf16")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    with torch.no_grad():
        logits = [theirs(tmp_path / name)(some_ids()).logits for name in ("bf16", "out")]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "family", ["mixtral", *slow("gpt_neox"), *slow("gemma2", "qwen3", "phi3", marks=GRID)]
)
def test_a_family_from_scratch_is_written_in_the_form_that_transformers_writes(
    family: str, tmp_path: Path
) -> None:
    config = trained(tmp_path / "run", model_of(family))
    export(config.run_dir, str(tmp_path / "out"))
    model = theirs(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path / "out") == tensors(tmp_path / "again")
    saved = ShardReader.open("RUN", config.run_dir)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.whole(MODEL + name)), name
