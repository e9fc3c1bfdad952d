"""A bounded dictionary that makes missing values, and forgets those that were not used for longest."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

MOST: Final = 4096

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """What is kept for each key, such as each (model, tenant), for the *most* recently used ones."""

    def __init__(self, make: Callable[[], Value], most: int = MOST) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        """Of *key*; new where there was none."""
        value = self._kept.get(key)
        if value is None:
            value = self._kept[key] = self._make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return value

    def get(self, key: Key) -> Value | None:
        """Of *key*, if there is one; it does not count as used."""
        return self._kept.get(key)

    def values(self) -> list[Value]:
        return list(self._kept.values())

    def items(self) -> list[tuple[Key, Value]]:
        return list(self._kept.items())

    def clear(self) -> None:
        self._kept.clear()
