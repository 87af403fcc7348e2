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
from support.commands import TINY
from support.forked import run
from support.launched import Launched
from support.paths import ROOT
from support.waiting import until
from titanlike.core.config.errors import ConfigError
from titanlike.run.local import scratch_folder


def test_a_local_run_listens_on_loopback_alone_and_no_port_is_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", _other_interface())  # as in a cluster's environment
    words = [*TINY, "pp=2", "model.num_hidden_layers=2", "steps=100000", "run_dir=run"]
    launched = Launched(*words, cwd=tmp_path, program=ROOT / "train.py")
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        until(metrics.exists)
        found = _listening(launched)
        assert len(found) >= 4, "each rank has a listener for every group that it is in"
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in found)
        assert not _stores(found, tmp_path)
        size = metrics.stat().st_size
        until(lambda: metrics.stat().st_size > size)  # the attempts have not harmed it
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


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_workers_folder_is_private_and_cannot_be_prepared_or_replaced_by_others(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    before = os.umask(umask)
    try:
        for mode in (0o777, 0o1777):  # not sticky: others may rename what is in it
            shared.chmod(mode)
            with scratch_folder() as folder:
                assert folder.stat().st_mode & 0o777 == 0o700
                assert (folder.parent == shared) == (mode == 0o1777)
    finally:
        os.umask(before)


def test_without_a_private_folder_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlike.run.local._replaceable", lambda folder: True)
    with pytest.raises(ConfigError, match="TMPDIR=.*may rename"), scratch_folder():
        pass
