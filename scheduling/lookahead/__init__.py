"""The look-ahead map: how full the KV cache of every instance will be (PreServe section 4.3.1)."""
