"""What is gathered for the layers of tensor-parallel ranks is not kept: it is gathered once more in
the backward.

That gradients are those of one process is proven in `test_tensor_parallel_models.py` and
`tests/proof/test_layouts.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titanlike.models.llama import Llama, rotary_table
from titanlike.parallel.tp.plan import named, parse_plan
from titanlike.parallel.tp.ranks import TensorRanks
from titanlike.parallel.tp.styles import shard_model
from titanlike.parallel.weight_gradients import DeferredWeightGradients
from titanlike.torch_private.fake_ranks import fake_process_group
from titanlike.torch_private.tensors import storage_id

WIDTH, TOKENS, BATCH = 64, 16, 3
META = torch.device("meta")


@pytest.mark.parametrize("waiting", [False, True], ids=["", "weight gradients later"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_saves_its_shard_and_gathers_again_in_the_backward(
    size: int, waiting: bool
) -> None:
    with META:
        model = Llama(vocab_size=64, hidden_size=WIDTH, num_attention_heads=4, num_hidden_layers=1)
        ranks = TensorRanks(size, 0, sequence=True)
        part = torch.empty(BATCH, TOKENS // size, WIDTH, requires_grad=True)
    plan = named(model, parse_plan(model.tp_plan()))
    shard_model(model, plan, ranks, whole_logits=False)
    block, parameters = model.model.layers[0], {storage_id(p) for p in model.parameters()}
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
    assert before == 4  # two all-gathers, two reduce-scatters
    result.backward(torch.empty_like(result))
    # and for q, k and v, and for gate and up, one all-gather more
    assert ranks.traffic.messages - before == 4 + (0 if waiting else 2)
    if later is not None:
        later.take()()
        assert ranks.traffic.messages - before == 6
    # both once, and the reduce-scatters, while the rank computes
    assert ranks.traffic.beside == 4 * part.nbytes * (size - 1)
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [False, True], ids=["", "weight gradients later"])
def test_a_compiled_block_saves_its_shard_and_gathers_again(waiting: bool) -> None:
    """Whose backward has an all-gather that equals the forward's."""
    with fake_process_group(0, 2):
        with META:
            model = Llama(
                vocab_size=64, hidden_size=WIDTH, num_attention_heads=4, num_hidden_layers=1
            )
        ranks = TensorRanks(2, 0, dist.group.WORLD, sequence=True)
        shard_model(model, named(model, parse_plan(model.tp_plan())), ranks, whole_logits=False)
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
        assert kept.count(part.nbytes) >= 2 and 2 * part.nbytes not in kept
        result.sum().backward()
        if later is not None:
            later.take()()
        assert all(p.grad is not None for p in block.parameters())
