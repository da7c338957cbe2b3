"""`python -m dllm_bench`."""

from dllm_bench.cli import main

main()
