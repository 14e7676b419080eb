"""The client of a vLLM scheduler, and the requests that it follows."""

import atexit
import os

from refrain_client import Client
from refrain_client.announced import start
from refrain_client.suffix import DRAIN_SECONDS
from refrain_client.vllm import tokenizer_folder


def client_of(vllm_config, **how):
    """A client for the model of an engine, which sends its outputs before the process ends."""
    model = vllm_config.model_config
    folder = tokenizer_folder(model.tokenizer, model.tokenizer_revision)
    client = Client(os.environ.get("REFRAIN_CLIENT_CONFIG"), folder, **how)
    atexit.register(client.drain, DRAIN_SECONDS)
    return client


class FollowedRequests:
    """Tells the client of requests that begin, of the tokens that they emit, and of their end.

    An engine that makes room for others keeps its request, so nothing is told then: the output goes on later.
    """

    def __init__(self, client):
        self.client = client
        # By request id: the request, and the length of its text that the client knows.
        self._followed = {}

    def __contains__(self, req_id):
        return req_id in self._followed

    def begin(self, request):
        """Begins a request. Output that it has already is told with its next tokens. Returns its fields."""
        params = request.sampling_params
        fields = (params.extra_args if params else None) or {}
        prompt = list(request.all_token_ids[: request.num_prompt_tokens])
        self._followed[request.request_id] = [request, len(prompt)]
        start(self.client, request.request_id, prompt, fields)
        return fields

    def take_new_tokens(self, req_id):
        """The tokens of a request that the client does not know yet. The caller tells it."""
        request, known = self._followed[req_id]
        self._followed[req_id][1] = request.num_tokens
        return list(request.all_token_ids[known:])

    def end_gone(self, requests):
        """Ends the requests that the engine no longer has, or that have ended, with the tokens of their last step.
        Returns their ids."""
        gone = [id for id, (request, _) in self._followed.items() if id not in requests or request.is_finished()]
        for req_id in gone:
            self.client.extend(req_id, self.take_new_tokens(req_id))
            request, _ = self._followed.pop(req_id)
            reason = request.get_finished_reason()
            self.client.finish(req_id, None if reason is None else str(reason))
        return gone
