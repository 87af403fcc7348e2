"""What a config decides, says and refuses before anything is allocated: stages, names, and what tp
divides."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from support.models import LLAMA, tiny
from support.vision_models import of_images
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, ConstantLr
from titanlike.core.config.groups.pipeline import BalanceSplit, EvenSplit, PointSplit, Schedule
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import MESH_KEYS
from titanlike.core.graph.cut import message
from titanlike.core.graph.partition import partition
from titanlike.core.pipeline.from_config import build_order, derive_microbatches
from titanlike.core.training.preflight import preflight
from titanlike.core.training.report import epochs, warmup
from titanlike.core.training.train_plan import make_plan
from titanlike.run.checks import problems
from titanlike.techniques.tp import tensor_parallel as tensor_draft


def test_a_mesh_that_breaks_a_rule_hides_no_error_of_model_and_loss() -> None:
    """All are told at once, and none that the mesh alone makes."""
    meshes: list[dict[str, Any]] = [
        {"dp": 3, "split": PointSplit(["model.layers.2"]), "pp": 2},
        {"dp": 2, "batch_size": 7, "seq_len": 32, "schedule": "interleaved1f1b"},
        {"dp": 4, "replicate": 3, "ep": 5},
    ]
    heads = Custom("llama", {**LLAMA, "num_attention_heads": 5, "vocab_size": None})
    wrong = {"model": heads, "loss": Custom("nowhere.loss")}
    own = {problem.key for problem in problems(replace(tiny(), **wrong))}
    assert own >= {"model.num_attention_heads", "loss.name"}
    for mesh in meshes:
        alone = {problem.key for problem in problems(tiny(**mesh))}
        assert alone and alone <= {*MESH_KEYS}
        found = problems(replace(tiny(**mesh), **wrong))
        assert {problem.key for problem in found} == alone | own


def test_a_405b_model_is_drafted_in_seconds() -> None:
    sizes = {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
    }
    config = tiny(
        pp=16, dp=64, batch_size=16 * 64, model=Custom("llama", {**sizes, "vocab_size": 128256})
    )
    plan = make_plan(config)
    assert plan.whole_numel == pytest.approx(405.9e9, rel=1e-3)
    biggest = max(plan.stage_numel(stage) for stage in range(16))
    assert biggest < 1.1 * plan.whole_numel / 16


@pytest.mark.parametrize("asked", [None, 1, 3])
def test_one_stage_accumulates_gradients_in_the_order_of_1f1b(asked: int | None) -> None:
    schedule = Schedule("1f1b", asked)
    plan = make_plan(tiny(batch_size=6, schedule=schedule))
    count, why = (asked, "asked for") if asked else derive_microbatches(schedule, 1, 6)
    assert (plan.order, plan.why_microbatches) == (build_order(schedule, 1, count), why)
    assert plan.stages == partition(plan.model_graph.units, EvenSplit(), 1)


def named(name: str = "llama", **sizes: object) -> Config:
    return tiny(model=Custom(name, {"vocab_size": None, **sizes}))


@pytest.mark.parametrize(
    "config, expected",
    [
        (named(hidden_size=30, num_attention_heads=4), "model.hidden_size=32"),
        (
            named(hidden_size=48, num_attention_heads=6, num_key_value_heads=4),
            "model.num_key_value_heads=3",
        ),
        (named(width=4), "width"),
        (named(hidden_sise=64), "model.hidden_size=64"),
        (named("lama"), "llama"),
        (named("no.such.module"), "no.such"),
        (named(vocab_size=10), "model.vocab_size=null"),
        (named("gpt2", n_positions=8), "seq_len=8"),
        (tiny(pp=2, dp=2, schedule="zbvzerobubble", fsdp=Fsdp(3)), "fsdp.zero=1"),
        (tiny(pp=2, split=BalanceSplit(balance=[4, 3])), "sums to 7"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_one_that_does(
    config: Config, expected: str
) -> None:
    """By the launcher, and by a rank that plans it."""
    assert expected in "\n".join(map(str, preflight(config)))
    with pytest.raises((ConfigError, ImportError, ValueError), match=expected.replace(".", r"\.")):
        make_plan(config)


# --- what is said of data and of the learning rate ---------------------------------------------


@pytest.mark.parametrize(
    "sequences, said",
    [
        (1 << 40, ""),  # synthetic data never end
        (9600, "0.5 of 9.6 k sequences by step 300"),
        (2400, "2 of 2.4 k sequences by step 300: each is read again"),
        (48, "100 of 48 sequences by step 300; WARNING"),
    ],
)
@pytest.mark.parametrize("dp", [1, 2])
def test_epochs_are_printed_and_many_are_a_warning(dp: int, sequences: int, said: str) -> None:
    """However many ranks share a batch."""
    config = Config(steps=300, batch_size=16, dp=dp)
    text = epochs(config, sequences)
    assert text.replace(" k ", "k ").startswith(said.replace(" k ", "k "))
    if "WARNING" in said:  # with fewer steps there is none
        steps = int(text.rpartition("steps=")[2])
        assert "WARNING" not in epochs(Config(steps=steps - 1, batch_size=16), sequences)


def test_a_warm_up_beyond_the_run_is_a_warning_with_numbers_that_work() -> None:
    config = Config(steps=50, lr=ConstantLr(warmup=1000))
    said = warmup(config)
    assert said.startswith("WARNING: the learning rate reaches 0.05 of its peak at step 50")
    steps, warm = said.split("steps=")[1].split()[0], said.rpartition("lr.warmup=")[2]
    assert not warmup(Config(steps=int(steps), lr=ConstantLr(warmup=1000)))
    assert not warmup(Config(steps=50, lr=ConstantLr(warmup=int(warm))))
    assert not warmup(Config(steps=20)), "the default's warm-up fits a short trial"


# --- tensor parallelism ------------------------------------------------------------------------


class Wide(nn.Module):
    """A model of one's own without a plan."""

    def __init__(self, vocab_size: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


PLAN = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}


def own(plan: Any, **changes: Any) -> Config:
    """tp=2 of the model above with a plan in its YAML."""
    model = Model(f"{__name__}.Wide", {"vocab_size": 64}, tp_plan=plan)
    return tiny(tp=2, model=model, **changes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (tiny(tp=3, layers=1), r"q_proj has 4 heads, which 3 ranks cannot share \(nor \d more.*write tp=2"),
        (own(None, dp=2), r"tp=2: .*Wide has no tensor-parallel plan; write tp=1 dp=4, or a plan \(docs/"),
        (own({}), "tp=2: .* has no tensor-parallel plan"),
        (own({"layers.*.1": "colwise"}), r"layers.0.1 is of class GELU; model.tp_plan.layers.\*.1=replicate"),
        (own({"tokens": "colwise"}), "tokens is of class Embedding; write model.tp_plan.tokens=vocab"),
        (own({"layers.*.0": {"colwise": "x"}}), "needs the size of a head; {colwise: 64}"),
        (own({**PLAN, "layers.1.0": "colwise"}), "layers.1.0 is also named by"),
        (own({**PLAN, "head": "rowwise_split"}, loss=ChunkedCrossEntropy(chunk=16)),
         "divides its last linear layer as rowwise_split; vocab in its tp_plan, or loss=cross"),
        (tiny(tp=4, layers=1, data=SyntheticData(vocab_size=9)),
         "embed_tokens has 9 rows, which leave a rank none .*write tp=2"),
        (own(["colwise"]), "must map names of modules to styles; {'layers.*.up"),
        (of_images("ResNet", 1, 1, tp=2), "tp=2: its .* keeps running statistics.*write tp=1 dp=2"),
    ],
)  # fmt: skip
def test_an_indivisible_size_is_refused_with_a_divisible_one(config: Config, said: str) -> None:
    found = preflight(config)
    assert len(found) == 1
    assert re.search(said, str(found[0])), str(found[0])


@pytest.mark.slow
def test_messages_flops_and_parameters_are_those_of_one_tensor_parallel_rank() -> None:
    sizes = {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    whole = tiny(pp=2, model=Model("llama", sizes))
    one = make_plan(whole)
    flops, tokens, parameters = {}, {}, {}
    for tp in (1, 2, 4):
        plan = one if tp == 1 else make_plan(replace(whole, tp=tp))
        (sent,) = plan.model_graph.graphs(plan.fields, True)[0].sends
        tokens[tp] = message(sent).shape[1]
        flops[tp] = sum(plan.memory().unit_costs.flops())
        norms = sum(n for s in plan.stage_parameters for name, n in s.items() if "norm" in name)
        parameters[tp] = sum(map(plan.stage_numel, (0, 1))) - norms
        assert plan.whole_numel == one.whole_numel
        assert plan.flops_per_token == one.flops_per_token, "of the whole model, for MFU"
    assert tokens == {1: 16, 2: 8, 4: 4}
    assert flops[1] == 2 * flops[2] == 4 * flops[4]
    assert parameters[1] == 2 * parameters[2] == 4 * parameters[4]


def test_a_checked_tp_plan_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is the same, in other microbatches and with other stages, too."""
    config = tiny(tp=2, layers=4, batch_size=8)
    other = replace(config, pp=2, schedule=Schedule("1f1b", 4))
    before, alone = make_plan(config), make_plan(other)
    monkeypatch.setattr(tensor_draft, "ForwardCheck", None)
    again = make_plan(other, checked=before.transforms)
    tensors = [x.transforms["tp"].sharding for x in (before, again, alone)]
    assert tensors[1] is not tensors[0]
    assert replace(tensors[1], like=tensors[2].like) == tensors[2]
    assert tensors[1].like.sequence == tensors[2].like.sequence is True
    assert again.stage_parameters == alone.stage_parameters
    blocks = alone.recomputed.blocks
    assert again.memory().of_ranks(blocks) == alone.memory().of_ranks(blocks)


@pytest.mark.parametrize("loss", ["cross_entropy", "support.losses.Smoothed"])
def test_a_custom_loss_receives_all_logits_of_all_tokens(loss: str) -> None:
    config = tiny(tp=2, layers=1)
    if loss != "cross_entropy":
        config = replace(config, loss=Custom(loss, {"amount": 0.1}))
    plan = make_plan(config)
    output = plan.model_graph.meta_output(plan.fields, True)
    assert list(output.shape[1:]) == [16, 32 if loss == "cross_entropy" else 64]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (tiny(tp=2, layers=1), "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head; activations between them sharded"),
        (tiny(tp=4, layers=1), ", and k_proj, v_proj with each head on 2 ranks; activations"),
        (tiny(tp=2, layers=1, tp_sequence=False), "activations between them full (tp_sequence=false)"),
        (tiny(tp=2, layers=1, seq_len=15), "full: 2 does not divide 15 tokens (it would 16)"),
        (own(PLAN), "sharded: 0, 2; activations between them full: the plan has no style sequence"),
    ],
    ids=["tp=2", "tp=4", "tp_sequence=false", "15 tokens", "a plan without sequence"],
)  # fmt: skip
def test_the_opening_table_lists_what_is_sharded(config: Config, said: str) -> None:
    plan = make_plan(config)
    [(title, text)] = plan.transforms["tp"].describe(plan)
    assert title == "tensor parallel" and said in text
    assert "% of the parameters sharded" in text


def test_tp_groups_across_nodes_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = tiny(tp=4, layers=1, run_dir=str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert problems(config, 4, said.append) == []
    assert said == [
        "tp=4 on machines of 2 ranks: the activations of every layer go over the network; "
        "pp=1 dp=2 tp=2 keeps them within a machine"
    ]
    assert problems(config, None, said.append) == [] and len(said) == 1, "all on this machine"


def test_stages_without_a_module_are_told() -> None:
    told: list[str] = []
    assert problems(tiny(pp=9, layers=2), warn=told.append) == []
    assert told == ["5 of 9 stages have no module: fewer ranks of pp do as much"]
    told.clear()
    assert problems(tiny(pp=3, layers=2), warn=told.append) == [] == told
