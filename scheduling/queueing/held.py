"""What is done with a request of a class that is not interactive: bits of a number, added; 0 for interactive classes."""

from typing import Final

HELD: Final = 1
"""The queue manager for non-interactive work holds it on arrival."""
OPPORTUNISTIC: Final = 2
"""Donated instances serve it, and others when capacity is left."""
ENDS_ON_RECLAIM: Final = 4
"""It ends with an error when its donated instance is reclaimed, instead of waiting again."""
