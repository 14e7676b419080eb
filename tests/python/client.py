"""Tests of the Python client, with a running draft store and without one.

    client.py REFRAIN MODEL

REFRAIN is the binary, and MODEL the folder of the shipped model.
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
from refrain_client.followed import FollowedRequests
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
            raise AssertionError(f"this did not happen in {PATIENCE_SECONDS} s: {what}")
        time.sleep(0.02)


class Mesh:
    """The keys and the configuration of a mesh, and a draft store that can be stopped."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.port = free_port()
        self.store = None
        self.keys = subprocess.run([REFRAIN, "keys"], check=True, capture_output=True, text=True).stdout
        # No other service runs: the client needs only the store.
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
        config = self.folder / "mesh.toml"
        command = [REFRAIN, "store", "sign", "--config", config, "--tenant", "acme", "--model", "tiny"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def client(self, **settings):
        given = {
            "STORE_URL": f"http://127.0.0.1:{self.port}", "MESH__SECRET": self.key("secret"),
            "MESH__NAMESPACE_PUBLIC_KEY": self.key("namespace_public_key"), "TOKENIZER": MODEL, "TOKEN": self.token(),
            "LOG": "error", **settings,
        }  # fmt: skip
        variables = {f"REFRAIN_CLIENT_{name}": str(value) for name, value in given.items() if value is not None}
        os.environ.update(variables)
        try:
            return Client()
        finally:
            for name in variables:
                del os.environ[name]


def undisturbed(client, call):
    """Repeats a call until it finds no index busy, and returns its result. A step goes without a busy index, as it
    should."""
    answers = []

    def holds():
        before = client.stats()["busy"]
        answers.append(call())
        return client.stats()["busy"] == before

    wait_until("a call that finds no index busy", holds)
    return answers[-1]


def drafts(client, wanted, **how):
    return undisturbed(client, lambda: client.propose(wanted, **how))


def drafted(client, request, tokens_max=16, **how):
    (draft,) = drafts(client, [(request, tokens_max)], **how)
    return draft[0]


def extend(client, request, tokens):
    """Reports emitted tokens. Tokens that a busy index did not get are merged by the next call."""
    before = client.stats()["busy"]
    client.extend(request, tokens)
    if client.stats()["busy"] != before:
        undisturbed(client, lambda: client.extend(request, []))


def emit(client, request, tokens, prompt=PROMPT, **fields):
    """Runs a request from its begin to its end."""
    client.start(request, prompt, **fields)
    extend(client, request, tokens)
    client.finish(request)


class WithMesh(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mesh = Mesh(folder.name)
        self.addCleanup(self.mesh.stop, signal.SIGKILL)


class WithoutAStore(WithMesh):
    """Without a store the engine goes on, and drafts from its own outputs."""

    def test_emitted_tokens_are_drafted_from_at_once(self):
        client = self.mesh.client()
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:60])
        client.start("b", array("i", PROMPT))
        extend(client, "b", array("i", TEXT[:10]))
        # The output of another running request is drafted from as far as it has come.
        self.assertEqual(drafted(client, "b"), TEXT[10:26])
        self.assertEqual(drafted(client, "b", tokens_max=3), TEXT[10:13])
        # The match has the last 16 tokens of the prompt and the output of both.
        self.assertEqual(drafted(client, "b", alpha=0.5), TEXT[10 : 10 + 26 // 2])
        extend(client, "a", TEXT[60:])
        client.finish("a")
        extend(client, "b", TEXT[10:100])
        self.assertEqual(drafted(client, "b"), TEXT[100:116])
        stats = client.stats()
        self.assertEqual((stats["requests"], stats["emitted_tokens"]), (1, 220))
        self.assertFalse(client.drain(0.2))

    def test_one_call_drafts_for_all_requests(self):
        client = self.mesh.client()
        emit(client, "first", TEXT)
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

    def test_a_request_is_resumed_after_the_engine_made_room(self):
        client = self.mesh.client()
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:50])
        client.finish("a")
        client.start("a", PROMPT)
        extend(client, "a", TEXT[50:60])
        client.start("b", PROMPT)
        extend(client, "b", TEXT[:48])
        # Both parts are one output: the draft after a match of 48 tokens runs on past the interruption.
        wait_until("both parts are one output", lambda: drafted(client, "b", tokens_max=12) == TEXT[48:60])

    def test_accepted_drafts_are_counted(self):
        client = self.mesh.client()
        emit(client, "first", TEXT)
        client.start("a", PROMPT)
        extend(client, "a", TEXT[:10])
        self.assertEqual(drafted(client, "a", tokens_max=6), TEXT[10:16])
        extend(client, "a", [*TEXT[10:14], 555])
        stats = client.stats()
        self.assertEqual(stats["accepted_tokens"], 4)
        # There is one draft, or more where the call was repeated since an index was busy.
        self.assertGreaterEqual(stats["drafts"], 1)
        self.assertLessEqual(stats["drafted_tokens"], 6 * stats["drafts"])
        self.assertIn("refrain_client_accepted_tokens_total 4", client.metrics())

    def test_the_engines_own_drafts_are_replaced_by_better_ones(self):
        client = self.mesh.client()
        emit(client, "first", TEXT)

        def steps(name, engine_draft):
            """Emits the text, two tokens a step. Returns for each step whether the engine's draft was replaced."""
            client.start(name, PROMPT)
            taken = []
            for at in range(0, 60, 2):
                own = engine_draft(at + 2)
                before = client.stats()["busy"]
                (draft,) = client.step([(name, TEXT[at : at + 2], 6, own)])
                # A step that found an index busy shows nothing.
                if client.stats()["busy"] == before:
                    taken.append(draft is not None)
                if draft:
                    self.assertEqual(draft, TEXT[at + 2 : at + 8])
            client.finish(name)
            return taken

        # A head that is always wrong is replaced, and so is one that is always right but drafts fewer tokens.
        wrong = steps("wrong", lambda at: [999] * 6)
        self.assertTrue(len(wrong) > 5 and all(wrong[5:]), wrong)
        shorter = steps("short", lambda at: TEXT[at : at + 2])
        self.assertTrue(len(shorter) > 5 and all(shorter[5:]), shorter)
        # For a new prompt only the engine's head has drafts.
        client.start("new", PROMPT)
        drafts = [client.step([("new", [700 + at], 6, [701 + at])])[0] for at in range(20)]
        self.assertEqual(drafts, [None] * 20)

    def test_drafts_of_a_better_head_are_kept(self):
        client = self.mesh.client()
        other = [(at * 31 + 7) % 500 for at in range(400)]
        # Each earlier output differs after two tokens.
        for at in range(0, 396, 2):
            emit(client, f"misleads-{at}", [*other[at : at + 2], 888, 889, 890], prompt=PROMPT)
        client.start("a", PROMPT)
        taken = []
        for at in range(0, 390, 2):
            (draft,) = client.step([("a", other[at : at + 2], 6, other[at + 2 : at + 6])])
            taken.append(draft is not None)
        self.assertFalse(any(taken[-50:]), taken)

    def test_a_token_must_be_the_meshs_own(self):
        client = self.mesh.client()
        emit(client, "first", TEXT)
        with tempfile.TemporaryDirectory() as folder:
            foreign = Mesh(folder).token()
        for token in (foreign, "nonsense", self.mesh.token()[:-4]):
            with self.assertRaisesRegex(ValueError, "namespace refused"):
                client.start(token[-8:], PROMPT, namespace=token)
            # The request runs, and drafts from its own text alone.
            extend(client, token[-8:], TEXT[:20])
            self.assertEqual(drafted(client, token[-8:]), [])
            extend(client, token[-8:], TEXT[:10])
            self.assertEqual(drafted(client, token[-8:], tokens_max=4), TEXT[10:14])
        self.assertEqual(client.stats()["refused_tokens"], 3)
        with self.assertRaisesRegex(ValueError, "namespace refused"):
            self.mesh.client(TOKEN=foreign)

    def test_groups_are_drafted_from_first(self):
        client = self.mesh.client()
        for sample in range(5):
            emit(client, f"other-{sample}", TEXT[:30] + [1, 2, 3, 4])
        # Fewer outputs than those, but the majority of their group.
        for sample in range(3):
            client.start(f"one-{sample}", PROMPT, group="g")
            extend(client, f"one-{sample}", TEXT[:30] + [5, 6, 7, 8])
        client.start("two", PROMPT, group="g")
        extend(client, "two", TEXT[:30])
        client.start("three", PROMPT)
        extend(client, "three", TEXT[:30])
        self.assertEqual(drafted(client, "two", tokens_max=4), [5, 6, 7, 8])
        self.assertEqual(drafted(client, "three", tokens_max=4), [1, 2, 3, 4])

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
        emit(engine, "a", TEXT)
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        wait_until("the other engine has it", lambda: other.stats()["documents"] == 1)
        other.start("b", PROMPT)
        extend(other, "b", TEXT[:8])
        self.assertEqual(drafted(other, "b"), TEXT[8:24])
        del engine
        # Outputs also outlive the store: what it acknowledged is on the disk.
        self.mesh.stop(signal.SIGKILL)
        self.mesh.start()
        restarted = self.mesh.client()
        wait_until("the output is there again", lambda: restarted.stats()["documents"] == 1)
        restarted.start("c", PROMPT)
        extend(restarted, "c", TEXT[:8])
        self.assertEqual(drafted(restarted, "c"), TEXT[8:24])

    def test_a_restarted_store_gets_the_outputs_that_it_missed(self):
        engine = self.mesh.client()
        self.mesh.stop()
        for number in range(20):
            emit(engine, str(number), [number, *TEXT])
        self.assertFalse(engine.drain(0.1))
        self.mesh.start()
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        other = self.mesh.client()
        wait_until("all outputs are there", lambda: other.stats()["documents"] == 20)

    def test_the_token_can_come_from_a_file(self):
        file = self.mesh.folder / "token"
        file.write_text(self.mesh.token() + "\n")
        engine = self.mesh.client(TOKEN=None, TOKEN_FILE=file)
        emit(engine, "a", TEXT)
        self.assertTrue(engine.drain(PATIENCE_SECONDS))
        # A request can bring a token of the same namespace itself.
        other = self.mesh.client(TOKEN=None)
        other.start("b", PROMPT, namespace=self.mesh.token())
        extend(other, "b", TEXT[:8])
        wait_until("the namespace is followed", lambda: drafted(other, "b") == TEXT[8:24])
        # Without a token there are no drafts of the namespace.
        other.start("c", PROMPT)
        extend(other, "c", TEXT[:8])
        self.assertEqual(drafted(other, "c"), [])


class SuffixCache(WithMesh):
    """The suffix cache, called in the order of vLLM 0.32's SuffixDecodingProposer."""

    def step(self, cache, batch):
        drafts = []
        for req_id, prompt, context, emitted in batch:
            if req_id not in cache.active_requests:
                if req_id in cache.cached_requests:
                    cache.evict_cached_response(req_id)
                cache.start_request(req_id, prompt)
            cache.add_active_response(req_id, emitted)
            pattern = array("i", context[-24:])
            draft = cache.speculate(req_id, pattern, max_spec_tokens=24, max_spec_factor=1.0, min_token_prob=0.1)
            drafts.append(draft.token_ids)
        here = {req_id: at for at, (req_id, *_) in enumerate(batch)}
        for req_id in cache.active_requests - here.keys():
            cache.stop_request(req_id)
        return drafts

    def decode(self, cache, req_id, text):
        """Emits the text, whatever is drafted. Returns the number of steps."""
        prompt, at, steps = array("i", PROMPT), 1, 0
        emitted = text[:1]
        while True:
            (draft,) = self.step(cache, [(req_id, prompt, PROMPT + text[:at], emitted)])
            steps += 1
            if at == len(text):
                self.step(cache, [])
                return steps
            kept = 0
            while kept < len(draft) and at + kept < len(text) - 1 and draft[kept] == text[at + kept]:
                kept += 1
            emitted = text[at : at + kept + 1]
            at += kept + 1

    def few_steps(self, cache, fields=None):
        """Emits the text until it takes few steps: a step that finds an index busy goes without drafts."""
        attempts = itertools.count()

        def holds():
            req_id = f"again-{next(attempts)}"
            if fields:
                cache.announce(req_id, fields, Ending())
            return self.decode(cache, req_id, TEXT) < len(TEXT) // 5

        wait_until("a known text takes few steps", holds)

    def test_a_repeated_text_takes_few_steps(self):
        cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=10000, client=self.mesh.client())
        self.assertEqual(self.decode(cache, "a", TEXT), len(TEXT))
        self.few_steps(cache)
        self.assertEqual(list(cache.active_requests), [])

    def test_arguments_that_a_user_set_come_before_the_configuration(self):
        client = mock.create_autospec(Client, instance=True)
        client.start.return_value, client.propose.return_value = 0, [([], 0.0, 0)]
        open_to_the_client = {"alpha": None, "offset": 0.0, "min_token_prob": None, "depth": None}
        for sizes, given, passed_on in (
            # The defaults of vLLM.
            ({"max_tree_depth": 24}, {"max_spec_factor": 1.0, "min_token_prob": 0.1}, {}),
            ({"max_tree_depth": 64}, {"max_spec_factor": 1.0, "min_token_prob": 0.1}, {"depth": 64}),
            ({"max_tree_depth": 24}, {"max_spec_factor": 4.0, "min_token_prob": 0.1}, {"alpha": 4.0}),
            ({"max_tree_depth": 24}, {"max_spec_factor": 1.0, "min_token_prob": 0.3}, {"min_token_prob": 0.3}),
            ({}, {"max_spec_offset": 2.0}, {"offset": 2.0}),
        ):
            cache = SuffixDecodingCache(**sizes, client=client)
            cache.start_request("a", PROMPT)
            cache.speculate("a", [1], max_spec_tokens=9, **given)
            client.propose.assert_called_with([("a", 9)], **{**open_to_the_client, **passed_on})

    def test_the_configuration_holds_where_a_user_set_no_arguments(self):
        for settings, tokens in (
            ({}, 24),
            ({"SPECULATION__ALPHA": 0.5}, 13),
            ({"SPECULATION__ALPHA": "auto", "SPECULATION__MAX_SPEC_TOKENS": 5}, 5),
            ({"SPECULATION__ALPHA": 1.0, "SPECULATION__MATCH_TOKENS_MAX": 8}, 8),
        ):
            client = self.mesh.client(**settings)
            emit(client, "first", TEXT)
            cache = SuffixDecodingCache(client=client)
            cache.start_request("a", PROMPT)
            cache.add_active_response("a", TEXT[:10])
            # The match has the last 16 tokens of the prompt and 10 of the output.
            draft = undisturbed(client, lambda: cache.speculate("a", [], max_spec_tokens=24))
            self.assertEqual(draft.token_ids, TEXT[10 : 10 + tokens], settings)
        for settings, why in (
            ({"SPECULATION__ALPHA": 0}, 'speculation.alpha: "auto", or a number above 0'),
            ({"SPECULATION__MIN_TOKEN_PROB": 1.5}, 'speculation.min_token_prob: "auto", or a number from 0 to 1'),
            ({"SPECULATION__MATCH_TOKENS_MAX": 0}, "speculation.match_tokens_max: from 1 to 1024"),
            ({"SPECULATION__FACTOR": 2}, "REFRAIN_CLIENT_SPECULATION__FACTOR"),
        ):
            with self.assertRaisesRegex(ValueError, why):
                self.mesh.client(**settings)

    def test_calls_out_of_order_are_refused_as_arctic_inference_does(self):
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

    def test_the_output_before_an_interruption_is_known(self):
        cache = SuffixDecodingCache(client=self.mesh.client())
        prompt = array("i", PROMPT)
        # A request with a refused token is not resumed, and one with unreadable fields is not even begun.
        refused = {"refrain_namespace": "nonsense"}
        unreadable = {"refrain_group": 1}
        for req_id, fields, is_begun in (("kept", {}, True), ("refused", refused, True), ("unread", unreadable, False)):
            cache.announce(req_id, fields, Ending())
            self.step(cache, [(req_id, prompt, PROMPT, TEXT[:40])])
            self.step(cache, [])
            cache.announce(req_id, fields, Ending(), TEXT[:40])
            (draft,) = self.step(cache, [(req_id, prompt, PROMPT, TEXT[:10])])
            self.assertEqual(draft[:4], TEXT[10:14] if is_begun else [], req_id)
            self.step(cache, [])

    def test_a_client_that_resumes_gets_no_token_twice(self):
        client = mock.create_autospec(Client, instance=True)
        client.propose.return_value = [([], 0.0, 0)]
        cache = SuffixDecodingCache(client=client)
        for req_id, known, more in (("a", 3, []), ("b", 2, [9]), ("c", 0, [7, 8, 9])):
            client.start.return_value = known
            client.extend.reset_mock()
            cache.announce(req_id, {}, Ending(), [7, 8, 9])
            self.step(cache, [(req_id, array("i", PROMPT), PROMPT, [1])])
            extended = [call.args[1] for call in client.extend.call_args_list]
            self.assertEqual(extended, [more, [1]] if more else [[1]])

    def test_fields_that_cannot_be_read_do_not_stop_the_engine(self):
        client = self.mesh.client()
        cache = SuffixDecodingCache(client=client)
        token = {"refrain_namespace": self.mesh.token()}
        unreadable = [
            {"refrain_namespace": 5}, {"refrain_namespace": ["x"]}, {"refrain_group": 1.5}, {**token, "refrain_document": 7},
            {**token, "refrain_document": "xyz"}, {**token, "refrain_epoch": -1}, {**token, "refrain_epoch": "soon"},
            {**token, "refrain_epoch": [1]}, {**token, "refrain_epoch": float("inf")}, {**token, "refrain_epoch": 2**64},
            {**token, "refrain_written": float("nan")}, {**token, "refrain_written": -1}, {**token, "refrain_written": {}},
            {"refrain_alpha": "x"}, {"refrain_alpha": 0}, {"refrain_alpha": 10**400}, {"refrain_min_token_prob": 1.5},
            {"refrain_min_token_prob": float("nan")}, {"refrain_max_spec_tokens": -1}, {"refrain_max_spec_tokens": []},
        ]  # fmt: skip
        for number, fields in enumerate(unreadable):
            cache.announce(str(number), fields, Ending())
            self.assertEqual(self.decode(cache, str(number), TEXT), len(TEXT), fields)
        self.assertEqual(client.stats()["refused_fields"], len(unreadable))
        # The largest epoch has no next epoch.
        cache.announce("last", {**token, "refrain_epoch": 2**63 - 1}, Ending())
        for _ in range(2):
            self.decode(cache, "last", TEXT)
        # Without a token the other fields are not read.
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

    def test_batches_announce_each_request_once_to_every_cache(self):
        from refrain_client import vllm

        added = []
        batch = type("InputBatch", (), {"add_request": lambda self, request: added.append(request.req_id)})
        names = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_input_batch")
        modules = {name: ModuleType(name) for name in names}
        modules[names[-1]].InputBatch = batch
        caches = [SuffixDecodingCache(client=vllm.NullClient()) for _ in range(2)]
        announced = []
        with mock.patch.dict(sys.modules, modules):
            for at, cache in enumerate(caches):
                cache.announce = lambda *what, at=at: announced.append((at, *what))
                vllm.announce_to(cache)
        params = {"eos_token_id": 2, "stop_token_ids": [7], "max_tokens": 30}
        for req_id, fields in (("a", {"refrain_group": "g"}), ("b", {"other": 1}), ("c", None)):
            params["extra_args"] = fields
            batch().add_request(Namespace(req_id=req_id, sampling_params=Namespace(**params), output_token_ids=[1] * 10))
        self.assertEqual(added, ["a", "b", "c"])
        self.assertEqual([(at, req_id) for req_id in "abc" for at in sorted({0, 1})], [
            (at, req_id) for at, req_id, *_ in sorted(announced, key=lambda one: (one[1], one[0]))
        ])  # fmt: skip
        for _, req_id, fields, ending, output in announced:
            # Only Refrain's own fields are passed on.
            self.assertEqual(fields, {"refrain_group": "g"} if req_id == "a" else {})
            self.assertEqual(output, [1] * 10)
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

    def test_the_client_gets_the_finish_reason_of_the_cache(self):
        client = mock.create_autospec(Client, instance=True)
        client.start.return_value, client.propose.return_value = 0, [([], 0.0, 0)]
        cache = SuffixDecodingCache(client=client)
        for req_id, ending in (("a", Ending([9])), ("b", Ending([9], 4)), ("c", Ending([9], 4))):
            cache.announce(req_id, {}, ending)
        prompt, context = array("i", PROMPT), PROMPT
        self.step(cache, [(req_id, prompt, context, [1, 2]) for req_id in "abc"])
        self.step(cache, [("a", prompt, context, [3, 9, 4]), ("b", prompt, context, [3, 4, 5])])
        # The engine reports tokens of an ended output once more, before the request leaves the batch.
        self.step(cache, [("a", prompt, context, [5])])
        self.step(cache, [])
        self.assertEqual(
            client.extend.call_args_list,
            [mock.call(req_id, [1, 2]) for req_id in "abc"] + [mock.call("a", [3, 9]), mock.call("b", [3, 4])],
        )
        # The third left the batch before its end, maybe only for now.
        ended = [mock.call("a", "stop"), mock.call("b", "length"), mock.call("c")]
        self.assertEqual(client.finish.call_args_list, ended)

    def test_the_client_gets_the_finish_reason_of_the_scheduler(self):
        names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.scheduler")
        modules = {name: ModuleType(name) for name in names}
        passed_on = []
        update = {"update_draft_token_ids": lambda self, drafts: passed_on.append(drafts.draft_token_ids)}
        modules[names[-1]].Scheduler = type("Scheduler", (), update)
        with mock.patch.dict(sys.modules, modules):
            from refrain_client.scheduler import RefrainScheduler

        class Request:
            """A request as vLLM's scheduler holds it."""

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
        scheduler.num_spec_tokens, scheduler.max_model_len = 4, 1000
        scheduler.followed = FollowedRequests(scheduler.drafts)
        requests = [Request(name) for name in "abc"]
        scheduler.requests = {request.request_id: request for request in requests}
        scheduler.update_draft_token_ids(drafted(["a", "b", "c"], [[5], [6], []]))
        self.assertEqual(passed_on, [[[7, 8], [6], []]])
        # They leave with their last tokens. The third has no finish reason.
        for request, reason in zip(requests, ("length", "abort", None)):
            request.all_token_ids += [2, 3]
            request.reason = reason
            del scheduler.requests[request.request_id]
        scheduler.update_draft_token_ids(drafted([], []))
        extended = {call.args[0]: call.args[1] for call in scheduler.drafts.extend.call_args_list}
        self.assertEqual(extended, {name: [2, 3] for name in "abc"})
        ended = {call.args for call in scheduler.drafts.finish.call_args_list}
        self.assertEqual(ended, {("a", "length"), ("b", "abort"), ("c", None)})

    def test_the_plugin_replaces_a_module_only_where_a_store_is_configured(self):
        import importlib.util

        from refrain_client import vllm

        os.environ.pop("REFRAIN_CLIENT_STORE_URL", None)
        vllm.register()
        self.assertIsNone(importlib.util.find_spec("arctic_inference"))
        os.environ["REFRAIN_CLIENT_STORE_URL"] = "http://127.0.0.1:1"
        self.addCleanup(os.environ.pop, "REFRAIN_CLIENT_STORE_URL")
        for _ in range(2):
            vllm.register()
            # vLLM checks that the package is there, and then imports the class.
            self.assertIsNotNone(importlib.util.find_spec("arctic_inference"))
            importlib.import_module("arctic_inference")
            from arctic_inference.suffix_decoding import SuffixDecodingCache as replacement

            self.assertIs(replacement, vllm.SuffixDecodingCache)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
