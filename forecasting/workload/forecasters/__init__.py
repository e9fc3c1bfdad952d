"""The forecasters of workload series."""
