"""A first worker. Run it, or `fencedjobs work first_worker:worker` in this folder; Ctrl-C ends it."""

from sqlalchemy import create_engine

from fencedjobs import Store, Worker, schema

engine = create_engine("sqlite:///shop.db")
schema.upgrade(engine)
worker = Worker(Store(engine), queues=["orders"])


@worker.handler("pack")
def pack(ctx):
    with ctx.transaction("packed") as uow:  # business rows and completion, or neither
        uow.outbox.add(ctx.id, ctx.payload, topic="warehouse")


if __name__ == "__main__":
    worker.run()
