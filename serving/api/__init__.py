"""The HTTP server: protocols over one engine interface."""

from .app import create_app
from .service import Service

__all__ = ["Service", "create_app"]
