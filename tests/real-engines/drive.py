"""Drive mode in front of a real engine: equal tokens, and the time that they take."""

import statistics
import time

from engines import END_TOKEN
from mesh import compare

PROMPTS = 8
ROUNDS = 12
# Answers up to their end, and long texts that repeat themselves.
KINDS = {
    "answers": (48, {}),
    "long texts": (200, {"logit_bias": {str(END_TOKEN): -100}}),
}


def check(table, engine, plain, driven, asked):
    """Compares two meshes in front of the engine: `plain` without drive mode, and `driven` with it."""
    asked = asked[:PROMPTS]
    seconds = {}
    # The engine's CPU time, which other work on the machine changes less.
    cpu = {}
    for kind, (tokens, fields) in KINDS.items():
        before = driven.metric("refrain_drive_calls_total")
        for turn in range(ROUNDS):
            # In the order A B B A, so that a slow phase of the machine slows both.
            meshes = [("plain", plain), ("driven", driven)]
            for name, mesh in meshes if turn % 2 == 0 else reversed(meshes):
                spent = engine.process.cpu_seconds()
                for number, prompt in enumerate(asked):
                    session = f"{kind}-{turn}-{number}"
                    started = time.perf_counter()
                    status, answer = mesh.ask(prompt, tokens, session=session, **fields)
                    seconds[name, kind, turn, number] = time.perf_counter() - started
                    if status != 200:
                        table.row(engine.kind, "driven: same greedy tokens", False, f"status {status}: {answer}")
                        return
                cpu[name, kind, turn] = engine.process.cpu_seconds() - spent
        calls = driven.metric("refrain_drive_calls_total") - before
        # The first turns are left out: later turns draft from their outputs.
        ratios = [
            seconds["plain", kind, turn, number] / seconds["driven", kind, turn, number]
            for turn in range(ROUNDS // 3, ROUNDS)
            for number in range(len(asked))
        ]
        middle = statistics.quantiles(ratios, n=4)
        work = [sum(cpu[name, kind, turn] for turn in range(ROUNDS // 3, ROUNDS)) for name in ("plain", "driven")]
        detail = (
            f"{middle[1]:.2f}x as quick as streamed alone (quartiles {middle[0]:.2f}, {middle[2]:.2f}), "
            f"the engine's CPU time {work[1] / work[0]:.2f}x; {calls:.0f} calls"
        )
        table.measured(engine.kind, f"driven: {kind}", detail)
    calls, accepted = driven.metric("refrain_drive_calls_total"), driven.metric("refrain_spec_accepted_tokens_total")
    drafted = driven.metric("refrain_spec_drafted_tokens_total")
    found, expected = driven.outputs(), plain.outputs()
    outputs = [
        (session, asked[int(session.rsplit("-", 1)[1])], found.get(session), theirs) for session, theirs in expected.items()
    ]
    same, ties, wrong = compare(engine, outputs)
    detail = (
        f"{same} of {len(expected)} outputs, {ties} part at near-ties, {len(wrong)} differ; "
        f"{calls:.0f} calls, {accepted:.0f} of {drafted:.0f} draft tokens accepted"
    )
    table.row(engine.kind, "driven: same greedy tokens", not wrong and calls > 0, detail)
