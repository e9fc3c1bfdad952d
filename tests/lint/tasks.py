"""A background task that dies is said: every task that nothing awaits is made by `background.spawn`."""

import ast
from collections.abc import Iterator

from tests.lint.source import modules

MAKES = {"create_task", "ensure_future", "run_coroutine_threadsafe"}
AWAITED = {
    "controlplane/background.py": 1,
    "controlplane/console/live/feed.py": 1,
    "controlplane/dispatch/live_fleet/heartbeats.py": 2,
    "controlplane/dispatch/live_fleet/kv_caches.py": 1,
    "controlplane/gateway/upstream/adapters.py": 1,
    "workers/traffic/__main__.py": 1,
    "controlplane/supervisor/child.py": 1,
    "controlplane/supervisor/stack.py": 2,
    "forecasting/lengths/predictor.py": 3,  # its own process is watched, and started again
    "workers/emulator/instance.py": 1,  # no part of a real fleet, as the next
    "workers/emulator/kv_events.py": 1,
    "workers/traffic/waves.py": 3,  # of its own TaskGroup
}
"""By module: calls whose task its maker awaits, or whose error it reads."""


def faults() -> Iterator[str]:
    counts = {}
    for module in modules().values():
        if count := sum(is_bare(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
            counts[f"{module.name.replace('.', '/')}.py"] = count
    for name in sorted(counts.keys() | AWAITED.keys()):
        if counts.get(name, 0) != AWAITED.get(name, 0):
            yield f"{name} makes {counts.get(name, 0)} tasks by itself: use background.spawn, or list them as awaited"


def is_bare(maker: ast.expr) -> bool:
    """Whether *maker* makes a task by itself; those of a TaskGroup are awaited by it."""
    return (
        isinstance(maker, ast.Attribute)
        and maker.attr in MAKES
        and not (isinstance(maker.value, ast.Name) and maker.value.id == "group")
    )
