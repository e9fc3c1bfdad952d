"""The global scheduler of QLM (section 7): which request groups each virtual queue serves, and in which order."""
