"""The inventory as named values, for `/api` and fleet files, checked by the same rules."""
