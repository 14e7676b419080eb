"""Where an output ends, and why."""


class Ending:
    """An output's end by the engine's own rules: vLLM 0.32 has them in `v1/core/sched/utils.py`, `check_stop`, SGLang 0.5.23 in
    `Req`. What drafts there is given what was sampled before these rules cut it, and is told of no end."""

    def __init__(self, stop_ids=(), tokens_max=None, said=0):
        self.stop_ids = frozenset(stop_ids)
        # Tokens that are left to be said.
        self.left = None if tokens_max is None else tokens_max - said

    @classmethod
    def of_vllm(cls, params, said):
        """`params` are the request's sampling parameters; so many tokens were said before."""
        if params is None:
            return cls()
        end_token = getattr(params, "eos_token_id", None)
        stop_ids = set(params.stop_token_ids or ())
        if end_token is not None:
            stop_ids.add(end_token)
        return cls(stop_ids, params.max_tokens, said)

    @classmethod
    def of_sglang(cls, req, said):
        """The same of SGLang's request."""
        params, stop_ids = req.sampling_params, set()
        if not params.ignore_eos:
            stop_ids.update(params.stop_token_ids or (), req.eos_token_ids or ())
            if req.tokenizer is not None:
                stop_ids.add(req.tokenizer.eos_token_id)
                stop_ids.update(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        return cls(stop_ids, params.max_new_tokens, said)

    def take(self, tokens):
        """What of these the output has, and why it ends with them: "stop", "length", or None."""
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
