"""How many examples property tests draw: few by default, many with `--hypothesis-profile many` (`make properties`).

Both draw the same ones in every run, so that a change fails for what it changed. `explore` draws others each time
(`make explore`): a failure it finds becomes an `@example` of its test.
"""

from hypothesis import settings

FEW, MANY = 25, 150

# Examples are judged by what they find, not by how long they take on a busy machine.
settings.register_profile("few", max_examples=FEW, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=MANY, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=MANY, deadline=None)


def costly(few: int) -> settings:
    """For a test whose examples take long: *few* of them, and more in proportion where others draw more."""
    return settings(max_examples=few * settings().max_examples // FEW)
