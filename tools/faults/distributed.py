"""Faults of several ranks: how a model is cut, what the others are told, who is one of them."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

RANKS, MEETING, FOLLOWING, SERVING = (
    f"tests/distributed/{name}.py" for name in ("test_ranks", "test_meeting", "test_following", "test_serving")
)
SHARDING = "tests/models/test_sharding.py"

FAULTS = [
    Fault(
        "a rank that ended for another is named in its place",
        "distributed/launch.py",
        "min(broken, key=lambda each: each[1] > 0)",
        "broken[0]",
        f"{SERVING} -k rank_that_is_killed",
    ),
    Fault(
        "channels of the delta rule cut in one piece",
        "models/block_part.py",
        "    for width in (keys, keys, values):\n",
        "    for width in (2 * keys + values,):\n",
        f"{RANKS} -k dense",
    ),
    Fault(
        "a bias is added by every rank",
        "models/sharding.py",
        'if ranks.rank and "bias" in layer:',
        "if ranks.rank < 0:",
        f"{RANKS} -k biased",
    ),
    Fault(
        "a rank embeds tokens of others",
        "models/sharding.py",
        "mx.logical_and(place >= 0, place < rows)",
        "place < rows",
        f"{RANKS} -k dense",
    ),
    Fault(
        "ranks beyond the key/value heads take the first",
        "models/sharding.py",
        "(rank * heads // size, max(",
        "(rank // size, max(",
        SHARDING,
    ),
    Fault(
        "a number of ranks that divides no heads is taken",
        "models/sharding.py",
        "if config[name] % size:",
        "if config[name] < size:",
        SHARDING,
    ),
    Fault(
        "quantisation groups are cut through",
        "models/sharding.py",
        "if length % cut.units:",
        "if length < 0:",
        SHARDING,
    ),
    Fault(
        "others are not told what stays of a forward",
        "distributed/leading.py",
        '        self._leader.tell(["commit", list(tokens)])\n',
        "",
        f"{RANKS} -k two_ranks",
    ),
    Fault(
        "a cycle is started that may be dropped",
        "distributed/leading.py",
        "looks_ahead = False",
        "looks_ahead = True",
        "tests/distributed/test_following.py",
    ),
    Fault(
        "a model is run ahead that cannot take it back",
        "engine/engine.py",
        "looks_ahead(self.model) and len(rows)",
        "len(rows)",
        "tests/engine/test_running_ahead.py -k taken_back",
    ),
    Fault(
        "other tokens go unnoticed",
        "distributed/following.py",
        "if mine != digest:",
        "if mine < 0:",
        FOLLOWING,
    ),
    Fault(
        "what is dropped on rank 0 stays on others",
        "distributed/following.py",
        "        self._arrays.pop(number, None)\n",
        "",
        FOLLOWING,
    ),
    Fault(
        "whoever connects is a rank",
        "distributed/channel.py",
        'if not secrets.compare_digest(str(presented).encode("utf-8", "replace"), secret.encode()):',
        "if not presented:",
        MEETING,
    ),
    Fault(
        "a stranger that talks nonsense ends rank 0",
        "distributed/channel.py",
        "except (SelfdraftError, ValueError, TypeError, RecursionError):",
        "except (SelfdraftError, ValueError):",
        f"{MEETING} -k stranger",
    ),
    Fault(
        "garbage that is collected while a message is sent holds rank 0 up for ever",
        "distributed/channel.py",
        "threading.RLock()",
        "threading.Lock()",
        f"{MEETING} -k garbage",
    ),
    Fault(
        "another model is a part all the same",
        "distributed/facts.py",
        "if other != value:",
        "if other is None:",
        MEETING,
    ),
    Fault(
        "decoding goes on behind a forward that was broken off",
        "server/service.py",
        "        if (why := self.beyond_repair()) is not None:\n            raise why\n",
        "        self.beyond_repair()\n",
        "tests/server/test_service.py",
    ),
    Fault(
        "clients are not told that a rank is lost",
        "server/dialects/failures.py",
        '    (GroupBroken, 503, "group_broken"),\n',
        "",
        f"{SERVING} -k killed",
    ),
    Fault(
        "ranks are started for several models",
        "cli/group.py",
        "if len(models) > 1:",
        "if False:",
        "tests/cli/test_group.py",
    ),
    Fault(
        "ranks are started with an adapter that they cannot share",
        "cli/group.py",
        "if settings.adapter_path is not None:",
        "if False:",
        "tests/cli/test_group.py",
    ),
]
