"""Context parallelism: attention of a rank's tokens with those of all ranks is that of whole
sequences, in any model whose attention is scaled_dot_product_attention; a model that mixes tokens
otherwise is refused with the call.

Layouts of our own models are in `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint

from support.cells import cells, slow
from support.counted_calls import CountedCalls
from support.families import hf, moe
from support.models import tiny
from support.proven import assert_proven
from support.varlen import as_on_a_gpu, varlen_attn
from support.world import run_world
from titanlike.core.config.groups.computation import ActivationCheckpoint, Precision
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.jobs import Sample
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.models.attention import attention
from titanlike.core.models.document_attention import document_mask
from titanlike.core.models.documents import Documents, document_spans, host_copy, with_host_copy
from titanlike.core.training.preflight import preflight
from titanlike.core.training.train_plan import make_plan
from titanlike.proof.verify import verify
from titanlike.techniques.cp.context_attention import ContextAttention, _Ring
from titanlike.techniques.cp.context_parallel import IGNORED, ContextParallel
from titanlike.techniques.cp.context_tokens import ContextRanks

# of a block: what it computes beside attention and layers that take each token by itself
MIXERS = {
    "convolution": lambda block, x: block.more(x.transpose(1, 2)).transpose(1, 2),
    "lstm": lambda block, x: block.more(x)[0],
    "cumsum": lambda block, x: x.cumsum(1) * 0.01,
    "shift": lambda block, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "mean": lambda block, x: x.mean(1, keepdim=True),
    "first": lambda block, x: x[:, :1],
    "flip": lambda block, x: x.flip(1),
    # of a table of just as many rows, of which all are taken where the sequence is whole
    "rows of a table": lambda block, x: x * block.more.weight[None, : x.shape[1]],
    "positions": lambda block, x: (
        x
        * block.more(torch.arange(x.shape[1], device=x.device))
        * block.more.weight.sin()[torch.arange(x.shape[1], device=x.device)]
        * block.more.weight[None, : x.shape[1]].tanh()
        + block.sorts(x)
        + (0.01 * torch.ones(1, 1, device=x.device) * x[:, :, :1] if block.training else 0)
    ),
    "rotated": lambda block, x: rotated(x),
    # as many features as a rank of two has of 16 tokens
    "eight features": lambda block, x: rotated(x[:, :, :8]).repeat(1, 1, x.shape[2] // 8),
    "recomputed by itself": lambda block, x: checkpoint(rotated, x, use_reentrant=False),
    "a table that grows": lambda block, x: x * block.grown(x)[: x.shape[1]],
    "a list of positions": lambda block, x: torch.tensor(
        [0.1 * number for number in range(x.shape[1])], device=x.device
    )[None, :, None],
    "chance of a sequence": lambda block, x: x * x.new_empty(len(x), 1, 1).bernoulli_(),
}


def rotated(x: Tensor) -> Tensor:
    """By angles of their own positions, as rotary embeddings do."""
    half = x.shape[-1] // 2
    speeds = 10 ** -(torch.arange(0, half, device=x.device) / half)
    angles = torch.arange(0, x.shape[1], device=x.device, dtype=torch.float32)[:, None] * speeds
    a, b = x[..., :half], x[..., half:]
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Sorts(nn.Linear):
    """Sorts the tokens that are here, and puts them back: their numbers are no positions."""

    token_wise = True

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = rows.detach().sum(1).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        return F.linear(rows[order], self.weight, self.bias)[place].view_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.out, self.ffn = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.kind = kind
        if kind == "convolution":
            self.more = nn.Conv1d(dim, dim, 3, padding=1)
        elif kind in ("rows of a table", "positions"):
            self.more = nn.Embedding(16 if kind == "rows of a table" else 40, dim)
            self.sorts = Sorts(dim, dim) if kind == "positions" else None
        elif kind == "bias of pairs":
            self.more = nn.Linear(dim, 4)
        elif kind == "lstm":
            self.more = nn.LSTM(dim, dim, batch_first=True)

    def grown(self, x: Tensor) -> Tensor:
        """A table that is made again where it is too short."""
        if not hasattr(self, "table") or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], device=x.device)[:, None].cos()
        return self.table

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            part.view(batch, tokens, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if self.kind == "by hand":
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        else:
            causal = bias is None and self.kind != "encoder"
            if self.kind == "bias of pairs":
                of_query = self.more(x).transpose(1, 2).unsqueeze(-1)  # [B, 4, T, 1]
                bias, causal = of_query * of_query.mT, False
            if self.kind == "a mask that is cut":
                whole = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril()
                bias, causal = whole[..., : k.shape[2], : k.shape[2]], False
            if self.kind == "a mask that is made":
                bias, causal = x.new_ones(()) * torch.ones(tokens, tokens).tril().log(), False
            if self.kind == "distances":
                at = torch.arange(tokens, device=x.device)
                bias = (at - at[:, None]).float().masked_fill(at > at[:, None], float("-inf"))
                causal = False
            y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        if self.kind in MIXERS:
            x = x + MIXERS[self.kind](self, x)
        return x + self.ffn(F.gelu(x))


class Own(nn.Module):
    """positions: none, weights (a parameter), embedding, or bias (relative ones, of attention)."""

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int = 32,
        layers: int = 2,
        kind: str = "",
        positions: str = "none",
        result: str = "tokens",
    ) -> None:
        super().__init__()
        self.kind, self.positions, self.result = kind, positions, result
        self.embedding = nn.Embedding(vocab_size, dim)
        if positions in ("weights", "embedding"):
            table = nn.Embedding(64, dim)
            self.table = table if positions == "embedding" else table.weight
        elif positions == "bias":
            self.bias = nn.Embedding(64, 4)
        self.layers = nn.ModuleList(Block(dim, kind) for _ in range(layers))
        self.between = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        at = torch.arange(tokens, device=ids.device)
        x, bias = self.embedding(ids), None
        if self.positions == "weights":
            x = x + self.table[:tokens]
        elif self.positions == "embedding":
            x = x + self.table(at)
        elif self.positions == "bias":
            bias = self.bias((at[:, None] - at).clamp(0, 63)).permute(2, 0, 1)[None]
            bias = bias.masked_fill(at > at[:, None], float("-inf"))
        for block in self.layers:
            x = block(x, bias)
        # between units, with the length written into a call
        q = self.between(x).view(batch, tokens, 4, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, tokens, -1)
        if self.kind == "loop":
            state, states = torch.zeros_like(x[:, 0]), []
            for number in range(tokens):
                state = 0.5 * state + x[:, number]
                states.append(state)
            x = torch.stack(states, 1)
        if self.result == "mean":
            return self.head(x.mean(1))
        return self.head(x)


METHODS = ("gather", "ulysses", "ring")
RANKS = 3  # of two, the rank before and the rank behind are one
TOKENS = 18
HEADS = ((6, 2), (6, 6), (6, 1))  # of queries, of keys and values


def masks(heads: int) -> dict[str, Tensor]:
    """Of each kind that a model may give: bool, or added to scores."""
    itself = torch.eye(TOKENS, dtype=torch.bool)
    any_key = torch.rand(2, 1, 1, TOKENS) < 0.7
    any_key[..., 0] = True
    return {
        "of the batch": (torch.rand(2, 1, TOKENS, TOKENS) < 0.7) | itself,
        "of each head": (torch.rand(1, heads, TOKENS, TOKENS) < 0.7) | itself,
        "two dimensions": (torch.rand(TOKENS, TOKENS) < 0.7) | itself,
        "added": torch.randn(1, heads, TOKENS, TOKENS),
        "keys alone": any_key,
        "queries alone": torch.randn(2, 1, TOKENS, 1),
    }


def differences(config: Config, worker: Worker) -> dict[str, dict[str, float]]:
    """Method -> case -> largest difference from whole sequences, of results and gradients."""
    mesh = open_mesh(config, worker)
    return {
        method: _differences(ContextRanks(mesh.cp, mesh.cp_rank, dist.group.WORLD, method=method))
        for method in METHODS
    }


def _differences(ranks: ContextRanks) -> dict[str, float]:
    found: dict[str, float] = {}
    torch.manual_seed(0)
    for heads, kv_heads in HEADS:
        q, k, v = (
            torch.randn(2, n, TOKENS, 8).requires_grad_() for n in (heads, kv_heads, kv_heads)
        )
        gradient = torch.randn(2, heads, TOKENS, 8)
        given: dict[str, dict] = {"causal": {"is_causal": True}, "all tokens": {}}
        if ranks.method != "ring":
            given |= {name: {"attn_mask": mask} for name, mask in masks(heads).items()}
        for name, options in given.items():
            expected = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
            truth = torch.autograd.grad(expected, (q, k, v), gradient)
            mask = options.get("attn_mask")
            alone = mask is not None and 1 in mask.shape[-2:]
            if mask is not None and (ranks.method == "gather" or alone):  # as graphs do
                dim = mask.dim() - (1 if mask.shape[-2] == 1 else 2)
                options = {"attn_mask": ranks.take(mask, dim)}
            mine = [ranks.take(x.detach(), 2).requires_grad_() for x in (q, k, v)]
            with ContextAttention(ranks):
                result = F.scaled_dot_product_attention(*mine, **options, enable_gqa=True)
            own = torch.autograd.grad(result, mine, ranks.take(gradient, 2))
            pairs = zip((result, *own), (expected, *truth), strict=True)
            worst = max((a - ranks.take(b, 2)).abs().max().item() for a, b in pairs)
            found[f"{name}, {heads} and {kv_heads} heads"] = worst
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """Of each rank."""
    config = tiny(cp=RANKS, batch_size=RANKS, seq_len=TOKENS)
    return run_world(differences, config, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("method", METHODS)
def test_attention_matches_that_of_the_full_sequence(method: str, found: list) -> None:
    for of_rank in found:
        assert max(of_rank[method].values()) < 1e-5, of_rank[method]


def verified_as_on_a_gpu(config: Config, worker: Worker) -> dict[str, Any]:
    with as_on_a_gpu():
        return verify(config, worker)


DOCUMENTS = Custom("models.test_attention.data")
BY_OFFSETS = {"llama": {"layers": 2, "data": DOCUMENTS}, "a window": {"model": hf("mistral")}}


@pytest.mark.parametrize("method", ["gather", *slow("ulysses")])
@pytest.mark.parametrize("what", BY_OFFSETS)
def test_document_attention_by_offsets_matches_the_full_sequence(
    what: str, method: str, tmp_path: Path
) -> None:
    """Those of GPUs do, and trust them."""
    sizes = {"batch_size": 8, "seq_len": 16, "steps": 3}
    config = tiny(cp=2, context_parallel=method, **sizes, **BY_OFFSETS[what])
    results = run_world(verified_as_on_a_gpu, config, tmp_path)
    assert {one["exit_code"] for one in results} == {0}, (tmp_path / "rank0.out").read_text()


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        return attention(q, k, v, documents)


def compiled_differences(config: Config, worker: Worker) -> list[float]:
    """Of a compiled block on a rank's tokens from whole sequences with a mask."""
    mesh, on_cpu = open_mesh(config, worker), varlen_attn

    @torch.library.custom_op("tests::varlen", mutates_args=())
    def operator(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        lengths = offsets, offsets, longest, longest
        return on_cpu(q, k, v, *lengths, window_size=(-1, 0), enable_gqa=True)

    operator.register_fake(lambda q, *_: torch.empty_like(q))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, 8) for n in (4, 2, 2))
    documents = Documents(document_spans(torch.tensor([[0] * 5 + [1] * 11, [0] * 16])))
    mask = document_mask(documents, 2, 16)
    whole = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    found = []
    for method in ("gather", "ulysses"):
        ranks = ContextRanks(2, mesh.cp_rank, dist.group.WORLD, method=method)
        ContextAttention(ranks).around(block := Attends(), "")
        with as_on_a_gpu(), torch.no_grad():
            varlen.varlen_attn = lambda q, k, v, offsets, _, longest, *a, **b: operator(
                q, k, v, offsets, longest
            )
            compiled = torch.compile(block.forward, fullgraph=True, backend="eager")
            result = compiled(*(ranks.take(x, 2) for x in (q, k, v)), documents)
        found.append((result - ranks.take(whole, 2)).abs().max().item())
    return found


def test_a_block_with_documents_by_offsets_is_compiled_as_a_whole(tmp_path: Path) -> None:
    for of_rank in run_world(compiled_differences, tiny(cp=2), tmp_path):
        assert max(of_rank) < 1e-6


def test_each_token_is_on_one_rank_and_causal_attention_is_balanced() -> None:
    tokens = torch.arange(24)
    for size in (2, 3, 4):
        for method in METHODS:
            ranks = [ContextRanks(size, rank, method=method) for rank in range(size)]
            parts = [one.take(tokens, 0) for one in ranks]
            assert torch.equal(torch.cat(parts).sort().values, tokens)
            assert torch.equal(ranks[0].in_order(torch.cat(parts), 0), tokens)
            if method != "ulysses":  # which attends with whole sequences
                assert len({int(part.sum()) for part in parts}) == 1


@pytest.mark.parametrize("tp, length", [(1, 20), (4, 24)])
def test_padding_of_a_batch_has_no_loss(tp: int, length: int) -> None:
    """To what two ranks can share, whose tokens tp ranks divide once more."""
    ranks = ContextRanks(2, 1)
    context = ContextParallel(tiny(cp=2, tp=tp), ranks)
    batch = {
        "inputs": torch.ones(3, 17, dtype=torch.int64),
        "targets": torch.ones(3, 17, dtype=torch.int64),
        "document_ids": torch.ones(3, 17, dtype=torch.int64),
        "attn_mask": torch.ones(3, 17, 17, dtype=torch.bool),
        "label": torch.ones(3, 2),
    }
    padded = context.padded(batch)
    assert padded["inputs"].shape == (3, length) and padded["attn_mask"].shape[1:] == (length,) * 2
    assert padded["targets"][:, 17:].eq(IGNORED).all()
    assert padded["document_ids"][:, 17:].eq(-1).all()
    assert not padded["attn_mask"][:, 17:].any() and not padded["attn_mask"][..., 17:].any()
    assert torch.equal(padded["label"], batch["label"])
    assert context.batch(batch)["targets"].shape == (3, length // 2)
    assert context.padded(padded) is padded


def test_documents_that_are_padded_are_counted_on_the_host() -> None:
    """As others are: their number is read there, without a wait for the device."""
    host = torch.arange(34).view(2, 17) // 3
    batch = {"inputs": host, "targets": host, "document_ids": with_host_copy(host.clone(), host)}
    padded = ContextParallel(tiny(cp=2), ContextRanks(2, 1)).padded(batch)["document_ids"]
    for part in padded.tensor_split(2):
        found = host_copy(part)
        assert found is not None and torch.equal(found, part) and part.shape == (1, 20)


def test_a_ring_repeats_no_keys_for_each_head_of_queries() -> None:
    """Four of which share keys and values; the kernels take them as they are."""
    q, k, v = (torch.randn(1, n, 32, 8, requires_grad=True) for n in (8, 2, 2))
    with CountedCalls() as counted:
        _Ring.apply(q, k, v, ContextRanks(2, 0, method="ring"), True, None).sum().backward()
    written = [shape for call in counted.calls for shape in call.shapes]
    # what a rank sends on, and no more of keys and values
    assert max(shape.numel() for shape in written if len(shape) > 4) == 2 * 2 * 32 * 8
    assert v.grad is not None and v.grad.shape == v.shape


# --- models ---------------------------------------------------------------------------------------


def own(**changes: Any) -> Model:
    return Model(f"{__name__}.Own", {"vocab_size": None, **changes})


def divided(model: Model, method: str, **layout: Any) -> Config:
    sizes = {"batch_size": 8, "seq_len": 16, "steps": 3}
    return tiny(model=model, cp=2, context_parallel=method, **sizes, **layout)


BIASED = {"own, bias of attention": divided(own(positions="bias"), "gather")}
OTHERS = {
    "own, weights of positions": divided(own(positions="weights"), "ring", dp=2),
    "own, embedded positions": divided(own(positions="embedding"), "ulysses", pp=2),
    "own, not causal": divided(own(kind="encoder"), "ring"),
    "hf mistral, a window": divided(hf("mistral"), "gather"),
    "hf gpt2": divided(hf("gpt2"), "ulysses"),
    "own, rotated in its blocks": divided(own(kind="rotated"), "ring"),
    "own, rows of a table in its blocks": divided(own(kind="rows of a table"), "ulysses", dp=2),
    "own, a mask that is cut": divided(own(kind="a mask that is cut"), "gather"),
    "own, a mask made in its blocks": divided(own(kind="a mask that is made"), "ulysses"),
    "own, a cut of as many features": divided(own(kind="eight features"), "ring"),
}


POSITIONS = divided(
    own(kind="positions"),
    "gather",
    schedule=Schedule("1f1b", 8),  # of a sequence each: its tokens are all that there are
    activation_checkpoint=ActivationCheckpoint("full"),
)


@pytest.mark.parametrize("config", cells({"positions in blocks": POSITIONS}, BIASED | OTHERS))
def test_a_model_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert preflight(config) == []
    assert_proven(config, tmp_path)


MIXED = {
    "by hand": "with cp a token sees others by scaled_dot_product_attention alone",
    "convolution": "convolves over a rank's part of the tokens",
    "lstm": "layers.0.more calls",
    "cumsum": "calls cumsum: it cumulates over a rank's part of the tokens",
    "shift": "a rank's part of the tokens",
    "mean": "calls mean: it reduces over a rank's part of the tokens",
    "first": "a rank's part of the tokens",
    "flip": "calls flip: it reverses over a rank's part of the tokens",
    "loop": "it makes other calls for shorter sequences",
    "a table that grows": "",
    "recomputed by itself": "layers.0 counts its tokens, and calls torch.utils.checkpoint",
    "distances": "its mask is not that of the rank's tokens",
    "a list of positions": "layers.0",
    "chance of a sequence": "draws random numbers for whole sequences",
    "bias of pairs": "its mask is not that of the rank's tokens",
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_model_that_mixes_tokens_otherwise_is_refused_with_the_call(kind: str) -> None:
    method = ("gather", "ulysses")[len(kind) % 2]
    config = tiny(dp=2, cp=2, context_parallel=method, model=own(kind=kind, layers=1))
    [problem] = preflight(config)
    assert (problem.key, problem.value, problem.fix) == ("cp", 2, "cp=1 dp=4")
    assert MIXED[kind] in problem.reason


@pytest.mark.slow
def test_attention_with_a_softcap_is_no_call_of_torchs() -> None:
    [problem] = preflight(tiny(cp=2, model=hf("gemma2", num_hidden_layers=1)))
    assert "model.layers.0.self_attn" in problem.reason
    assert MIXED["by hand"] in problem.reason


def shifted(output: Tensor, targets: Tensor) -> Tensor:
    """As transformers' models compute theirs: each token is held against the next target."""
    return F.cross_entropy(output[:, :-1].mT, targets[:, 1:], reduction="none")


def of_sequences(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets, reduction="none").mean(1)


ITS_OWN = "each must have its own"
SHARED = "4 heads and 2 key/value heads cannot be shared by 8 ranks"
OF_8 = {"cp": 8, "seq_len": 32, "context_parallel": "ulysses"}
TEXT = {"data": TextData(documents=True), "context_parallel": "ring"}


@pytest.mark.parametrize(
    "changes, key, said, fix",
    [
        ({"model": own(result="mean")}, "loss.name", "", ""),
        ({"loss": Custom(f"{__name__}.shifted")}, "loss.name", ITS_OWN, ""),
        ({"loss": Custom(f"{__name__}.of_sequences")}, "loss.name", ITS_OWN, ""),
        ({"seq_len": 18, "cp": 4}, "seq_len", "no multiple of 2 x cp = 8", "seq_len=24"),
        (OF_8, "context_parallel", SHARED, "context_parallel=ring"),
        (TEXT, "context_parallel", "a ring takes no mask, and", "context_parallel=ulysses"),
    ],
)
def test_a_sequence_that_cannot_be_sharded_is_refused(
    changes: dict[str, Any], key: str, said: str, fix: str
) -> None:
    [problem] = preflight(replace(tiny(cp=2, layers=1), **changes))
    assert problem.key == key and said in problem.reason and fix in problem.fix


def test_variable_length_samples_are_refused() -> None:
    config = tiny(cp=2, data=TextData(), sample=Sample(every=5, prompts=["def"]))
    [problem] = problems(config)
    assert (problem.key, problem.fix) == ("sample.every", "sample.every=0")


def test_the_method_is_chosen_by_heads_and_masks() -> None:
    def chosen(**changes: Any) -> tuple[str, str]:
        context = make_plan(tiny(layers=1, **changes)).transforms["cp"]
        assert context is not None
        return context.ranks.method, context.why

    assert chosen(cp=2)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32) == ("ring", SHARED)
    documents = TextData(documents=True)
    assert chosen(cp=2, data=documents)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32, data=documents)[0] == "gather"
    with as_on_a_gpu():  # there is no mask that could be seen
        assert chosen(cp=8, seq_len=32, data=documents)[0] == "gather"
        assert chosen(cp=8, seq_len=32, model=hf("mistral"))[0] == "gather"


def test_buffers_keep_their_dtype_where_tokens_are_checked_beside_tensor_parallel_ranks() -> None:
    model = moe(balance_loss=0.01)
    assert preflight(tiny(cp=2, tp=2, model=model, precision=Precision("bf16"))) == []
