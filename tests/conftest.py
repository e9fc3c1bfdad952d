from hypothesis import settings

from tests import examples  # noqa: F401 (registers the profiles)

settings.load_profile("few")
