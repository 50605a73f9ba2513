"""The chat page: its files, and Markdown rendered for it. Talks to the model only as any client does, over HTTP."""

from .routes import router

__all__ = ["router"]
