"""Tests of the drafts on the devices of vLLM's Model Runner V2: the kernels in Triton's interpreter, beside the naive
search, on segments that the Rust index wrote. vLLM is not needed; PyTorch and Triton are.

    device_index.py REFRAIN MODEL
"""

import os
import random
import subprocess
import sys
import unittest
from types import SimpleNamespace as Namespace
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from client import PROMPT, WithMesh, wait_until
from refrain_client.v2 import kernels, plugin, refusals
from refrain_client.v2.drafter import DeviceDrafter
from refrain_client.v2.index import DeviceIndex, Limits
from refrain_client.v2.news import Place, StepNews
from refrain_client.v2.rows import Rows

PLACES = 6
TEXT_TOKENS_MAX = 128
DEPTH = 32
# Small, since the interpreter runs each program by itself. Two chunks of two blocks make a whole text.
SMALL = {"segments": 4, "siblings": 4, "chunk": 64, "block": 32, "segments_max": 16, "tables": 4}


def segment(documents):
    """The words of a segment of (left context, tokens), as the Rust index writes them, and the length of its text."""
    text, ends, at = [-1], [], 1
    for left, tokens in documents:
        text += [*tokens, -1]
        ends += range(at + max(left, 1) - 1, at + len(tokens) - 1)
        at += len(tokens) + 1
    unsigned = [token & 0xFFFFFFFF for token in text]

    def backwards(end):
        key = []
        while True:
            key.append(unsigned[end])
            if unsigned[end] == 0xFFFFFFFF:
                return key
            end -= 1

    ends.sort(key=backwards)
    return np.array(text + ends, dtype=np.int32), len(text)


def longest(documents, context):
    """The longest match of the end of a context before an output token, by looking everywhere."""
    best = 0
    for left, tokens in documents:
        for at in range(max(left, 1), len(tokens)):
            shared = 0
            while shared < min(DEPTH, at, len(context)) and tokens[at - 1 - shared] == context[-1 - shared]:
                shared += 1
            best = max(best, shared)
    return best


def occurs(documents, context, draft):
    """Whether the first token of a draft follows the end of the context somewhere in these documents."""
    return any(
        tokens[at] == draft[0] and tokens[at - 1] == context[-1]
        for left, tokens in documents
        for at in range(max(left, 1), len(tokens))
    )


class States:
    """vLLM's state of requests, as far as drafts need it."""

    def __init__(self, rows, device="cpu"):
        self.max_num_reqs, self.max_model_len = rows, TEXT_TOKENS_MAX
        self.all_token_ids = Namespace(gpu=torch.zeros(rows, TEXT_TOKENS_MAX, dtype=torch.int32, device=device))
        self.total_len = Namespace(gpu=torch.zeros(rows, dtype=torch.int32, device=device))
        self.last_sampled_tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.req_id_to_index = {}

    def set(self, row, tokens):
        self.all_token_ids.gpu[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len.gpu[row] = len(tokens)
        self.last_sampled_tokens[row] = tokens[-1]


def propose(index, states, rows, sampled=None, wanted=PLACES):
    sampled = torch.ones(len(rows), dtype=torch.int32) if sampled is None else torch.tensor(sampled, dtype=torch.int32)
    return index.propose(
        states.all_token_ids.gpu, states.total_len.gpu, torch.tensor(rows), sampled, states.last_sampled_tokens.view(-1),
        wanted,
    )  # fmt: skip


class KernelTest(unittest.TestCase):
    def test_matches_are_exact_and_no_list_opens_another_tenants_text(self):
        random.seed(1)
        for vocabulary in (4, 20, 300):
            for _ in range(2):
                self.try_tenants(vocabulary)

    def try_tenants(self, vocabulary):
        text = lambda low, high: [random.randrange(vocabulary) for _ in range(random.randrange(low, high))]  # noqa: E731
        documents = [[(random.randrange(4), text(5, 60)) for _ in range(8)] for _ in range(4)]
        owners, tenants = (0, 0, 1, 2), (0, 1, 2, 0, 1, 2, 0, -1)
        index = DeviceIndex(Limits(20_000, **SMALL), len(tenants), TEXT_TOKENS_MAX, PLACES, "cpu")
        at = 0
        for number, (owner, texts) in enumerate(zip(owners, documents)):
            words, length = segment(texts)
            index.load(number, owner, at, words, length)
            at += len(words)
        states, contexts, prompts = States(len(tenants)), [], []
        table = np.full((len(tenants), index.columns), -1, dtype=np.int32)
        for row, tenant in enumerate(tenants):
            _, base = random.choice(documents[max(tenant, 0)])
            cut = random.randrange(1, len(base) + 1)
            contexts.append(text(0, 5) + base[max(0, cut - 20) : cut])
            prompts.append(random.randrange(len(contexts[-1])))
            states.set(row, contexts[-1])
            # Every row names all segments and four other rows, whoever these belong to.
            others = [other for other in range(len(tenants)) if other != row][:4]
            table[row] = [tenant, -1, prompts[row], 0, *others, *range(4)]
        index.set_rows(table)
        rows, sampled = random.sample(range(len(tenants)), 6), [1, 1, 0, 2, 1, 1]
        drafts = propose(index, states, rows, sampled)
        found = index.found[:6] >> kernels.LENGTH_BIT.value
        texts = index.texts[:6].view(6, 5, -1) >> kernels.LENGTH_BIT.value
        for at, row in enumerate(rows):
            context, tenant = contexts[row], tenants[row]
            may_read = [d for owner, texts_ in zip(owners, documents) if owner == tenant for d in texts_]
            is_drafting = sampled[at] > 0
            self.assertEqual(int(found[at].max()), longest(may_read, context) if is_drafting else 0)
            self.assertEqual(int(texts[at, 0].max()), longest([(0, context)], context) if is_drafting else 0)
            others = [other for other in range(len(tenants)) if other != row][:4]
            for place, other in enumerate(others, 1):
                is_open = is_drafting and tenant >= 0 and tenants[other] == tenant
                expected = longest([(prompts[other], contexts[other])], context) if is_open else 0
                self.assertEqual(int(texts[at, place].max()), expected)
                may_read += [(prompts[other], contexts[other])] if is_open else []
            count = int(index.drafted[at])
            draft = drafts[at].tolist()
            # Fillers are tokens of the vocabulary, since the engine embeds them.
            self.assertEqual(draft[count:], [context[-1]] * (PLACES - count))
            if count:
                self.assertTrue(occurs([*may_read, (0, context)], context, draft))

    def test_the_text_after_the_longest_match_is_drafted_and_agreement_counts(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 4, TEXT_TOKENS_MAX, PLACES, "cpu")
        rows, states = Rows(index.limits, 4), States(4)
        for number, texts in enumerate(([1, 2, 3, 4, 5, 6, 7, 8, 9], [20, 3, 4, 30, 31], [21, 4, 30, 32])):
            words, length = segment([(0, texts)])
            index.load(number, 7, 100 * number, words, length)
            rows.mount(7, number)
        rows.begin(0, 7, -1, 4)
        rows.begin(1, 7, -1, 2)
        index.set_rows(rows.take())
        states.set(0, [50, 2, 3, 4])
        states.set(1, [60, 61, 4])
        drafts = propose(index, states, [0, 1])
        self.assertEqual(drafts[0].tolist(), [5, 6, 7, 8, 9, 4])
        # Two texts go on with 30 after 4, and one with 5. Behind it they part, and the newest one is followed.
        self.assertEqual(drafts[1].tolist()[:2], [30, 32])
        self.assertEqual(index.drafted[:2].tolist(), [5, 2])
        # As many places as are wanted are drafted, and the others are filled.
        self.assertEqual(propose(index, states, [0], wanted=2)[0].tolist(), [5, 6, 4, 4, 4, 4])

    def test_what_is_learnt_about_matches_decides_between_them(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 4, TEXT_TOKENS_MAX, PLACES, "cpu")
        rows, states = Rows(index.limits, 4), States(4)
        words, length = segment([(0, [1, 2, 3, 4, 5])])
        index.load(0, 1, 0, words, length)
        rows.mount(1, 0)
        rows.begin(0, 1, -1, 9)
        index.set_rows(rows.take())
        # Its own text says 8 after 4, the segment says 5 after 3 4.
        states.set(0, [4, 8, 9, 3, 4])
        self.assertEqual(propose(index, states, [0])[0].tolist()[:1], [5])
        odds = np.full((kernels.KINDS, DEPTH + 1), 0.01)
        odds[kernels.OWN.value] = 10.0
        index.set_odds(1, odds.reshape(-1).tolist())
        self.assertEqual(propose(index, states, [0])[0].tolist()[:1], [8])
        likely = float(index.scores[0])
        index.set_odds(1, np.full_like(odds, 0.01).reshape(-1).tolist())
        propose(index, states, [0])
        self.assertGreater(likely, float(index.scores[0]))

    def test_samples_of_a_group_draft_from_each_other_while_they_run(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 4, TEXT_TOKENS_MAX, PLACES, "cpu")
        rows, states = Rows(index.limits, 4), States(4)
        for row, group in enumerate((5, 5, 6)):
            rows.begin(row, 1, group, 2)
        index.set_rows(rows.take())
        states.set(0, [1, 2, 30, 31, 32, 33])
        states.set(1, [1, 2, 30, 31])
        states.set(2, [1, 2, 40, 31, 50])
        self.assertEqual(propose(index, states, [1])[0].tolist()[:2], [32, 33])
        # A row that another request gets is nobody's sibling any more.
        rows.begin(0, 2, -1, 2)
        index.set_rows(rows.take())
        self.assertEqual(propose(index, states, [1])[0].tolist()[:2], [50, 31])

    def test_a_dropped_segment_leaves_nothing_behind(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 2, TEXT_TOKENS_MAX, PLACES, "cpu")
        words, length = segment([(0, [1, 2, 3, 4, 5])])
        index.load(3, 1, 10, words, length)
        self.assertTrue((index.arena != -1).any())
        index.drop(3, 10, len(words))
        self.assertTrue((index.arena == -1).all())
        self.assertTrue((index.segments == -1).all())

    def test_drafts_of_a_head_stay_where_they_are_expected_to_bring_more(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 2, TEXT_TOKENS_MAX, PLACES, "cpu")
        rows, states = Rows(index.limits, 2), States(2)
        rows.begin(0, -1, -1, 1)
        rows.begin(1, -1, -1, 1)
        index.set_rows(rows.take())
        states.set(0, [*range(1, 20), *range(1, 13)])
        states.set(1, [10, 11, 12])
        batch, sampled = torch.tensor([0, 1]), torch.tensor([1, 3], dtype=torch.int32)
        for _ in range(60):
            drafts = propose(index, states, [0, 1])
            is_better = index.is_better(batch, sampled, PLACES + 1 - sampled)
            # A step that verifies nothing says nothing.
            index.is_better(batch, torch.ones_like(sampled), torch.zeros_like(sampled))
        # The head brings two tokens where it drafts. The repeating text is expected to bring more, the other nothing.
        self.assertAlmostEqual(float(index.gain_of_others), 2.0, delta=0.2)
        self.assertEqual(is_better.tolist(), [True, False])
        self.assertEqual(drafts[0].tolist(), [13, 14, 15, 16, 17, 18])

    def test_confidences_say_where_texts_agree_and_what_the_next_drafts_may_be(self):
        index = DeviceIndex(Limits(4_000, **SMALL), 3, TEXT_TOKENS_MAX, PLACES, "cpu")
        rows, states = Rows(index.limits, 3), States(3)
        for row in range(3):
            rows.begin(row, -1, -1, 1)
        index.set_rows(rows.take())
        # A text that goes on in one way, one that went on in two, and one that never came.
        once = [*range(1, 20), *range(1, 13)]
        states.set(0, once)
        states.set(1, [*range(1, 14), 50, *once])
        states.set(2, [10, 11, 12])
        propose(index, states, [0, 1, 2], wanted=4)
        sure, unsure, none = index.confidences.tolist()
        self.assertTrue(all(0.5 < confidence < 1 for confidence in sure[:4]), sure)
        self.assertLess(unsure[1], sure[1])
        # Behind what is wanted nothing is drafted.
        self.assertEqual((sure[4:], none), ([0, 0], [0] * PLACES))

        sampled = torch.tensor([1, 1, 0], dtype=torch.int32)
        expected = index.next_confidences(index.confidences[:3], sampled).cumprod(dim=1)
        present = index.confidences.cumprod(dim=1)
        # The mean knows little yet, so less is expected of a draft than it says.
        self.assertTrue((expected[0, :4] < present[0, :4]).all())
        for _ in range(2000):
            expected = index.next_confidences(index.confidences[:3], sampled).cumprod(dim=1)
        mean = present[:2].mean(dim=0)
        self.assertTrue(torch.allclose(index.mean_path, mean, atol=1e-4))
        self.assertTrue(torch.allclose(expected[0], 0.75 * present[0] + 0.25 * mean, atol=1e-4))
        # A row without a draft may have one next, and a prompt that is not read to its end does not count.
        self.assertTrue(torch.allclose(expected[2], 0.25 * mean, atol=1e-4))

    def test_the_kernels_compile_for_a_gpu(self):
        # In a process without the interpreter. No GPU is needed to compile for one.
        script = (
            "import sys, triton\n"
            "from triton.backends.compiler import GPUTarget\n"
            "from triton.compiler import ASTSource\n"
            "from refrain_client.v2 import kernels\n"
            "from refrain_client.v2.index import Limits\n"
            "l = Limits(1 << 20)\n"
            "types = dict(stride='i64', wanted='i32', rows_ptr='*i64', found_ptr='*i64', segments_ptr='*i64',\n"
            "    last_ptr='*i64', texts_ptr='*i64', drafts_ptr='*i64', scores_ptr='*fp32',\n"
            "    confidences_ptr='*fp32')\n"
            "sizes = dict(COLUMNS=kernels.SOURCES_AT.value + l.siblings + l.segments, SIBLINGS=l.siblings, CHUNKS=4,\n"
            "    CHUNK=l.chunk, BLOCK=l.block, DEPTH=l.depth, TOP=l.top, SEGMENTS=l.segments, NEAR=l.near,\n"
            "    TEXT_MATCHES=72, OF_SOURCE=8, SEGMENT_MATCHES=256, LANES=512, PLACES=16, PLACES_P2=16,\n"
            "    TOKENS=l.tokens)\n"
            "for kernel in (kernels.match_texts, kernels.match_segments, kernels.draft):\n"
            "    names = kernel.arg_names\n"
            "    kind = lambda name: 'constexpr' if name in sizes else types.get(name, '*i32')\n"
            "    signature = {name: kind(name) for name in names}\n"
            "    constants = {(at,): sizes[name] for at, name in enumerate(names) if name in sizes}\n"
            "    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)\n"
            "    made = triton.compile(source, target=GPUTarget('cuda', 90, 32))\n"
            "    assert made.asm['cubin']\n"
        )
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        subprocess.run([sys.executable, "-c", script], check=True, env=variables)


class RowsTest(unittest.TestCase):
    def sources(self, rows, row):
        table = rows.take()
        at = kernels.SOURCES_AT.value
        siblings = [int(other) for other in table[row, at : at + 4] if other >= 0]
        return siblings, [int(number) for number in table[row, at + 4 :] if number >= 0]

    def test_a_row_reads_its_group_first_then_the_newest_of_its_namespace_and_the_newest_segments(self):
        rows = Rows(Limits(1, **SMALL), 16)
        for number in range(6):
            rows.mount(1, number)
        rows.mount(2, 9)
        for row, group in enumerate((3, -1, 3, -1, -1, -1)):
            rows.begin(row, 1, group, 1)
        rows.begin(6, 2, 3, 1)
        rows.begin(7, -1, 3, 1)
        self.assertEqual(self.sources(rows, 0), ([2, 5, 4, 3], [5, 4, 3, 2]))
        self.assertIsNone(rows.take())
        rows.end(5)
        rows.unmount(5)
        self.assertEqual(self.sources(rows, 0), ([2, 4, 3, 1], [4, 3, 2, 1]))
        rows.begin(15, 2, -1, 1)
        self.assertEqual(self.sources(rows, 6), ([15], [9]))
        rows.begin(14, -1, -1, 1)
        self.assertEqual(self.sources(rows, 7), ([], []))

    def test_lists_never_name_others_whatever_comes_and_goes(self):
        random.seed(2)
        rows, namespaces, segments = Rows(Limits(1, **SMALL), 12), {}, {}
        for step in range(400):
            row, namespace = random.randrange(12), random.randrange(-1, 3)
            if random.random() < 0.3:
                rows.end(row)
                namespaces.pop(row, None)
            elif random.random() < 0.6:
                rows.begin(row, namespace, random.randrange(-1, 3), 1)
                namespaces[row] = namespace
            elif segments and random.random() < 0.5:
                number = random.choice(list(segments))
                rows.unmount(number)
                del segments[number]
            else:
                segments[step] = max(namespace, 0)
                rows.mount(segments[step], step)
            table = rows.take()
            if table is None:
                continue
            for row in range(12):
                mine = namespaces.get(row, -1)
                self.assertEqual(int(table[row, kernels.NAMESPACE.value]), mine)
                at = kernels.SOURCES_AT.value
                others, numbers = table[row, at : at + 4], table[row, at + 4 :]
                self.assertTrue(all(other < 0 or namespaces.get(int(other)) == mine >= 0 for other in others))
                self.assertTrue(all(number < 0 or segments.get(int(number)) == mine for number in numbers))
                self.assertNotIn(row, others[others >= 0])


class DrafterTest(unittest.TestCase):
    def new_request(self, req_id, tokens, states, row):
        states.req_id_to_index[req_id] = row
        states.set(row, tokens)
        return Namespace(req_id=req_id, prompt_len=len(tokens))

    def test_requests_get_and_leave_rows_with_the_news_of_their_step(self):
        states = States(4)
        drafter = DeviceDrafter(states, PLACES, 4_000, "cpu", **SMALL)
        news = StepNews(began={"a": Place(1, 2), "b": Place(1, 2)})
        new = [self.new_request("a", [1, 2, 3], states, 0), self.new_request("b", [9, 2, 3], states, 1)]
        drafter.take_step(new, news)
        states.set(0, [1, 2, 3, 40, 41])
        one, batch = torch.ones(1, dtype=torch.int32), torch.tensor([1])
        draft = lambda: drafter.propose(batch, one, states.last_sampled_tokens)[0].tolist()  # noqa: E731
        self.assertEqual(draft()[:3], [40, 41, 3])
        drafter.end("a")
        drafter.take_step([], None)
        self.assertEqual(draft(), [3] * PLACES)
        # vLLM's own requests come without news.
        drafter.take_step([self.new_request("warm-up", [1, 2, 3], states, 2)], None)
        drafter.end("unknown")

    def test_nothing_of_a_step_waits_for_the_device(self):
        # Tensors without values, on a device that is none: whatever reads a value fails.
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode, mock.patch.object(
            kernels, "match_texts", mock.MagicMock()
        ), mock.patch.object(kernels, "match_segments", mock.MagicMock()), mock.patch.object(
            kernels, "draft", mock.MagicMock()
        ), mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            device = torch.device("cuda:0")
            states = States(4, device)
            drafter = DeviceDrafter(states, PLACES, 4_000, device, **SMALL)
            states.req_id_to_index["a"] = 0
            drafter.take_step([Namespace(req_id="a", prompt_len=3)], StepNews(began={"a": Place(1)}))
            drafter.index.load(0, 1, 0, *segment([(0, [1, 2, 3])]))
            drafter.index.set_odds(1, [0.5] * kernels.KINDS * (DEPTH + 1))
            rows = torch.zeros(1, dtype=torch.int64, device=device)
            sampled = torch.ones(1, dtype=torch.int32, device=device)
            drafts = drafter.propose(rows, sampled, states.last_sampled_tokens, 4)
            index = drafter.index
            self.assertEqual(index.is_better(rows, sampled, sampled).device, device)
            self.assertEqual(index.next_confidences(index.confidences[:1], sampled).device, device)
            self.assertEqual((drafts.device, tuple(drafts.shape)), (device, (1, PLACES)))
            drafter.index.drop(0, 0, 8)
            with self.assertRaises(Exception):
                drafts[0, 0].item()
            self.assertIsNotNone(mode)


class OnDevicesTest(WithMesh):
    def client(self, **settings):
        with mock.patch("client.Client", lambda: __import__("refrain_client").Client(devices=True)):
            return self.mesh.client(DEVICE__FOLDER=self.mesh.folder, **settings)

    def settle(self, client, drafter, holds):
        """Carries out commands until something holds."""

        def carried_out():
            news = StepNews(commands=client.device_commands())
            drafter.take_step([], news)
            if news.has_loads():
                client.devices_have_loaded()
            return holds(drafter)

        wait_until("a change on the device", carried_out)

    def test_segments_of_the_rust_index_are_searched_in_place(self):
        random.seed(3)
        client = self.client()
        states = States(4)
        drafter = DeviceDrafter(states, PLACES, 40_000, "cpu", **SMALL)
        outputs = [[random.randrange(30) for _ in range(40)] for _ in range(12)]
        for number, output in enumerate(outputs):
            client.start(f"r{number}", PROMPT)
            namespace, _ = client.place(f"r{number}")
            client.extend(f"r{number}", output)
            client.finish(f"r{number}", "stop")
        documents = [(len(PROMPT), PROMPT + output) for output in outputs]
        words = 2 * 12 * 40
        self.settle(client, drafter, lambda drafter: int((drafter.index.arena >= 0).sum()) >= words)
        for _ in range(6):
            contexts = []
            for row in range(4):
                output = random.choice(outputs)
                cut = random.randrange(1, 40)
                contexts.append([700 + row, *output[max(0, cut - random.randrange(1, 20)) : cut]])
                states.set(row, contexts[-1])
                drafter.rows.begin(row, namespace, -1, 1)
            drafter.take_step([], None)
            drafts = drafter.propose(torch.arange(4), torch.ones(4, dtype=torch.int32), states.last_sampled_tokens)
            found = (drafter.index.found[:4] >> kernels.LENGTH_BIT.value).max(dim=1).values
            for row, context in enumerate(contexts):
                self.assertEqual(int(found[row]), longest(documents, context))
                if int(drafter.index.drafted[row]):
                    self.assertTrue(occurs(documents, context, drafts[row].tolist()))
        self.assertEqual(list(self.mesh.folder.glob("refrain-device-*/*")), [])

    def test_a_restarted_engine_has_the_outputs_on_its_device(self):
        self.mesh.start()
        first = self.client()
        first.start("r", PROMPT)
        first.extend("r", list(range(100, 140)))
        first.finish("r", "stop")
        self.assertTrue(first.drain(60))
        second, states = self.client(), States(1)
        drafter = DeviceDrafter(states, PLACES, 40_000, "cpu", **SMALL)
        second.start("again", PROMPT)
        namespace, _ = second.place("again")
        states.req_id_to_index["again"] = 0
        states.set(0, [*PROMPT, 100, 101])
        drafter.take_step(
            [Namespace(req_id="again", prompt_len=len(PROMPT))], StepNews(began={"again": Place(namespace)})
        )
        one = torch.ones(1, dtype=torch.int32)

        def drafts(drafter):
            proposed = drafter.propose(torch.zeros(1, dtype=torch.int64), one, states.last_sampled_tokens)
            return proposed[0].tolist() == list(range(102, 102 + PLACES))

        self.settle(second, drafter, drafts)


class RefusalTest(unittest.TestCase):
    def config(self, **changes):
        speculation = Namespace(
            method="ngram", draft_sample_method="greedy", rejection_sample_method="standard", watermark_config=None
        )
        given = Namespace(
            speculative_config=speculation,
            use_v2_model_runner=True,
            scheduler_config=Namespace(async_scheduling=True, scheduler_cls=f"refrain_client.v2.{refusals.SCHEDULER}"),
            parallel_config=Namespace(pipeline_parallel_size=1, data_parallel_size=1, nnodes=1),
            watermark_config=None,
        )
        for path, value in changes.items():
            *sections, name = path.split("__")
            at = given
            for section in sections:
                at = getattr(at, section)
            setattr(at, name, value)
        return given

    def refuse(self, version="0.33.0", **changes):
        with mock.patch.dict(sys.modules, vllm=Namespace(__version__=version)):
            return refusals.refuse(self.config(**changes))

    def test_tested_configurations_are_accepted_and_others_are_named(self):
        self.assertIsNone(self.refuse())
        self.assertIsNone(self.refuse(speculative_config__method="eagle3"))
        for words, version, changes in (
            ("0.34.1", "0.34.1", {}),
            ("0.32.0", "0.32.0", {}),
            ("method is ngram_gpu", "0.33.0", {"speculative_config__method": "ngram_gpu"}),
            ("the speculative method is suffix", "0.33.0", {"speculative_config__method": "suffix"}),
            ("the speculative method is none", "0.33.0", {"speculative_config": None}),
            ("V1 model runner", "0.33.0", {"use_v2_model_runner": False}),
            ("asynchronous scheduling is off", "0.33.0", {"scheduler_config__async_scheduling": False}),
            ("draft_sample_method", "0.33.0", {"speculative_config__draft_sample_method": "probabilistic"}),
            ("not lossless", "0.33.0", {"speculative_config__rejection_sample_method": "typical"}),
            ("watermarks", "0.33.0", {"watermark_config": object()}),
            ("pipeline", "0.33.0", {"parallel_config__pipeline_parallel_size": 2}),
            ("data parallelism", "0.33.0", {"parallel_config__data_parallel_size": 2}),
            ("LoRA", "0.33.0", {"lora_config": object()}),
            ("several machines", "0.33.0", {"parallel_config__nnodes": 2}),
        ):
            self.assertIn(words, self.refuse(version, **changes))

    def test_vllm_keeps_its_own_speculator_unless_the_scheduler_is_named(self):
        self.assertTrue(plugin.is_chosen(self.config()))
        named = type(refusals.SCHEDULER, (), {})
        self.assertTrue(plugin.is_chosen(self.config(scheduler_config__scheduler_cls=named)))
        for other in (None, "vllm.v1.core.sched.async_scheduler.AsyncScheduler", "refrain_client.scheduler.RefrainScheduler"):
            self.assertFalse(plugin.is_chosen(self.config(scheduler_config__scheduler_cls=other)))

    def test_adaptive_verification_ranks_by_drafts_and_chooses_the_number_by_what_is_expected_next(self):
        class Manager:
            def __init__(self):
                self._confidence_probs, self.copied = torch.zeros(4, 2), None

            def record_confidences(self, confidences, batch):
                self._confidence_probs[batch.idx_mapping] = confidences[: batch.num_reqs]
                self.copied = self._confidence_probs.clone()

        plugin.tell_of_next_drafts(Manager)
        plugin.tell_of_next_drafts(Manager)
        manager, batch = Manager(), Namespace(num_reqs=1, idx_mapping=torch.tensor([2]))
        present = torch.tensor([[0.9, 0.8], [0.1, 0.1]])
        manager.record_confidences(present, batch)
        self.assertEqual(manager.copied[2].tolist(), present[0].tolist())
        present.refrain_next = torch.tensor([[0.5, 0.4]])
        manager.record_confidences(present, batch)
        self.assertEqual(manager.copied[2].tolist(), present.refrain_next[0].tolist())
        self.assertEqual(manager._confidence_probs[2].tolist(), present[0].tolist())
        self.assertEqual(manager._confidence_probs[:2].sum(), 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
