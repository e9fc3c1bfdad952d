"""Slow, plain twins of compiled code: what each kernel must decide, said in the shortest way."""
