"""What-if: where it begins (`start`), what futures change (`changes`), their runs, comparison and plan."""
