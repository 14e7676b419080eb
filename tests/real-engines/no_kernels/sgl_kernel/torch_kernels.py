"""The kernels that SGLang 0.5.23 calls on a CPU with n-grams, in PyTorch.

They stand for those of SGLang's package, so that its scheduler and workers run without a GPU. They are slow.
"""

import ctypes

import torch


def assign_extend_cache_locs_cpu(rows, req_to_token, starts, ends, out, width):
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        out[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def fill_accept_out_cache_loc_cpu(accepted, places, out):
    taken = accepted.flatten()
    taken = taken[taken > -1].long()
    out[: len(taken)] = places[taken]


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict
):  # fmt: skip
    for row, tokens in enumerate(candidates.tolist()):
        node, count = 0, 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            wanted = int(target_predict[row, node])
            predicts[retrive_index[row, node]] = wanted
            child = int(retrive_next_token[row, node])
            while child != -1 and tokens[child] != wanted:
                child = int(retrive_next_sibling[row, child])
            if child == -1:
                break
            node, count = child, count + 1
            accept_index[row, count] = retrive_index[row, node]
        accept_token_num[row] = count


def reconstruct_indices_from_tree_mask(mask, lens, positions, index, next_token, next_sibling, count, nodes):
    before = mask.view(count, nodes, nodes).bool().tril(-1)
    positions.copy_((before.sum(-1) + lens.view(-1, 1)).flatten())
    index.copy_(torch.arange(count * nodes).view(count, nodes))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row in range(count):
        newest = {}
        for node in reversed(range(1, nodes)):
            parent = int(before[row, node].nonzero().max())
            next_sibling[row, node] = newest.get(parent, -1)
            newest[parent] = node
        for parent, child in newest.items():
            next_token[row, parent] = child


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    for pointer, stride in zip(pointers.tolist(), strides.tolist()):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows):
            ctypes.memmove(pointer + target * stride, row, stride)


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, places, width):
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        req_to_token[row, start:end] = places[at : at + end - start]
        at += end - start
