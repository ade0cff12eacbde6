"""ChatService: a `Service`, and what its apps keep: conversations, requests to cancel by name."""

from typing import TypeAlias

from kqview.engine import Engine
from kqview.server.apps.conversations import Conversations
from kqview.server.live_config import LiveConfig
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import Cancelling
from kqview.server.models.service import LEAST_CLOSE_S, Service
from kqview.server.settings import Settings
from kqview.server.web import endpoint


class ChatService(Service):
    """What `create_app` serves."""

    def __init__(self, engine: Engine | None, settings: Settings | LiveConfig) -> None:
        super().__init__(engine, settings)
        self.conversations = Conversations(self.live, self.budget)
        self.cancelling = Cancelling()

    async def open(self) -> None:
        """As of `Service`; opens the database of the conversations."""
        await super().open()
        await self.conversations.open()

    async def close(self) -> None:
        """As of `Service`; what the conversations have to write is written before."""
        await self.drain(self.settings.shutdown_grace_s)
        await self.conversations.close(max(LEAST_CLOSE_S, self.grace_left_s))
        await super().close()


Call: TypeAlias = endpoint.Call[ChatService, ModelEntry]
"""A request to an operation of an app."""
