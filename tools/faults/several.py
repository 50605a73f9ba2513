"""Faults of several models in one server: what is loaded, what gives way, whose memory it is."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_POOL, _SEVERAL = "tests/server/test_pool.py", "tests/server/test_several_models.py"

FAULTS = [
    Fault(
        "a thing is taken from whoever uses it",
        "server/pool.py",
        "for each in [each for each in in_the_way if not each.leases]:",
        "for each in in_the_way:",
        _POOL,
    ),
    Fault(
        "newcomers keep a load waiting for ever",
        "server/pool.py",
        "each.leaving = each in in_the_way",
        "each.leaving = False",
        _POOL,
    ),
    Fault(
        "the most recently used thing gives way",
        "server/pool.py",
        "not each.leaving, each.used))",
        "not each.leaving, -each.used))",
        _POOL,
    ),
    Fault(
        "room is made for what can never fit",
        "server/pool.py",
        "if lacking > 0 or too_many > 0:",
        "if False:",
        _POOL,
    ),
    Fault(
        "a pinned thing gives way",
        "server/pool.py",
        "if not each.entry.pinned:",
        "if True:",
        _POOL,
    ),
    Fault(
        "a load that failed is the last one",
        "server/pool.py",
        'except BaseException:\n            slot.state = "unloaded"',
        'except BaseException:\n            slot.state = "loaded"',
        _POOL,
    ),
    Fault(
        "any number of requests wait for a load",
        "server/pool.py",
        "if self.waiting >= self._most_waiting:",
        "if False:",
        _POOL,
    ),
    Fault(
        "things are loaded for those who have left",
        "server/pool.py",
        "while slot.wanted and not self._closed:",
        "while not self._closed:",
        _POOL,
    ),
    Fault(
        "a lease that nobody took is held for ever",
        "server/pool.py",
        "future.result().release()  # it came and went at the same moment",
        "pass",
        _POOL,
    ),
    Fault(
        "the longest time asked for holds, not the newest",
        "server/pool.py",
        "slot.stay = stay\n",
        "slot.stay = max(slot.stay, stay)\n",
        _POOL,
    ),
    Fault(
        "a device's queue is a race",
        "server/turns.py",
        "self._changed.wait_for(lambda: self._now == mine)",
        "pass",
        "tests/server/test_turns.py",
    ),
    Fault(
        "a model that was unloaded keeps its memory",
        "server/service.py",
        "self._llm = self.disk = None",
        "pass",
        f"{_SEVERAL}::test_an_unloaded_model_gives_its_memory_back",
    ),
    Fault(
        "rows of other models count for nothing",
        "budget.py",
        "return self.fits(needed + self.beside().rows)",
        "return self.fits(needed)",
        f"{_SEVERAL}::test_rows_of_all_models_share_the_limit",
    ),
    Fault(
        "a model believes that it is alone in the memory",
        "llm.py",
        "weights=self.weights_bytes), parts.beside)",
        "weights=self.weights_bytes))",
        f"{_SEVERAL}::test_rows_of_all_models_share_the_limit",
    ),
    Fault(
        "of two models one alone keeps its warm prefixes on disk",
        "sessions/disk/shared.py",
        "if not self._users:",
        "if True:",
        "tests/sessions/disk/test_shared.py",
    ),
    Fault(
        "prefixes that are only in memory leave with their model",
        "keeping.py",
        "self._llm.sessions.store_all()",
        "pass",
        "tests/sessions/test_on_disk.py",
    ),
    Fault(
        "any name means the first of several models",
        "server/registry.py",
        "self._lenient = lenient and len(models) == 1",
        "self._lenient = lenient",
        f"{_SEVERAL}::test_names_are_taken_strictly_where_there_are_several",
    ),
    Fault(
        "a bad request loads a model",
        "server/endpoints.py",
        "job = replace(self.job(asked), scope=request.state.owner)  # what is wrong with it loads no model\n"
        "            work = _Work(models.use(asked.model, stay=asked.stay))",
        "(await models.use(asked.model)).release()\n"
        "            job = replace(self.job(asked), scope=request.state.owner)\n"
        "            work = _Work(models.use(asked.model, stay=asked.stay))",
        f"{_SEVERAL}::test_a_bad_request_loads_nothing",
    ),
    Fault(
        "a stream is silent while its model is loaded",
        "server/endpoints.py",
        "work.has_model(keepalive if asked.stream else None)",
        "work.has_model(None)",
        f"{_SEVERAL}::test_while_one_is_loaded_the_others_answer_and_streams_are_kept_alive",
    ),
    Fault(
        "why a model cannot be loaded is told to everybody",
        "server/served.py",
        "the server's log says why\") from error",
        '{error}") from error',
        f"{_SEVERAL}::test_a_load_that_fails_says_so_without_the_reason_and_is_tried_again",
    ),
    Fault(
        "keep_alive below 0 unloads at once",
        "server/dialects/sampling.py",
        "return STAY if stay < 0 else stay",
        "return max(stay, 0.0)",
        f"{_SEVERAL}::test_idle_models_are_unloaded_and_a_request_says_how_long_its_one_stays",
    ),
]
