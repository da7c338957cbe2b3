"""Median wall time of commands that must feel instant: `--help`, `list`, `show`, and an error.

Usage: python scripts/bench_startup.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = (["--help"], ["run", "--help"], ["list", "methods"], ["show", "fast_dllm"], ["run", "--method", "fastdllm"])


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dllm_bench", *arguments], capture_output=True, check=False)
    return time.perf_counter() - begin


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for arguments in COMMANDS:
        seconds(arguments)
        times = sorted(seconds(arguments) for _ in range(rounds))
        low, middle, high = times[0], statistics.median(times), times[-1]
        print(f"{' '.join(arguments):24s} median {middle:.3f} s   ({low:.3f} to {high:.3f} s, {rounds} rounds)")


if __name__ == "__main__":
    main()
