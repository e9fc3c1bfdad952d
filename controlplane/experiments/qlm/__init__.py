"""QLM's evaluation (section 8), by `manage.py reproduce qlm`: against EDF, vLLM's FCFS and SHEPHERD's batches."""
