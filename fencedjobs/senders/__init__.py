"""Senders for the relay: what takes an event to a receiver, and returns ``True`` only for its proven ack.

``fencedjobs.senders.http``, ``.nats`` and ``.rabbitmq`` each need the extra of that name; nothing of them
is imported here. Any other callable that takes an `Event` and returns ``True`` will do as well.
"""
