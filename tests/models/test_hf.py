"""`model=hf`: transformers' decoders give transformers' numbers, however they are cut."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.cells import slow
from support.hf_tiny import folder_of, logits_by_document, model_of, own, sizes, tiny_hf
from support.real_model import real
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.pipeline import EvenSplit
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.schema import Config
from titanlike.core.distributed.initialize import initialize
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.graph.cut import StageGraph
from titanlike.core.graph.model_graph import ModelGraph, fields_of
from titanlike.core.graph.partition import partition
from titanlike.core.graph.stage import Stage
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import build_model, initial_weights_of
from titanlike.core.training.build import build
from titanlike.core.training.preflight import preflight
from titanlike.hf import hf, safetensors_folder
from titanlike.hf.hf_config import FAMILIES
from titanlike.hf.hf_init import record_initialization
from titanlike.hf.safetensors_folder import SafetensorsFolder

CPU = torch.device("cpu")
# learned positions; windows; experts, normed heads; sinks
QUICK = ("gpt2", "gemma3_text", "qwen3_moe", "gpt_oss")
REST = slow(*(family for family in FAMILIES if family not in QUICK))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 3 + [4] * 4 + [3] * 5])


def stages_of(model: Custom, batch: dict[str, Tensor], count: int) -> tuple[list, list[StageGraph]]:
    meta = build_model(model)
    model_graph = ModelGraph(meta, fields_of(batch), len(batch["inputs"]), ())
    model_graph.stages = partition(model_graph.units, EvenSplit(), count)
    graphs = [model_graph.graphs(fields_of(batch), training) for training in (True, False)]
    start, canonical = initial_weights_of(model, 0), model_graph.canonical_names()
    stages = []
    for index, graph in enumerate(graphs[0]):
        stage = Stage(build_model(model), graph.units, graph.weights)
        names = {n: canonical[n] for n, _ in stage.named_parameters(remove_duplicate=False)}
        initialize(stage, start, CPU, names)
        stage.add_forwards(0, {True: graph, False: graphs[1][index]}, index, CPU)
        stages.append(stage)
    return stages, graphs[0]


def chained(stages: list, batch: dict[str, Tensor]) -> Tensor:
    x: Any = batch["inputs"]
    for stage in stages:
        x = stage(*(x if isinstance(x, tuple) else (x,)), **batch)
    return x


def a_batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"inputs": ids, "document_ids": DOCUMENTS}


# --- every family ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*QUICK, *REST])
def test_a_family_has_transformers_logits_unsplit_and_in_stages(family: str) -> None:
    model, packed = model_of(family), a_batch()
    plain = {"inputs": packed["inputs"]}
    whole = real(model)
    theirs = own(whole)
    assert type(theirs).forward is not hf.Decoder.forward
    with torch.no_grad():
        truth = theirs(plain["inputs"], use_cache=False).logits
        assert torch.equal(whole(plain["inputs"]), truth)
        by_document = logits_by_document(theirs, packed["inputs"], DOCUMENTS)
    assert (truth - by_document).abs().max() > 1e-3  # the documents matter
    for batch, expected in ((plain, truth), (packed, by_document)):
        stages, graphs = stages_of(model, batch, 4)
        assert [len(graph.sends) for graph in graphs] == [1] * 4
        assert all(stage.training for stage in stages)
        found = chained(stages, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    F.cross_entropy(found.flatten(0, 1), packed["inputs"].flatten()).backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("family", ["gpt2", "apertus", *slow("llama", "gemma2", "gpt_oss")])
def test_initial_values_have_transformers_own_distribution(family: str) -> None:
    """Drawn by rows; what transformers' own initialization gives has the same mean and spread."""
    ours = real(model_of(family))
    with torch.device("cpu"), torch.random.fork_rng():
        torch.manual_seed(1)
        theirs = build_model(model_of(family), "cpu")
    for (name, mine), (other, value) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        if value.numel() < 256:  # too few to tell
            assert (mine - value).abs().max() < 0.2, name
            continue
        spread = value.std().item()
        assert mine.std().item() == pytest.approx(spread, rel=0.2), name
        assert mine.mean().item() == pytest.approx(value.mean().item(), abs=0.25 * spread + 1e-6)
    assert real(model_of(family)).state_dict().keys() == ours.state_dict().keys()


def test_initializers_are_recorded_without_allocating() -> None:
    model = model_of("gpt2")
    writes = record_initialization(build_model(model))
    (residual,) = writes["transformer.h.3.mlp.c_proj.weight"]
    assert residual.std == pytest.approx(0.02 / 8**0.5)  # 4 layers, two paths each
    llama, name = model_of("llama", pad_token_id=5), "model.embed_tokens.weight"
    embedding, padding = record_initialization(build_model(llama))[name]
    assert (embedding.row, padding.row, padding.std) == (None, 5, 0.0)
    start, shape = initial_weights_of(llama, 0), torch.Size([64, 32])
    for first in (0, 4, 6):  # of the rows of a rank
        rows = start.block(name, shape, (slice(first, first + 8), slice(0, 32)))
        zero = (rows.abs().amax(1) == 0).nonzero().flatten().tolist()
        assert zero == [5 - first] * (first < 6)


def test_attention_masks_and_position_ids_are_accepted() -> None:
    """Padding on the right changes nothing before it; shifted positions change learned ones."""
    model, batch = real(model_of("gpt2")), a_batch()["inputs"]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 9:] = False
    with torch.no_grad():
        masked, plain = model(batch, mask=mask), model(batch)
        torch.testing.assert_close(masked[:, :9], plain[:, :9], rtol=0, atol=1e-6)
        assert (masked[:, 11] - plain[:, 11]).abs().max() > 1e-4
        shifted = own(model)(batch, position_ids=torch.arange(12)[None] + 5).logits
        found = model(batch, positions=torch.arange(12) + 5)
    torch.testing.assert_close(found, shifted, rtol=0, atol=1e-6)


# --- from a folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", *slow("gpt2", "mixtral", "gemma3_text")])
def test_a_folders_weights_are_loaded_into_stages(family: str, tmp_path: Path) -> None:
    more = {key: 12 for key in ("num_experts", "num_local_experts")}  # the names end in 0 to 11
    saved = folder_of(family, tmp_path / "model", **(more if "mo" in family else {}))
    assert (tmp_path / "model" / safetensors_folder.INDEX).is_file()  # several shards
    model = Custom("hf", {"path": str(tmp_path / "model"), "vocab_size": 64, "max_seq_len": 16})
    batch = {"inputs": a_batch()["inputs"]}
    with torch.no_grad():
        truth = saved(batch["inputs"], use_cache=False).logits
        torch.testing.assert_close(real(model)(batch["inputs"]), truth, rtol=0, atol=1e-6)
        stages, _ = stages_of(model, batch, 3)
        torch.testing.assert_close(chained(stages, batch), truth, rtol=0, atol=1e-6)
    scratch = replace(model, args=model.args | {"weights": "scratch"})
    assert (real(scratch)(batch["inputs"]) - truth).abs().max() > 0.01


def test_one_file_of_the_inner_model_in_bf16(tmp_path: Path) -> None:
    """As the published GPT-2: one file, without the prefix, with masks that are no weights."""
    saved = folder_of("gpt2", tmp_path, shard="1GB")
    torch_file = tmp_path / safetensors_folder.SINGLE
    from safetensors.torch import load_file, save_file

    values = {
        name.removeprefix("transformer."): value.bfloat16()
        for name, value in load_file(torch_file).items()
    }
    values["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(values, torch_file, metadata={"format": "pt"})
    found = real(Custom("hf", {"path": str(tmp_path)}))
    for name, value in saved.named_parameters():
        assert torch.equal(found.get_parameter(name).detach(), value.bfloat16().float()), name


class CountedSlice:
    """In place of safetensors' slice of a tensor: notes how many numbers each read gives."""

    def __init__(self, part: Any, reads: list[int]) -> None:
        self.get_shape, self._part, self._reads = part.get_shape, part, reads

    def __getitem__(self, place: Any) -> Tensor:
        self._reads.append(self._part[place].numel())
        return self._part[place]


def count_reads(config: Config, worker: Worker) -> tuple[int, int, int]:
    """(numbers read, in the largest read, parameters of the model) while a rank is built."""
    original, reads = SafetensorsFolder.slice, list[int]()
    SafetensorsFolder.slice = lambda *args: CountedSlice(original(*args), reads)
    run = build(config, open_mesh(config, worker))
    close_mesh()
    return sum(reads), max(reads), run.plan.whole_numel


PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": {"colwise": 8},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}


@pytest.mark.parametrize("layout", [{"tp": 2}, *slow({"pp": 2, "dp": 2, "tp": 2})], ids=str)
def test_a_rank_reads_its_own_shards_only(layout: dict, tmp_path: Path) -> None:
    saved = folder_of("llama", tmp_path / "model", tie_word_embeddings=False)
    config = tiny_hf(Model("hf", {"path": str(tmp_path / "model")}, PLAN), **layout)
    reads, largest, (whole, *_) = zip(
        *run_world(count_reads, config, tmp_path / "run"), strict=True
    )
    assert whole == sum(p.numel() for p in saved.parameters())
    norms = sum(p.numel() for p in saved.parameters() if p.dim() == 1)  # whole on each tp rank
    assert sum(reads) == whole + norms * (config.tp - 1)  # nothing else twice, nothing left out
    assert max(reads) < 1.2 * (whole + norms) / config.world_size
    assert max(largest) <= max(p.numel() for p in saved.parameters()) // 2


# --- mistakes ----------------------------------------------------------------------------------


MISTAKES = {  # the key, and what to write
    "model.path=null": ({}, "model.family=llama"),
    "model.family=lama": ({"family": "lama"}, "write model.family=llama"),
    "model.family=bert": ({"family": "bert"}, "not among the families"),
    "model.family=mamba": ({"family": "mamba"}, "refused: its layers scan"),
    "model.config.hiden_size=64": (
        {"family": "llama", "config": {"hiden_size": 64}},
        "write model.config.hidden_size=64",
    ),
    "attention=sdpa": ({"family": "gemma2", "attention": "sdpa"}, "write model.attention=eager"),
    "weights=load": ({"family": "llama", "weights": "load"}, "write model.weights=scratch"),
    "layerdrop=0.1": (
        {"family": "opt", "config": {"layerdrop": 0.1}},
        "write model.config.layerdrop=0.0",
    ),
    "model.config.vocab_size=9": (
        {"family": "llama", "config": {"vocab_size": 9}, "vocab_size": 64},
        "write model.config.vocab_size=64",
    ),
    "seq_len=16": (
        {"family": "gpt2", "config": {"n_positions": 8}, "max_seq_len": 16},
        "write seq_len=8",
    ),
    "nothing is downloaded": ({"path": "meta-llama/Llama-3-8B"}, "hf download meta-llama"),
    "is not a folder": ({"path": "/nowhere"}, ""),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_a_mistake_in_model_hf_is_reported_with_a_fix(told: str) -> None:
    args, fix = MISTAKES[told]
    with pytest.raises(ConfigError) as error:
        build_model(Custom("hf", args))
    assert told in str(error.value) and fix in str(error.value)


def test_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'titanlike\[hf\]'"):
        build_model(Custom("hf", {"family": "llama"}))


UP = "model.layers.{}.mlp.up_proj.weight"


def test_damaged_folders_are_detected_before_launch(tmp_path: Path) -> None:
    folder_of("llama", tmp_path)
    index_file, config_file = tmp_path / safetensors_folder.INDEX, tmp_path / "config.json"
    names = json.loads(index_file.read_text())["weight_map"]
    config, shard = json.loads(config_file.read_text()), tmp_path / names[UP.format(1)]

    def told(text: str, changed: dict[str, Any], **sizes: int) -> None:
        index_file.write_text(json.dumps({"weight_map": {k: v for k, v in changed.items() if v}}))
        config_file.write_text(json.dumps(config | sizes))
        (problem,) = preflight(tiny_hf(Custom("hf", {"path": str(tmp_path)})))
        assert text in str(problem), str(problem)
        assert str(problem).startswith(f"model.path={tmp_path}")

    told(f"its files lack {UP.format(1)}", names | {UP.format(1): ""})
    told("lacks model.safetensors; copy", names | {UP.format(9): "model.safetensors"})
    told(f"the model has no {UP.format(9)}", names | {UP.format(9): names[UP.format(1)]})
    sizes = "is [64, 32] in the files and [80, 32] in the model"
    told(f"mlp.gate_proj.weight {sizes}", names, intermediate_size=80)
    shard.write_bytes(shard.read_bytes()[:-100])
    told(f"{shard.name} cannot be read", names)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").touch()
    index_file.unlink()
    (problem,) = preflight(tiny_hf(Custom("hf", {"path": str(tmp_path)})))
    assert "has weights in pytorch_model.bin" in str(problem)  # and not silently from scratch


def test_config_keys_reach_the_model(tmp_path: Path) -> None:
    args = {"family": "llama", "config": sizes("llama", num_hidden_layers=2), "vocab_size": 64}
    assert build_model(Custom("hf", args)).config.num_hidden_layers == 2
    assert build_model(Custom("hf", args | {"max_seq_len": 48})).max_seq_len == 48
    folder_of("llama", tmp_path)
    older = {"rope_theta": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for where in ({"path": str(tmp_path)}, {"family": "llama"}):  # keys of transformers 4
        model = build_model(Custom("hf", where | {"config": deepcopy(older)}))
        assert model.config.rope_parameters == {"rope_theta": 50.0, **older["rope_scaling"]}
