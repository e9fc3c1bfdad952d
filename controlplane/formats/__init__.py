"""How dates are written in the admin; Django looks for `<language>/formats.py` below FORMAT_MODULE_PATH."""
