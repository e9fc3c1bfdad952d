"""vLLM servers on the machines of a Ray cluster. No Django; `ray` itself is imported when a cluster is asked."""
