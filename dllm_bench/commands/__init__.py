"""The commands of `dllm-bench`, one file each; they import nothing heavy before they run."""
