"""Brings a model's files to a host and proves that they are the published ones. Standard library, Python 3.9.

The modules `model_weights*` import it, and one of them puts it on the host, where a systemd unit runs `program`, so
that a transfer of hours outlives the controller. In the order in which a job uses them: `sources` and `hub` (what the
files must be), `transfer` (a client under a watchdog), `files` (hashes, and the manifest of what was verified), `job`
(all of it, step by step). Beside it: `state` (what a folder is now), `launch` and `unit` (systemd), `peer` (a host that
hands its files on).
"""
