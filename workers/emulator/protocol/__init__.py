"""vLLM's HTTP surface: bodies of requests, answers, errors and the metrics page, as vLLM 0.32 has them."""
