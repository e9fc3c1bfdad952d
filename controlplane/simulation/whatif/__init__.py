"""What-if: start (`start`), changes of futures (`changes`), runs, comparison and plan."""
