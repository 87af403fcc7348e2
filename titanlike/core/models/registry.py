"""Models by name: find, build on meta, choose initial weights.

To add a model `abc`:

1. one file, `titanlike/models/abc.py`: an nn.Module whose constructor's arguments are its keys;
2. one line in `MODELS` below;
3. one YAML, `conf/model/abc.yaml`: `name: abc` and the keys with their values.

A model of another package needs none of these: `model.name` is its import path.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlike.core.config.errors import ConfigError, Problem, nearest, override_text
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.imports import import_fix, import_object, of_a_library
from titanlike.core.config.parse import convert
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data, vocab_size
from titanlike.core.distributed import initialize

MODELS = {
    "llama": "titanlike.core.models.llama.Llama",
    "gpt2": "titanlike.core.models.gpt2.Gpt2",
    "moe": "titanlike.techniques.mixture.moe.Moe",
    "hf": "titanlike.hf.hf.hf",
}
LENGTHS = ("max_seq_len", "n_positions")  # keys of the longest sequence


def resolve_model(config: Config, vocabulary: int | None = None) -> Custom:
    """The model's name and arguments, with null vocab_size and maximum sequence length filled in.

    vocabulary: the open data's; None = ask the data.
    """
    args = dict(config.model.args)
    if config.model.name not in MODELS:
        args |= {key: None for key in _required(config.model.name) if key not in args}
    if args.get("vocab_size", 0) is None:
        args["vocab_size"] = vocab_size(config) if vocabulary is None else vocabulary
        if args["vocab_size"] is None and config.model.name != "hf":
            reason = f"data.name={config.data.name} does not say how many token ids there are"
            size = f"vocab_size={_largest_id(config) + 1}"
            fix = f"model.{size}, or let the function return a Data with {size}, or more"
            raise ConfigError([Problem("model.vocab_size", "null", reason, fix)])
    args |= {key: config.seq_len for key in LENGTHS if args.get(key, 0) is None}
    return Custom(config.model.name, args)


def _largest_id(config: Config) -> int:
    """Return the largest id among the first samples of a user's data."""
    data = open_data(config)
    source: Any = data.train
    count = 0 if data.example is not None else min(len(source), 256)
    samples = [data.example or {}, *(source[i] for i in range(count))]
    fields = [sample[name] for sample in samples for name in ("inputs", "targets") if sample]
    ids = [x for x in fields if x.numel() and not x.is_floating_point()]
    return max((int(each.max()) for each in ids), default=0)


def _required(name: str) -> set[str]:
    """The sizes that follow from data and seq_len, and that a custom model must take."""
    try:
        parameters = inspect.signature(_import_family(name)).parameters
    except (ConfigError, ValueError, TypeError):
        return set()  # reported when it is built
    sizes = {"vocab_size", *LENGTHS} & parameters.keys()
    return {size for size in sizes if parameters[size].default is inspect.Parameter.empty}


def complete_arguments(model: Custom) -> dict[str, Any]:
    """A model's arguments, with its constructor's defaults."""
    parameters = inspect.signature(_import_family(model.name)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | model.args


def build_model(model: Custom, device: str = "meta") -> nn.Module:
    """The full model on a device, with fp32 parameters; the arguments must be resolved.

    Raises ConfigError with every problem of its keys.
    """
    family = _import_family(model.name)
    parameters = inspect.signature(family).parameters
    if unknown := _unknown_keys(model, parameters):
        arguments = {key: value for key, value in model.args.items() if key in parameters}
        try:  # to report the problems of the other keys as well
            build_model(Custom(model.name, arguments), device)
        except ConfigError as error:
            unknown += [problem for problem in error.problems if problem.key != "model"]
        raise ConfigError(unknown)
    _check_arguments(model, family)
    built = _construct(model, family, device)
    for name, parameter in built.named_parameters():
        if parameter.dtype == torch.float64 or parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            reason = f"its parameter {name} is {kind}, and weights are trained in fp32"
            fix = "a model of fp32 weights (two real ones for a complex one)"
            raise ConfigError([Problem("model.name", model.name, reason, fix)])
        if parameter.is_floating_point():  # master weights, whatever the constructor chose
            parameter.data = parameter.data.float()
    return built


def _import_family(name: str) -> Callable[..., Any]:
    if name == "???":
        fix = "model=own model.name=package.module.Class"
        raise ConfigError([Problem("model.name", "???", "your own model needs a name", fix)])
    try:
        family = import_object(MODELS.get(name, name))
    except ValueError as error:
        near = nearest(name, MODELS)
        fix = f"model.name={near}" if near else f"model.name={' or '.join(MODELS)}"
        own = "name it as package.module.Class" if "." in name else fix
        fix = import_fix("model.name", error, own)
        raise ConfigError([Problem("model.name", name, str(error), fix)]) from None
    if inspect.isclass(family):
        right, kind = issubclass(family, nn.Module), "class, but not of torch.nn.Module"
    else:
        kind = of_a_library(name, family, nn.Module)
        right, kind = callable(family) and not kind, kind or type(family).__name__
    if not right or inspect.isbuiltin(family):
        fix = "a module class, or a function that returns a module"
        raise ConfigError([Problem("model.name", name, f"is a {kind}", fix)])
    return family


def _unknown_keys(model: Custom, parameters: Mapping[str, inspect.Parameter]) -> list[Problem]:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    if not (unknown := model.args.keys() - parameters.keys()):
        return []
    from titanlike.core.config.other_frameworks import Context, other_names, translate

    problems = []
    for key in unknown:
        value = override_text(model.args[key])
        here, note = translate(key, value, Context()) or ([], "")
        usual = "".join(here).partition("=")[0].removeprefix("model.")
        names = [name for name in (usual, *other_names(key)) if name in parameters]
        near = names[0] if names else nearest(key, parameters)
        reason = f"{model.name} has no such argument"
        if near:
            fix = f"model.{near}={value}"
        elif here:
            reason, fix = f"{reason}; {note}", " ".join(here)
        else:
            fix = note or f"a key of {model.name}: {', '.join(parameters)}"
        problems.append(Problem(f"model.{key}", model.args[key], reason, fix))
    return problems


def _check_arguments(model: Custom, family: Callable[..., Any]) -> None:
    """Raise ConfigError for missing arguments, and for values that do not match their annotation."""
    signature = inspect.signature(family)
    try:
        signature.bind(**model.args)
    except TypeError as error:
        fix = f"its keys: {', '.join(signature.parameters)}"
        raise ConfigError([Problem("model", model.name, str(error), fix)]) from None
    hints = typing.get_type_hints(family.__init__ if inspect.isclass(family) else family)
    problems: list[Problem] = []
    for key, value in model.args.items():
        if hints.get(key) in (int, float, bool, str):
            convert(hints[key], value, f"model.{key}", problems)
    if not problems and hasattr(family, "may_be_zero"):
        problems = _not_positive(complete_arguments(model), family.may_be_zero)
    if problems:
        raise ConfigError(problems)


def _not_positive(sizes: Mapping[str, Any], may_be_zero: Collection[str]) -> list[Problem]:
    """The problem of each non-positive size of a built-in model."""
    heads = sizes.get("num_attention_heads", sizes.get("n_head", 1))
    if not heads > 0:
        heads = max(sizes.get("num_key_value_heads", 1), 1)
    fits = dict.fromkeys(("num_attention_heads", "n_head"), heads)
    fits |= dict.fromkeys(("hidden_size", "n_embd"), 32 * heads)  # which heads divide
    return [
        Problem(f"model.{key}", value, "must be above 0", f"model.{key}={fits.get(key, 1)}")
        for key, value in sizes.items()
        if isinstance(value, (int, float)) and not value > 0 and not isinstance(value, bool)
        if key not in may_be_zero
    ]


def _construct(model: Custom, family: Callable[..., Any], device: str) -> nn.Module:
    """Call the constructor; raise ConfigError for its exceptions and wrong results."""
    try:
        with torch.device(device), _WithoutValues():
            built = family(**model.args)
    except ValueError as error:
        keys = inspect.signature(family).parameters
        problems = [Problem.parse("model", str(text)) for text in error.args]
        raise ConfigError(
            [replace(p, key=f"model.{p.key}") if p.key in keys else p for p in problems]
        ) from None
    except Exception as error:  # of any kind
        reason = f"building it raised {type(error).__name__}: {error}"
        raise ConfigError([Problem("model", model.name, reason, "other sizes")]) from error
    if not isinstance(built, nn.Module):
        reason = f"it returned a {type(built).__name__} and not a torch.nn.Module"
        fix = "a module class, or a function that returns a module"
        raise ConfigError([Problem("model.name", model.name, reason, fix)])
    return built


_DRAWS = {
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
    *(Tensor.normal_, Tensor.uniform_, Tensor.erfinv_),
}


class _WithoutValues(TorchFunctionMode):
    """A context in which random functions return meta tensors unchanged.

    torch's random meta kernels are written in Python: they take most of the time of constructing a
    model, and import the compiler (half a second).
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DRAWS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


def constructed_buffers(model: Custom, seed: int) -> dict[str, Tensor]:
    """The buffers as constructed, by all their names; parameters take no memory."""
    with initialize.seeded(seed), initialize.parameters_on_meta():
        real = build_model(model, "cpu")
    return dict(real.named_buffers(remove_duplicate=False))


def initial_weights_of(
    model: Custom, seed: int, agreed: Callable[[bool], bool] = bool
) -> initialize.InitialWeights:
    """A model's initial weights, see `titanlike.core.distributed.initialize`.

    agreed: reduces over ranks whether the model is too large to be constructed on a rank.
    """
    meta: Any = build_model(model)
    if hasattr(meta, "initial_weights"):
        return meta.initial_weights(seed)
    initial = getattr(meta, "initial", None)
    if initial is not None and next(meta.buffers(), None) is None:
        return initialize.SeededWeights(initial, seed, {})
    if initial is None:
        from titanlike.core.distributed import module_weights  # of a custom model alone

        if agreed(module_weights.too_large_to_construct(meta)):
            buffers = constructed_buffers(model, seed)
            return module_weights.ModuleWeights(meta, model.name, seed, buffers)
        with initialize.seeded(seed):
            return initialize.ConstructedWeights(build_model(model, "cpu"))
    return initialize.SeededWeights(initial, seed, constructed_buffers(model, seed))
