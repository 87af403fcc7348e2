"""Which rule each operator of torch follows; one that has none is refused on a rank's part."""

from __future__ import annotations

from titanlike.parallel.tp import rules, view_rules
from titanlike.parallel.tp.layout import Call, Division, Layout, Operand, Rule, WrongCall, part_of


def layouts_of(call: Call) -> list[Layout]:
    """Of a call's results; raises WrongCall."""
    kind = call.name.split(".")[1].removesuffix("_") or call.name
    divided = [operand for operand in call.operands if any(operand.layout)]
    if kind not in RULES and not call.pointwise:
        return _without_rule(call, divided)
    rule, sized = RULES.get(kind, (rules.elementwise, False))
    if not sized:
        call.check_same_numbers()
    if not divided and all(whole == local for whole, local in call.results):
        return [(None,) * len(whole) for whole, _ in call.results]
    return rule(call)


def _without_rule(call: Call, divided: list[Operand]) -> list[Layout]:
    call.check_same_numbers()
    if not divided:
        if any(whole != local for whole, local in call.results):
            raise WrongCall("its sizes are not those of the whole model")
        return [(None,) * len(whole) for whole, _ in call.results]
    reason = f"it is not known to compute the same with {part_of(_first(divided))}"
    raise WrongCall(reason, style="unknown")


def _first(divided: list[Operand]) -> Division:
    return next(one for operand in divided for one in operand.layout if one is not None)


RULES: dict[str, tuple[Rule, bool]] = {}


def _rules(rule: Rule, names: str, *, sized: bool = False) -> None:
    RULES.update({name: (rule, sized) for name in names.split()})


_rules(
    rules.like,
    "native_dropout dropout bernoulli normal uniform exponential random native_layer_norm",
)
_rules(
    rules.elementwise,
    "clone copy _to_copy to type_as contiguous detach alias where "
    "masked_fill fill zero masked_scatter addcmul addcdiv lerp clamp nan_to_num positive "
    "_conj resolve_conj resolve_neg isin one_hot item rrelu_with_noise prelu _prelu_kernel",
)
_rules(
    rules.constant,
    "zeros ones empty full new_zeros new_ones new_empty new_full empty_strided new_empty_strided "
    "zeros_like ones_like empty_like full_like rand randn randint rand_like randn_like "
    "randint_like scalar_tensor",
    sized=True,
)
_rules(
    rules.numbers,
    "arange linspace logspace eye tril_indices triu_indices randperm range lift_fresh lift_fresh_copy",
    sized=True,
)
_rules(
    view_rules.views,
    "view _unsafe_view reshape _reshape_alias view_copy unsqueeze squeeze flatten unflatten "
    "expand_copy view_as",
    sized=True,
)
_rules(view_rules.permute, "permute transpose t numpy_T mT adjoint swapaxes swapdims")
_rules(view_rules.expand, "expand", sized=True)
_rules(view_rules.repeated, "repeat", sized=True)
_rules(
    rules.over("reduces", "dim"),
    "sum mean amax amin max min argmax argmin var std var_mean std_mean prod all any norm "
    "linalg_vector_norm logsumexp median nanmedian mode nanmean nansum count_nonzero aminmax",
)
_rules(
    rules.over("takes a softmax", "dim"), "softmax _softmax log_softmax _log_softmax _safe_softmax"
)
_rules(rules.over("cumulates", "dim"), "cumsum cumprod cummax cummin logcumsumexp _cummax_helper")
_rules(rules.over("sorts", "dim"), "sort argsort topk kthvalue")
_rules(rules.over("reverses", "dims"), "flip")
_rules(rules.over("rolls", "dims"), "roll")
_rules(rules.over("unfolds", "dimension"), "unfold")
_rules(rules.normalize, "native_layer_norm layer_norm rms_norm _fused_rms_norm")
_rules(
    rules.whole_only("normalizes", batch=True),
    "native_group_norm group_norm instance_norm",
)
_rules(
    rules.whole_only("normalizes"),
    "native_batch_norm batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_native_batch_norm_legit_functional cudnn_batch_norm",
)
_rules(rules.contract, "mm bmm addmm baddbmm mv addmv dot addbmm vdot")
_rules(rules.channels, "convolution _convolution conv1d conv2d conv3d")
_rules(rules.attention, "scaled_dot_product_attention")
_rules(rules.embedding, "embedding")
_rules(view_rules.sliced, "slice", sized=True)
_rules(
    view_rules.splits, "split split_with_sizes unsafe_split unsafe_chunk tensor_split", sized=True
)
_rules(view_rules.take_one, "select unbind")
_rules(rules.indexed, "index index_put _unsafe_index _index_put_impl")
_rules(
    rules.along,
    "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill",
)
_rules(view_rules.as_complex, "view_as_complex view_as_real")
_rules(view_rules.joined, "cat concat")
_rules(view_rules.stacked, "stack")
_rules(view_rules.padded, "constant_pad_nd")
_rules(view_rules.halves, "glu")
_rules(view_rules.triangle, "tril triu")
_rules(view_rules.diagonal, "diagonal")
_rules(rules.whole_only("selects"), "nonzero masked_select unique_consecutive _unique2 bincount")
