"""The tutorial is followed to the letter, in an empty folder."""

from __future__ import annotations

import signal
from pathlib import Path

from sqlalchemy import create_engine

from fencedjobs import JobState, Store
from tests.pages import Block, blocks
from tests.programs import Program, Programs, eventually
from tests.servers import free_port

#: what each program says when it is ready
READY = {"uvicorn": "Uvicorn running on", "work": "worker.started", "relay": "Relaying"}


class Reader:
    """Writes the files, makes the changes and types the commands, and compares what comes of it."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.running: dict[str, Program] = {}
        self._programs = programs
        self._folder = folder
        self._port = str(free_port())
        self._typed = ""
        self._said = ""

    def follows(self, block: Block) -> None:
        if block.language == "sh":
            self._types(block.text.replace("8000", self._port))
        elif block.language == "text":
            self._compares(block.text.strip())
        elif block.language == "diff":
            block.changed(self._folder)
        else:
            assert block.file, f"which file is this?\n{block.text}"
            path = self._folder / block.file[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.file[1])

    def _types(self, commands: str) -> None:
        """What is to be installed is there already; what ends with & runs on."""
        typed = []
        for line in commands.splitlines():
            if line.endswith(" &"):
                self._starts(line.removesuffix(" &"))
            elif not line.startswith("pip install "):
                typed.append(line)
        self._typed = "\n".join(typed)
        self._said = self._programs.run("sh", "-ec", self._typed) if typed else ""

    def _starts(self, line: str) -> None:
        (name,) = (name for name in READY if name in line)
        self.running[name] = self._programs.start("sh", "-ec", f"exec {line}")
        self.running[name].says(READY[name])

    def _compares(self, promised: str) -> None:
        """The page says that some things take a moment: who only looks may look again."""
        if self._typed.startswith("python -c"):
            eventually(lambda: self._looks() == promised)
        assert self._said.strip() == promised

    def _looks(self) -> str:
        self._said = self._programs.run("sh", "-ec", self._typed)
        return self._said.strip()


def test_who_follows_the_page_has_a_worker_an_outbox_and_an_inbox(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    with Programs(folder, tmp_path) as programs:
        reader = Reader(programs, folder)
        for block in blocks("tutorial.md"):
            reader.follows(block)
        assert set(reader.running) == set(READY)
        engine = create_engine(f"sqlite:///{folder / 'shop.db'}")
        store = Store(engine)
        eventually(lambda: store.outbox.stats()["default"].sent == 1)
        assert store.counts() == {"default": {JobState.DONE: 1}}
        assert store.inbox.stats().messages == 1
        engine.dispose()
        for name in ("work", "relay"):
            assert reader.running[name].told(signal.SIGTERM) == 0, reader.running[name].said
        reader.running["uvicorn"].told(signal.SIGTERM)
        assert "Application shutdown complete" in reader.running["uvicorn"].said
        assert not any("Traceback" in program.said for program in reader.running.values())
