"""Completion scripts, one module a shell: text made of the command tree, so that a Tab starts no Python."""
