"""Faults of kernels, and of what decides whether they are used."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

QMV = "tests/kernels/test_verify_qmv_mma.py"
ATTENTION = "tests/kernels/test_few_query_attention.py"
INPUTS = "tests/kernels/test_attention_inputs.py"
TAPE = "tests/kernels/test_gated_delta_tape.py"

FAULTS = [
    Fault(
        "a copy to shared memory is not waited for",
        "kernels/source/verify_qmv_mma.h",
        "await_copies<STAGES - 1>();",
        "await_copies<STAGES>();",
        QMV,
    ),
    Fault(
        "nibbles are taken for 15 and themselves",
        "kernels/source/verify_qmv_mma.h",
        "BITS == 4 ? -16.f : -272.f",
        "BITS == 4 ? -15.f : -272.f",
        QMV,
    ),
    Fault(
        "the order of sums hangs on the number of rows",
        "kernels/verify_qmv.py",
        "    warps = min(warps, matrix.inputs // (unit * matrix.group_size))\n",
        "    warps = min(warps, matrix.inputs // (unit * matrix.group_size), 2 + rows)\n",
        QMV,
    ),
    Fault(
        "a query sees the keys of those behind it",
        "kernels/source/few_query_partial.h",
        "start + key < SEEN(begin + slot)",
        "start + key < SEEN(BLOCK - 1)",
        ATTENTION,
    ),
    Fault(
        "what was summed before is not made relative to the new most",
        "kernels/source/few_query_partial.h",
        "sum[pass] = fma(sum[pass], factor, weight)",
        "sum[pass] = sum[pass] + weight",
        ATTENTION,
    ),
    Fault(
        "on tensor cores values behind the length are read",
        "kernels/source/few_query_partial_mma.h",
        "end = length < behind ? length : behind;",
        "end = length < behind ? length + 1 : behind;",
        ATTENTION,
    ),
    Fault(
        "on tensor cores a simdgroup does not wait for the scores of the others",
        "kernels/source/few_query_partial_mma.h",
        "BARRIER();  // the other board",
        "//          // the other board",
        ATTENTION,
    ),
    Fault(
        "on tensor cores a query's sums are made relative to the most of another",
        "kernels/source/few_query_partial_mma.h",
        "right = simd_from(factor, 8 * t + 4);",
        "right = simd_from(factor, 8 * t);",
        ATTENTION,
    ),
    Fault(
        "a query is taken for its gate",
        "kernels/source/few_query_merge.h",
        "(2 * head + 1) * D",
        "2 * head * D",
        ATTENTION,
    ),
    Fault(
        "a key is written behind the capacity",
        "kernels/source/attention_inputs.h",
        "position < capacity;",
        "position <= capacity;",
        INPUTS,
    ),
    Fault(
        "one step more of the tape than was accepted",
        "kernels/source/gated_delta_tape.h",
        "t < count ? next",
        "t <= count ? next",
        TAPE,
    ),
    Fault(
        "one step less of the tape belongs to a state",
        "state/captured.py",
        "self.tape.row(row), (tokens,))",
        "self.tape.row(row), (tokens - 1,))",
        "tests/engine/test_on_kernels.py",
    ),
    Fault(
        "a kernel whose result is NaN is used",
        "kernels/self_check.py",
        "if not error <= self.most:",
        "if error > self.most:",
        "tests/kernels/test_self_check.py",
    ),
    Fault(
        "a kernel that is slower is used",
        "kernels/self_check.py",
        "elif gain < 1:",
        "elif False:",
        "tests/kernels/test_self_check.py",
    ),
    Fault(
        "prefixes of other kernels are taken for one's own",
        "keeping.py",
        '"kernels": [*described["kernels"], sources_digest()] if described["kernels"] else []',
        '"kernels": []',
        "tests/sessions/test_on_disk.py",
    ),
]
