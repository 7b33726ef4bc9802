"""Paths of the WebSocket sessions."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.websockets import WebSocket

from .gemini_routes import VERSIONS
from .interaction_socket import interaction_socket
from .live import PATH, live
from .service import Service
from .sockets import REFUSED, Sessions


def add_sockets(app: FastAPI, service: Service) -> None:
    sessions = Sessions(service)

    @app.websocket("/ws/{method}")
    async def live_session(websocket: WebSocket, method: str) -> None:
        if PATH.fullmatch(method) is None:
            await websocket.close(REFUSED, "unknown method")
            return
        await live(websocket, sessions, service)

    for version in VERSIONS:

        @app.websocket(f"/{version}/interactions/live")
        async def interaction_session(websocket: WebSocket) -> None:
            await interaction_socket(websocket, sessions, service)
