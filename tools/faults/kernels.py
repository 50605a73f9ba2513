"""Faults of kernels, and of what decides whether they are used."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

QMV = "tests/kernels/test_verify_qmv_mma.py"
ATTENTION = "tests/kernels/test_few_query_attention.py"
INPUTS = "tests/kernels/test_attention_inputs.py"
TAPE = "tests/kernels/test_gated_delta_tape.py"
MIXER = "tests/kernels/test_gated_delta_mixer.py"
RANK = "tests/kernels/test_rank_threshold.py"
SCAN = "tests/kernels/test_gated_delta_scan.py"
DRAW = "tests/kernels/test_draw.py"
ACCEPTANCE = "tests/kernels/test_acceptance.py"

FAULTS = [
    Fault(
        "a copy to shared memory is not waited for",
        "kernels/source/verify_qmv_mma.h",
        "await_copies<STAGES - 1>();",
        "await_copies<STAGES>();",
        QMV,
    ),
    Fault(
        "a simdgroup does not wait for its team's part of x",
        "kernels/source/verify_qmv_mma.h",
        "      if (TEAMS > 1) team_wait<TEAMS>(share);  // for the others' part of x\n",
        "",
        QMV,
    ),
    Fault(
        "threadgroups begin as if all were full",
        "kernels/source/verify_qmv_mma.h",
        "first = group.x * most,",
        "first = group.x * kOwn,",
        QMV,
    ),
    Fault(
        "a group of weights is looked for where it was not put",
        "kernels/source/verify_qmv_mma.h",
        "(4 * place(g, u) + t)",
        "(4 * u + t)",
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
        "seen[i] = length - TOKENS + 1 + (begin + i * ABREAST + int(worker) / TILE) % TOKENS;",
        "seen[i] = length;",
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
        "layer.taped(tuple(tokens))",
        "layer.taped(tuple(max(each - 1, 0) for each in tokens))",
        "tests/engine/test_on_kernels.py",
    ),
    Fault(
        "the conv window begins a step late",
        "kernels/source/gated_delta_mixer.h",
        "c == count ? past",
        "c == count - 1 ? past",
        MIXER,
    ),
    Fault(
        "sums are added in another order than the tape's kernel adds them",
        "kernels/source/gated_delta_mixer.h",
        "(sums[0] + sums[2]) + (sums[1] + sums[3])",
        "(sums[0] + sums[1]) + (sums[2] + sums[3])",
        MIXER,
    ),
    Fault(
        "y is not rounded before its norm",
        "kernels/source/gated_delta_mixer.h",
        "float(T(place ? result[1] : result[0]))",
        "place ? result[1] : result[0]",
        MIXER,
    ),
    Fault(
        "a prompt's tokens are read before others brought them",
        "kernels/source/gated_delta_scan.h",
        "BARRIER();  // the only one of a piece",
        "//          // the only one of a piece",
        SCAN,
    ),
    Fault(
        "in a prompt, gates of another head are taken",
        "kernels/source/gated_delta_scan.h",
        "/ DV - head_0) * LINE;",
        "/ DV) * LINE;",
        SCAN,
    ),
    Fault(
        "ties that a slice did not list have no mass",
        "kernels/source/rank_threshold.h",
        "complete ? 0.0f : float(reach - k)",
        "0.0f",
        RANK,
    ),
    Fault(
        "the k-th itself is not counted",
        "kernels/source/rank_threshold.h",
        "all >= k) low",
        "all > k) low",
        RANK,
    ),
    Fault(
        "noise of an odd vocabulary has MLX's counters of an even one",
        "kernels/source/draw.h",
        "at + apart < size ? at + apart : 0);",
        "at + apart);",
        DRAW,
    ),
    Fault(
        "of equal tokens the first that a slice came by is drawn",
        "kernels/source/best.h",
        "value > best.value || (value == best.value && own < best.id)",
        "value > best.value",
        DRAW,
    ),
    Fault(
        "on the device the last draft of the block rule passes as the others do",
        "kernels/source/acceptance_choice.h",
        "if (int(lane) + 1 < depth) {",
        "if (int(lane) < depth) {",
        ACCEPTANCE,
    ),
    Fault(
        "on the device a correction is drawn from p unscaled",
        "kernels/source/acceptance_choice.h",
        "decided[1] = stay > 0 ? scale : 1.0f",
        "decided[1] = 1.0f",
        ACCEPTANCE,
    ),
    Fault(
        "a residual is left out",
        "kernels/source/verify_qmv_mma.h",
        "FORM == ADDED ? T(float(T(sum)) + float(residual[at]))",
        "FORM == ADDED ? T(sum)",
        QMV,
    ),
    Fault(
        "a gate takes the next row for what it gates",
        "kernels/source/verify_qmv_mma.h",
        "gated<T>(sum, total(row + 8, column))",
        "gated<T>(sum, total(row, column))",
        QMV,
    ),
    Fault(
        "what a head writes in place waits for somebody who wants its output",
        "models/few_tokens.py",
        "row.keys, row.values = mx.depends(list(pair), [out])",
        "pass",
        "tests/state/test_in_place.py tests/engine/test_kernels_stateful.py",
    ),
    Fault(
        "rows of one batch are taken for all of it",
        "state/row.py",
        "not layers or layers[0].rows == len(rows)",
        "True",
        "tests/state/test_in_place.py",
    ),
    Fault(
        "projections of two quantisations are put together",
        "models/few_rows.py",
        "all(getattr(layer, name) == getattr(first, name) for name in form)",
        "True",
        "tests/models/test_few_rows.py",
    ),
    Fault(
        "a fork writes into the buffers that it shares",
        "state/kv.py",
        "elif self._shared:",
        "elif False:",
        "tests/state/test_in_place.py",
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
    Fault(
        "MLX waits for graphs in the middle of a cycle on CUDA",
        "device.py",
        'os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "1000")',
        "pass",
        "tests/test_device.py",
    ),
    Fault(
        "a long prompt goes through MLX's quantised product on CUDA",
        "models/few_rows.py",
        'x.size // x.shape[-1] >= _DENSE and backend() == "cuda"',
        "False",
        "tests/models/test_few_rows.py",
    ),
    Fault(
        "a compiled kernel is looked for under another hash than MLX's",
        "kernels/cuda_compiler.py",
        "found = 0xC70F6907 ^",
        "found = 0xC70F6906 ^",
        "tests/kernels/test_cuda_compiler.py -k hash",
    ),
]
