"""The Python client against a draft store that runs, and against one that is away.

    client.py REFRAIN MODEL        # the binary, the folder of the shipped model
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from array import array
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Namespace
from unittest import mock

from refrain_client import Client
from refrain_client.ending import Ending
from refrain_client.lossless import refuse
from refrain_client.suffix import SuffixDecodingCache

PATIENCE_SECONDS = 60
REFRAIN, MODEL = sys.argv[1:3]

TEXT = [(at * 37 + 11) % 500 for at in range(120)]
PROMPT = list(range(600, 640))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(what, holds):
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > until:
            raise AssertionError(f"in vain: {what}")
        time.sleep(0.02)


class Mesh:
    """Keys, a configuration, and a draft store that can be stopped."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port = free_port()
        self.store = None
        self.keys = subprocess.run([REFRAIN, "keys"], check=True, capture_output=True, text=True).stdout
        # Nobody listens there: the client needs the store alone.
        text = (
            f'{self.keys}\n[telemetry]\nlog = "error"\n[urls]\nscheduler = "http://127.0.0.1:1"\n'
            f'[draft_store]\nlisten = "127.0.0.1:{self.port}"\ndata_dir = "{self.folder}/store"\n'
            '[gateway]\nlisten = "127.0.0.1:1"\nanonymous_tenant = "acme"\n'
            f'[[gateway.models]]\nid = "tiny"\nfiles = "{MODEL}"\n'
        )
        (self.folder / "mesh.toml").write_text(text)

    def key(self, name):
        return next(line.split('"')[1] for line in self.keys.splitlines() if line.startswith(name))

    def start(self):
        command = [REFRAIN, "draft-store", "--config", self.folder / "mesh.toml"]
        self.store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.store.stdout.readline()

    def stop(self, how=signal.SIGTERM):
        if self.store:
            self.store.send_signal(how)
            self.store.communicate()
            self.store = None

    def token(self):
        command = [REFRAIN, "store", "sign", "--config", self.folder / "mesh.toml", "--tenant", "acme", "--model", "tiny"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def client(self, **settings):
        given = {
            "STORE_URL": f"http://127.0.0.1:{self.port}", "MESH__SECRET": self.key("secret"),
            "MESH__NAMESPACE_PUBLIC_KEY": self.key("namespace_public_key"), "TOKENIZER": MODEL, "TOKEN": self.token(),
            "LOG": "error", "MEMORY__FOLLOW_WAIT_MS": 200, **settings,
        }  # fmt: skip
        variables = {f"REFRAIN_CLIENT_{name}": str(value) for name, value in given.items() if value is not None}
        os.environ.update(variables)
        try:
            return Client()
        finally:
            for name in variables:
                del os.environ[name]


def undisturbed(client, call):
    """What a call says that found no part of the memory busy. A step goes without such a part, as it should."""
    answers = []

    def holds():
        before = client.stats()["busy"]
        answers.append(call())
        return client.stats()["busy"] == before

    wait_until("a call that finds all of the memory", holds)
    return answers[-1]


def drafts(client, wanted, **how):
    return undisturbed(client, lambda: client.propose(wanted, **how))


def drafted(client, request, room=16, **how):
    (draft,) = drafts(client, [(request, room)], **how)
    return draft[0]


def extend(client, request, tokens):
    """What the memory was too busy for it gets with the next tokens, or none."""
    before = client.stats()["busy"]
    client.extend(request, tokens)
    if client.stats()["busy"] != before:
        undisturbed(client, lambda: client.extend(request, []))


def say(client, request, tokens, prompt=PROMPT, **named):
    client.start(request, prompt, **named)
    extend(client, request, tokens)
    client.finish(request)


class WithMesh(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mesh = Mesh(folder.name)
        self.addCleanup(self.mesh.stop, signal.SIGKILL)


class WithoutAStore(WithMesh):
    """The engine goes on when the store is away, from what was said in it."""

    def test_what_is_said_is_drafted_from_at_once(self):
        client = self.mesh.client()
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:60])
        client.start("b", array("i", PROMPT))
        extend(client, "b", array("i", TEXT[:10]))
        # Another request that still runs is drafted from, as far as it has come.
        self.assertEqual(drafted(client, "b"), TEXT[10:26])
        self.assertEqual(drafted(client, "b", room=3), TEXT[10:13])
        # The match: the last 16 tokens of the prompt, and what both said.
        self.assertEqual(drafted(client, "b", factor=0.5), TEXT[10 : 10 + 26 // 2])
        extend(client, "a", TEXT[60:])
        client.finish("a")
        extend(client, "b", TEXT[10:100])
        self.assertEqual(drafted(client, "b"), TEXT[100:116])
        stats = client.stats()
        self.assertEqual((stats["requests"], stats["said_tokens"]), (1, 220))
        self.assertFalse(client.drain(0.2))

    def test_all_requests_are_drafted_for_in_one_call(self):
        client = self.mesh.client()
        say(client, "first", TEXT)
        for number in range(8):
            client.start(str(number), PROMPT)
            extend(client, str(number), TEXT[: 20 + number])
        wanted = [(str(number), 4 + number) for number in range(8)]
        found = drafts(client, [*wanted, ("nobody", 4)])
        for number, (tokens, score, match_len) in enumerate(found[:8]):
            self.assertEqual(tokens, TEXT[20 + number : 24 + 2 * number])
            self.assertGreater(score, 1.0)
            self.assertGreaterEqual(match_len, 20 + number)
        self.assertEqual(found[8][0], [])

    def test_a_request_goes_on_after_the_engine_made_room(self):
        client = self.mesh.client()
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:50])
        client.finish("a")
        client.start("a", PROMPT)
        extend(client, "a", TEXT[50:60])
        client.start("b", PROMPT)
        extend(client, "b", TEXT[:48])
        # It is one output, before and after: the match of 48 runs on past the place.
        wait_until("the pieces are together", lambda: drafted(client, "b", room=12) == TEXT[48:60])

    def test_accepted_drafts_are_counted(self):
        client = self.mesh.client()
        say(client, "first", TEXT)
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:10])
        self.assertEqual(drafted(client, "a", room=6), TEXT[10:16])
        extend(client, "a", [*TEXT[10:14], 555])
        stats = client.stats()
        self.assertEqual(stats["accepted_tokens"], 4)
        # One draft, unless it was asked for again, since the memory was busy.
        self.assertGreaterEqual(stats["drafts"], 1)
        self.assertLessEqual(stats["drafted_tokens"], 6 * stats["drafts"])
        self.assertIn("refrain_client_accepted_tokens_total 4", client.metrics())

    def test_the_engines_own_drafts_are_replaced_where_others_are_worth_more(self):
        client = self.mesh.client()
        say(client, "first", TEXT)

        def steps(name, rival):
            """Whose drafts are taken, while the engine says the text, two tokens a step."""
            client.start(name, PROMPT)
            taken = []
            for at in range(0, 60, 2):
                own = rival(at + 2)
                before = client.stats()["busy"]
                (draft,) = client.step([(name, TEXT[at : at + 2], 6, own)])
                # A step that a part of the memory was too busy for shows nothing.
                if client.stats()["busy"] == before:
                    taken.append(draft is not None)
                if draft:
                    self.assertEqual(draft, TEXT[at + 2 : at + 8])
            client.finish(name)
            return taken

        # A head that is always wrong is found out, and so is one that is always right, but shorter.
        wrong = steps("wrong", lambda at: [999] * 6)
        self.assertTrue(len(wrong) > 5 and all(wrong[5:]), wrong)
        shorter = steps("short", lambda at: TEXT[at : at + 2])
        self.assertTrue(len(shorter) > 5 and all(shorter[5:]), shorter)
        # A prompt that nobody had, where only the engine's head knows anything.
        client.start("new", PROMPT)
        drafts = [client.step([("new", [700 + at], 6, [701 + at])])[0] for at in range(20)]
        self.assertEqual(drafts, [None] * 20)

    def test_a_head_that_knows_more_is_left_alone(self):
        client = self.mesh.client()
        other = [(at * 31 + 7) % 500 for at in range(400)]
        # What was said before goes wrong after each two tokens.
        for at in range(0, 396, 2):
            say(client, f"misleads-{at}", [*other[at : at + 2], 888, 889, 890], prompt=PROMPT)
        client.start("a", PROMPT)
        taken = []
        for at in range(0, 390, 2):
            (draft,) = client.step([("a", other[at : at + 2], 6, other[at + 2 : at + 6])])
            taken.append(draft is not None)
        self.assertFalse(any(taken[-50:]), taken)

    def test_a_token_must_be_the_meshs_own(self):
        client = self.mesh.client()
        say(client, "first", TEXT)
        with tempfile.TemporaryDirectory() as folder:
            foreign = Mesh(folder).token()
        for token in (foreign, "nonsense", self.mesh.token()[:-4]):
            with self.assertRaisesRegex(ValueError, "namespace refused"):
                client.start(token[-8:], PROMPT, namespace=token)
            # It runs, with its own text alone.
            extend(client, token[-8:], TEXT[:20])
            self.assertEqual(drafted(client, token[-8:]), [])
            extend(client, token[-8:], TEXT[:10])
            self.assertEqual(drafted(client, token[-8:], room=4), TEXT[10:14])
        self.assertEqual(client.stats()["refused_tokens"], 3)
        with self.assertRaisesRegex(ValueError, "namespace refused"):
            self.mesh.client(TOKEN=foreign)

    def test_groups_are_drafted_from_first(self):
        client = self.mesh.client()
        for sample in range(5):
            say(client, f"other-{sample}", TEXT[:30] + [1, 2, 3, 4])
        # Fewer than those, but most of their group.
        for sample in range(3):
            client.start(f"one-{sample}", PROMPT, group="g")
            extend(client, f"one-{sample}", TEXT[:30] + [5, 6, 7, 8])
        client.start("two", PROMPT, group="g")
        extend(client, "two", TEXT[:30])
        client.start("three", PROMPT)
        extend(client, "three", TEXT[:30])
        self.assertEqual(drafted(client, "two", room=4), [5, 6, 7, 8])
        self.assertEqual(drafted(client, "three", room=4), [1, 2, 3, 4])

    def test_requests_that_ended_are_remembered_within_bounds(self):
        client = self.mesh.client(PAUSED_TOKENS_MAX=2 * len(PROMPT) + 60)
        for name in ("a", "b"):
            say(client, name, TEXT[:30])
        self.assertEqual(client.stats()["paused_tokens"], 2 * len(PROMPT) + 60)
        # It goes on, and ends with the same text.
        client.start("b", PROMPT)
        self.assertEqual(client.stats()["paused_tokens"], len(PROMPT) + 30)
        client.finish("b")
        self.assertEqual(client.stats()["paused_tokens"], 2 * len(PROMPT) + 60)
        say(client, "c", TEXT[:31])
        self.assertEqual(client.stats()["paused_tokens"], len(PROMPT) + 31)
        say(client, "long", TEXT, prompt=PROMPT * 10)
        self.assertEqual(client.stats()["paused_tokens"], 0)
        self.assertIn("refrain_client_forgotten_requests_total 4", client.metrics())

    def test_bad_input_is_refused(self):
        client = self.mesh.client()
        with self.assertRaises((ValueError, OverflowError)):
            client.start("a", [1, -1])
        with self.assertRaises(ValueError):
            client.start("a", array("i", [-1]))
        with self.assertRaises(ValueError):
            client.start("a", PROMPT, document="xyz")
        client.extend("unknown", [1])
        client.finish("unknown")
        with self.assertRaisesRegex(ValueError, "store_url"):
            self.mesh.client(STORE_URL="nowhere")
        with self.assertRaisesRegex(ValueError, "tokenizer"):
            self.mesh.client(TOKENIZER="/nowhere")


class WithAStore(WithMesh):
    def setUp(self):
        super().setUp()
        self.mesh.start()

    def test_outputs_outlive_the_engine_and_reach_others(self):
        engine, other = self.mesh.client(), self.mesh.client()
        wait_until("both follow", lambda: engine.stats()["is_caught_up"] and other.stats()["is_caught_up"])
        say(engine, "a", TEXT)
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        wait_until("the other engine hears it", lambda: other.stats()["documents"] == 1)
        other.start("b", PROMPT)
        extend(other, "b", TEXT[:8])
        self.assertEqual(drafted(other, "b"), TEXT[8:24])
        del engine
        # The store as well: what it acknowledged is on the disk.
        self.mesh.stop(signal.SIGKILL)
        self.mesh.start()
        restarted = self.mesh.client()
        wait_until("it is there again", lambda: restarted.stats()["documents"] == 1)
        restarted.start("c", PROMPT)
        extend(restarted, "c", TEXT[:8])
        self.assertEqual(drafted(restarted, "c"), TEXT[8:24])

    def test_a_store_that_comes_back_gets_what_it_missed(self):
        engine = self.mesh.client()
        self.mesh.stop()
        for number in range(20):
            say(engine, str(number), [number, *TEXT])
        self.assertFalse(engine.drain(0.1))
        self.mesh.start()
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        other = self.mesh.client()
        wait_until("all are there", lambda: other.stats()["documents"] == 20)

    def test_the_token_can_come_from_a_file(self):
        file = self.mesh.folder / "token"
        file.write_text(self.mesh.token() + "\n")
        engine = self.mesh.client(TOKEN=None, TOKEN_FILE=file)
        say(engine, "a", TEXT)
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        # A token of the request names the same namespace.
        other = self.mesh.client(TOKEN=None)
        other.start("b", PROMPT, namespace=self.mesh.token())
        extend(other, "b", TEXT[:8])
        wait_until("the namespace is followed", lambda: drafted(other, "b") == TEXT[8:24])
        # Without any nothing is known.
        other.start("c", PROMPT)
        extend(other, "c", TEXT[:8])
        self.assertEqual(drafted(other, "c"), [])


class StandIn(WithMesh):
    """What vLLM 0.32 calls, in the order in which its SuffixDecodingProposer does."""

    def step(self, cache, batch):
        drafts = []
        for req_id, prompt, context, said in batch:
            if req_id not in cache.active_requests:
                if req_id in cache.cached_requests:
                    cache.evict_cached_response(req_id)
                cache.start_request(req_id, prompt)
            cache.add_active_response(req_id, said)
            pattern = array("i", context[-24:])
            draft = cache.speculate(req_id, pattern, max_spec_tokens=24, max_spec_factor=1.0, min_token_prob=0.1)
            drafts.append(draft.token_ids)
        here = {req_id: at for at, (req_id, *_) in enumerate(batch)}
        for req_id in cache.active_requests - here.keys():
            cache.stop_request(req_id)
        return drafts

    def decode(self, cache, req_id, text):
        """The engine says the text, whatever is drafted. Returns its steps."""
        prompt, at, steps = array("i", PROMPT), 1, 0
        said = text[:1]
        while True:
            (draft,) = self.step(cache, [(req_id, prompt, PROMPT + text[:at], said)])
            steps += 1
            if at == len(text):
                self.step(cache, [])
                return steps
            kept = 0
            while kept < len(draft) and at + kept < len(text) - 1 and draft[kept] == text[at + kept]:
                kept += 1
            said = text[at : at + kept + 1]
            at += kept + 1

    def few_steps(self, cache, fields=None):
        """Says the text until nobody was in the way: steps that met somebody else went without drafts."""
        attempts = itertools.count()

        def holds():
            req_id = f"again-{next(attempts)}"
            if fields:
                cache.announce(req_id, fields, Ending())
            return self.decode(cache, req_id, TEXT) < len(TEXT) // 5

        wait_until("a text that is known takes few steps", holds)

    def test_a_repeated_text_takes_few_steps(self):
        cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=10000, client=self.mesh.client())
        self.assertEqual(self.decode(cache, "a", TEXT), len(TEXT))
        self.few_steps(cache)
        self.assertEqual(list(cache.active_requests), [])

    def test_calls_out_of_order_are_refused_as_the_peer_does(self):
        cache = SuffixDecodingCache(client=self.mesh.client())
        for call in (
            lambda: cache.stop_request("a"),
            lambda: cache.add_active_response("a", [1]),
            lambda: cache.speculate("a", [1]),
            lambda: cache.evict_cached_response("a"),
        ):
            with self.assertRaises(ValueError):
                call()
        cache.start_request("a", PROMPT)
        with self.assertRaises(ValueError):
            cache.start_request("a", PROMPT)

    def test_a_refused_token_does_not_stop_the_engine(self):
        cache = SuffixDecodingCache(client=self.mesh.client())
        self.decode(cache, "a", TEXT)
        cache.announce("b", {"refrain_namespace": "nonsense"}, Ending())
        with self.assertLogs("refrain_client", "WARNING"):
            self.assertEqual(self.decode(cache, "b", TEXT), len(TEXT))
        fields = {"refrain_namespace": self.mesh.token(), "refrain_document": "0" * 31 + "7"}
        self.few_steps(cache, fields)

    def test_what_a_request_had_said_before_the_engine_made_room_is_known(self):
        cache = SuffixDecodingCache(client=self.mesh.client())
        prompt = array("i", PROMPT)
        # One whose token is refused is not remembered, one that cannot be read not even begun: neither goes on by itself.
        refused = {"refrain_namespace": "nonsense"}
        for req_id, fields, is_begun in (("kept", {}, True), ("refused", refused, True), ("unread", {"refrain_group": 1}, False)):
            cache.announce(req_id, fields, Ending())
            self.step(cache, [(req_id, prompt, PROMPT, TEXT[:40])])
            self.step(cache, [])
            cache.announce(req_id, fields, Ending(), TEXT[:40])
            (draft,) = self.step(cache, [(req_id, prompt, PROMPT, TEXT[:10])])
            self.assertEqual(draft[:4], TEXT[10:14] if is_begun else [], req_id)
            self.step(cache, [])

    def test_a_client_that_goes_on_is_told_nothing_twice(self):
        client = mock.create_autospec(Client, instance=True)
        client.propose.return_value = [([], 0.0, 0)]
        cache = SuffixDecodingCache(client=client)
        for req_id, known, more in (("a", 3, []), ("b", 2, [9]), ("c", 0, [7, 8, 9])):
            client.start.return_value = known
            client.extend.reset_mock()
            cache.announce(req_id, {}, Ending(), [7, 8, 9])
            self.step(cache, [(req_id, array("i", PROMPT), PROMPT, [1])])
            told = [call.args[1] for call in client.extend.call_args_list]
            self.assertEqual(told, [more, [1]] if more else [[1]])

    def test_fields_that_cannot_be_read_do_not_stop_the_engine(self):
        client = self.mesh.client()
        cache = SuffixDecodingCache(client=client)
        token = {"refrain_namespace": self.mesh.token()}
        unreadable = [
            {"refrain_namespace": 5}, {"refrain_namespace": ["x"]}, {"refrain_group": 1.5}, {**token, "refrain_document": 7},
            {**token, "refrain_document": "xyz"}, {**token, "refrain_epoch": -1}, {**token, "refrain_epoch": "soon"},
            {**token, "refrain_epoch": [1]}, {**token, "refrain_epoch": float("inf")}, {**token, "refrain_epoch": 2**64},
            {**token, "refrain_written": float("nan")}, {**token, "refrain_written": -1}, {**token, "refrain_written": {}},
        ]  # fmt: skip
        for number, fields in enumerate(unreadable):
            cache.announce(str(number), fields, Ending())
            self.assertEqual(self.decode(cache, str(number), TEXT), len(TEXT), fields)
        self.assertEqual(client.stats()["refused_fields"], len(unreadable))
        # The largest epoch has no next one.
        cache.announce("last", {**token, "refrain_epoch": 2**63 - 1}, Ending())
        for _ in range(2):
            self.decode(cache, "last", TEXT)
        # Without a token nobody says where an output is kept.
        cache.announce("alone", {"refrain_document": 7, "refrain_epoch": -1, "refrain_written": []}, Ending())
        self.decode(cache, "alone", TEXT)
        self.assertEqual(client.stats()["refused_fields"], len(unreadable))

    def test_drafts_are_overridden_only_where_that_is_lossless(self):
        def config(async_scheduling=False, pipeline_parallel_size=1, v2=False, **speculation):
            given = {
                "method": "eagle3", "draft_sample_method": "greedy", "rejection_sample_method": "standard", **speculation,
            }  # fmt: skip
            return Namespace(
                speculative_config=Namespace(**given),
                scheduler_config=Namespace(async_scheduling=async_scheduling),
                parallel_config=Namespace(pipeline_parallel_size=pipeline_parallel_size),
                use_v2_model_runner=v2,
            )

        for fine in (config(), config(method="ngram"), config(rejection_sample_method="block")):
            self.assertIsNone(refuse(fine))
        for wrong, why in (
            (config(draft_sample_method="probabilistic"), "draft_sample_method"),
            (config(rejection_sample_method="synthetic"), "rejection_sample_method"),
            (config(method="suffix"), "suffix"),
            (config(async_scheduling=True), "--no-async-scheduling"),
            (config(pipeline_parallel_size=2), "pipeline"),
            (config(v2=True), "VLLM_USE_V2_MODEL_RUNNER=0"),
            (Namespace(speculative_config=None), "no drafts"),
        ):
            self.assertIn(why, refuse(wrong))

    def test_batches_tell_every_cache_once(self):
        from refrain_client import vllm

        added = []
        batch = type("InputBatch", (), {"add_request": lambda self, request: added.append(request.req_id)})
        names = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_input_batch")
        modules = {name: ModuleType(name) for name in names}
        modules[names[-1]].InputBatch = batch
        caches = [SuffixDecodingCache(client=vllm.Nothing()) for _ in range(2)]
        told = []
        with mock.patch.dict(sys.modules, modules):
            for at, cache in enumerate(caches):
                cache.announce = lambda *what, at=at: told.append((at, *what))
                vllm.announce_to(cache)
        params = {"eos_token_id": 2, "stop_token_ids": [7], "max_tokens": 30}
        for req_id, fields in (("a", {"refrain_group": "g"}), ("b", {"other": 1}), ("c", None)):
            params["extra_args"] = fields
            batch().add_request(Namespace(req_id=req_id, sampling_params=Namespace(**params), output_token_ids=[1] * 10))
        self.assertEqual(added, ["a", "b", "c"])
        self.assertEqual([(at, req_id) for req_id in "abc" for at in sorted({0, 1})], [
            (at, req_id) for at, req_id, *_ in sorted(told, key=lambda one: (one[1], one[0]))
        ])  # fmt: skip
        for _, req_id, fields, ending, said in told:
            # Only what is Refrain's own is passed on.
            self.assertEqual(fields, {"refrain_group": "g"} if req_id == "a" else {})
            self.assertEqual(said, [1] * 10)
            self.assertEqual((ending.stop_ids, ending.left), ({2, 7}, 20))

    def test_outputs_end_where_the_engine_ends_them(self):
        for ending, tokens, kept, reason in (
            (Ending(), [1, 2, 3], 3, None),
            (Ending([2]), [1, 3], 2, None),
            (Ending([2, 3]), [1, 3, 2], 2, "stop"),
            (Ending([9], 5, 2), [1, 2], 2, None),
            (Ending([9], 5, 2), [1, 2, 3, 9], 3, "length"),
            (Ending([9], 5, 2), [1, 2, 9, 9], 3, "stop"),
            (Ending([9], 5, 2), [1, 2, 3], 3, "length"),
        ):
            self.assertEqual(ending.take(tokens), (tokens[:kept], reason), tokens)
        ending = Ending([9], 6)
        self.assertEqual([ending.take([1, 2])[1] for _ in range(3)], [None, None, "length"])

    def test_the_client_hears_why_an_output_ended(self):
        client = mock.create_autospec(Client, instance=True)
        client.start.return_value, client.propose.return_value = 0, [([], 0.0, 0)]
        cache = SuffixDecodingCache(client=client)
        for req_id, ending in (("a", Ending([9])), ("b", Ending([9], 4)), ("c", Ending([9], 4))):
            cache.announce(req_id, {}, ending)
        prompt, context = array("i", PROMPT), PROMPT
        self.step(cache, [(req_id, prompt, context, [1, 2]) for req_id in "abc"])
        self.step(cache, [("a", prompt, context, [3, 9, 4]), ("b", prompt, context, [3, 4, 5])])
        # The engine brings what has ended once more, before it is out of the batch.
        self.step(cache, [("a", prompt, context, [5])])
        self.step(cache, [])
        self.assertEqual(
            client.extend.call_args_list,
            [mock.call(req_id, [1, 2]) for req_id in "abc"] + [mock.call("a", [3, 9]), mock.call("b", [3, 4])],
        )
        # The third left the batch before it came to an end: maybe only for now.
        ended = [mock.call("a", "stop"), mock.call("b", "length"), mock.call("c")]
        self.assertEqual(client.finish.call_args_list, ended)

    def test_the_scheduler_tells_why_an_output_ended(self):
        names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.scheduler")
        modules = {name: ModuleType(name) for name in names}
        passed_on = []
        update = {"update_draft_token_ids": lambda self, drafts: passed_on.append(drafts.draft_token_ids)}
        modules[names[-1]].Scheduler = type("Scheduler", (), update)
        with mock.patch.dict(sys.modules, modules):
            from refrain_client.scheduler import RefrainScheduler

        class Request:
            """As vLLM's scheduler has it."""

            def __init__(self, name):
                self.request_id, self.all_token_ids, self.num_prompt_tokens = name, [*PROMPT, 1], len(PROMPT)
                self.sampling_params, self.is_prefill_chunk, self.reason = Namespace(extra_args=None), False, None

            num_tokens = property(lambda self: len(self.all_token_ids))

            def is_finished(self):
                return self.reason is not None

            def get_finished_reason(self):
                return self.reason

        drafted = type("DraftTokenIds", (), {"__init__": lambda self, ids, drafts: vars(self).update(
            req_ids=ids, draft_token_ids=drafts)})  # fmt: skip
        scheduler = RefrainScheduler.__new__(RefrainScheduler)
        scheduler.drafts = mock.create_autospec(Client, instance=True)
        scheduler.drafts.step.side_effect = lambda wanted: [[7, 8] if name == "a" else None for name, *_ in wanted]
        scheduler.followed, scheduler.num_spec_tokens, scheduler.max_model_len = {}, 4, 1000
        requests = [Request(name) for name in "abc"]
        scheduler.requests = {request.request_id: request for request in requests}
        scheduler.update_draft_token_ids(drafted(["a", "b", "c"], [[5], [6], []]))
        self.assertEqual(passed_on, [[[7, 8], [6], []]])
        # They leave with what they said last, and nobody ended the third.
        for request, reason in zip(requests, ("length", "abort", None)):
            request.all_token_ids += [2, 3]
            request.reason = reason
            del scheduler.requests[request.request_id]
        scheduler.update_draft_token_ids(drafted([], []))
        extended = {call.args[0]: call.args[1] for call in scheduler.drafts.extend.call_args_list}
        self.assertEqual(extended, {name: [2, 3] for name in "abc"})
        ended = {call.args for call in scheduler.drafts.finish.call_args_list}
        self.assertEqual(ended, {("a", "length"), ("b", "abort"), ("c", None)})

    def test_the_plugin_shadows_no_file(self):
        import importlib.util

        from refrain_client import vllm

        os.environ.pop("REFRAIN_CLIENT_STORE_URL", None)
        vllm.register()
        self.assertIsNone(importlib.util.find_spec("arctic_inference"))
        os.environ["REFRAIN_CLIENT_STORE_URL"] = "http://127.0.0.1:1"
        self.addCleanup(os.environ.pop, "REFRAIN_CLIENT_STORE_URL")
        for _ in range(2):
            vllm.register()
            # As vLLM looks whether the package is there, and then imports the class.
            self.assertIsNotNone(importlib.util.find_spec("arctic_inference"))
            importlib.import_module("arctic_inference")
            from arctic_inference.suffix_decoding import SuffixDecodingCache as stands

            self.assertIs(stands, vllm.SuffixDecodingCache)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
