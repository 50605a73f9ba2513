from .flags import *


def inspect() -> None:
    "Chat"
