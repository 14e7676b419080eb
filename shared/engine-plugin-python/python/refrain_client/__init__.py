"""Drafts from a Refrain mesh's memory, inside an engine.

`Client` is a copy of the drafts. For vLLM nothing is to be imported: see `refrain_client.vllm`.
"""

from refrain_client._native import Client

__all__ = ["Client"]
