"""What a run that starts its own workers lets others reach: nothing beyond this machine, and no
store of torch's, whose reader unpickles what anyone sets there."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from support import store_attack
from support.commands import TINY, command
from support.forked import run
from support.launched import Launched
from support.paths import ROOT
from support.waiting import until
from titanlike.config.errors import ConfigError
from titanlike.launch.scratch_folder import scratch_folder

LAYOUTS = {
    "train.py": ["pp=2", "dp=2", "model.layers=4", "steps=100000"],
    "tools/verify.py": ["pp=2", "dp=2", "model.layers=40", "model.dim=64"],
}


@pytest.mark.parametrize(
    "program",
    ["train.py", pytest.param("tools/verify.py", marks=pytest.mark.slow)],
)
def test_a_local_run_listens_on_loopback_alone_and_no_port_is_a_store(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", _other_interface())  # as in a cluster's environment
    launched = Launched(
        *TINY, *LAYOUTS[program], "run_dir=run", cwd=tmp_path, program=ROOT / program
    )
    try:
        # each of four ranks has a listener for the mesh, and for every group that it is in
        until(lambda: len(_listening(launched)) >= 8)
        if program == "train.py":
            until((tmp_path / "run" / "metrics.jsonl").exists)
        found = _listening(launched)
        beyond = [address for address in found if not ipaddress.ip_address(address[0]).is_loopback]
        assert not beyond
        assert not _stores(found, tmp_path)
        if program == "train.py":  # the attempts have not harmed it
            size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
            until(lambda: (tmp_path / "run" / "metrics.jsonl").stat().st_size > size)
    finally:
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.all_exit(within=30)


def _other_interface() -> str:
    """An interface with an address, other than loopback if there is one."""
    usable = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family == socket.AF_INET for address in addresses)
    ]
    return min(usable, key=lambda name: name.startswith("lo"))


def _listening(launched: Launched) -> set[tuple[str, int]]:
    found = set()
    for process in launched.alive():
        try:
            connections = process.net_connections("inet")
        except psutil.Error:  # it has ended meanwhile
            continue
        found |= {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def _stores(addresses: set[tuple[str, int]], tmp_path: Path) -> list[str]:
    """The addresses where a value can be set."""
    words = [f"{host}:{port}" for host, port in sorted(addresses)]
    done = run([str(Path(store_attack.__file__)), *words], tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_the_attack_on_ports_succeeds_where_there_is_a_store(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _stores({("127.0.0.1", server.port)}, tmp_path)


@pytest.mark.slow
def test_restarted_workers_meet_anew_on_loopback(tmp_path: Path) -> None:
    words = ["pp=3", "model.layers=3", "launch.max_restarts=1"]
    launched = Launched("last_rank_dies_once", *words, f"run_dir={tmp_path}")
    until((tmp_path / "starts").exists)
    assert not _listening(launched)
    code, _, err = launched.wait()
    assert code == 0, err
    assert (tmp_path / "starts").read_text().count(" ") == 2


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_workers_folder_is_private_and_cannot_be_prepared_or_replaced_by_others(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # not sticky: others may rename what is in it
    monkeypatch.setenv("TMPDIR", str(shared))
    before = os.umask(umask)
    try:
        with scratch_folder() as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert folder.parent != shared
        tempfile.tempdir = None
        shared.chmod(0o1777)
        with scratch_folder() as folder:
            assert folder.parent == shared and folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        tempfile.tempdir = None


def test_without_a_private_folder_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlike.launch.scratch_folder._replaceable", lambda folder: True)
    with pytest.raises(ConfigError, match="TMPDIR=.*may rename"), scratch_folder():
        pass


def test_a_run_of_one_process_listens_on_loopback_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")  # fails if it is used
    done = command(*TINY, "model.layers=1", "steps=1", "run_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
