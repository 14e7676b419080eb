"""Tests of the scheduler for vLLM's Model Runner V2, over a fake of vLLM's own that calls it as the source of 0.33 does:
a step is scheduled before the output of the one before it is known. vLLM is not needed.

    scheduling.py REFRAIN MODEL
"""

import os
import sys
import unittest
from types import ModuleType
from types import SimpleNamespace as Namespace
from unittest import mock

from client import MODEL, PROMPT, WithMesh, wait_until

END = 2


class Request:
    """The fields of vLLM's request that the scheduler reads."""

    def __init__(self, req_id, prompt, tokens_max, fields=None):
        self.request_id, self.num_prompt_tokens, self.tokens_max = req_id, len(prompt), tokens_max
        self.all_token_ids, self.spec_token_ids = list(prompt), []
        self.sampling_params = Namespace(extra_args=fields)
        self.reason = None

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def is_finished(self):
        return self.reason is not None

    def get_finished_reason(self):
        return self.reason


class Output(Namespace):
    """A `SchedulerOutput`."""


class FakeScheduler:
    """vLLM's asynchronous scheduler, as far as drafts are concerned."""

    def __init__(self, vllm_config):
        self.requests, self.waiting, self.num_spec_tokens = {}, [], 8

    @property
    def running(self):
        return list(self.requests.values())

    def schedule(self):
        new, self.waiting = self.waiting, []
        places = {id: request.spec_token_ids for id, request in self.requests.items() if request.spec_token_ids}
        is_new = {request.request_id for request in new}
        output = Output(
            scheduled_new_reqs=[Namespace(req_id=request.request_id) for request in new],
            num_scheduled_tokens={
                id: request.num_prompt_tokens if id in is_new else 1 + len(places.get(id, ()))
                for id, request in self.requests.items()
            },
            scheduled_spec_decode_tokens=places,
            num_spec_tokens_to_schedule=self.num_spec_tokens,
        )
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, output):
        for id in output.num_scheduled_tokens:
            self.requests[id].spec_token_ids = [-1] * output.num_spec_tokens_to_schedule

    def update_from_output(self, output, sampled):
        for id, tokens in sampled.items():
            request = self.requests.get(id)
            if request is None:
                continue
            request.all_token_ids += tokens
            if tokens and tokens[-1] == END:
                request.reason = "stop"
            elif request.num_tokens - request.num_prompt_tokens >= request.tokens_max:
                request.reason = "length"
            if request.reason:
                del self.requests[id]
        return {}

    # For tests.
    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def preempt(self, req_id):
        """Makes room: the request comes again as a new one."""
        self.waiting.append(self.requests[req_id])


def install_fake():
    """Puts the fake where the scheduler imports vLLM's."""
    for name, content in (
        ("vllm", {"__version__": "0.33.0"}), ("vllm.v1", {}), ("vllm.v1.core", {}), ("vllm.v1.core.sched", {}),
        ("vllm.v1.core.sched.async_scheduler", {"AsyncScheduler": FakeScheduler}),
    ):  # fmt: skip
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)


install_fake()
from refrain_client.v2.scheduler import RefrainAsyncScheduler  # noqa: E402

CONFIG = Namespace(
    speculative_config=Namespace(
        method="ngram", draft_sample_method="greedy", rejection_sample_method="standard", num_speculative_tokens=8,
        num_speculative_tokens_per_batch_size=[(1, 2, 8), (3, 4, 4), (5, 8, 0)], enable_adaptive_verification=False,
    ),
    use_v2_model_runner=True,
    scheduler_config=Namespace(async_scheduling=True),
    parallel_config=Namespace(pipeline_parallel_size=1, data_parallel_size=1, nnodes=1),
    model_config=Namespace(tokenizer=MODEL, tokenizer_revision=None),
)  # fmt: skip


class SchedulerTest(WithMesh):
    def setUp(self):
        super().setUp()
        self.mesh.start()
        self.scheduler = self.begin_engine()

    def begin_engine(self):
        made = []

        def client():
            made.append(RefrainAsyncScheduler(CONFIG))

        with mock.patch("client.Client", client):
            self.mesh.client(DEVICE__FOLDER=self.mesh.folder)
        return made[0]

    def kept(self):
        """Documents and tokens that a new replica has."""
        client = self.mesh.client()
        wait_until("a replica that has everything", lambda: client.stats()["is_caught_up"])
        return client.stats()["documents"], client.stats()["tokens"]

    def test_outputs_are_told_once_with_a_step_in_progress(self):
        scheduler = self.scheduler
        scheduler.add(Request("a", PROMPT, 100))
        scheduler.add(Request("b", PROMPT, 5))
        first = scheduler.schedule()
        self.assertEqual(set(first.refrain.began), {"a", "b"})
        self.assertEqual(first.refrain.began["a"].namespace, first.refrain.began["b"].namespace)
        second = scheduler.schedule()
        self.assertEqual(second.refrain.began, {})
        scheduler.update_from_output(first, {"a": [10], "b": [20]})
        third = scheduler.schedule()
        scheduler.update_from_output(second, {"a": [11, 12, 13], "b": [21, 22, 23, 24]})
        # `b` has ended at its limit, and its step in progress brings nothing more.
        self.assertEqual(scheduler.drafts.stats()["requests"], 1)
        scheduler.preempt("a")
        again = scheduler.schedule()
        self.assertEqual(set(again.refrain.began), {"a"})
        scheduler.update_from_output(third, {"a": [14], "b": [25]})
        scheduler.update_from_output(again, {"a": [15, END]})
        stats = scheduler.drafts.stats()
        self.assertEqual((stats["requests"], stats["emitted_tokens"]), (0, 7 + 5))
        self.assertTrue(scheduler.drafts.drain(60))
        # A document has the last 16 tokens of its prompt before its output.
        self.assertEqual(self.kept(), (2, 7 + 5 + 2 * 16))

    def test_an_aborted_request_is_left(self):
        scheduler = self.scheduler
        scheduler.add(Request("a", PROMPT, 100))
        step = scheduler.schedule()
        scheduler.requests.pop("a").reason = "abort"
        scheduler.update_from_output(step, {})
        self.assertEqual(scheduler.drafts.stats()["requests"], 0)
        self.assertEqual(scheduler.places, {})

    def test_lengths_follow_the_engine_and_a_requests_own_rules(self):
        scheduler = self.scheduler
        self.assertEqual(scheduler.lengths, [0, 4, 8])
        scheduler.add(Request("free", PROMPT, 1000))
        scheduler.add(Request("none", PROMPT, 1000, {"refrain_max_spec_tokens": 0}))
        lengths = set()
        for number in range(40):
            output = scheduler.schedule()
            # All places are drafted, and the next step chooses how many it verifies.
            self.assertEqual(output.num_spec_tokens_to_schedule, 8)
            verified = output.scheduled_spec_decode_tokens
            self.assertNotIn("none", verified)
            lengths.add(len(verified.get("free", ())))
            scheduler.update_from_output(output, {"free": [number % 7 + 10], "none": [number + 100]})
        self.assertLessEqual(lengths, set(scheduler.lengths))
        self.assertIn(8, lengths)

    def test_adaptive_verification_gets_all_places_and_shortens_them_itself(self):
        with mock.patch.object(CONFIG.speculative_config, "enable_adaptive_verification", True):
            scheduler = self.begin_engine()
        self.assertEqual(scheduler.lengths, [8])
        scheduler.add(Request("a", PROMPT, 1000))
        scheduler.update_from_output(scheduler.schedule(), {"a": [1]})
        self.assertEqual(len(scheduler.schedule().scheduled_spec_decode_tokens["a"]), 8)

    def test_groups_have_numbers_while_their_requests_run(self):
        scheduler = self.scheduler
        for name, group in (("a", "g"), ("b", "g"), ("c", "h"), ("d", None)):
            scheduler.add(Request(name, PROMPT, 3, {"refrain_group": group} if group else None))
        began = scheduler.schedule().refrain.began
        self.assertEqual(began["a"].group, began["b"].group)
        self.assertNotIn(began["c"].group, (began["a"].group, -1))
        self.assertEqual(began["d"].group, -1)
        scheduler.update_from_output(scheduler.schedule(), {name: [END] for name in "abcd"})
        scheduler.add(Request("e", PROMPT, 3, {"refrain_group": "g", "refrain_written": 4}))
        place = scheduler.schedule().refrain.began["e"]
        self.assertNotEqual(place.group, began["a"].group)
        self.assertEqual(place.written, 4)

    def test_a_forged_namespace_costs_drafts_and_opens_nothing(self):
        scheduler = self.scheduler
        scheduler.add(Request("a", PROMPT, 3, {"refrain_namespace": "forged", "refrain_group": "g"}))
        place = scheduler.schedule().refrain.began["a"]
        self.assertEqual((place.namespace, place.group), (-1, -1))

    def test_texts_go_to_the_devices_with_a_step_and_their_files_end_with_it(self):
        scheduler = self.scheduler
        scheduler.add(Request("a", PROMPT, 3))
        scheduler.update_from_output(scheduler.schedule(), {"a": [10, 11, 12]})
        loads, files = [], lambda: list(self.mesh.folder.glob("refrain-device-*/*"))

        def has_loaded():
            output = scheduler.schedule()
            loads.extend(command for command in output.refrain.commands if command[0] == "load")
            if loads:
                self.assertTrue(os.path.exists(loads[0][5]))
            scheduler.update_from_output(output, {})
            return loads

        wait_until("a segment for the devices", has_loaded)
        wait_until("the end of its file", lambda: not files())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
