"""Whether engines hold the locks of their devices."""

import threading


def free(alone):
    """Whether another thread would get in at once."""
    found = []

    def look():
        got = [lock.held.acquire(blocking=False) for lock in alone._locks]
        for lock, ours in zip(alone._locks, got, strict=True):
            if ours:
                lock.held.release()
        found.append(all(got))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]
