"""Where an output ends, and why."""


class Ending:
    """The end of an output by the engine's own rules.

    vLLM 0.32 has these rules in `check_stop` of `v1/core/sched/utils.py`, and SGLang 0.5.23 in `Req`. Their proposers
    get the sampled tokens before the rules cut them, and are not told when a request ends.
    """

    def __init__(self, stop_ids=(), tokens_max=None, emitted=0):
        self.stop_ids = frozenset(stop_ids)
        # Tokens that may still be emitted.
        self.left = None if tokens_max is None else tokens_max - emitted

    @classmethod
    def of_vllm(cls, params, emitted):
        """The rules of vLLM's sampling parameters, for a request that has emitted so many tokens."""
        if params is None:
            return cls()
        end_token = getattr(params, "eos_token_id", None)
        stop_ids = set(params.stop_token_ids or ())
        if end_token is not None:
            stop_ids.add(end_token)
        return cls(stop_ids, params.max_tokens, emitted)

    @classmethod
    def of_sglang(cls, req, emitted):
        """The rules of SGLang's request, which has emitted so many tokens."""
        params, stop_ids = req.sampling_params, set()
        if not params.ignore_eos:
            stop_ids.update(params.stop_token_ids or (), req.eos_token_ids or ())
            if req.tokenizer is not None:
                stop_ids.add(req.tokenizer.eos_token_id)
                stop_ids.update(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        return cls(stop_ids, params.max_new_tokens, emitted)

    def take(self, tokens):
        """Returns the part of `tokens` that belongs to the output, and why the output ends: "stop", "length", or
        None."""
        count = len(tokens)
        if not self.stop_ids.isdisjoint(tokens):
            count = next(at for at, token in enumerate(tokens, 1) if token in self.stop_ids)
            if self.left is None or count <= self.left:
                return tokens[:count], "stop"
        if self.left is None:
            return tokens, None
        if count >= self.left:
            return tokens[: self.left], "length"
        self.left -= count
        return tokens, None
