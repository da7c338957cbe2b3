"""Where lm-eval's tasks are defined, found by reading the files: its own index parses all of them, for many seconds."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from dllm_bench.errors import UserError, nearest
from dllm_bench.lm_eval_requests import lm_eval_folder

__all__ = ["find"]

_TASK = re.compile(rb"""^task:[ \t]*["']?([^\s"'#\[]+)""", re.MULTILINE)
_GROUP = re.compile(rb"""^(?:group|tag):[ \t]*["']?([^\s"'#\[]+)""", re.MULTILINE)


def find(name: str, include_path: str | None) -> Path:
    """The YAML file that defines a task: in `include_path`, else in lm-eval itself.

    Raises UserError for an unknown task (names the nearest one), a group of tasks, or a folder that does not exist.
    """
    folders = [lm_eval_folder() / "tasks"]
    if include_path is not None:
        own = Path(include_path).expanduser()
        if not own.is_dir():
            raise UserError(f"include_path '{include_path}' is no folder of lm-eval's task files")
        folders.insert(0, own)
    tables = [_names(folder) for folder in folders]
    for tasks, _ in tables:
        if name in tasks:
            return tasks[name]
    if any(name in groups for _, groups in tables):
        raise UserError(f"'{name}' is a group of lm-eval tasks: name its tasks, as 'dllm-bench lm-eval ls tasks' shows")
    near = nearest(name, [one for tasks, _ in tables for one in tasks])
    hint = f"did you mean '{near}'? " if near else ""
    raise UserError(f"unknown lm-eval task '{name}': {hint}'dllm-bench lm-eval ls tasks' lists them")


@lru_cache(maxsize=8)
def _names(folder: Path) -> tuple[dict[str, Path], frozenset[str]]:
    """The tasks that files of a folder define, and names of groups and tags."""
    tasks: dict[str, Path] = {}
    groups: set[str] = set()
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_bytes()
        found = _GROUP.search(text)
        if found:
            groups.add(found[1].decode(errors="replace"))
        found = _TASK.search(text)
        if found:
            tasks.setdefault(found[1].decode(errors="replace"), path)
    return tasks, frozenset(groups)
