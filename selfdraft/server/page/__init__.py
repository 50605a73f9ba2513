"""The chat page: its files, and Markdown rendered for it. Talks to the model only as any client does, over HTTP."""

from .routes import HEADERS, router

__all__ = ["HEADERS", "router"]
