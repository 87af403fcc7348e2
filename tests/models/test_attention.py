"""Attention within documents: every kernel gives what a mask gives, with no [T, T] mask on a
GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from support.cells import slow
from support.families import gpt2, llama
from support.hf_tiny import model_of
from support.live_memory import Largest
from support.models import tiny
from support.real_model import real
from support.varlen import as_on_a_gpu, uncompiled_flex
from support.world import run_world
from titanlike.core.config.groups.computation import SelectiveActivationCheckpoint
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.graph.model_graph import Field, ModelGraph
from titanlike.core.graph.recording import Recording
from titanlike.core.launch.worker import Worker
from titanlike.core.models import attention as attention_module
from titanlike.core.models import document_attention as kernels
from titanlike.core.models import documents as documents_module
from titanlike.core.models.attention import attention
from titanlike.core.models.document_attention import document_blocks, document_mask
from titanlike.core.models.documents import (
    Documents,
    attention_inputs,
    document_spans,
    with_host_copy,
)
from titanlike.core.models.llama import rotary_table, rotate
from titanlike.core.models.registry import build_model
from titanlike.core.torch_private.operators import operator_names
from titanlike.core.training.build import build
from titanlike.planning.costs.node_costs import count

B, T, E = 2, 37, 16
TIGHT = {"rtol": 1e-6, "atol": 2e-6}
# an id that occurs again, a document of one token, one that is a whole sequence
IDS = {
    "mixed": [[5] * 9 + [7] + [5] * 20 + [1] * 7, [2] * T],
    "a token each": [list(range(T)), [0] * 30 + [1] * 7],
    "whole sequences": [[0] * T, [0] * T],
}
LLAMA = llama(vocab_size=64, hidden_size=64, num_hidden_layers=2)
GPT2 = gpt2(vocab_size=64, n_embd=64, n_layer=2, n_positions=T, tie_word_embeddings=True)


def of(name: str) -> Tensor:
    return torch.tensor(IDS[name])


def heads(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(B, count, T, E) for count in (queries, keys, keys)]
    drawn = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    return [x.requires_grad_() for x in drawn]


def with_gradients(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    scalar = (result * weights.to(result)).sum()
    return [result, *torch.autograd.grad(scalar, inputs)]


@pytest.fixture
def flex_on_cpu() -> Iterator[None]:
    with uncompiled_flex():
        yield


# --- the kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [4, 2], ids=["as many keys", "grouped"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_document_attention_by_offsets_matches_masked_attention(
    kernel: str, window: int | None, keys: int, flex_on_cpu: None
) -> None:
    for name in IDS:
        inputs, documents = heads(4, keys), Documents(document_spans(of(name)), window)
        numbers = of(name).diff(prepend=torch.tensor([[-1]] * B)).ne(0).cumsum(1)
        at = torch.arange(T)
        allowed = (at[:, None] >= at) & (numbers[:, None, :, None] == numbers[:, None, None, :])
        if window is not None:
            allowed &= at[:, None] - at < window
        assert torch.equal(document_mask(documents, B, T), allowed)
        right = F.scaled_dot_product_attention(
            *inputs, attn_mask=allowed, scale=0.2, enable_gqa=keys < 4
        )
        with as_on_a_gpu(kernel=kernel == "varlen"):
            found = attention(*inputs, documents, scale=0.2)
        torch.testing.assert_close(
            with_gradients(found, inputs), with_gradients(right, inputs), **TIGHT
        )


@pytest.mark.parametrize("window", [None, 5])
def test_a_mask_for_some_queries_has_only_their_rows(window: int | None) -> None:
    documents = Documents(document_spans(of("mixed")), window)
    places = torch.tensor([0, 1, 2, 31, 32, 33])
    with Largest() as largest:
        found = document_mask(documents, B, T, places)
    assert torch.equal(found, document_mask(documents, B, T)[:, :, places])
    assert largest.numbers == found.numel()


def test_documents_with_dropout_use_a_mask() -> None:
    inputs, documents = heads(4, 2), Documents(document_spans(of("mixed")))
    torch.manual_seed(3)
    with as_on_a_gpu():
        found = attention(*inputs, documents, dropout=0.5)
    torch.manual_seed(3)
    mask = document_mask(documents, B, T)
    right = F.scaled_dot_product_attention(*inputs, attn_mask=mask, dropout_p=0.5, enable_gqa=True)
    assert torch.equal(found, right)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_block_masks_match_torchs(window: int | None) -> None:
    tokens = 700
    ids = (torch.rand(B, tokens, generator=torch.Generator().manual_seed(0)) < 0.01).cumsum(1)
    ids[1] = 0
    found = document_blocks(Documents(document_spans(ids), window), B, tokens)
    right = flex_attention.create_block_mask(
        found.mask_mod, B, None, tokens, tokens, device="cpu", BLOCK_SIZE=128
    )
    for part in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, part), getattr(right, part)), part
    assert torch.equal(found.to_dense(), right.to_dense())
    assert found.full_kv_num_blocks.sum() > 0 or window == 100


def test_block_lists_are_contiguous_in_a_compiled_block(flex_on_cpu: None) -> None:
    """Flex attention reads them as rows, and inductor may transpose what it makes itself. The
    kernel needs a GPU."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return lambda *_: (torch.zeros(B, 4, T, E),)

    spans = document_spans(of("mixed"))
    with as_on_a_gpu(kernel=False):
        compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
        compiled(*(x.detach() for x in heads(4, 2)), Documents(spans, 5))
    (graph,) = graphs
    assert "flex_attention" in graph and "titanlike.document_blocks" in graph
    assert "sort" not in graph
    for tokens, window in ((T, None), (8, None), (300, 5)):
        offsets = document_spans(torch.arange(B * tokens).view(B, tokens) // 6)[0]
        made = kernels._blocks(offsets, B, tokens, window)
        with FakeTensorMode() as mode:
            told = kernels._blocks(mode.from_tensor(offsets), B, tokens, window)
        layouts = [[(x.dtype, x.shape, x.stride()) for x in parts] for parts in (made, told)]
        assert layouts[0] == layouts[1]


@pytest.mark.parametrize("window", [None, 5])
def test_uncompiled_blocks_compile_attention_once(window: int | None, flex_on_cpu: None) -> None:
    """Of any number of sequences, with gradients and without: a graph takes a GPU's compiler 10
    seconds and more."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    ids = torch.tensor([*IDS["mixed"], *IDS["mixed"]])
    offsets = [document_spans(ids[:rows]) for rows in (2 * B, 1, B)]
    compiled = torch.compile(flex_attention.flex_attention, backend=backend)
    with as_on_a_gpu(kernel=False), mock.patch.object(kernels, "_compiled", lambda _: compiled):
        for spans, rows in zip(offsets, (2 * B, 1, B), strict=True):
            documents = Documents(spans, window)
            inputs = [torch.cat([x.detach(), x.detach().flip(2)])[:rows] for x in heads(4, 2)]
            right = F.scaled_dot_product_attention(
                *inputs, attn_mask=document_mask(documents, rows, T), enable_gqa=True
            )
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    found = attention(*(x.requires_grad_(gradients) for x in inputs), documents)
                torch.testing.assert_close(found.detach(), right, **TIGHT)
                assert found.requires_grad == gradients
    assert len(graphs) == 1


def test_offsets_scale_with_documents_not_tokens() -> None:
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    ids[:, 1000:], ids[:, 1300:] = 1, 2
    spans = document_spans(ids)
    assert spans.shape == (4096, 5) and spans.untyped_storage().nbytes() == 5 * 4
    assert spans[0].tolist() == [0, 1000, 1300, 4096, 4096]
    ids = torch.arange(4096)[None] // 100
    assert document_spans(ids).shape == (128, 65)  # 41 documents of 100 tokens


def test_any_number_of_documents_shares_one_compiled_graph() -> None:
    """fullgraph: a graph that breaks raises. The kernel itself needs a GPU."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return lambda *_: (torch.zeros(B, 4, T, E, dtype=torch.bfloat16),)

    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    half = [x.detach() for x in heads(4, 2, torch.bfloat16)]
    with mock.patch.object(kernels, "takes_offsets", lambda q, v: True):
        for step in (1, 40, 2, 20, 5, 10, 3):
            spans = document_spans((torch.arange(B * T) // step).view(B, T))
            compiled(*half, Documents(spans))
    assert len(graphs) <= 3 and all("_varlen_attn" in graph for graph in graphs)
    compiled(*half)
    assert "scaled_dot_product_attention" in graphs[-1]


# --- how many documents there are -----------------------------------------------------------------


def test_offsets_from_the_host_need_no_device_sync() -> None:
    """The values on the "device" are others, so that whoever reads them is found out."""
    host = torch.cat([of("mixed"), of("a token each")])
    device = with_host_copy(host.clone(), host)
    right = [document_spans(part) for part in host.tensor_split(2)]
    with mock.patch.object(Tensor, "cpu", side_effect=AssertionError("waits for the device")):
        found = [document_spans(part) for part in device.tensor_split(2)]
        assert [x.tolist() for x in found] == [x.tolist() for x in right]
        with pytest.raises(AssertionError, match="waits"):
            document_spans(host.clone())
    read = with_host_copy(torch.zeros_like(host), host)
    assert document_spans(read.tensor_split(2)[1]).shape == right[1].shape


# --- models ---------------------------------------------------------------------------------------


MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "hf llama": model_of("llama", max_position_embeddings=T),
    "hf mistral": model_of("mistral", max_position_embeddings=T),  # a window of 5
    "hf gemma3": model_of("gemma3_text", max_position_embeddings=T),  # a window in some layers
    "hf gpt2": model_of("gpt2", n_positions=T),  # takes masks only
    "hf gpt_oss": model_of("gpt_oss", max_position_embeddings=T),  # eager attention, with sinks
}
QUICK = ("gpt2", "hf gemma3", "hf gpt2")
BY_MASK = ("hf gpt2", "hf gpt_oss")
WINDOWS = ("hf mistral", "hf gemma3")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in MODELS if name not in QUICK))])
def test_a_model_computes_the_same_with_offsets_as_with_a_mask(name: str) -> None:
    model = real(MODELS[name])
    inputs = torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(0))
    calls: list[Documents] = []

    def counted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            calls.append(args[3])
            return original(*args)

        return call

    for fields in ({"document_ids": of("mixed")}, {}):
        right = with_gradients(model(inputs, **fields), list(model.parameters()))
        kernel = counted(kernels.by_offsets)
        with as_on_a_gpu(), mock.patch.object(kernels, "by_offsets", kernel):
            found = with_gradients(model(inputs, **fields), list(model.parameters()))
        for one, other in zip(found, right, strict=True):
            assert (one - other).norm() <= 2e-6 * other.norm()
        if name in BY_MASK or (not fields and name not in WINDOWS):
            assert not calls
        elif name in WINDOWS:
            assert {5} <= {documents.window for documents in calls} <= {5, None}
        else:
            layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
            assert len(calls) == len(layers)
        calls.clear()


class Synthetic:
    """Sequences of random tokens in documents of random lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (17,), generator=generator)
        begins = torch.rand(16, generator=generator) < 0.05 * (index % 7)
        return {"inputs": ids[:-1], "targets": ids[1:], "document_ids": begins.cumsum(0)}

    def example(self) -> dict[str, Tensor]:
        return {name: value[None] for name, value in self[0].items()}


def data(seq_len: int) -> Data:
    return Data(Synthetic(), Synthetic(), 64, "documents")


def differences(config: Config, worker: Worker) -> tuple[float, float]:
    """Of losses and gradients of a stage with offsets from the model's with a mask."""
    mesh, batch = open_mesh(config, worker), default_collate([Synthetic()[i] for i in range(16)])
    model = real(config)
    logits = model(batch["inputs"], document_ids=batch["document_ids"])
    right = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    right.backward()
    with as_on_a_gpu():
        run = build(config, mesh, data(16))
        loss, _ = run.pipeline.train(batch)
        run.train_mode(False)
        evaluated, _ = run.pipeline.evaluate(batch)
    close_mesh()
    named = [pair for stage in run.stage_states for pair in stage.parameters()]
    of_gradients = [(p.grad - model.get_parameter(n).grad).abs().max() for n, p in named]
    of_losses = (loss - right).abs(), (evaluated - right).abs()
    return max(of_losses).item(), max(of_gradients).item()


def test_stages_compute_offsets_from_their_batch_and_train_as_with_a_mask(tmp_path: Path) -> None:
    """Microbatches have other numbers of documents, so offsets of other shapes than recorded."""
    config = tiny(pp=2, data=Custom("models.test_attention.data"), layers=2)
    for of_losses, of_gradients in run_world(differences, config, tmp_path):
        assert of_losses < 5e-6 and of_gradients < 2e-6


# --- a forward recorded for a GPU, here on meta ---------------------------------------------------


def recorded_for_a_gpu(
    model: Custom, dtype: torch.dtype, *fields: str, tokens: int = T
) -> tuple[nn.Module, Recording]:
    meta = build_model(model).to(dtype)
    shapes = {name: Field((tokens,), torch.int64) for name in ("inputs", *fields)}
    return meta, ModelGraph(meta, shapes, B, (), device="cuda").recording(shapes, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "hf gemma3", "hf gpt2"])
def test_documents_build_no_mask_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    _, recording = recorded_for_a_gpu(MODELS[name], dtype, "document_ids")
    shapes = {tuple(node.value.shape) for node in recording.nodes if node.value is not None}
    assert ((B, 1, T, T) in shapes) == (name in BY_MASK)


class OnGpu(TorchFunctionMode):
    """Within it, tensors say that they are on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(getattr(function, "__self__", None), "__name__", "") == "is_cuda":
            return True
        return function(*args, **(kwargs or {}))


def test_a_custom_mask_works_on_a_gpu_with_grouped_queries() -> None:
    """The efficient kernel, which alone takes masks for sure and fp32, has no grouped queries."""
    mask = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    called = mock.Mock(wraps=F.scaled_dot_product_attention)
    found = []
    for dtype, given in ((torch.float32, mask), (torch.float32, None), (torch.bfloat16, None)):
        q, k, v = (x.detach() for x in heads(4, 2, dtype))
        with mock.patch.object(F, "scaled_dot_product_attention", called), OnGpu():
            found.append(attention(q, k, v, given))
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found[-1], right)
    masked, in_fp32, plain = called.call_args_list
    assert masked.args[1].size(1) == in_fp32.args[1].size(1) == 4
    assert not masked.kwargs["enable_gqa"] and masked.kwargs["attn_mask"] is mask
    assert plain.args[1].size(1) == 2 and plain.kwargs["enable_gqa"] and plain.kwargs["is_causal"]


@pytest.mark.parametrize("name", ["llama", "hf llama"])
def test_a_gpu_tries_its_kernels_in_order_and_a_cpu_sets_nothing(name: str) -> None:
    with mock.patch.object(
        attention_module, "sdpa_kernel", wraps=attention_module.sdpa_kernel
    ) as s:
        real(MODELS[name])(torch.zeros(B, T, dtype=torch.int64))
        s.assert_not_called()
        recorded_for_a_gpu(MODELS[name], torch.bfloat16)
    (order,), options = s.call_args
    assert order[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert options == {"set_priority": True}


def test_documents_cost_as_much_as_whole_sequences() -> None:
    """An upper limit: which documents there are is not known before the run."""
    found, attention_alone = [], ["torch_attn._varlen_attn"]
    for fields in ((), ("document_ids",)):
        meta, recording = recorded_for_a_gpu(LLAMA, torch.bfloat16, *fields)
        block = next(node for node in recording.nodes if node.target == "model.layers.0")
        costs = count(block, meta)
        found.append((costs.flops, costs.saved, costs.kept(attention_alone)))
    (flops, saved, kept), (flops_by_offsets, saved_by_offsets, kept_by_offsets) = found
    assert flops == flops_by_offsets and kept == kept_by_offsets
    assert saved_by_offsets - saved == T * E * 4  # positions differ: one more rotary table
    # bf16, with a logsumexp in fp32 for each query
    assert kept == B * T * 2 * 64 + B * T * 4 * (2 * E + 4)


def test_gpu_attention_operators_have_flop_formulas() -> None:
    names = operator_names()
    default = SelectiveActivationCheckpoint(name="selective").save
    for kernel in ("cudnn", "flash", "efficient"):
        assert f"aten._scaled_dot_product_{kernel}_attention" in names
    for name in ("torch_attn._varlen_attn", "flex_attention"):
        assert name in names and any(fnmatchcase(name, pattern) for pattern in default)


# --- with a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_kernels_match_the_reference(dtype: torch.dtype, window: int | None) -> None:
    for name in IDS:
        inputs = [x.detach().cuda().requires_grad_() for x in heads(4, 2, dtype)]
        documents = Documents(document_spans(of(name).cuda()), window)
        found = with_gradients(attention(*inputs, documents), inputs)
        mask = document_mask(documents, B, T)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        result = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
        right = with_gradients(result, exact)
        close = 2e-2 if dtype == torch.bfloat16 else 1e-3  # TF32 in flex attention
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_kernels_match_the_reference_in_a_compiled_block(
    dtype: torch.dtype, gradients: bool
) -> None:
    shapes = (8, 4, 300, 64), (8, 2, 300, 64), (8, 2, 300, 64)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    ids = (torch.rand(8, 300, generator=generator) < 0.02).cumsum(1).cuda()
    block = torch.compile(lambda q, k, v, documents: attention(q, k, v, documents), fullgraph=True)
    found, right = (
        of_kernels(function, [x.requires_grad_() for x in values], gradients)
        for function, values in (
            (lambda *x: block(*x, Documents(document_spans(ids))), inputs),
            (
                lambda *x: F.scaled_dot_product_attention(
                    *x,
                    attn_mask=document_mask(Documents(document_spans(ids)), 8, 300),
                    enable_gqa=True,
                ),
                [x.detach().double() for x in inputs],
            ),
        )
    )
    close = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for a, b in zip(found, right, strict=True):
        assert (a.double() - b).norm() < close * b.norm()


def of_kernels(
    function: Callable[..., Tensor], inputs: list[Tensor], gradients: bool
) -> list[Tensor]:
    with torch.set_grad_enabled(gradients):
        result = function(*inputs)
    return with_gradients(result, inputs) if gradients else [result]


@pytest.mark.gpu
def test_attention_never_synchronizes_a_gpu() -> None:
    host = of("mixed")
    ids = with_host_copy(host.cuda(), host)
    positions, documents = attention_inputs(ids, ids, None, None, True)
    inputs = [x.detach().cuda().requires_grad_() for x in heads(4, 2, torch.bfloat16)]
    attention(*inputs, documents).sum().backward()  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, documents = attention_inputs(ids, ids, None, None, True)
        attention(*inputs, documents).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert documents_module.document_starts(ids).is_cuda and positions.is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [torch.arange(6), torch.tensor([[3, 4, 5, 0, 1, 2]] * 2)])
def test_heads_are_rotated_as_by_transformers_and_keep_their_layout(
    dtype: torch.dtype, positions: torch.Tensor
) -> None:
    """Values and gradients; so projections, attention and their backwards copy nothing."""
    table = rotary_table(positions, 8, 100.0)
    cos, sin = (torch.cat([half, half], -1).expand(2, 6, 8) for half in table)
    shapes = (2, 6, 4, 8), (2, 6, 2, 8)
    heads = [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    found, true = rotate(table, *heads), apply_rotary_pos_emb(*(x.float() for x in heads), cos, sin)
    gradients = [torch.randn(x.shape).to(dtype) for x in heads]
    of_found = torch.autograd.grad(found, heads, gradients)
    of_true = torch.autograd.grad(true, heads, [g.float() for g in gradients])
    assert [x.stride() for x in found] == [x.stride() for x in heads]
    for one, other in zip((*found, *of_found), (*true, *of_true), strict=True):
        assert one.dtype == dtype
        near = 1e-2 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(one, other.to(dtype), rtol=near, atol=near)
