"""This engine beside others on the same machine, in one run."""
