"""What was checked, as a table in which each row says what happened, what was seen, and whether it held."""

import contextlib
import signal
import time


class Report:
    """Rows are printed as they come. A part that raises or takes too long is a row that failed."""

    def __init__(self):
        self.rows = []

    def row(self, what, seen, holds):
        self.rows.append((what, seen, bool(holds)))
        print(f"{'ok   ' if holds else 'FAILS'}  {what}: {seen}", flush=True)

    @contextlib.contextmanager
    def part(self, name, seconds_max=300):
        """Nothing may hang: the part is given up after so many seconds."""

        def give_up(*_):
            raise TimeoutError(f"not done after {seconds_max} s")

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(seconds_max)
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a row tells it, and the other parts go on.
            notes = " ".join(getattr(error, "__notes__", []))
            self.row(name, f"{type(error).__name__}: {error} {notes}"[:600], False)
        finally:
            signal.alarm(0)
            print(f"       {name} took {time.monotonic() - began:.1f} s", flush=True)

    def end(self):
        """Prints the table. Returns the exit code."""
        print("\n| what happens | what was seen | |\n|---|---|---|")
        for what, seen, holds in self.rows:
            print(f"| {what} | {seen} | {'' if holds else 'failed'} |")
        failed = sum(not holds for _, _, holds in self.rows)
        print(f"\n{len(self.rows) - failed} of {len(self.rows)} rows held")
        return 1 if failed or not self.rows else 0
