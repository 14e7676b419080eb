"""The drafts of one vLLM on a CPU, beside each other: vLLM's own n-grams and Refrain's in Model Runner V2, and
arctic-inference's suffix cache at its best factor, for which vLLM falls back to V1. Each engine gets the same prompts
when it is new, once more, after a restart, and in a second engine beside the first."""

import json

from attach import Store
from mesh import clear, prompts
from v2 import TOKENS, V2, await_uploads, client_series, engine_of, of, wake

NAME = "v2-compared"
PROMPTS = 16
PLACES = 16
NGRAM = {
    "method": "ngram", "num_speculative_tokens": PLACES, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    "num_speculative_tokens_per_batch_size": [[1, 2, PLACES], [3, 8, 4], [9, 9, 0]],
}  # fmt: skip
SUFFIX = {"method": "suffix", "num_speculative_tokens": PLACES, "suffix_decoding_max_spec_factor": 4.0}
OURS, PEER, OWN = "Refrain", "arctic-inference", "vLLM's n-grams"


class Drafts:
    """One way to draft, and the engines that do."""

    def __init__(self, options, name, store):
        self.options, self.name, self.store = options, name, store
        self.token = store.token("compared")
        self.fields = of(self.token) if name == OURS else {}
        self.engines = []

    def start(self):
        kind = f"{self.name.split()[-1]}-{len(self.engines)}"
        if self.name == OURS:
            engine = engine_of(self.options, kind, self.store.variables(), NGRAM)
        else:
            speculation = SUFFIX if self.name == PEER else NGRAM
            # V1 refuses asynchronous scheduling, which the plugin of the interpreter switches on.
            variables = {"VLLM_PLUGINS": "arctic_inference"} if self.name == PEER else {}
            engine = V2(self.options, kind, ["--speculative-config", json.dumps(speculation)], variables)
            engine.start()
        self.engines.append(engine)
        return engine

    def ask(self, engine, asked):
        """Accepted draft tokens of one round, and its outputs."""
        outputs, accepted = engine.accepted(lambda: [engine.ask(prompt, **self.fields) for prompt in asked])
        return accepted, outputs

    def start_knowing(self, known, other):
        """Another engine. Refrain's has so many tokens of the first one once its namespace is asked for."""
        engine = self.start()
        if self.name == OURS:
            wake(engine, other, self.token, known)
        return engine

    def rounds(self, asked, other):
        """Accepted tokens by round, and whether all outputs were the same."""
        first = self.start()
        cold, expected = self.ask(first, asked)
        warm, again = self.ask(first, asked)
        found, outputs = {"cold": cold, "warm": warm}, [again]
        known = 0
        if self.name == OURS:
            await_uploads(first)
            known = client_series(first, "device_tokens")
        if self.name != OWN:
            second = self.start_knowing(known, other)
            found["second"], more = self.ask(second, asked)
            outputs.append(more)
            second.kill()
            first.kill()
            restarted = self.start_knowing(known, other)
            found["restarted"], more = self.ask(restarted, asked)
            outputs.append(more)
        self.engines[-1].kill()
        return found, expected, all(more == expected for more in outputs)


def check(table, options):
    clear(options.work, "attach-data")
    store = Store(options).ready()
    plain = V2(options, "plain")
    plain.start()
    asked = prompts(plain)
    expected = [plain.ask(prompt) for prompt in asked[:PROMPTS]]
    plain.kill()
    found = {}
    try:
        for name in (OWN, PEER, OURS):
            drafts = Drafts(options, name, store)
            found[name], outputs, same = drafts.rounds(asked[:PROMPTS], asked[PROMPTS])
            detail = ", ".join(f"{part} {accepted}" for part, accepted in found[name].items())
            detail += f" of {PROMPTS * TOKENS} tokens accepted"
            table.row(NAME, name, same and outputs == expected, detail)
    finally:
        store.process.stop()
    ours, peer = found[OURS], found[PEER]
    table.row(NAME, "warm: no less than the peer", ours["warm"] >= peer["warm"], f"{ours['warm']}, {peer['warm']}")
    for part in ("restarted", "second"):
        holds = ours[part] > peer[part] and ours[part] >= 0.9 * ours["warm"]
        table.row(NAME, f"{part}: more than the peer", holds, f"{ours[part]}, {peer[part]}; warm {ours['warm']}")
