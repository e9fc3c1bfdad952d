"""LoRA adapters of an emulated server, in the memory that vLLM gives them."""

from collections import OrderedDict


class AdapterCache:
    """Adapters that a server knows, and where they are: the least recently used ones leave the GPU, then the memory.

    Without a limit on the GPU (0) all of them are there.
    """

    def __init__(self, on_gpu: int, in_memory: int, storage_s: float, memory_s: float) -> None:
        self.paths: dict[str, str] = {}
        """By name, of those loaded and not unloaded since."""
        self.on_gpu, self.in_memory = on_gpu, max(on_gpu, in_memory)
        self.storage_s, self.memory_s = storage_s, memory_s
        self._used: OrderedDict[str, None] = OrderedDict()  # most recently used last

    def use(self, name: str) -> float:
        """Bring the adapter *name* onto the GPU; return the seconds that takes."""
        if not self.on_gpu or name not in self.paths:
            return 0.0
        newer = list(reversed(self._used)).index(name) if name in self._used else self.in_memory
        self._used[name] = None
        self._used.move_to_end(name)
        while len(self._used) > self.in_memory:
            self._used.popitem(last=False)
        return 0.0 if newer < self.on_gpu else self.memory_s if newer < self.in_memory else self.storage_s

    def unload(self, name: str) -> bool:
        """Forget *name*; return False if it is not loaded."""
        self._used.pop(name, None)
        return self.paths.pop(name, None) is not None

    def clear(self) -> None:
        self.paths.clear()
        self._used.clear()
