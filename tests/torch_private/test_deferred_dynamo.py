"""torch's compiler is imported by a run that compiles, and by no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.slow

LOADED = "print('torch._dynamo.eval_frame' in sys.modules)"
OURS = "import sys, torch, titanlike.core.torch_private"


def printed(*lines: str) -> list[str]:
    """What a fresh process that runs these lines prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# each in a fork of the process, as imports take seconds
EACH = f"""
import os
for use in ("import torch.distributed.pipelining.schedules", "torch.stack([torch.empty(2, device='meta')])"):
    if not (child := os.fork()):
        exec(use)
        {LOADED}
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_what_compiles_nothing_does_not_import_the_compiler() -> None:
    """Schedules, and operators on meta."""
    assert printed(OURS, EACH) == ["False", "False"]
    # when this says False, torch does so by itself: titanlike.core.torch_private.deferred_dynamo can go
    assert printed("import sys, torch", EACH) == ["True", "True"]


def test_a_function_is_compiled_as_if_the_compiler_had_been_there_from_the_start() -> None:
    seen = printed(
        OURS,
        """
from torch.distributed.pipelining import schedules
disabled = torch._dynamo.disable(lambda x: x + 1)
print(disabled(torch.zeros(1)).item())
kept = schedules.OptimizedModule
layer = torch.nn.Linear(2, 2)
print(isinstance(layer, kept))
compiled = torch.compile(layer, backend="eager")
print(isinstance(compiled, kept), isinstance(layer, kept))
""",
        LOADED,
        """
def f(x):
    return disabled(x * 2) * 5
print(torch._dynamo.explain(f)(torch.zeros(1)).graph_break_count)
print(torch.compile(f, backend="eager")(torch.ones(1)).item())
""",
    )
    assert seen == ["1.0", "False", "True", "False", "True", "1", "15.0"]


def test_a_module_of_the_compiler_that_is_imported_first_is_there_once() -> None:
    """As torchao does; a second one counted no graphs."""
    seen = printed(
        OURS,
        "from torch._dynamo.utils import counters",
        "import torch._dynamo.output_graph",
        "print(torch._dynamo.output_graph.counters is counters)",
        "print(torch._dynamo.utils.__spec__.name)",
    )
    assert seen == ["True", "torch._dynamo.utils"]


def test_nothing_is_compiled_within_force_eager_by_a_compiler_that_is_imported_within_it() -> None:
    seen = printed(
        OURS,
        "from titanlike.core.torch_private.deferred_dynamo import force_eager",
        """
def backend(graph, inputs):
    print("compiled")
    return graph
with force_eager():
    f = torch.compile(lambda x: x + 1, backend=backend)
    print('torch._dynamo.eval_frame' in sys.modules)
    f(torch.zeros(1))
    print("eager")
f(torch.zeros(1))
""",
    )
    assert seen == ["True", "eager", "compiled"]


def test_a_module_of_the_compiler_is_imported_once_with_it() -> None:
    seen = printed(
        OURS,
        "import torch._dynamo.config as config",
        LOADED,
        "import torch._dynamo.exc",
        "print(config is torch._dynamo.config, sys.modules['torch._dynamo.config'] is config)",
        "print(sys.modules['torch._dynamo'] is torch._dynamo, type(torch._dynamo).__name__)",
        "print(config.__spec__.loader is config.__loader__)",
    )
    assert seen == ["False", "True", "True", "True", "module", "True"]
