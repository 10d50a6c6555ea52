"""No request is read further than it may go."""

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Limited:
    """413 for a body of more than ``most`` bytes, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                raise HTTPException(413, f"more than {self.most} bytes")
            return message

        await self.app(scope, counted, send)
