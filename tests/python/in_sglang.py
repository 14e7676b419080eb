"""Tests of the SGLang plugin, in a fake engine that calls it as the source of SGLang 0.5.23 does. SGLang is not
needed. With PyTorch, masks are tested as well.

    in_sglang.py REFRAIN MODEL

REFRAIN is the binary, and MODEL the folder of the shipped model.
"""

import functools
import importlib
import itertools
import os
import sys
import unittest
from array import array
from types import ModuleType
from types import SimpleNamespace as Namespace
from unittest import mock

import numpy as np
from client import PATIENCE_SECONDS, PROMPT, TEXT, WithMesh, undisturbed, wait_until
from refrain_client import announced, corpus, sglang
from refrain_client.corpus import RefrainCorpus

try:
    import torch
except ImportError:
    torch = None

END = 2
NODES = 8
# Tokens at the end of a text that the corpus gets: SGLang's --speculative-ngram-max-trie-depth.
TAIL = 18
# Longer than a test takes.
NEVER_SECONDS = 3600.0


class Req:
    """The fields of SGLang's requests that the plugin reads."""

    def __init__(self, rid, text, prompt=PROMPT, **params):
        self.rid, self.text = rid, text
        self.origin_input_ids_unpadded, self.output_ids = array("q", prompt), array("q", text[:1])
        self.finished_reason = self.finished_len = None
        self.eos_token_ids, self.tokenizer = {END}, None
        given = {
            "ignore_eos": False, "stop_token_ids": None, "max_new_tokens": 1000, "min_new_tokens": 0, "custom_params": None,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, **params,
        }  # fmt: skip
        self.sampling_params = Namespace(**given)

    @property
    def output_ids_through_stop(self):
        return self.output_ids[: self.finished_len] if self.finished_len is not None else self.output_ids

    def token_at(self, at):
        """The token of the output at a position, whatever is drafted. Tokens after the end are not kept."""
        return self.text[at] if at < len(self.text) else 999

    def append(self, tokens):
        for token in tokens:
            self.output_ids.append(token)
            if self.finished_reason is None and token == END:
                self.finish("stop")
            elif self.finished_reason is None and len(self.output_ids) == self.sampling_params.max_new_tokens:
                self.finish("length")

    def finish(self, why):
        self.finished_reason = Namespace(to_json=lambda: {"type": why})
        self.finished_len = len(self.output_ids)


class Engine:
    """SGLang's NGRAMWorker with its scheduler. Where steps overlap, a request gets the tokens of a step only after
    the next step began."""

    def __init__(self, corpus, overlaps):
        self.corpus, self.overlaps = corpus, overlaps
        self.batch, self.sampled, self.last, self.steps = [], {}, set(), 0

    def step(self):
        self.steps += 1
        batch, corpus = self.batch, self.corpus
        texts = self.texts()
        nodes, mask = self.draft(batch)
        assert (nodes.dtype, mask.dtype) == ("int64", "bool")
        nodes, mask = nodes.reshape(len(batch), NODES), mask.reshape(len(batch), NODES, NODES)
        sampled = {}
        for req, text, tokens, before in zip(batch, texts, nodes.tolist(), mask.tolist()):
            assert tokens[0] == text[-1]
            sampled[req.rid] = self.verify(req, len(text) - len(PROMPT), tokens, before)
        here = {req.rid for req in batch}
        if gone := self.last - here:
            corpus.erase_match_state(list(gone))
        self.last = here
        accepted, self.sampled = (self.sampled, sampled) if self.overlaps else (sampled, {})
        for req in batch:
            req.append(accepted.get(req.rid, []))
        self.batch = [req for req in batch if req.finished_reason is None]

    def texts(self):
        ahead = {req.rid: self.sampled.get(req.rid, []) for req in self.batch}
        return [[*req.origin_input_ids_unpadded, *req.output_ids, *ahead[req.rid]] for req in self.batch]

    def draft(self, batch):
        self.corpus.begin_step(batch)
        return self.ask(self.corpus)

    def ask(self, corpus):
        """Asks a corpus for the nodes and masks of the batch, as SGLang's `_prepare_draft_tokens` does."""
        corpus.synchronize()
        texts = self.texts()
        return corpus.batch_get([req.rid for req in self.batch], [text[-TAIL:] for text in texts], list(map(len, texts)))

    def flush(self):
        """Flushes SGLang's caches, for which nothing may run."""
        assert not self.batch
        self.corpus.reset()
        self.last = set()

    @staticmethod
    def verify(req, at, tokens, before):
        """Returns the accepted path through the tree, and one bonus token."""
        assert all(before[node][node] for node in range(NODES))
        parents = [max((other for other in range(node) if before[node][other]), default=-1) for node in range(NODES)]
        node, emitted = 0, []
        while True:
            emitted.append(req.token_at(at + len(emitted)))
            children = [child for child in range(NODES) if parents[child] == node]
            # Equal siblings would count twice where a token is sampled.
            assert len({tokens[child] for child in children}) == len(children)
            node = next((child for child in children if tokens[child] == emitted[-1]), None)
            if node is None:
                return emitted


class Tensor(np.ndarray):
    """A tensor on a device, as far as drafts need it."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


class Group:
    """A tensor-parallel group whose ranks take turns, the first one first."""

    world_size = 2
    sent = None

    def rank(self, rank_in_group):
        send = functools.partial(self.broadcast, rank_in_group)
        return Namespace(rank_in_group=rank_in_group, world_size=self.world_size, broadcast=send)

    def broadcast(self, rank, tensor, src):
        if rank == src:
            self.sent = tensor.copy()
        tensor[:] = self.sent
        return tensor


class NGRAMWorker:
    """SGLang's worker, as far as drafts go through it. `engine` is set by the test."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        self.draft_token_num, self.ngram_corpus, self.grammar_tree_host = NODES, None, None

    def _prepare_draft_tokens(self, batch):
        return self.engine.ask(self.ngram_corpus)

    def _prepare_for_speculative_decoding(self, batch):
        nodes, mask = self._prepare_draft_tokens(batch)
        self.grammar_tree_host = (mask, nodes) if batch.has_grammar else None
        batch.spec_info = Namespace(draft_token=nodes.copy().view(Tensor), custom_mask=mask)


class Ranks(Engine):
    """An engine with several ranks, all of which have to verify the same drafts. Every other step has a grammar."""

    def __init__(self, workers):
        super().__init__(workers[0].ngram_corpus, True)
        self.workers = workers
        for worker in workers:
            worker.engine = self

    def draft(self, batch):
        infos = []
        for worker in self.workers:
            step = Namespace(reqs=batch, has_grammar=self.steps % 2, forward_mode=Namespace(is_decode=lambda: True))
            worker._prepare_for_speculative_decoding(step)
            infos.append(step.spec_info)
            if step.has_grammar:
                assert np.array_equal(worker.grammar_tree_host[1], infos[0].draft_token)
        assert all(np.array_equal(info.draft_token, infos[0].draft_token) for info in infos)
        worker._update_ngram_corpus(step)
        return infos[-1].draft_token, infos[-1].custom_mask


def fake_modules(group, is_cpu=True):
    """The modules that the worker imports, with a torch that does nothing where there is none."""
    names = ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.speculative.ngram_worker",
             "sglang.srt.runtime_context")  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    if torch is None:
        modules["torch"] = ModuleType("torch")
    worker = modules["sglang.srt.speculative.ngram_worker"]
    worker.NGRAMWorker, worker.USE_FULL_MASK, worker._is_cpu = NGRAMWorker, True, is_cpu
    modules["sglang.srt.speculative"].ngram_worker = worker
    modules["sglang.srt.runtime_context"].get_parallel = lambda: Namespace(tp_group=group)
    return mock.patch.dict(sys.modules, modules)


class Corpus(WithMesh):
    def corpus(self, **settings):
        return RefrainCorpus(self.mesh.client(**settings), NODES)

    def run_all(self, engine, reqs):
        """Runs requests to their ends. Returns the number of steps."""
        engine.batch, before = list(reqs), engine.steps
        while engine.batch:
            engine.step()
        # A further step, so that SGLang removes the last requests.
        engine.step()
        return engine.steps - before

    def few_steps(self, engine, count=1, **params):
        """Emits the text until it takes few steps: a step that finds an index busy goes without drafts. Returns all
        requests."""
        ran = []

        def holds():
            reqs = [Req(f"again-{len(ran) + number}", [*TEXT, END], **params) for number in range(count)]
            ran.extend(reqs)
            return self.run_all(engine, reqs) < len(TEXT) // 3

        wait_until("a known text takes few steps", holds)
        return ran

    def test_repeated_texts_take_few_steps_and_are_what_they_were(self):
        text = [*TEXT, END]
        for overlaps in (False, True):
            corpus = self.corpus()
            engine = Engine(corpus, overlaps)
            first = Req("a", text)
            self.assertGreaterEqual(self.run_all(engine, [first]), len(text))
            ran = [first, *self.few_steps(engine, count=6)]
            for req in ran:
                self.assertEqual(list(req.output_ids_through_stop), text)
            stats = corpus.client.stats()
            # No token after the end of an output is kept.
            self.assertEqual((stats["requests"], stats["emitted_tokens"]), (0, len(ran) * len(text)))

    def test_chains_fill_the_nodes_unless_the_configuration_says_otherwise(self):
        for settings, drafted in (({}, NODES - 1), ({"SPECULATION__ALPHA": 0.5}, 4), ({"SPECULATION__MAX_SPEC_TOKENS": 3}, 3)):
            corpus = self.corpus(**settings)
            # A prompt of a request that shares only the last eight tokens with a text that is known by then.
            req = Req("a", TEXT[19:], prompt=[*TEXT, *TEXT[12:19]])
            corpus.begin_step([req])
            text = [*req.origin_input_ids_unpadded, *req.output_ids]
            (chain,) = corpus.chains(["a"], [text[-TAIL:]], [len(text)])
            self.assertEqual(chain[: drafted + 1], TEXT[19 : 20 + drafted], settings)
            self.assertEqual(chain[drafted + 1 :], [chain[drafted]] * (NODES - 1 - drafted), settings)

    def assert_in_the_store(self, count, *texts):
        """Asserts that the store has so many outputs, and these texts with their last tokens."""
        other = self.mesh.client()
        wait_until("all outputs are there", lambda: other.stats()["documents"] == count)
        for at, text in enumerate(texts):
            other.start(str(at), text[-12:-4])
            wait_until("the end of the output is there", lambda at=at, text=text: other.propose([(str(at), 4)])[0][0] == text[-4:])

    def ended(self, *reqs):
        """Returns an engine whose requests have ended without a further step. Their last tokens are not known to the
        client, and the thread that looks for ends does not run."""
        with mock.patch.object(corpus, "LOOK_EVERY_SECONDS", NEVER_SECONDS):
            engine = Engine(self.corpus(), False)
        engine.batch = list(reqs)
        while engine.batch:
            engine.step()
        stats = engine.corpus.client.stats()
        self.assertGreater(stats["requests"], 0)
        self.assertLess(stats["emitted_tokens"], sum(len(req.text) for req in reqs))
        return engine

    def test_a_flush_passes_on_the_tokens_of_the_last_batch(self):
        self.mesh.start()
        texts = [[*TEXT[:60], END], [9, *TEXT[60:], END]]
        engine = self.ended(*(Req(str(at), text) for at, text in enumerate(texts)))
        client = engine.corpus.client
        engine.flush()
        stats = client.stats()
        self.assertEqual((stats["requests"], stats["emitted_tokens"]), (0, sum(map(len, texts))))
        last = [10, *TEXT[30:90], END]
        self.run_all(engine, [Req("after", last)])
        stats = client.stats()
        self.assertEqual((stats["requests"], stats["emitted_tokens"]), (0, sum(map(len, texts)) + len(last)))
        self.assertTrue(client.drain(PATIENCE_SECONDS))
        self.assert_in_the_store(3, *texts, last)

    def test_ends_are_passed_on_though_no_step_follows(self):
        self.mesh.start()
        for overlaps, text in ((False, [7, *TEXT, END]), (True, [8, *TEXT, END])):
            engine = Engine(self.corpus(), overlaps)
            client, req = engine.corpus.client, Req("a", text)
            engine.batch = [req]
            while len(req.output_ids) < 50:
                engine.step()
            if overlaps:
                # The client disconnected, so no token marks this end.
                req.finish("abort")
            else:
                while engine.batch:
                    engine.step()
            wait_until("the request has ended here", lambda client=client: client.stats()["requests"] == 0)
            self.assertGreaterEqual(client.stats()["emitted_tokens"], len(req.output_ids))
            self.assertTrue(client.drain(PATIENCE_SECONDS))
            self.assert_in_the_store(1 + overlaps, list(req.output_ids))

    def test_the_step_after_an_end_passes_it_on(self):
        req = Req("a", [*TEXT, END])
        engine = self.ended(req)
        client = engine.corpus.client
        # One call alone may come while SGLang is ending the request, and within a step no request is removed.
        engine.corpus.settle_ended()
        engine.corpus.begin_step([req])
        engine.corpus.settle_ended()
        self.assertEqual(client.stats()["requests"], 1)
        engine.corpus.begin_step([Req("b", [8, *TEXT])])
        stats = client.stats()
        self.assertEqual((stats["requests"], stats["emitted_tokens"]), (1, len(TEXT) + 1))

    def test_whole_outputs_reach_the_store_also_those_of_the_last_batch(self):
        self.mesh.start()
        corpus = self.corpus()
        engine = Engine(corpus, True)
        reqs = [Req("stops", [*TEXT[:40], END]), Req("long", [7, *TEXT], max_new_tokens=50), Req("aborted", [8, *TEXT])]
        engine.batch = list(reqs)
        while len(engine.batch) > 1:
            engine.step()
        reqs[2].finish("abort")
        corpus.close()
        other = self.mesh.client()
        wait_until("all outputs are there", lambda: other.stats()["documents"] == 3)
        for start, then in ((PROMPT[-4:] + [7, *TEXT[:3]], TEXT[3:6]), (PROMPT[-4:] + [8, *TEXT[:3]], TEXT[3:6])):
            other.start(str(start), start)
            found = undisturbed(other, lambda: other.propose([(str(start), 3)]))
            self.assertEqual(found[0][0], then)

    def test_a_request_that_sglang_made_room_with_is_resumed(self):
        corpus = self.corpus()
        engine = Engine(corpus, True)
        req, other = Req("a", [*TEXT, END]), Req("b", [9, *TEXT[:60], END])
        engine.batch = [req, other]
        for _ in range(10):
            engine.step()
        # The request gets the tokens of the last step, and leaves the batch.
        req.append(engine.sampled.pop("a"))
        engine.batch = [other]
        engine.step()
        self.assertEqual(corpus.client.stats()["requests"], 1)
        engine.batch.append(req)
        while engine.batch:
            engine.step()
        engine.step()
        self.assertEqual(list(req.output_ids_through_stop), [*TEXT, END])
        self.assertEqual(corpus.client.stats()["emitted_tokens"], len(TEXT) + 1 + 62)

    def test_the_text_of_a_refused_request_is_not_indexed_twice(self):
        corpus = self.corpus()
        engine = Engine(corpus, False)
        req = Req("a", [*TEXT, END], custom_params={"refrain_namespace": "nonsense"})
        with mock.patch.object(announced, "_has_warned", True):
            for batch in ([req], [], [req]):
                engine.batch = batch
                for _ in range(5):
                    engine.step()
        # A text that was indexed twice would be drafted from.
        stats = corpus.client.stats()
        self.assertEqual((stats["refused_tokens"], stats["drafted_tokens"]), (2, 0))

    def test_an_output_longer_than_the_tail_is_taken_whole_when_its_request_begins(self):
        # Nothing of the output is known where SGLang made room with a request whose token is refused.
        for overlaps in (False, True):
            corpus = self.corpus()
            engine = Engine(corpus, overlaps)
            req = Req("a", [*TEXT, END])
            req.append(TEXT[1 : 1 + 2 * TAIL])
            self.run_all(engine, [req])
            self.assertEqual(corpus.client.stats()["emitted_tokens"], len(TEXT) + 1)
            client = corpus.client
            for at in (4, 2 * TAIL, 3 * TAIL):
                client.start(str(at), [*PROMPT[-4:], *TEXT[at - 4 : at]])
                wait_until("the output is drafted from", lambda at=at: client.propose([(str(at), 3)])[0][0] == TEXT[at : at + 3])

    def test_requests_that_sglang_does_not_verify_exactly_get_no_drafts(self):
        corpus = self.corpus()
        engine = Engine(corpus, False)
        self.run_all(engine, [Req("a", [*TEXT, END])])
        for params in ({"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_new_tokens": 5}):
            before = corpus.client.stats()["drafted_tokens"]
            self.run_all(engine, [Req(str(params), [*TEXT, END], **params)])
            self.assertEqual(corpus.client.stats()["drafted_tokens"], before)
        self.few_steps(engine)

    def test_a_token_of_the_request_is_accepted_when_it_is_signed(self):
        corpus = self.corpus(TOKEN=None)
        engine = Engine(corpus, False)
        fields = {"custom_params": {"refrain_namespace": self.mesh.token(), "other": 1}}
        self.few_steps(engine, **fields)
        drafted = corpus.client.stats()["drafted_tokens"]
        with self.assertLogs("refrain_client", "WARNING"):
            self.run_all(engine, [Req("c", [*TEXT, END], custom_params={"refrain_namespace": "nonsense"})])
        self.assertEqual(corpus.client.stats()["drafted_tokens"], drafted)

    def test_an_attached_worker_names_the_output_and_its_rules(self):
        self.mesh.start()
        corpus = self.corpus(TOKEN=None)
        engine, names = Engine(corpus, True), itertools.count()

        def steps():
            name = next(names)
            fields = {
                "refrain_namespace": self.mesh.token(), "refrain_document": f"{name:032x}", "refrain_epoch": 1,
                "refrain_written": 3, "refrain_max_spec_tokens": 4,
            }  # fmt: skip
            return self.run_all(engine, [Req(str(name), [*TEXT, END], custom_params=fields)])

        wait_until("a known text takes as few steps as the rule allows", lambda: len(TEXT) // 5 <= steps() < len(TEXT) // 2)
        self.assertEqual(corpus.client.stats()["refused_fields"], 0)
        # The worker writes these outputs to the store itself.
        self.assertTrue(corpus.client.drain(PATIENCE_SECONDS))
        self.assertEqual(self.mesh.client().stats()["documents"], 0)

    def test_all_ranks_verify_the_drafts_of_the_first(self):
        group, workers, clients = Group(), [], []

        def client_of(*_):
            clients.append(self.mesh.client())
            return clients[-1]

        for rank in range(2):
            with fake_modules(group.rank(rank)):
                chains = importlib.import_module("refrain_client.chains")
                with mock.patch.object(chains, "client_of", client_of):
                    workers.append(chains.RefrainWorker(None, gpu_id=0, nccl_port=0, target_worker=None))
                del sys.modules["refrain_client.chains"]
        engine = Ranks(workers)
        self.run_all(engine, [Req("a", [*TEXT, END])])
        for req in self.few_steps(engine, count=3):
            self.assertEqual(list(req.output_ids_through_stop), [*TEXT, END])
        self.assertEqual(len(clients), 1)

    def test_there_are_no_corpora_to_load(self):
        corpus = self.corpus()
        for call in (lambda: corpus.load_external_corpus_named("a", [[1]]), lambda: corpus.remove_external_corpus("a")):
            with self.assertRaisesRegex(ValueError, "draft store"):
                call()
        self.assertEqual(corpus.list_external_corpora(), {})
        corpus.reset()
        corpus.erase_match_state(["unknown"])
        self.assertTrue(corpus.client.drain(PATIENCE_SECONDS))


class ServerArgs:
    """SGLang's arguments, which a plugin reads and writes through a recorder, since they are sealed."""

    def __init__(self, **fields):
        object.__setattr__(self, "fields", fields)

    def __getattr__(self, name):
        if name not in self.fields:
            raise AttributeError(name)
        return self.fields[name]

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is sealed")

    def record(self, resolve):
        """Calls a plugin with a recorder, as `record_foreign_defaults` does. Returns the arguments as declared."""
        written = {}

        class Recorder:
            def __getattr__(_, name):
                return written[name] if name in written else getattr(self, name)

            def __setattr__(_, name, value):
                written[name] = value

        resolve(Recorder())
        assert written.keys() <= self.fields.keys(), "SGLang ignores what is no argument"
        return ServerArgs(**{**self.fields, **written})


def server_args(**given):
    return ServerArgs(**{
        "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1, "enable_mixed_chunk": True, "speculative_eagle_topk": None,
        "speculative_num_steps": None, "speculative_ngram_max_bfs_breadth": 10, "device": "cuda", "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0, "speculative_use_rejection_sampling": False, "max_running_requests": None,
        "speculative_num_draft_tokens": None, "speculative_ngram_max_trie_depth": 18, **given,
    })  # fmt: skip


class Plugin(unittest.TestCase):
    def setUp(self):
        """Provides the names that the plugin imports from SGLang."""
        self.registered = {}

        class CustomSpecAlgo:
            """SGLang's base class, as far as the plugin overrides it."""

            def is_ngram(self):
                return False

            def has_draft_kv(self):
                return True

        class SpeculativeAlgorithm:
            NGRAM = Namespace(carries_draft_hidden_states=lambda: False, __deepcopy__=None)

            @staticmethod
            def register(name, *, supports_overlap, validate_server_args, spec_class):
                def decorator(factory):
                    self.registered[name] = Namespace(
                        overlaps=supports_overlap, check=validate_server_args, algorithm=spec_class(), factory=factory
                    )
                    return factory

                return decorator

        self.is_hip = False
        names = ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.speculative.spec_info",
                 "sglang.srt.speculative.spec_registry", "sglang.srt.utils")  # fmt: skip
        modules = {name: ModuleType(name) for name in names}
        modules["sglang.srt.speculative.spec_info"].SpeculativeAlgorithm = SpeculativeAlgorithm
        modules["sglang.srt.speculative.spec_registry"].CustomSpecAlgo = CustomSpecAlgo
        modules["sglang.srt.utils"].is_hip = lambda: self.is_hip
        patch = mock.patch.dict(sys.modules, modules)
        patch.start()
        self.addCleanup(patch.stop)

    def test_it_is_registered_where_a_store_is_configured(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("REFRAIN_CLIENT_STORE_URL", None)
            sglang.register()
            self.assertEqual(self.registered, {})
            os.environ["REFRAIN_CLIENT_STORE_URL"] = "http://127.0.0.1:1"
            sglang.register()
        plugin = self.registered["REFRAIN"]
        self.assertTrue(plugin.overlaps and plugin.algorithm.is_ngram() and not plugin.algorithm.has_draft_kv())
        self.assertFalse(plugin.algorithm.carries_draft_hidden_states())
        self.assertFalse(hasattr(plugin.algorithm, "__deepcopy__"))
        given = server_args(speculative_num_draft_tokens=16).record(plugin.check)
        given = given.record(plugin.algorithm.handle_server_args)
        self.assertEqual((given.speculative_num_steps, given.speculative_eagle_topk), (16, 1))
        self.assertEqual((given.max_running_requests, given.enable_mixed_chunk), (48, False))
        self.assertEqual(given.speculative_ngram_max_trie_depth, 18)
        deep = server_args(speculative_num_draft_tokens=32).record(plugin.algorithm.handle_server_args)
        self.assertEqual(deep.speculative_ngram_max_trie_depth, 32)

    def test_it_refuses_configurations_that_are_not_lossless(self):
        self.assertIsNone(sglang.refuse(server_args(tp_size=8)))
        for wrong in (
            {"pp_size": 2}, {"dp_size": 2}, {"attn_dp_size": 2}, {"device": "cpu"}, {"device": "xpu"},
            {"speculative_accept_threshold_acc": 0.9}, {"speculative_use_rejection_sampling": True},
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, "REFRAIN: "):
                server_args(**wrong).record(sglang.check)
        self.is_hip = True
        self.assertIn("greedily", sglang.refuse(server_args()))


@unittest.skipIf(torch is None, "PyTorch is not installed")
class Masks(unittest.TestCase):
    def test_the_full_mask_is_the_one_that_sglang_concatenates(self):
        with fake_modules(None):
            chains = importlib.import_module("refrain_client.chains")
            del sys.modules["refrain_client.chains"]
        for nodes in (2, 5, 16):
            for lens in ([7], [1, 30, 4], [100] * 64):
                own = torch.tril(torch.ones(nodes, nodes))
                rows = [torch.cat((torch.ones(nodes, length), own), dim=1).to(torch.bool).flatten() for length in lens]
                lens = torch.tensor(lens)
                for device_lens in (lens, lens.int()):
                    self.assertTrue(torch.equal(chains.full_mask(device_lens, lens, nodes), torch.cat(rows)))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
