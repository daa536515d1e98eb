"""Forked runs of every stage that are killed, starved and stopped, and must end in the same bytes: `make chaos`.

`world` makes a small world and starts the real CLI in forked processes, `fingerprint` selects the bytes that must be
equal, `faults` wraps each write, `kills` ends runs at random moments and at each fail point, `troubles` fills the disk
and more.
"""
