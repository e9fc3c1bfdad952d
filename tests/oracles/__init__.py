"""Slow, plain twins of compiled code: what each kernel must decide, in the shortest form."""
