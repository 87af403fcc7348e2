"""With this folder on PYTHONPATH, rank 0 stops still at a place in its work on checkpoints.

FAULT is JSON: {"event", "path", "marked", "count", "flag", "fsync"}. At the count-th audit event of
that name whose path fits, and whose folder has a marker or not as `marked` says (null = either),
the thread creates the file `flag` and waits until somebody removes it, or kills the process.
`event` "" stops nowhere. `fsync`: seconds that each fsync takes longer, as on a slow disk.
"""

import json
import os
import re
import sys
import time

FAULT = json.loads(os.environ.get("FAULT", "null"))


def stop_at_place(fault: dict, pattern: re.Pattern) -> None:
    left = fault["count"]

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event != fault["event"] or left == 0:
            return
        path = arguments[1 if event == "os.rename" else 0]
        if not isinstance(path, str) or not pattern.search(path):
            return
        if event == "open" and path.endswith(".safetensors") and not arguments[2] & os.O_CREAT:
            return  # for reading
        folder = path if re.search(r"step-\d+$", path) else os.path.dirname(path)
        marked = fault["marked"]
        if marked is not None and os.path.exists(f"{folder}/COMMITTED") != marked:
            return
        left -= 1
        if left == 0:
            open(fault["flag"], "w").close()
            while os.path.exists(fault["flag"]):
                time.sleep(0.002)

    sys.addaudithook(hook)


def slow_down_fsync(seconds: float) -> None:
    fsync = os.fsync

    def slow(handle: int) -> None:
        time.sleep(seconds)
        fsync(handle)

    os.fsync = slow


# the driver of several ranks, which has no RANK, reads some of these files as well
if FAULT is not None and os.environ.get("RANK", "") == os.environ.get("FAULT_RANK", ""):
    if FAULT["event"]:
        stop_at_place(FAULT, re.compile(FAULT["path"]))
    if FAULT["fsync"]:
        slow_down_fsync(FAULT["fsync"])
