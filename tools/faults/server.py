"""Faults of the server and of the text that it reads and writes."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "a page of another name reaches the server",
        "server/security.py",
        "if not self._known(name):",
        "if False:",
        "tests/server/test_security.py",
    ),
    Fault(
        "a page of another origin reaches the server",
        "server/security.py",
        'and not _same_origin(origin, headers["host"]):',
        "and False:",
        "tests/server/test_security.py",
    ),
    Fault(
        "any key opens the gate",
        "server/security.py",
        "if hmac.compare_digest(given.encode(), self._access.key.encode()):",
        "if given:",
        "tests/server/test_security.py",
    ),
    Fault(
        "a body of unknown length is not counted",
        "server/security.py",
        'self._left -= len(message.get("body", b""))',
        "pass",
        "tests/server/test_security.py tests/server/test_limits.py",
    ),
    Fault(
        "reachable from elsewhere without a key",
        "server/config.py",
        "if not self.loopback and key is None:",
        "if False:",
        "tests/server/test_security.py tests/server/test_serve_command.py tests/server/test_settings.py",
    ),
    Fault(
        "any name means the model, on strict servers too",
        "server/registry.py",
        "if self._lenient:",
        "if True:",
        "tests/server/test_security.py tests/server/test_server.py",
    ),
    Fault(
        "the queue has no end",
        "server/service.py",
        "if self._admitted + len(answers) > most:",
        "if False:",
        "tests/server/test_server.py tests/server/test_limits.py",
    ),
    Fault(
        "a place in the queue is never given back",
        "server/service.py",
        "self._admitted -= 1",
        "pass",
        "tests/server/test_server.py",
    ),
    Fault(
        "a client that leaves is decoded for",
        "server/running.py",
        "self._service.cancel(self._tickets)",
        "pass",
        "tests/server/test_server.py tests/server/test_field_reports.py",
    ),
    Fault(
        "a client that leaves during its prefill is waited for",
        "server/service.py",
        "            ticket.answer.give_up()\n",
        "            pass\n",
        "tests/server/test_service.py",
    ),
    Fault(
        "memory is not asked for before a prefill",
        "server/service.py",
        "needs = [self._budget.check(answer.request) for answer in answers]",
        "needs = [0 for answer in answers]",
        "tests/server/test_server.py tests/server/test_field_reports.py",
    ),
    Fault(
        "all n answers are the same",
        "server/chat.py",
        "choice=choice,",
        "choice=0,",
        "tests/server/test_server.py tests/clients/test_openai_sdk.py",
    ),
    Fault(
        "a grammar holds the reasoning too",
        "server/chat.py",
        "return grammar.after(THINK_END) if in_reasoning else grammar",
        "return grammar",
        "tests/server/test_tools.py tests/server/test_server.py",
    ),
    Fault(
        "a thinking budget is not kept",
        "text/thinking.py",
        "if isinstance(place, _Reasoning) and place.left <= 0:",
        "if False:",
        "tests/text/test_thinking.py tests/server/test_field_reports.py",
    ),
    Fault(
        "instructions of a developer are dropped",
        "text/messages.py",
        'copy["role"] = "system"',
        "pass",
        "tests/text/test_template.py",
    ),
    Fault(
        "arguments reach the template as a string",
        "text/messages.py",
        'holder["arguments"] = _arguments(arguments, f"{where}.arguments")',
        "pass",
        "tests/text/test_template.py",
    ),
    Fault(
        "results are told in the order in which they came",
        "server/dialects/conversation.py",
        'run.sort(key=lambda message: _place(message["tool_call_id"], ids))',
        "pass",
        "tests/server/dialects tests/server/test_tools.py",
    ),
    Fault(
        "a call that broke off counts as made",
        "server/chat.py",
        'return "tool_calls" if all(end.complete for end in self._ended) else "length"',
        'return "tool_calls"',
        "tests/server/test_tools.py tests/server/dialects",
    ),
    Fault(
        "scores of a prompt are those of the token before",
        "engine/prefill.py",
        "list(row.request.prompt[start + 1 : start + 1 + hidden.shape[1]])",
        "list(row.request.prompt[start : start + hidden.shape[1]])",
        "tests/engine/test_prompt_scores.py",
    ),
    Fault(
        "nothing is said on a silent stream",
        "server/running.py",
        "async with asyncio.timeout(silence):",
        "async with asyncio.timeout(None):",
        "tests/server/test_server.py",
    ),
]
