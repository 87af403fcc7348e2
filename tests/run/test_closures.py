"""What a command imports: what its config does not ask for is not read on the way of a run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
import yaml

from support.paths import ROOT

# in every process of a command: at its end, which files of titanlike it has imported; who asked for
# torch's compiler, or for what shards tensors; and which files were on the stack when one of CALLS
# was called
NOTED = """
import atexit, os, sys, traceback
end = os._exit
ASKED = {"torch._dynamo.eval_frame": "compiler", "torch.distributed.tensor": "dtensor"}
class Asked:
    def find_spec(self, name, path, target=None):
        if name in ASKED:
            file = os.path.join(os.environ["NOTED"], f"{ASKED[name]}-{os.getpid()}")
            with open(file, "w") as file:
                traceback.print_stack(file=file)
sys.meta_path.insert(0, Asked())
def note(*code):
    files = {getattr(m, "__file__", None) for n, m in [*sys.modules.items()] if n.startswith("titanlike")}
    with open(os.path.join(os.environ["NOTED"], str(os.getpid())), "w") as file:
        file.write("\\n".join(sorted(filter(None, files))))
    with open(os.path.join(os.environ["NOTED"], f"stacks-{os.getpid()}"), "w") as file:
        file.writelines(" ".join(stack) + "\\n" for stack in stacks)
    if code:
        end(*code)
os._exit = note
atexit.register(note)
ROOT, CALLS, stacks = os.environ["ROOT"], os.environ["CALLS"].split(), set()
def called(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_qualname in CALLS and code.co_filename.startswith(ROOT):
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        inside = [c for c in stack if c.co_filename.startswith(ROOT)]
        stacks.add(tuple(f"{c.co_filename.removeprefix(ROOT)}:{c.co_qualname}" for c in inside))
if CALLS:
    sys.setprofile(called)
"""
ROWS = yaml.safe_load((Path(__file__).parent / "closures.yaml").read_text())
COMMON = "device=cpu data=synthetic logger=none checkpoint.every=0 checkpoint.last=false"
FIRST, *OTHERS = ROWS
PATH = yaml.safe_load((Path(__file__).parent / "main_path.yaml").read_text())


def imported(command: str, folder: Path, calls: Sequence[str] = ()) -> dict[str, int]:
    """Lines of each file of titanlike that a process of the command has imported."""
    for name in ("noted", "site"):
        (folder / name).mkdir()
    (folder / "site/sitecustomize.py").write_text(NOTED)
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "NOTED": str(folder / "noted")}
    env |= {"ROOT": str(ROOT / "titanlike") + os.sep, "CALLS": " ".join(calls)}
    tool, *words = command.split()
    line = [sys.executable, str(ROOT / tool), *words, *COMMON.split()]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    asked = [file.read_text() for file in (folder / "noted").glob("compiler-*")]
    assert not asked, f"no command here compiles, yet: {asked[0]}"
    noted = [file for file in (folder / "noted").iterdir() if file.name.isdecimal()]
    files = {line for file in noted for line in file.read_text().split("\n")}
    return {
        str(Path(file).relative_to(ROOT)): len(Path(file).read_text().splitlines())
        for file in files
        if file.startswith(str(ROOT / "titanlike"))
    }


def check(row: dict, folder: Path, calls: Sequence[str] = ()) -> dict[str, int]:
    found = imported(row["command"], folder, calls)
    files, lines = len(found), sum(found.values())
    told = f"{row['command']}: {files} files, {lines} lines"
    assert files <= row["files"] and lines <= row["lines"], f"{told}: {sorted(found)}"
    assert row["lines"] < 1.1 * lines, f"{told}: less, which tests/run/closures.yaml should say"
    return found


def test_a_default_run_imports_no_more_than_it_did_and_nothing_that_is_not_asked_for(
    tmp_path: Path,
) -> None:
    names = check(FIRST, tmp_path, PATH["calls"])
    _check_main_path(tmp_path / "noted")
    asked = [file.read_text() for file in (tmp_path / "noted").glob("dtensor-*")]
    assert not asked, f"nothing is sharded in one process: {asked[0]}"
    rooms = (
        *("techniques/", "formats/", "hf/", "use/", "proof/"),
        *(f"core/checkpoint/{file}" for file in ("reader", "writer", "staging", "state_dict")),
    )
    techniques = (
        "expert_parallel",
        "float8",
        "compiled_blocks",
        "muon",
        "timeline",
        "profile",
        "stragglers",
        "wandb_sink",
        "batchnorm",
    )
    unasked = [n for n in names if any(f"titanlike/{room}" in n for room in rooms)]
    unasked += [n for n in names if Path(n).stem in techniques and "config/" not in n]
    assert not unasked


def _check_main_path(noted: Path) -> None:
    """The files of main_path.yaml are those on the stacks, and no more than it says."""
    lines = [line for file in noted.glob("stacks-*") for line in file.read_text().splitlines()]
    stacks = [[call.split(":") for call in line.split()] for line in lines]
    assert {*PATH["calls"]} == {stack[0][1] for stack in stacks}, "one is not called any more"
    aside = {*PATH["aside"]}
    way = [stack for stack in stacks if not aside.intersection(chain.from_iterable(stack))]
    found = {file for stack in way for file, _ in stack}
    assert found == {*PATH["files"]}
    count = sum(len((ROOT / "titanlike" / file).read_text().splitlines()) for file in found)
    assert len(found) <= PATH["most"]["files"] and count <= PATH["most"]["lines"], count


@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row["command"])
def test_a_command_imports_no_more_than_it_did(row: dict, tmp_path: Path) -> None:
    check(row, tmp_path)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions and for annotations count, too: a circle is read, changed and moved
    as one file. Raises CycleError with the files."""
    files = [path for path in (ROOT / "titanlike").rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    graph = {name: {*_imports(path, names)} for name, path in names.items()}
    assert len([*TopologicalSorter(graph).static_order()]) >= len(files) > 150


def _imports(path: Path, names: dict[str, Path]) -> Iterator[str]:
    """The modules that it imports: at its top, within functions, or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (
                    [whole] if whole in names else [node.module] if node.module in names else []
                )
