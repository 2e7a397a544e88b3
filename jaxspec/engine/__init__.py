"""The engine, which alone has state on the host: requests, slots, turns, compiled programs, text and results. It may import everything but
the doors (loading, train, batch, bench, info, the command line)."""
