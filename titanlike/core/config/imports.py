"""Import paths, `package.module.attribute`: how a config names a user's code.

Code that a config names is executed. So that a stranger's config can be inspected first, `outside`
finds where its code would be imported from, without importing it. The standard library is refused:
it has no models, but functions such as os.system.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import inspect
import logging
import os
import pkgutil
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlike.core.config.errors import nearest
from titanlike.core.config.files import leaves
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config

# the help of --trust-code
TRUST_CODE = (
    "import the code and open the files that RUN names, if they are not titanlike's or RUN's"
)
# in Hydra's section: keys that name code, and packages whose code configures Hydra
_HYDRA_KEYS = ("_target_", "class", "()")
_HYDRA_CODE = ("hydra.", "hydra_plugins.", "logging.", "colorlog.")


class NotFound(ValueError):
    """An import path that leads nowhere. near: one that may be meant, or ""."""

    def __init__(self, reason: str, near: str) -> None:
        super().__init__(reason)
        self.near = near


def import_fix(key: str, error: ValueError, otherwise: str) -> str:
    """Return what to write where `import_object` raised: the path that may be meant, if any."""
    near = getattr(error, "near", "")
    return f"{key}={near}" if near else otherwise


def import_object(path: str) -> Any:
    """Import the object at a path. The working directory is appended to sys.path. Raises ValueError
    that names the missing part."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is neither a built-in name nor package.module.attribute")
    _check_library(path, module_name)
    if (here := os.getcwd()) not in sys.path and not path.startswith("titanlike."):
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything during its import
        package, _, name = module_name.rpartition(".")
        beside = getattr(sys.modules.get(package), "__path__", ())
        near = nearest(name, [module.name for module in pkgutil.iter_modules(beside)])
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name and near
        raise NotFound(
            f"importing {module_name} failed with {type(error).__name__}: {error} "
            "(its folder must be the current one or on PYTHONPATH)",
            f"{package}.{near}.{attribute}" if missing else "",
        ) from error
    if not hasattr(module, attribute):
        near = nearest(attribute, [name for name in vars(module) if not name.startswith("__")])
        path = f"{module_name}.{near}" if near else ""
        raise NotFound(f"module {module_name} has no {attribute}", path)
    imported = getattr(module, attribute)
    if inspect.isroutine(imported) or inspect.isclass(imported):  # may be imported from elsewhere
        _check_library(path, str(imported.__module__))
    return imported


def _check_library(path: str, module_name: str) -> None:
    """Raise ValueError for code of the standard library."""
    package = module_name.partition(".")[0]
    if package in sys.stdlib_module_names:
        # Python may have imported the library's before, whatever is first on sys.path
        if shadowing := [name for name in (package, f"{package}.py") if Path(name).exists()]:
            raise ValueError(
                f"{shadowing[0]} in the working directory has the name of a module of Python's standard "
                f"library, which hides it: rename {shadowing[0]}"
            )
        raise ValueError(
            f"{path} is a part of Python's standard library ({module_name}), none of which can be "
            "used here; name code of your own, or of a package"
        )


def of_a_library(path: str, imported: Any, *kinds: type) -> str:
    """Return what an imported object is if it belongs to an installed package and does not make one
    of `kinds`; else "".

    A function must be annotated to return one of them: torch.load, for example, executes what its
    arguments say and only then returns something else.
    """
    names = {path.rpartition(".")[0], str(getattr(imported, "__module__", ""))}
    files = [getattr(sys.modules.get(name), "__file__", None) or "" for name in names]
    if not any({"site-packages", "dist-packages"} & {*Path(file).parts} for file in files):
        return ""
    try:
        made = imported if inspect.isclass(imported) else typing.get_type_hints(imported)["return"]
    except Exception:  # none, or of annotations that name what is not there
        made = None
    if inspect.isclass(made) and issubclass(made, kinds):
        return ""
    expected = " or ".join(f"{k.__module__}.{k.__name__}".removeprefix("builtins.") for k in kinds)
    return f"{type(imported).__name__} of a library, not annotated as one that returns a {expected}"


def imports_line(path: str, named: str) -> str:
    """Return the line shown before the code at an import path runs. named: the key that names it."""
    place = _place(path.rpartition(".")[0]) or f"the working directory, {os.getcwd()}"
    return f"imports {path} ({named}), from {place}"


def outside(plain: Mapping[str, Any], hydra: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each import from outside of titanlike and the working directory. Imports
    nothing.

    plain: a config as plain dicts. hydra: its section for Hydra.
    """
    for key, path in named_code(plain, hydra):
        if _place(path.rpartition(".")[0]) is not None:
            yield imports_line(path, key)


def named_code(plain: Mapping[str, Any], hydra: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, import path) of all code that a config names, except titanlike's and Hydra's own."""
    for group, settings in plain.items():
        if isinstance(settings, Mapping) and "." in str(settings.get("name", "")):
            yield f"{group}.name", str(settings["name"])
    sets = _mapping(_mapping(plain.get("validation")).get("data"))
    for name, own in {"": sets, **sets}.items():
        if "." in str(_mapping(own).get("name", "")):
            yield ".".join(filter(None, ("validation.data", str(name), "name"))), str(own["name"])
    for name, path in _mapping(_mapping(plain.get("metrics")).get("own")).items():
        yield f"metrics.own.{name}", str(path)
    for key, value in leaves(hydra, "hydra"):  # except Hydra's own classes
        named = key.rpartition(".")[2] in _HYDRA_KEYS and isinstance(value, str)
        if named and not _is_hydras(value):
            yield key, value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def outside_code(config: Config) -> dict[str, str]:
    """Map keys to import paths of user code that runs in training. The learning rate's is left out:
    it gives equal values in each layout."""
    return {
        key: path
        for key, path in named_code(to_plain(config), {})
        if key != "lr.name" and not path.startswith("titanlike.")
    }


def _is_hydras(path: str) -> bool:
    """Return whether code is Hydra's or logging's, not of what they import (logging.os.system)."""
    if not path.startswith(_HYDRA_CODE):
        return False
    parts, folders = path.split("."), None
    for count in range(1, len(parts)):  # each a module, and not a name in one
        spec = _find(".".join(parts[:count]), folders) if count == 1 or folders else None
        if spec is None:
            return False
        folders = spec.submodule_search_locations
    return True


def _place(module_name: str) -> str | None:
    """Return a module's file; None if it is titanlike's, in the working directory, or not found."""
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        return "Python's standard library"
    file: str | None = None
    folders: list[str] | None = None
    parts = module_name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:count]), folders)
        if spec is None:  # it may be a package without __init__.py in another folder
            inner = [Path(folder, parts[count - 1]) for folder in folders or ()]
            folders = [str(path) for path in inner if path.is_dir()]
        else:
            file, folders = spec.origin or file, spec.submodule_search_locations
        if not folders:  # a parent's code may provide it
            break
    if file is None:
        return None
    path = Path(file).resolve()
    inside = Path(__file__).parents[2], Path.cwd()
    is_inside = any(path.is_relative_to(folder.resolve()) for folder in inside)
    return None if is_inside and "site-packages" not in path.parts else str(path)


def _find(name: str, folders: Any) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec without importing its parents, which importlib.util.find_spec does."""
    try:
        finders = (finder.find_spec(name, folders) for finder in sys.meta_path)
        return next((spec for spec in finders if spec is not None), None)
    except (KeyError, ImportError, AttributeError, ValueError):  # no __init__.py; no name
        return None


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress all logging but errors, around imports of torchao.

    Symptom without it: importing torchao logs each of its libraries that is for a different device,
    and torch a deprecation; transformers imports torchao, too. Test:
    `test_float8.py::test_a_run_says_that_it_is_emulated_and_nothing_of_torchao`.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
