"""Architectures: a trunk and its MTP head per file, one classifier, one loader.

`load_model` turns a folder into a `Model`; `classify` says what a folder holds without reading weights.
"""

from .base import Model, architecture, register

__all__ = ["Model", "architecture", "register"]
