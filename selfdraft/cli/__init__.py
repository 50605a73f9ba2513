"""The command line: one module per command. Translates flags and shows results; decides nothing about decoding.

Modules here import MLX and the tokenizer libraries inside functions only, so that help and usage errors are instant.
"""
