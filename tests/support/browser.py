"""A page in headless Chromium: what its scripts made of it, and what they complained of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts, lines of the console). Skips where there is no browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [program, *flags, page.resolve().as_uri()], capture_output=True, text=True, timeout=90
    )
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)
