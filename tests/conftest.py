"""Before torch is imported: two workers and their ranks share the cores, a thread each."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
