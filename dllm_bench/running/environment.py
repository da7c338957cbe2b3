"""What a row tells of the machine and of the code that made it."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Environment"]


@dataclass(frozen=True)
class Environment:
    """Columns of a row; none of them belongs to its key. See docs/schema.md."""

    device_name: str | None
    threads: int | None
    torch_version: str | None
    cuda_version: str | None
    python_version: str
    platform: str
    git_revision: str | None
    git_dirty: bool | None

    @classmethod
    def capture(cls, device: str) -> Environment:
        """The environment of this process, with `device` as the one that decodes."""
        import torch

        revision, dirty = _checkout(Path(__file__).resolve().parents[1])
        return cls(
            device_name=torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
            threads=torch.get_num_threads(),
            torch_version=str(torch.__version__),
            cuda_version=torch.version.cuda,
            python_version=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            git_revision=revision,
            git_dirty=dirty,
        )

    def columns(self) -> dict[str, Any]:
        """The row's columns."""
        return asdict(self)


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def _checkout(package: Path) -> tuple[str | None, bool | None]:
    """(commit, whether code differs from it) of the checkout that holds the package; (None, None) outside of one.

    An installed copy may lie inside somebody else's checkout: only one that has the package under its control counts.
    """
    if _git(package, "ls-files", "--error-unmatch", "errors.py") is None:
        return None, None
    changed = _git(package, "status", "--porcelain", "--", ":(top)*.py", ":(top)*.safetensors", ":(top)*.json")
    return _git(package, "rev-parse", "HEAD"), None if changed is None else bool(changed)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
