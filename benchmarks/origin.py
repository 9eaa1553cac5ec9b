"""When, where and on which code a run was made: what every record of a run says."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch


@cache
def origin() -> dict[str, str]:
    """`date`, `commit` (with a + if files were changed since) and `machine`."""
    return {"date": datetime.now(timezone.utc).date().isoformat(), "commit": _commit(), "machine": _machine()}


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".."], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    cpu = f"{os.cpu_count()} cores of {names[0] if names else platform.processor() or platform.machine()}"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
