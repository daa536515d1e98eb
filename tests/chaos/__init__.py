"""Forked runs of every stage that are killed, starved and stopped, and must end in the same bytes: `make chaos`.

    PYTHONPATH=tests:. python -m chaos --kills 200

`runs` makes a small world and starts the real CLI in forked processes, `fingerprint` says what must be the same,
`kills` kills them, `faults` does so before and after each write, `troubles` fills the disk and more.
"""
