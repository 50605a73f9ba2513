"""The error tree. Every message says what was wrong, with the value, and what to do.

SelfdraftError
├── InvalidRequest      the caller's input: a parameter, a prompt, a message list
│   ├── ContextOverflow prompt longer than the model's context
│   └── ImageTooLarge   an image with more bytes or pixels than are accepted
├── CheckpointError     a model folder or file that cannot be used
│   ├── ModelNotFound   nothing under that name, here or on the Hub
│   └── DownloadFailed  a model that could not be fetched whole
├── GroupBroken         a rank of those that share a model is lost
├── FanError            fans that cannot be held or given back, or are not there
├── TrayError           no icon can be shown here, or it cannot start a server
├── ServiceError        the operating system's service manager is not there, or refuses
├── OutOfMemoryBudget   the memory that weights or an answer need is not there
├── NonFiniteLogits     the model produced NaN or infinity while decoding
└── NonFiniteOutput     an embedding or a score is NaN or infinite
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ContextOverflow",
    "DownloadFailed",
    "FanError",
    "GroupBroken",
    "ImageTooLarge",
    "InvalidRequest",
    "ModelNotFound",
    "NonFiniteLogits",
    "NonFiniteOutput",
    "OutOfMemoryBudget",
    "SelfdraftError",
    "ServiceError",
    "TrayError",
]


class SelfdraftError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequest(SelfdraftError):
    """Bad input. `param` names the parameter at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextOverflow(InvalidRequest):
    """The prompt does not fit the model's context."""


class ImageTooLarge(InvalidRequest):
    """An image with more bytes or pixels than are accepted."""


class CheckpointError(SelfdraftError):
    """A model folder or file that cannot be used as it is."""


class ModelNotFound(CheckpointError):
    """Nothing answers to that model name."""


class DownloadFailed(CheckpointError):
    """A model could not be fetched whole. What is named as removed is; what else was fetched stays to go on from."""


class FanError(SelfdraftError):
    """Fans that cannot be held or given back: no Mac, no ThermalForge, or one that does not do what it is told."""


class TrayError(SelfdraftError):
    """No icon can be shown here, or what it was asked for cannot be done."""


class ServiceError(SelfdraftError):
    """The service manager of the operating system is not there, or does not do what it is told."""


class GroupBroken(SelfdraftError):
    """A rank that holds a part of the model is lost: nothing that runs can come to an end."""


class OutOfMemoryBudget(SelfdraftError):
    """Not enough memory, said before any is taken. `later` says that it may be enough once some is free."""

    def __init__(self, message: str, *, later: bool = False) -> None:
        super().__init__(message)
        self.later = later


class NonFiniteLogits(SelfdraftError):
    """The model produced NaN or infinite logits; decoding stops instead of emitting noise."""


class NonFiniteOutput(SelfdraftError):
    """An embedding or a score is NaN or infinite; nothing of the answer is sent."""
