"""A tensor-parallel plan: patterns of module names, and how each of those modules is sharded.

    layers.*.self_attn: gather                    # a module that takes full activations
    layers.*.self_attn.q_proj: {colwise: 64}  # in heads of 64
    layers.*.self_attn.o_proj: rowwise
    layers.*.input_layernorm: sequence

A model's own is its method `tp_plan()`; a model's YAML file may have another one as `tp_plan:`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

from torch import nn

from titanlike.core.config.errors import ConfigError, Problem, nearest

KEY = "model.tp_plan"
STYLES = {
    "colwise": "output features of a linear layer; `colwise: N` in whole heads of N features",
    "colwise_kv": "the same for keys and values: fewer heads than ranks are replicated",
    "colwise_gather": "output features of a linear layer, followed by an all-gather",
    "packed_colwise": "output features of N matrices fused into one, or of a fused weight of shape "
    "[N, M, ...]; head: N = rows that are not separated",
    "rowwise": "input features of a linear layer, followed by a reduce-scatter or an all-reduce",
    "rowwise_split": "the same where the input is replicated: each rank slices it",
    "vocab": "the vocabulary: rows of an embedding, logits of a head",
    "rows": "rows of a module's own parameters, which are one a head or a feature of a rank's",
    "sequence": "no weight; its activations are sharded along the sequence (norms, dropout)",
    "replicate": "no weight and no activation: each rank computes the same",
    "replicate_sum": "no weight; its input is the rank's heads or features, its gradients are "
    "all-reduced",
    "gather": "no weight; its first argument is all-gathered once for the sharded layers in it",
    "split": "no weight; its output is sharded along the sequence",
}
DIVIDING = ("colwise", "colwise_kv", "colwise_gather", "packed_colwise", "rowwise", "rowwise_split")
# transformers' names in `base_model_tp_plan`
TRANSFORMERS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "vocab",
    "vocab_parallel": "vocab",
    "replicated_with_grad_allreduce": "replicate_sum",
    "sequence_parallel": "sequence",
    "replicate": "replicate",
}
# transformers' styles that are not supported -> what to write
_OTHER_WORDS = {
    "embedding_colwise": "vocab",
    "packed_rowwise": "rowwise",
    **dict.fromkeys(
        ["all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"],
        "no entry: what has none is whole on each rank",
    ),
}


@dataclass(frozen=True)
class Entry:
    pattern: str  # of module names; * stands for anything between two dots
    style: str
    argument: int | tuple[int, ...] | None = None  # rows per head; rows of packed matrices
    head: int = 1  # rows of packed matrices that stay together

    def matrices(self, features: int) -> tuple[int, ...]:
        """The rows of each matrix in a weight with these output features."""
        if self.style != "packed_colwise":
            return (features,)
        assert self.argument is not None
        if isinstance(self.argument, tuple):
            return self.argument
        return (features // self.argument,) * self.argument

    def matches(self, name: str) -> bool:
        pattern, parts = self.pattern.split("."), name.split(".")
        pairs = zip(parts, pattern, strict=False)
        return len(pattern) == len(parts) and all(fnmatchcase(*pair) for pair in pairs)


def parse_plan(plain: Mapping[str, Any]) -> list[Entry]:
    """The entries of a plan given as data. Raises ConfigError with every problem."""
    entries, problems = [], []
    if not isinstance(plain, Mapping):
        example = "{'layers.*.up': colwise, 'layers.*.down': rowwise}"
        raise ConfigError([Problem(KEY, plain, "must map names of modules to styles", example)])
    for pattern, value in plain.items():
        style, argument, head = value, None, 1
        if isinstance(value, Mapping):
            rest = dict(value)
            head = rest.pop("head", 1) if "packed_colwise" in rest else 1
            if len(rest) == 1:
                [(style, argument)] = rest.items()
        style = str(style)
        if style not in STYLES:
            style = TRANSFORMERS.get(style, style)
        key = f"{KEY}.{pattern}"
        if style not in STYLES:
            near = nearest(style, STYLES)
            fix = near or f"a style: {', '.join(STYLES)}"
            problems.append(Problem(key, value, "no such style", _OTHER_WORDS.get(style, fix)))
            continue
        if isinstance(argument, list | tuple):
            argument = tuple(argument)
        if wrong := _argument_problem(style, argument):
            problems.append(Problem(key, value, *wrong))
        elif not _positive(head):
            problems.append(Problem(key, value, "needs the size of a head", "head: 64"))
        entries.append(Entry(str(pattern), style, argument, head))
    if problems:
        raise ConfigError(problems)
    return entries


def _argument_problem(style: str, argument: Any) -> tuple[str, str] | None:
    if style == "packed_colwise":
        numbers = argument if isinstance(argument, tuple) else (argument,)
        fine = all(map(_positive, numbers))
        return None if fine else ("needs the number of matrices in one", "{packed_colwise: 3}")
    if style in ("colwise", "colwise_kv"):
        fine = _positive(argument) or (argument is None and style == "colwise")
        return None if fine else ("needs the size of a head", f"{{{style}: 64}}")
    return None if argument is None else ("this style takes no number", style)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def match_modules(model: nn.Module, entries: list[Entry]) -> dict[str, Entry]:
    """Map module names to entries. Raises ConfigError if a pattern fits no name, or two fit one."""
    modules: dict[str, Entry] = {}
    problems, unmatched = [], {entry.pattern: entry for entry in entries}
    names = [name for name, _ in model.named_modules() if name]
    for name in names:
        for entry in (entry for entry in entries if entry.matches(name)):
            unmatched.pop(entry.pattern, None)
            if name in modules:
                reason = f"{name} is also named by {modules[name].pattern}"
                fix = "one entry for each module"
                problems.append(Problem(f"{KEY}.{entry.pattern}", entry.style, reason, fix))
            modules[name] = entry
    for pattern, entry in unmatched.items():
        fix = f"a module's name, such as {names[0]}"
        if (near := nearest(pattern, names)) is not None:  # with * where the pattern has it
            pairs = zip_longest(near.split("."), pattern.split("."))
            words = ["*" if given == "*" else word for word, given in pairs if word is not None]
            fix = f"{KEY}.{'.'.join(words)}={entry.style}"
        problems.append(Problem(f"{KEY}.{pattern}", entry.style, "matches no module", fix))
    if problems:
        raise ConfigError(problems)
    return modules


def entries_above(name: str, modules: Mapping[str, Entry]) -> list[Entry]:
    """The entries of a module's ancestors."""
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return [modules[path] for path in above if path in modules]


def gathered_above(name: str, modules: Mapping[str, Entry]) -> bool:
    """Whether an ancestor gathers the input of its layers."""
    return any(entry.style == "gather" for entry in entries_above(name, modules))


def written_plan(model: Any) -> Mapping[str, Any] | None:
    """The plan in the config; None = the model's own plan applies."""
    return getattr(model, "tp_plan", None)  # in Python it may be a Custom
