"""Faults of the memory budget: what is granted, what is told beforehand, what is given back."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "weights that do not fit are read",
        "memory.py",
        "if weights >= total - beside:",
        "if False:",
        "tests/test_budget.py -k weights_that",
    ),
    Fault(
        "a limit of the user is cut to what is free",
        "memory.py",
        "total = free_memory() + beside if limit is None else limit",
        "total = free_memory() + beside if limit is None else min(limit, free_memory())",
        "tests/test_budget.py -k user_wins",
    ),
    Fault(
        "a limit beyond the machine is obeyed in silence",
        "memory.py",
        "if not self.limited or self.total <= most:",
        "if True:",
        "tests/test_budget.py -k user_wins",
    ),
    Fault(
        "a limit beyond all machines is more than MLX can be told",
        "memory.py",
        "min(self.total - self.beside + mx.get_active_memory(), _MOST)",
        "self.total + mx.get_active_memory()",
        "tests/test_budget.py -k beyond_all",
    ),
    Fault(
        "the limit of MLX forgets what it holds already",
        "memory.py",
        "total = min(self.total - self.beside + mx.get_active_memory(), _MOST)",
        "total = min(self.total, _MOST)",
        "tests/test_budget.py -k mlx_is_told",
    ),
    Fault(
        "MLX's own limits are raised unasked",
        "memory.py",
        "mx.set_memory_limit(total if self.limited else min(total, own.memory))",
        "mx.set_memory_limit(total)",
        "tests/test_budget.py -k mlx_is_told",
    ),
    Fault(
        "spare buffers may be as large as the weights, too",
        "memory.py",
        "mx.set_cache_limit(min(self.total - self.beside - self.weights, own.cache))",
        "mx.set_cache_limit(min(self.total, own.cache))",
        "tests/test_budget.py -k mlx_is_told",
    ),
    Fault(
        "more is wired than the system allows",
        "memory.py",
        "mx.set_wired_limit(min(total, most))",
        "mx.set_wired_limit(total)",
        "tests/test_budget.py -k mlx_is_told",
    ),
    Fault(
        "the memory of a CUDA device is that of its host",
        "memory.py",
        'free = mx.device_info().get("free_memory")',
        "free = int(psutil.virtual_memory().available)",
        "tests/test_budget.py -k memory_of_a_gpu",
    ),
    Fault(
        "reading a long prompt takes no memory",
        "budget.py",
        "return self.state + self.working",
        "return self.state",
        "tests/test_budget.py tests/engine/test_modes.py",
    ),
    Fault(
        "scores of attention take no memory",
        "models/qwen3_5.py",
        "scores = tokens * length * (5 * size * args.attention.heads // 4 + 4)",
        "scores = 0",
        "tests/test_budget.py -k no_more_is_taken",
    ),
    Fault(
        "rows side by side are each counted alone",
        "budget.py",
        "return sum(need.state for need in needs) + max((need.working for need in needs), default=0)",
        "return max((need.bytes for need in needs), default=0)",
        "tests/test_budget.py -k side_by_side",
    ),
    Fault(
        "an answer in process is not checked",
        "llm.py",
        "fitted = [self.budget.fitted(answer.request, spare=self.session_bytes) for answer in answers]",
        "fitted = [(answer.request, self.budget.need(answer.request)) for answer in answers]",
        "tests/test_budget.py -k does_not_fit",
    ),
    Fault(
        "what runs already is not counted with a newcomer",
        "llm.py",
        "self.budget.check_together([*running, *needs])",
        "self.budget.check_together(needs)",
        "tests/test_budget.py -k side_by_side",
    ),
    Fault(
        "warm prefixes do not give way to an answer in process",
        "llm.py",
        "self.make_room([*running, *needs], lacking=self.budget.lacking(together(needs)))",
        "pass",
        "tests/test_budget.py -k give_way",
    ),
    Fault(
        "an idle server keeps its spare buffers",
        "server/service.py",
        "self.metrics.observe_release(self._llm.release())",
        "pass",
        "tests/server/test_service.py",
    ),
    Fault(
        "an idle server gives its buffers back again and again",
        "server/service.py",
        "released = True",
        "released = False",
        "tests/server/test_service.py",
    ),
    Fault(
        "a chat keeps its spare buffers while the user types",
        "cli/chat.py",
        "conversation.rest()",
        "pass",
        "tests/cli/test_chat.py -k given_back",
    ),
]
