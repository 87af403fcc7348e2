"""Batches: the same for every mesh, from any step on, and every mistake named beforehand."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commands import TINY
from support.forked import run
from support.paths import ROOT
from support.waiting import until
from titanlike.core.config import validate
from titanlike.core.config.groups.data import SyntheticData, TextData, TokenData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.loader import batches, validation_batches, validation_weights
from titanlike.core.data.registry import open_data, problems, vocab_size
from titanlike.formats.text import find_files


def token_config(folder: Path, count: int = 1000, **changes: object) -> Config:
    """A file that counts 0, 1, 2, ..., so that each token tells where it was read."""
    path = folder / "tokens.bin"
    np.arange(count, dtype="<u2").tofile(path)
    data = TokenData(path=str(path), vocab_size=count, validation_fraction=0.2)
    return replace(Config(data=data, seq_len=7, batch_size=8, device="cpu", seed=3), **changes)


def run_of(config: Config, steps: int, start: int = 0) -> torch.Tensor:
    """What a run reads [steps, batch_size, 2, T]: the slices of all dp ranks put together."""
    train = open_data(config).train
    ranks = [
        torch.stack(
            [
                torch.stack([batch["inputs"], batch["targets"]], 1)
                for batch in islice(batches(train, config, dp_rank=r, start_step=start), steps)
            ]
        )
        for r in range(config.dp)
    ]
    return torch.cat(ranks, 1)


def test_sequences_match_the_token_file(tmp_path: Path) -> None:
    """Targets are the next tokens, no training token is in validation, an epoch has all of it."""
    config = token_config(tmp_path)
    data = open_data(config)
    assert len(data.train) == (800 - 1) // 7 and len(data.validation) == (200 - 1) // 7
    read = run_of(config, steps=2 * len(data.train) // 8)
    assert read.dtype == torch.int64
    assert torch.equal(read[:, :, 0] + 1, read[:, :, 1])
    epoch = read[:, :, 0].reshape(-1)[: 7 * len(data.train)]
    assert sorted(epoch.tolist()) == list(range(7 * len(data.train)))
    held = torch.cat(
        [b["targets"] for b in validation_batches(data.validation, config, dp_rank=0, batches=4)]
    )
    assert held.min() >= 800


@pytest.mark.parametrize("name", ["tokens", "synthetic"])
def test_every_mesh_reads_the_same_global_batches(tmp_path: Path, name: str) -> None:
    config = token_config(tmp_path)
    if name == "synthetic":
        config = replace(config, data=SyntheticData(vocab_size=1000))
    alone = run_of(config, steps=20)
    for dp in (2, 4, 8):
        assert torch.equal(run_of(replace(config, dp=dp), steps=20), alone)
    assert not torch.equal(run_of(replace(config, seed=4), steps=20), alone)


@settings(max_examples=6)
@given(start=st.integers(0, 400), dp=st.sampled_from([1, 2, 4]))
def test_data_resumes_at_any_step_in_any_layout(
    tmp_path_factory: pytest.TempPathFactory, start: int, dp: int
) -> None:
    config = token_config(tmp_path_factory.mktemp("tokens"))
    whole = run_of(config, steps=start + 3)
    assert torch.equal(run_of(replace(config, dp=dp), steps=3, start=start), whole[start:])


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_resume_at_any_step(tmp_path: Path, workers: int) -> None:
    config = token_config(tmp_path)
    expected = run_of(config, steps=9)[5:]
    config.data.workers = workers
    assert torch.equal(run_of(replace(config, dp=2), steps=4, start=5), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is files on Linux alone")
def test_a_batch_that_shared_memory_cannot_take_ends_the_run_at_once(tmp_path: Path) -> None:
    """As a small /dev/shm, the limit of a process lets no file of 64 KiB be allocated."""
    config = token_config(tmp_path, 20_000, batch_size=1024)
    config.data.workers = 2
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the batch"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
    signal.alarm(20)
    try:
        with pytest.raises(
            ValueError, match=r"data.workers=2: .* \(one of 112 KiB: unable to .*=0"
        ):
            next(batches(open_data(config).train, config, dp_rank=0))
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        signal.signal(signal.SIGALRM, handler)


def test_batches_that_shared_memory_has_no_place_for_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = token_config(tmp_path, batch_size=2048, dp=2)  # 112 KiB on a rank
    config.data.workers = 2
    monkeypatch.setattr(registry, "free_shared_memory", lambda: 896 * 1024)
    assert problems(config) == []
    monkeypatch.setattr(registry, "free_shared_memory", lambda: 896 * 1024 - 1)
    (problem,) = problems(config)
    assert str(problem).startswith(
        "data.workers=2: a batch takes 112 KiB, and 2 of each loader process are on their way to 2 "
        "ranks of a machine: 896 KiB in /dev/shm, which has 896 KiB; write data.workers=0"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "data", "says"),
    [
        ("64k", "text", "1 error in the config; nothing was started"),
        ("64k", "own data.name=support.data.uneven data.vocab_size=50", "shared memory"),
        ("4k", "own data.name=support.data.uneven data.vocab_size=50", "No space left on device"),
    ],
)
def test_a_run_in_a_container_with_little_shared_memory_says_so_and_ends(
    room: str, data: str, says: str, tmp_path: Path
) -> None:
    line = f"{sys.executable} {ROOT}/train.py {' '.join(TINY)} dp=2 seq_len=256 batch_size=64 "
    line += f"run_dir={tmp_path} data.workers=2 data={data}"
    mount = f"mount -t tmpfs -o size={room} tmpfs /dev/shm && {line}"
    words = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/tests"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr
    assert "write data.workers=0" in done.stderr


def test_loading_leaves_the_generator_of_dropout_alone(tmp_path: Path) -> None:
    config = token_config(tmp_path)
    state = torch.get_rng_state()
    run_of(config, steps=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_is_the_same_each_time_and_in_every_mesh(tmp_path: Path) -> None:
    """Four batches of 8 out of 28 sequences: the last is filled up, and a fifth takes that away."""
    config = token_config(tmp_path)
    source = open_data(config).validation

    def read(config: Config) -> torch.Tensor:
        ranks = [
            torch.stack(
                [b["inputs"] for b in validation_batches(source, config, dp_rank=r, batches=4)]
            )
            for r in range(config.dp)
        ]
        return torch.cat(ranks, 1)

    alone = read(config)
    assert validation_weights(source, config, 4) == [1.0, 1.0, 1.0, 1.0, -0.5]
    first = [800 + 7 * min(i, 27) for i in range(32)] + [800 + 7 * 27] * 8
    assert alone[:, :, 0].flatten().tolist() == first
    for dp in (1, 2, 4):
        assert torch.equal(read(replace(config, dp=dp, seed=9)), alone)


def test_a_loader_process_maps_the_file_instead_of_copying_it(tmp_path: Path) -> None:
    """Where processes are spawned, not forked, the source is pickled."""
    source = open_data(token_config(tmp_path, count=60_000)).train
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[9]["inputs"], source[9]["inputs"])


def test_a_numpy_file_is_read(tmp_path: Path) -> None:
    config = token_config(tmp_path)
    expected = run_of(config, steps=3)
    np.save(tmp_path / "tokens.npy", np.arange(1000))
    config.data.path = str(tmp_path / "tokens.npy")
    assert problems(config) == [] and torch.equal(run_of(config, steps=3), expected)


def test_python_itself_gives_batches_of_text(tmp_path: Path) -> None:
    """The defaults: no file is named, nothing is downloaded, nothing that was installed is read."""
    files = find_files(None)
    assert files == find_files(None) == sorted(files)
    assert {"functools.py", "typing.py"} < {file.name for file in files}
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    config = Config(data=TextData(cache=str(tmp_path)), device="cpu")
    assert problems(config) == []
    data = open_data(config)
    assert vocab_size(config) == data.vocab_size == 257
    assert "standard library" in data.description
    assert len(data.train) * 128 > 4_000_000, "enough to train on"
    batch = next(batches(data.train, config, dp_rank=0))
    assert batch["inputs"].shape == batch["targets"].shape == (16, 128)
    text = data.decode(batch["inputs"].flatten().tolist())
    assert "self" in text or "def " in text
    assert data.boundary == 256 == data.train[0]["inputs"][0]


def test_random_tokens_are_uniform_and_validation_has_others() -> None:
    config = Config(data=SyntheticData(vocab_size=10), seq_len=1000, device="cpu")
    data = open_data(config)
    one, other = data.train[5]["inputs"], data.validation[5]["inputs"]
    assert torch.equal(one, open_data(config).train[5]["inputs"])
    assert torch.equal(one[1:], data.train[5]["targets"][:-1])
    assert not torch.equal(one, other) and not torch.equal(one, data.train[6]["inputs"])
    counts = torch.bincount(torch.cat([data.train[i]["inputs"] for i in range(20)]))
    assert len(counts) == 10 and (counts - 2000).abs().max() < 250


def test_a_custom_function_provides_the_data() -> None:
    """Further fields, and samples of other lengths: `test_variable_length.py`."""
    custom = Custom("support.samples.phrases", {"bucket": 16, "workers": 1})
    config = Config(data=custom, seq_len=16, batch_size=4, device="cpu")
    assert problems(config) == [] and vocab_size(config) == 64
    batch = next(batches(open_data(config).train, config, dp_rank=0))
    assert batch["inputs"].shape == batch["targets"].shape == (4, 16)
    assert open_data(replace(config, data=Custom("support.samples.short_phrases"))).vocab_size == 64
    for name, args, words in (
        ("support.samples.cubes", {}, "cubes"),
        ("no_such_module.f", {}, "no_such_module"),
        ("support.samples.phrases", {"colour": 3}, "colour"),
        ("collections.OrderedDict", {}, "OrderedDict"),
    ):
        with pytest.raises(ValueError, match=f"^data.(name={name}.*{words}|{words}=)"):
            open_data(replace(config, data=Custom(name, args)))


def tokens(**changes: object) -> Callable[[Config], object]:
    return lambda config: [setattr(config.data, key, value) for key, value in changes.items()]


def other(data: TextData | Custom) -> Callable[[Config], object]:
    return lambda config: setattr(config, "data", data)


PROBLEMS = {
    "no such file": (tokens(path="/no/such.bin"), "data.path", "no such file"),
    "half a token": (lambda c: os.truncate(c.data.path, 1999), "data.path", "1999 bytes"),
    "bad workers": (other(Custom("support.samples.odd", {"workers": -1})), "data.workers", ">= 0"),
    "too short": (lambda c: setattr(c, "seq_len", 300), "seq_len", "200 tokens"),
    "no text": (other(TextData(path="/no/such")), "data.path", "folder"),
    "no tokenizer": (other(TextData(tokenizer="no.json")), "data.tokenizer", "no such file"),
    "no module": (other(Custom("no_such.f")), "data.name", "no_such"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_mistake_is_found_before_anything_starts(tmp_path: Path, case: str) -> None:
    config = token_config(tmp_path)
    assert problems(config) == []
    spoil, key, words = PROBLEMS[case]
    spoil(config)
    (found,) = problems(config)
    assert found.key == key and words in found.reason and found.fix


def test_all_mistakes_are_reported_at_once() -> None:
    data = TextData(path="/no/such", tokenizer="no.json", validation_fraction=0.0, workers=-1)
    config = Config(data=data)
    keys = [problem.key for problem in (*validate.problems(config), *problems(config))]
    assert keys == [
        f"data.{key}" for key in ("validation_fraction", "workers", "tokenizer", "path")
    ]


def test_text_too_short_for_a_sequence_says_which_length_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    data = TextData(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    config = Config(data=data, seq_len=128, device="cpu")
    with pytest.raises(ValueError, match="seq_len=128.*validation.*write seq_len=50"):
        open_data(config)
    assert len(open_data(replace(config, seq_len=50)).validation) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_outside_of_the_vocabulary_is_an_error(tmp_path: Path, workers: int) -> None:
    config = token_config(tmp_path)
    config.data.vocab_size = 500
    config.data.workers = workers
    with pytest.raises(ValueError, match="outside of the vocabulary of 500"):
        list(islice(batches(open_data(config).train, config, dp_rank=0), 10))


def test_the_config_is_checked_without_torch() -> None:
    code = (
        "import sys; from titanlike.core.config.schema import Config\n"
        "from titanlike.core.data.registry import problems, vocab_size\n"
        "assert not problems(Config()) and vocab_size(Config()) == 257\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


TRAINING = """
import multiprocessing, signal, sys, time
from titanlike.core.config.schema import Config
from titanlike.core.config.groups.data import TokenData
from titanlike.core.data import registry
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("last step", flush=True))
config = Config(
    data=TokenData(path=sys.argv[1], vocab_size=1000, workers=2), seq_len=7, device="cpu"
)
for step, batch in enumerate(batches(open_data(config).train, config, dp_rank=0)):
    if step % 20 == 10:
        print(sorted(p.pid for p in multiprocessing.active_children()), flush=True)
    time.sleep(0.005)
"""


def test_loader_processes_serve_the_last_step_and_end_quietly(tmp_path: Path) -> None:
    """Ctrl-C and a launcher's SIGTERM reach the whole group, and the run decides what to do."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, token_config(tmp_path).data.path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    overdue = threading.Timer(40, process.kill)
    overdue.start()
    pids: list[int] = []
    try:
        first = process.stdout.readline()
        pids = json.loads(first)
        assert len(pids) == 2
        for sent in (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, sent)
            assert next(line for line in process.stdout if line != first) == "last step\n"
            assert process.stdout.readline() == first
        process.kill()
        until(lambda: not any(map(_alive, pids)), 20)
        assert process.communicate()[1] == ""
    finally:
        process.kill()
        overdue.cancel()
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


ENDED = """
from pathlib import Path
from support.sources import batches, of_source, open_data
from titanlike.core.launch.signals import exit_now
config = of_source("map_style", Path.cwd(), workers=2)
stream = batches(open_data(config).train, config, dp_rank=0)
next(stream)
exit_now(3)
"""


def test_loader_processes_that_are_ended_leave_no_temporary_folder(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": path}
    done = run(["-c", ENDED], tmp_path, env)
    assert done.returncode == 3, done.stderr
    assert not [*tmp_path.glob("pymp-*")]
