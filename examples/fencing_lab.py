"""The fencing lab: one table, eight functions, and a clock that you pass in.

python examples/fencing_lab.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fencedjobs import service


def main(path: str) -> None:
    service.init_db(path)
    assert service.enqueue(path, "job-1") is True
    assert service.enqueue(path, "job-1") is False, "registering again changes nothing"

    fence = service.claim(path, "job-1", "A", now=0, ttl=10)
    assert fence == 1
    assert service.claim(path, "job-1", "B", now=9, ttl=10) is None, "a live lease is not handed over"
    assert service.renew(path, "job-1", "A", fence, now=9, ttl=10) is True
    assert service.renew(path, "job-1", "A", fence, now=19, ttl=10) is False, "what ran out is not revived"

    again = service.claim(path, "job-1", "A", now=19, ttl=10)
    assert again == 2, "the same name, another run"
    assert service.complete(path, "job-1", "A", fence, now=20, result="old") is False
    assert service.release(path, "job-1", "A", again) is True

    answers = service.claim_many(path, "job-1", ["A", "B", "C", "D"], now=20, ttl=10)
    assert sorted(answer for answer in answers if answer) == [3], answers
    winner = "ABCD"[answers.index(3)]
    assert service.complete(path, "job-1", winner, 3, now=21, result="done by one") is True
    print(service.state(path, "job-1"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(str(Path(folder) / "lab.db"))
