"""Architectures: a trunk and its MTP head per file, one classifier, one loader.

`checkpoint.classify` says what a folder holds without reading weights; `loader.build_model` makes a `Model` of it.
"""

from .base import Model, architecture, register

__all__ = ["Model", "architecture", "register"]
