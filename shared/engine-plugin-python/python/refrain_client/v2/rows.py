"""The sources of each running request: whose texts it may read. Plain values, the same on all ranks."""

import numpy as np

from refrain_client.v2 import kernels


class Rows:
    """The table of rows. A row reads its own text, the rows of its group and of its namespace, and the segments of its
    namespace. A row without a namespace reads its own text alone."""

    def __init__(self, limits, rows):
        self.limits = limits
        self.columns = kernels.SOURCES_AT.value + limits.siblings + limits.segments
        self._table = np.full((rows, self.columns), -1, dtype=np.int32)
        self._table[:, kernels.VALUES.value] = 0
        # By namespace: the rows of its requests, the oldest first, with their groups.
        self._members = {}
        # By namespace: the numbers of its segments, the oldest first.
        self._segments = {}
        # By row: its namespace.
        self._namespaces = {}
        self._outdated = set()
        self._is_changed = True

    def begin(self, row, namespace, group, prompt_len):
        """A request gets a row, which may have been another's."""
        self.end(row)
        self._table[row] = -1
        self._table[row, kernels.NAMESPACE.value] = namespace
        self._table[row, kernels.GROUP.value] = group
        self._table[row, kernels.PROMPT_LEN.value] = prompt_len
        self._table[row, kernels.VALUES.value] = max(namespace, 0) % self.limits.tables
        self._is_changed = True
        if namespace >= 0:
            self._namespaces[row] = namespace
            self._members.setdefault(namespace, {})[row] = group
            self._outdated.add(namespace)

    def end(self, row):
        """A request leaves its row. Nobody reads it from now on."""
        namespace = self._namespaces.pop(row, None)
        self._table[row] = -1
        self._table[row, kernels.VALUES.value] = 0
        self._is_changed = True
        if namespace is not None:
            members = self._members[namespace]
            del members[row]
            if not members:
                del self._members[namespace]
            self._outdated.add(namespace)

    def mount(self, namespace, number):
        """A segment of a namespace is on the device."""
        self._segments.setdefault(namespace, []).append(number)
        self._outdated.add(namespace)

    def unmount(self, number):
        """A segment is no longer there."""
        for namespace, numbers in self._segments.items():
            if number in numbers:
                numbers.remove(number)
                self._outdated.add(namespace)
                if not numbers:
                    del self._segments[namespace]
                return

    def take(self):
        """The table, int32 [rows, columns], if it has changed since the last call, or None."""
        for namespace in self._outdated:
            self._refresh(namespace)
        is_changed = self._is_changed or bool(self._outdated)
        self._outdated.clear()
        self._is_changed = False
        return self._table.copy() if is_changed else None

    def _refresh(self, namespace):
        members = self._members.get(namespace, {})
        newest = list(reversed(members))
        segments = self._segments.get(namespace, [])[-self.limits.segments :][::-1]
        siblings_at = kernels.SOURCES_AT.value
        segments_at = siblings_at + self.limits.siblings
        by_group = {}
        for row in newest:
            if members[row] >= 0:
                by_group.setdefault(members[row], []).append(row)
        for row, group in members.items():
            # The group first. A namespace's other rows are those that began last.
            near = by_group.get(group, ()) if group >= 0 else ()
            near = [other for other in near[: self.limits.siblings + 1] if other != row]
            if len(near) < self.limits.siblings:
                known = {row, *near}
                others = newest[: self.limits.siblings + len(known)]
                near += [other for other in others if other not in known]
            near = near[: self.limits.siblings]
            self._table[row, siblings_at:] = -1
            self._table[row, siblings_at : siblings_at + len(near)] = near
            self._table[row, segments_at : segments_at + len(segments)] = segments
