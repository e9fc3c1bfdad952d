"""Emulated vLLM servers: vLLM's HTTP surface and metrics, with the simulator's reference engine in wall time behind it.

    python -m workers.emulator --port 8100

For the demonstration fleet, for tests and for benchmarks; no model is loaded and the answers are prose of no meaning.
Differences from vLLM are listed in `workers/emulator/generation.py` (requests) and `metrics.py`.
"""
