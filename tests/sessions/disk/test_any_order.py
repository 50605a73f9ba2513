"""Whatever is done in whatever order: what is there reads as it was offered, what leaves was used longest ago."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from selfdraft.sessions.disk.store import Stored

from .support import IDENTITY, files, is_right, opened, stored, taken

CAP = 450_000
OTHER = "cd" * 32


class Model:
    """What is known of a record that was stored."""

    def __init__(self, stored: Stored, seed: int, parent: Model | None, used: int) -> None:
        self.stored = stored
        self.seed = seed
        self.parent = parent
        self.used = used

    @property
    def path(self) -> list[Model]:
        return [self, *(self.parent.path if self.parent else [])]


class AnyOrder(RuleBasedStateMachine):
    """A store against a dict."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.store = opened(self.root, max_bytes=CAP)
        self.models: dict[str, Model] = {}
        self.count = 0
        self.damaged = False

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)

    def use(self, model: Model) -> None:
        self.count += 1
        model.used = self.count

    def pick(self, number: int) -> Model | None:
        mine = sorted(self.here, key=lambda model: model.seed)
        return mine[number % len(mine)] if mine else None

    @property
    def here(self) -> list[Model]:
        """Records of the identity that is open."""
        return [model for model in self.models.values() if model.stored.key]

    @rule(
        number=st.integers(0, 50), behind=st.booleans(), size=st.sampled_from([5, 300, 1500, 6000]), again=st.booleans()
    )
    def offer(self, number: int, behind: bool, size: int, again: bool) -> None:
        parent = self.pick(number) if behind else None
        seed = number if again else 1000 + self.count
        before = self.here
        made = stored(self.store, seed, parent.stored if parent else None, size=size)
        gone = [model for model in before if not model.stored.key]
        spared = {id(model) for model in (parent.path if parent else [])}
        parents = {id(model.parent) for model in before}
        leaves = [m for m in before if m.stored.key and id(m) not in parents and id(m) not in spared]
        if gone and leaves:  # nobody who was used longer ago could have left instead
            assert max(model.used for model in gone) <= min(model.used for model in leaves)
        assert not any(id(model) in spared for model in gone)
        if made.key:
            known = self.models.get(made.key)
            model = known if known and known.stored.key else Model(made, seed, parent, 0)
            self.models[made.key] = model
            if model is not known:
                self.use(model)
        else:
            assert made.failed

    @rule(number=st.integers(0, 50))
    def touch(self, number: int) -> None:
        model = self.pick(number)
        if model:
            self.store.touch(model.stored)
            self.use(model)

    @rule(other=st.booleans())
    def reopen(self, other: bool) -> None:
        """Perhaps with another model, which is a fresh start for what we hold."""
        before = {model.stored.key for model in self.here}
        self.store.close()
        if other:
            self.store = opened(self.root, max_bytes=CAP, identity=OTHER)
            assert self.store.records() == []
            self.store.close()
        self.store = opened(self.root, max_bytes=CAP, identity=IDENTITY)
        self.damaged = False
        found = {record.key: handle for record, handle in self.store.records()}
        assert found.keys() == before
        for key, handle in found.items():
            self.models[key].stored = handle

    @precondition(lambda self: self.here)
    @rule(number=st.integers(0, 50), position=st.integers(0, 10_000), kind=st.sampled_from(["flip", "cut", "delete"]))
    def damage(self, number: int, position: int, kind: str) -> None:
        model = self.pick(number)
        assert model
        assert model.stored.entry
        self.damaged = True
        names = sorted(model.stored.entry.row.blobs)
        name = names[position % len(names)]
        path = self.root / "v1" / "blobs" / name[:2] / f"{name}.safetensors"
        content = bytearray(path.read_bytes())
        if kind == "delete":
            path.unlink()
        else:
            content[position % len(content)] ^= 1 + position % 255
            path.write_bytes(content[: position % len(content)] if kind == "cut" else content)
        for record, handle in self.store.records():
            is_right(self.store, record, handle)  # or a miss
        assert not model.stored.key
        self.store.flush(10)

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if not hasattr(self, "store"):
            return
        wanted = set()
        for record, handle in self.store.records():
            assert is_right(self.store, record, handle)
            assert record.parent is None or self.models[record.parent].stored.key
            assert handle.entry
            wanted |= {f"{name}.safetensors" for name in handle.entry.row.blobs}
        assert files(self.root) == wanted
        assert self.store.figures.records == len(self.here)
        assert self.store.figures.pending_bytes == 0
        assert self.store.figures.failed == 0
        assert taken(self.root) <= self.store.figures.bytes <= CAP
        assert self.damaged or self.store.figures.bytes == taken(self.root)


@pytest.mark.usefixtures("no_sync")
class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
