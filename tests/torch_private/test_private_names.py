"""Private names of torch are used in titanlike/torch_private alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT


def private_names(path: Path) -> Iterator[str]:
    """`from torch.x import _y`, `from torch._x import y`, `import torch._x`, and `torch.x._y` of
    names that such imports bind."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bound: dict[str, str] = {}  # name here -> what of torch it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from private(alias.name, node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from private(f"{node.module}.{alias.name}", node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, *rest = names_of(node)
            if base in bound:
                yield from private(".".join([bound[base], *rest]), node)


def names_of(node: ast.expr) -> list[str]:
    """[a, b, c] of a.b.c; [""] of what is no chain of names alone."""
    if isinstance(node, ast.Attribute):
        names = names_of(node.value)
        return [*names, node.attr] if names[0] else names
    return [node.id if isinstance(node, ast.Name) else ""]


def private(name: str, node: ast.AST) -> Iterator[str]:
    parts = name.split(".")
    if any(part.startswith("_") and not part.endswith("__") for part in parts):
        yield f"line {node.lineno}: {name}"


def modules(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if path.parent.name != "torch_private"]


def test_private_names_of_torch_are_used_in_torch_private_alone() -> None:
    paths = modules("titanlike", "hydra_plugins", "tools")
    assert len(paths) > 100
    assert not [(path, name) for path in paths for name in private_names(path)]


@pytest.mark.parametrize(
    "line",
    [
        "import torch._ops",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist.distributed_c10d._set_pg_timeout(1)",
        "from torch.distributed.pipelining import schedules\nschedules._Action",
    ],
)
def test_private_names_are_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert list(private_names(tmp_path / "module.py"))
