"""What is assumed about GPUs, measured: see ``benchmarks/gpu_probe/__main__.py``."""
