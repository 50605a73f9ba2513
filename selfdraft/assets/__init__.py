"""Files that ship inside the package: the reference checkpoint."""
