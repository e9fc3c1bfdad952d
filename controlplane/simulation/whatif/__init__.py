"""What-if: where it starts (`start`), what futures change (`changes`), their runs, comparison and plan."""
