"""What is gathered for the layers of tensor-parallel ranks is not kept: it is gathered once more in
the backward; in compiled blocks it is kept.

That gradients are those of one process is proven in `test_tensor_parallel_models.py` and
`tests/proof/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from support.cells import slow
from support.counted_calls import CountedCalls
from support.counted_memory import fake_process_group
from support.models import tiny
from titanlike.core.config.groups.computation import Float8Precision, Mxfp8Precision, Precision
from titanlike.core.distributed.placement import in_float8
from titanlike.core.models.llama import Llama, rotary_table
from titanlike.core.torch_private.tensors import storage_id
from titanlike.planning.estimate import make_estimate
from titanlike.planning.known_hardware import shipped
from titanlike.techniques.low_precision.float8 import use_float8
from titanlike.techniques.low_precision.float8_linear import cast_weights
from titanlike.techniques.tp.plan import match_modules, parse_plan
from titanlike.techniques.tp.ranks import TensorRanks
from titanlike.techniques.tp.styles import shard_model
from titanlike.techniques.weight_gradients import DeferredWeightGradients

WIDTH, TOKENS, BATCH = 128, 16, 3
META = torch.device("meta")


FLOAT8 = [Float8Precision(min_features=16), Mxfp8Precision(min_features=32)]


@pytest.mark.parametrize(
    ("waiting", "precision"),
    [(False, Precision()), (True, Precision()), *((False, one) for one in FLOAT8)],
    ids=["", "weight gradients later", "float8", "mxfp8"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_saves_its_shard_and_gathers_again_in_the_backward(
    size: int, waiting: bool, precision: Precision
) -> None:
    with META:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4}
        model = Llama(vocab_size=64, num_hidden_layers=1, **sizes)
        ranks = TensorRanks(size, 0, sequence=True)
        part = torch.empty(BATCH, TOKENS // size, WIDTH, requires_grad=True)
    use_float8(model, tiny(precision=precision), torch.device("cpu"))
    plan = match_modules(model, parse_plan(model.tp_plan()))
    shard_model(model, plan, ranks, whole_logits=False)
    block = model.model.layers[0]
    if layers := [module for module in block.modules() if in_float8(module)]:
        cast_weights(layers, None)
    weights = [*model.parameters(), *(x for one in layers for cast in one.casts for x in cast)]
    parameters = {storage_id(weight) for weight in weights}
    later = DeferredWeightGradients(block, META) if waiting else None
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    table = rotary_table(torch.arange(TOKENS, device=META), WIDTH // 4, 1e4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = block(part, table, None)
    kept_sizes = [size for key, size in kept.items() if key not in parameters]
    assert kept_sizes.count(part.nbytes) >= 2  # of attention and the feed-forward layer
    assert part.nbytes * size not in kept_sizes
    before = ranks.traffic.messages
    # scales are all-reduced in two messages: of all weights at once, of 2 inputs; of 5 gradients
    scales = precision.name == "float8"
    assert before == 4 + 2 * 3 * scales  # two all-gathers, two reduce-scatters
    result.backward(torch.empty_like(result))
    # and for q, k and v, and for gate and up, one all-gather more
    more = 2 * 5 * scales + (0 if waiting else 2)
    assert ranks.traffic.messages - before == 4 + more
    if later is not None:
        later.take()()
        assert ranks.traffic.messages - before == 6
    # both once, and the reduce-scatters, while the rank computes
    assert ranks.traffic.beside == 4 * part.nbytes * (size - 1)
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("waiting", [False, *slow(True)], ids=["kept", "weight gradients later"])
def test_a_compiled_block_gathers_once_and_keeps_it_unless_weight_gradients_come_later(
    waiting: bool,
) -> None:
    """Its second all-gather, which equals the forward's, would overlap with nothing."""
    with fake_process_group(0, 2):
        with META:
            model = Llama(
                vocab_size=64, hidden_size=WIDTH, num_attention_heads=4, num_hidden_layers=1
            )
        ranks = TensorRanks(2, 0, dist.group.WORLD, sequence=True, compiled=True)
        shard_model(
            model, match_modules(model, parse_plan(model.tp_plan())), ranks, whole_logits=False
        )
        block = model.to_empty(device="cpu").model.layers[0]
        later = DeferredWeightGradients(block, torch.device("cpu")) if waiting else None
        part = torch.randn(BATCH, TOKENS // 2, WIDTH, requires_grad=True)
        table = rotary_table(torch.arange(TOKENS), WIDTH // 4, 1e4)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = torch.compile(block, fullgraph=True, backend="aot_eager")(part, table, None)
        parameters = {storage_id(p) for p in block.parameters()}
        kept = [size for key, size in sizes.items() if key not in parameters]
        assert kept.count(2 * part.nbytes) == (0 if waiting else 2)
        assert not waiting or kept.count(part.nbytes) >= 2
        with CountedCalls() as counted:
            result.sum().backward()
        names = [c.name for c, n in counted.calls.items() for _ in range(n)]
        exchanged = [name for name in names if name.startswith("_c10d_functional::")]
        # two gathers of gradients, two reduce-scatters; it was six
        assert len([name for name in exchanged if "wait" not in name]) == 4, exchanged
        if later is not None:
            later.take()()
        assert all(p.grad is not None for p in block.parameters())


def test_a_plan_counts_what_compiled_blocks_keep() -> None:
    """The other half of two inputs of each layer."""
    config = tiny(tp=2, layers=4, seq_len=256, batch_size=8)
    plain, compiled = (
        make_estimate(replace(config, compile=on), shipped("cpu")).fullest for on in (False, True)
    )
    kept = 4 * 2 * (8 * 256 * 32 * 4) // 2
    assert 0.7 * kept < compiled - plain <= kept
