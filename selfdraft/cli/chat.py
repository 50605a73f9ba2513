from .flags import *


def chat() -> None:
    "Chat"
