"""The look-ahead map: KV cache use of every instance in its next iterations (PreServe section 4.3.1)."""
