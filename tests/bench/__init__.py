"""Benchmarks: `python -m tests.bench [NAME] [--json]`.

A benchmark is a module here with `run(options) -> dict` (numbers by name; units in names; dicts may nest) and
`add_arguments(parser)`. It prints to stderr and returns its result.
"""
