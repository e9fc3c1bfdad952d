"""What a role may not read, looked for in what it was answered."""

from tests.access import expected
from tests.access.expected import OF_ACME, OF_GLOBEX
from tests.access.world import World


def forbidden(world: World, role: str) -> tuple[str, ...]:
    if role in expected.OF_THE_FLEET:
        return world.hidden_from_all()
    words = (*world.hidden_from_all(), *world.of_the_fleet)
    if role not in OF_ACME:
        words += world.of_others("acme")
    return words if role in OF_GLOBEX else words + world.of_others("globex")


def check(world: World, role: str, what: str, text: str) -> list[str]:
    """Return what *role* may not read but finds in the answer *text*; repeating the address is allowed."""
    text = text.replace(what.rpartition(" ")[2].partition("?")[0], "")
    return [f"{what}: shows {word!r}" for word in forbidden(world, role) if word in text]
